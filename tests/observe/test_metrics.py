"""metrics.py: one line of JSON a record, and callbacks that need not answer to everything."""

import dataclasses
import json
import math
import time

from slideformer_ray.observe.metrics import Callback, EvalMetrics, MetricsFile, StepMetrics

STEP = StepMetrics(
    step=3,
    loss=2.5,
    grad_norm=1.25,
    learning_rate=1e-5,
    skipped=False,
    tokens=100,
    supervised_tokens=60,
    step_seconds=0.5,
    tokens_per_second=200.0,
    update_busy_seconds=0.1,
    gpu_wait_seconds={"updated": 0.01},
    gpu_peak_bytes=1 << 30,
)
EVAL = EvalMetrics(step=4, eval_loss=2.25, supervised_tokens=600)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_with_its_kind_and_time(tmp_path):
    """Steps and evaluations in one file, in the order in which they came, each with all of its fields."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    before = time.time()
    file.on_step(STEP)
    file.on_eval(EVAL)
    step, evaluation = records(file.path)
    assert before <= step.pop("time") <= evaluation.pop("time") <= time.time()
    assert step == {"kind": "step", **dataclasses.asdict(STEP)}
    assert evaluation == {"kind": "eval", **dataclasses.asdict(EVAL)}


def test_a_line_is_on_file_when_the_step_has_ended(tmp_path):
    """Another process can follow a run, and a killed one leaves whole lines."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for count in (1, 2):
        file.on_step(STEP)
        assert len(records(file.path)) == count


def test_a_resumed_run_keeps_the_records_of_the_steps_before_it(tmp_path):
    """Steps that a killed run did after its last checkpoint are done again, and are not on file twice; a run from step
    0 begins a new file, also where the old one ends in half a line."""
    path = tmp_path / "metrics.jsonl"
    for step in range(5):
        MetricsFile(path).on_step(dataclasses.replace(STEP, step=step))
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    MetricsFile(path).on_start(total_steps=10, first_step=3)
    assert [record["step"] for record in records(path)] == [0, 1, 2]
    MetricsFile(path).on_start(total_steps=10, first_step=0)
    assert records(path) == []


def test_a_norm_that_is_not_finite_is_null(tmp_path):
    """A skipped step's record is JSON that every reader takes, and says that the step was skipped."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_step(dataclasses.replace(STEP, grad_norm=math.nan, skipped=True))
    (record,) = records(file.path)
    assert record["grad_norm"] is None and record["skipped"] is True


def test_a_callback_overrides_what_it_wants():
    """Every event has an answer that does nothing."""
    callback = Callback()
    callback.on_start(10, 0)
    callback.on_step(STEP)
    callback.on_eval(EVAL)
    callback.on_end(None)
