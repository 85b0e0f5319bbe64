"""transformers PR #39659 (#38837), Automodel PR #2257.

In: 5 micro-batches, accumulation 2.
Bad: the last window under-scaled, or dropped.
Good: its real count is used; the length of the schedule is the ceil.

The counts that the loss is divided by and the number of steps come from the data set, so they are checked here.
"""

import json

from transformers import AutoTokenizer

from slideformer_ray.config import RunConfig
from slideformer_ray.data.batches import IGNORE_INDEX, DataSet
from slideformer_ray.data.quickstart import quickstart_model_dir


def test_last_window_uses_its_real_count(tmp_path):
    """10 rows, 4 a step, 2 a micro-batch, one epoch: windows of 2, 2 and 1 micro-batches, each row once."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (i + 1)}) + "\n" for i in range(10)))
    config = RunConfig.from_dict(
        {
            "run_dir": tmp_path / "run",
            "model": {"path": quickstart_model_dir()},
            "data": {"train": [path]},
            "training": {"epochs": 1, "rows_per_step": 4, "micro_batch_rows": 2},
        }
    )
    data = DataSet.load(config, AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True))
    assert data.num_steps == 3
    batches = [data.step_batch(step) for step in range(data.num_steps)]
    assert [len(batch.micro_batches) for batch in batches] == [2, 2, 1]
    assert sorted(sum((batch.row_ids for batch in batches), ())) == list(range(10))
    for batch in batches:
        assert batch.num_supervised == sum(data.train[row].num_supervised for row in batch.row_ids)
        assert batch.num_supervised == sum(int((m.targets != IGNORE_INDEX).sum()) for m in batch.micro_batches)
