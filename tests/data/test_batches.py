"""Step batches and the data set: shapes, targets, counts, and the errors of data that cannot train."""

import json
import logging

import numpy as np
import pytest
from transformers import AutoTokenizer

from slideformer_ray.config import RunConfig
from slideformer_ray.data.batches import IGNORE_INDEX, DataSet, make_step_batch
from slideformer_ray.data.chat import EncodedRow
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.data.rows import DataError

PAD = 99


def encoded(row_id, length, first_supervised=1):
    """Ids 10 * row_id + 1, + 2, ...; supervised from `first_supervised` on."""
    ids = np.arange(length, dtype=np.int32) + 10 * row_id + 1
    return EncodedRow(ids, np.arange(length) >= first_supervised, row_id)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(quickstart_model_dir(), local_files_only=True)


def run_config(tmp_path, data=None, training=None):
    training = {"steps": 3, "rows_per_step": 4, "micro_batch_rows": 3, **(training or {})}
    if "epochs" in training:
        del training["steps"]
    return RunConfig.from_dict(
        {
            "run_dir": tmp_path / "run",
            "model": {"path": quickstart_model_dir()},
            "data": {"train": [tmp_path / "train.jsonl"], "seq_len": 16, "pad_to_multiple": 8, **(data or {})},
            "training": training,
        }
    )


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_chats(path, chats):
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def test_targets_are_the_next_supervised_ids():
    """Shifted here, once: targets[t] is ids[t + 1] where that is supervised; the last token has no target."""
    batch = make_step_batch([encoded(0, 5, first_supervised=3)], 1, 1, PAD)
    (micro,) = batch.micro_batches
    assert micro.ids.tolist() == [[1, 2, 3, 4, 5]]
    assert micro.targets.tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 4, 5, IGNORE_INDEX]]
    assert micro.ids.dtype == micro.targets.dtype == np.int32
    assert (batch.num_supervised, batch.num_tokens, batch.row_ids) == (2, 5, (0,))


def test_rows_are_padded_on_the_right_to_the_multiple():
    """Padding is never a target, and not counted."""
    batch = make_step_batch([encoded(0, 5), encoded(1, 2)], 2, 4, PAD)
    (micro,) = batch.micro_batches
    assert micro.ids.tolist() == [[1, 2, 3, 4, 5, PAD, PAD, PAD], [11, 12, PAD, PAD, PAD, PAD, PAD, PAD]]
    assert micro.targets.tolist() == [[2, 3, 4, 5] + [IGNORE_INDEX] * 4, [12] + [IGNORE_INDEX] * 7]
    assert (batch.num_supervised, batch.num_tokens) == (5, 7)


def test_rows_of_like_length_share_a_micro_batch():
    """Longest first; equal lengths keep their order; the last has what is left; each is as wide as it needs."""
    lengths = [3, 9, 3, 8, 1, 4, 9]
    batch = make_step_batch([encoded(i, n) for i, n in enumerate(lengths)], 3, 4, PAD)
    assert batch.row_ids == (1, 6, 3, 5, 0, 2, 4)
    assert [micro.ids.shape for micro in batch.micro_batches] == [(3, 12), (3, 4), (1, 4)]


@pytest.mark.parametrize("micro_batch_rows", [1, 3, 8])
def test_the_cut_into_micro_batches_changes_no_count(micro_batch_rows):
    """The loss is divided by the count of the whole step, whatever the micro-batches (transformers #37766)."""
    batch = make_step_batch([encoded(i, 4 + 3 * i % 7) for i in range(8)], micro_batch_rows, 8, PAD)
    whole = make_step_batch([encoded(i, 4 + 3 * i % 7) for i in range(8)], 8, 8, PAD)
    assert batch.num_supervised == whole.num_supervised
    assert batch.num_supervised == sum(int((m.targets != IGNORE_INDEX).sum()) for m in batch.micro_batches)
    assert (batch.num_tokens, batch.row_ids) == (whole.num_tokens, whole.row_ids)


def test_steps_are_a_function_of_seed_and_step(tmp_path, tokenizer):
    """Any step can be made at any time, by another object: this is all that a resume needs."""
    write_rows(tmp_path / "train.jsonl", [f"row {'x' * i}" for i in range(7)])
    config = run_config(tmp_path, training={"steps": 6, "seed": 5})
    first, second = DataSet.load(config, tokenizer), DataSet.load(config, tokenizer)
    ids = [first.step_batch(step).row_ids for step in range(6)]
    assert [second.step_batch(step).row_ids for step in reversed(range(6))] == ids[::-1]
    assert len(set(ids)) == 6
    other = DataSet.load(run_config(tmp_path, training={"steps": 6, "seed": 6}), tokenizer)
    assert [other.step_batch(step).row_ids for step in range(6)] != ids


def test_long_rows_are_truncated_and_counted(tmp_path, tokenizer):
    """On the right, to seq_len tokens; what is kept stays supervised."""
    write_rows(tmp_path / "train.jsonl", ["a b", "a b c d e f g h", "a b c d"])
    data = DataSet.load(run_config(tmp_path, {"seq_len": 4}), tokenizer)
    assert [len(row.ids) for row in data.train] == [3, 4, 4]
    counts = data.train_counts
    assert (counts.rows, counts.truncated, counts.dropped) == (3, 2, 0)
    assert (counts.tokens, counts.supervised_tokens) == (11, 8)
    assert data.step_batch(0).micro_batches[0].ids.shape[1] == 8


def test_held_out_rows_leave_the_training_rows(tmp_path, tokenizer):
    """eval_rows of a seeded permutation; together the two parts are all rows; seq_len moves none."""
    write_rows(tmp_path / "train.jsonl", [f"row {i}" for i in range(20)])
    data = DataSet.load(run_config(tmp_path, {"eval_rows": 6}), tokenizer)
    train, held_out = ({row.row_id for row in rows} for rows in (data.train, data.eval))
    assert len(held_out) == 6 == data.eval_counts.rows and train | held_out == set(range(20))
    short = DataSet.load(run_config(tmp_path, {"eval_rows": 6, "seq_len": 2}), tokenizer)
    assert {row.row_id for row in short.eval} == held_out
    other = DataSet.load(run_config(tmp_path, {"eval_rows": 6}, {"seed": 1}), tokenizer)
    assert {row.row_id for row in other.eval} != held_out


def test_eval_files_replace_eval_rows(tmp_path, tokenizer, caplog):
    """Then all training rows train, and an eval_rows that has no effect is reported."""
    write_rows(tmp_path / "train.jsonl", ["a b", "c d"])
    held_out = write_rows(tmp_path / "eval.jsonl", ["e f", "g h", "i j"])
    with caplog.at_level(logging.WARNING):
        data = DataSet.load(run_config(tmp_path, {"eval": [held_out], "eval_rows": 1}), tokenizer)
    assert (len(data.train), len(data.eval)) == (2, 3)
    assert "data.eval_rows=1 has no effect" in caplog.text


def test_evaluation_takes_every_held_out_row_once(tmp_path, tokenizer):
    """In batches no larger than a step, the same ones each time."""
    write_rows(tmp_path / "train.jsonl", [f"row {i}" for i in range(20)])
    data = DataSet.load(run_config(tmp_path, {"eval_rows": 9}), tokenizer)
    batches = data.eval_batches()
    assert [len(batch.row_ids) for batch in batches] == [4, 4, 1]
    assert sorted(sum((batch.row_ids for batch in batches), ())) == sorted(row.row_id for row in data.eval)
    assert [batch.row_ids for batch in data.eval_batches()] == [batch.row_ids for batch in batches]
    assert sum(batch.num_supervised for batch in batches) == data.eval_counts.supervised_tokens


def test_no_held_out_rows_make_no_batches(tmp_path, tokenizer):
    write_rows(tmp_path / "train.jsonl", ["a b", "c d"])
    data = DataSet.load(run_config(tmp_path), tokenizer)
    assert data.eval == () and data.eval_batches() == []


def test_holding_out_everything_is_refused(tmp_path, tokenizer):
    write_rows(tmp_path / "train.jsonl", ["a b", "c d"])
    with pytest.raises(DataError, match="data.eval_rows=2 leaves none of 2 rows to train on"):
        DataSet.load(run_config(tmp_path, {"eval_rows": 2}), tokenizer)


def test_data_without_a_supervised_token_is_refused(tmp_path, tokenizer):
    """Before anything else is loaded, with the count of rows and the likely reason (trl #4879)."""
    path = write_chats(tmp_path / "train.jsonl", [("a long question", "an answer")] * 3)
    with pytest.raises(DataError) as error:
        DataSet.load(run_config(tmp_path, {"seq_len": 3}), tokenizer)
    assert str(error.value).startswith(
        f"{path}: none of the 3 training rows has a supervised token (3 truncated to data.seq_len=3); a row needs"
    )


def test_held_out_data_without_a_supervised_token_is_refused(tmp_path, tokenizer):
    """A held-out loss over no token would be NaN."""
    write_rows(tmp_path / "train.jsonl", ["a b", "c d"])
    held_out = write_chats(
        tmp_path / "eval.jsonl", [("a long question, much longer than the rows are allowed to be", "b")]
    )
    with pytest.raises(DataError, match="none of the 1 held-out rows has a supervised token"):
        DataSet.load(run_config(tmp_path, {"eval": [held_out]}), tokenizer)


@pytest.mark.parametrize(
    "training, num_steps, last_rows",
    [
        ({"steps": 9}, 9, 4),
        ({"epochs": 1}, 2, 3),
        ({"epochs": 2}, 4, 2),
        ({"epochs": 0.5}, 1, 4),
        ({"epochs": 0.01}, 1, 1),
    ],
)
def test_steps_and_epochs(tmp_path, tokenizer, training, num_steps, last_rows):
    """Steps are whole and go on into the next epoch; epochs end with what is left, and are at least one row."""
    write_rows(tmp_path / "train.jsonl", [f"row {i}" for i in range(7)])
    data = DataSet.load(run_config(tmp_path, training=training), tokenizer)
    assert data.num_steps == num_steps
    assert len(data.step_batch(num_steps - 1).row_ids) == last_rows
