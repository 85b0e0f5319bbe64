"""The quickstart's files: complete, small, and a task that the model has to learn."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slideformer_ray.data.batches import IGNORE_INDEX, DataSet
from slideformer_ray.data.quickstart import (
    QUICKSTART_PROMPT,
    quickstart_config,
    quickstart_data,
    quickstart_model_dir,
)


def test_the_files_are_small_and_carry_their_licence():
    """The package stays under 3 MB; WordNet's licence lies beside what was made from it."""
    folder = quickstart_data().parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 3e6
    assert "WordNet" in (folder / "WORDNET_LICENSE").read_text()


def test_the_prompt_asks_for_what_no_row_says():
    questions = [json.loads(line)["messages"][0]["content"] for line in quickstart_data().open()]
    assert len(questions) == 4000 and QUICKSTART_PROMPT not in questions


def test_the_template_closes_each_answer():
    """A turn is a line, as in the text that the model was trained on; the EOS ends an assistant's turn."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True)
    turns = [{"role": role, "content": content} for role, content in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "a\nb<|endoftext|>c\n"


def test_the_task_is_not_learned_yet(tmp_path):
    """Held-out loss before training: 7.08, near a uniform guess (ln 2048 = 7.62). No row is truncated or dropped."""
    config = quickstart_config(tmp_path / "run")
    data = DataSet.load(config, AutoTokenizer.from_pretrained(config.model.path, local_files_only=True))
    assert (len(data.train), len(data.eval), data.num_steps) == (3800, 200, 100)
    assert data.train_counts.truncated == data.train_counts.dropped == 0
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    total, count = 0.0, 0
    for batch in data.eval_batches():
        for micro in batch.micro_batches:
            with torch.no_grad():
                logits = model(torch.from_numpy(micro.ids)).logits
            targets = torch.from_numpy(micro.targets).long()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
        count += batch.num_supervised
    assert abs(total / count - 7.077) < 0.01
