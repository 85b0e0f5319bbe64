"""Automodel #3796, TRL PR #6671.

In: a batch whose labels are all -100.
Bad: NaN into every weight, or a silent loss of 0.0.
Good: zero gradient, one warning with the sample ids, an error if the whole step has none.
"""

import json
import logging

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from slideformer_ray.config import RunConfig
from slideformer_ray.data.batches import IGNORE_INDEX, DataSet, make_step_batch
from slideformer_ray.data.chat import EncodedRow
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.data.rows import DataError


def encoded(row_id, length, supervised):
    return EncodedRow(np.arange(1, length + 1, dtype=np.int32), np.full(length, supervised), row_id)


def test_a_micro_batch_without_labels_has_zero_gradient():
    """The step divides its sum by the count of the whole step, so such a micro-batch adds 0 and not 0 / 0."""
    batch = make_step_batch([encoded(7, 9, False), encoded(8, 4, True)], 1, 1, 0)
    silent = batch.micro_batches[0]
    assert batch.row_ids == (7, 8) and (silent.targets == IGNORE_INDEX).all()
    logits = torch.randn(9, 16, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(silent.targets[0]).long(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (loss / batch.num_supervised).backward()
    assert loss.item() == 0 and logits.grad.count_nonzero() == 0


def test_a_step_without_labels_is_an_error_that_names_its_rows():
    with pytest.raises(DataError, match="no supervised token in a whole step: rows 7, 3 have none"):
        make_step_batch([encoded(3, 4, False), encoded(7, 9, False)], 1, 1, 0)


def test_rows_without_labels_are_left_out_with_one_warning(tmp_path, caplog):
    """A run never meets them: they are counted and named once, when the data is loaded."""
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text("".join(json.dumps({"messages": turns[:n]}) + "\n" for n in (2, 1, 2, 1)))
    config = RunConfig.from_dict(
        {
            "run_dir": tmp_path / "run",
            "model": {"path": quickstart_model_dir()},
            "data": {"train": [path]},
            "training": {"epochs": 2, "rows_per_step": 1},
        }
    )
    with caplog.at_level(logging.WARNING, logger="slideformer_ray"):
        data = DataSet.load(config, AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True))
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 training rows have no supervised token within data.seq_len=1024 and are left out: rows 1, 3"
    ]
    assert (data.train_counts.rows, data.train_counts.dropped, data.num_steps) == (2, 2, 4)
    assert {data.step_batch(step).row_ids for step in range(4)} == {(0,), (2,)}
