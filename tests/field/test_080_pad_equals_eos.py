"""llm-course #33, trl #1623, DeepSeek-Coder #163.

In: pad = eos.
Bad: eos masked everywhere, endless output.
Good: masked by position, not by id.
"""

import json

from transformers import AutoTokenizer

from slideformer_ray.config import RunConfig
from slideformer_ray.data.batches import IGNORE_INDEX, DataSet
from slideformer_ray.data.quickstart import quickstart_model_dir


def test_every_row_learns_its_eos_and_no_padding(tmp_path):
    """Two turns and one, of unequal length: each answer's EOS is a target; nothing after a row's last token is."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "no more, thank you"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": turns[:n]}) + "\n" for n in (4, 2)))
    config = RunConfig.from_dict(
        {
            "run_dir": tmp_path / "run",
            "model": {"path": quickstart_model_dir()},
            "data": {"train": [path]},
            "training": {"steps": 1, "rows_per_step": 2},
        }
    )
    data = DataSet.load(config, tokenizer)
    batch = data.step_batch(0)
    (micro,) = batch.micro_batches
    for row_id, ids, targets, num_eos in zip(batch.row_ids, micro.ids, micro.targets, (2, 1), strict=True):
        length = len(data.train[row_id].ids)
        assert (ids[length:] == tokenizer.eos_token_id).all()
        assert (targets == tokenizer.eos_token_id).sum() == num_eos
        assert targets[length - 2] == tokenizer.eos_token_id
        assert (targets[length - 1 :] == IGNORE_INDEX).all()
