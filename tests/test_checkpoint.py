"""Saving and resuming: the same bits as the run that never stopped, and no half-written checkpoint is ever resumed.

A crash at each write, fsync and rename: tests/test_checkpoint_crashes.py; what may be resumed: tests/test_resume.py.
"""

import errno
import itertools
import json
import os
import re
import shutil
import threading
import time

import pytest
import torch
from pipeline import differing, saved_tensors
from recorded_run import Record, small_config
from transformers import AutoModelForCausalLM

from slideformer_ray import checkpoint
from slideformer_ray.checkpoint import SaveFailed, checkpoint_dir, complete_checkpoints
from slideformer_ray.config import ConfigError
from slideformer_ray.tiers import LocalTiers
from slideformer_ray.trainer import Interrupted, Trainer

STEPS, SAVED_AT = 8, 4


def run(directory, callbacks=(), **changes):
    """A run as threads, 12 training rows: each epoch of three steps has its own order."""
    directory.mkdir(exist_ok=True)
    fixed = {"training__steps": STEPS, "checkpoint__save_every": SAVED_AT, "checkpoint__save_final": False}
    if changes.get("training__steps") == 1:
        fixed["optimizer__warmup_steps"] = 0
    record = Record()
    record.config = small_config(directory, num_rows=14, **{**fixed, **changes})
    record.trainer = Trainer(record.config, callbacks=[record, *callbacks], local=True)
    record.summary = record.trainer.train()
    return record


def bits_of(saved):
    """Model, states and Adam's step of a checkpoint."""
    training = json.loads((saved / "training.json").read_text())
    return saved_tensors(saved) | {"adam step": torch.tensor(training["adam_step"])}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Eight steps in bf16 with clipping, never stopped, saved after the fourth and the eighth."""
    return run(tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def saved(straight):
    return checkpoint_dir(straight.config.run_dir, SAVED_AT)


# ---------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("num_actors", [2, 3])
def test_a_resumed_run_has_the_bits_of_the_straight_one(tmp_path, straight, saved, num_actors):
    """Masters, both moments, Adam's step, losses, norms, rates and rows; also with another number of actors. Moments
    that are rounded on their way show at the second resumed step's norm (KempnerForge #114)."""
    resumed = run(
        tmp_path / "resumed",
        checkpoint__resume=saved,
        placement__num_optimizer_actors=num_actors,
    )
    for found, wanted in zip(resumed.steps, straight.steps[SAVED_AT:], strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens"):
            assert getattr(found, name) == getattr(wanted, name), (found.step, name)
        assert not found.skipped and found.grad_norm > resumed.config.optimizer.max_grad_norm  # clipping is active
    assert resumed.evals[-1] == straight.evals[-1]
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS)) for r in (resumed, straight)]
    assert differing(*ends) == []


def test_a_resumed_fp32_run_has_the_bits_of_the_straight_one(tmp_path):
    """There the model's files are the masters."""
    changes = {"training__precision": "fp32"}
    whole = run(tmp_path / "straight", **changes)
    source = checkpoint_dir(whole.config.run_dir, SAVED_AT)
    resumed = run(tmp_path / "resumed", checkpoint__resume=source, **changes)
    assert [m.loss for m in resumed.steps] == [m.loss for m in whole.steps[SAVED_AT:]]
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS)) for r in (resumed, whole)]
    assert differing(*ends) == []


def test_other_micro_batches_after_a_resume_stay_close(tmp_path, straight, saved):
    """Rows of a step may be cut otherwise: the same sums in another order, so close and not equal. In bf16 each
    micro-batch's gradients are rounded before they are summed."""
    resumed = run(tmp_path / "resumed", checkpoint__resume=saved, training__micro_batch_rows=3)
    losses = [m.loss for m in straight.steps[SAVED_AT:]]
    assert [m.loss for m in resumed.steps] == pytest.approx(losses, rel=1e-2)
    assert [m.loss for m in resumed.steps] != losses


def test_a_run_that_was_done_has_nothing_to_resume(tmp_path, straight):
    """Its last checkpoint: no step is run, the held-out loss is the same."""
    resumed = run(tmp_path / "resumed", checkpoint__resume=checkpoint_dir(straight.config.run_dir, STEPS))
    assert resumed.steps == [] and resumed.evals == [straight.evals[-1]]


def test_auto_continues_the_newest_or_starts(tmp_path, straight):
    """The same command, whether the run is new, was killed or is done (`rerun until it ends`)."""
    first = run(tmp_path, training__steps=STEPS, checkpoint__resume="auto")
    assert [m.loss for m in first.steps] == [m.loss for m in straight.steps]
    shutil.rmtree(checkpoint_dir(first.config.run_dir, STEPS))
    second = run(tmp_path, training__steps=STEPS, checkpoint__resume="auto")
    assert [m.step for m in second.steps] == list(range(SAVED_AT, STEPS))
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS)) for r in (second, straight)]
    assert differing(*ends) == []


def test_a_rate_that_was_set_is_resumed(tmp_path, straight, saved):
    """`set_learning_rate` is part of the run's state, unless the config's own rate was changed."""

    class Slower(Record):
        def on_step(self, metrics):
            if metrics.step == 0:
                self.trainer.set_learning_rate(1e-4)

    slower = Slower()
    config = small_config(tmp_path, num_rows=14, training__steps=6, checkpoint__save_every=4)
    slower.trainer = Trainer(config, callbacks=[slower, record := Record()], local=True)
    slower.trainer.train()
    source = checkpoint_dir(config.run_dir, SAVED_AT)
    shutil.rmtree(config.run_dir / "model")
    goes_on = run(tmp_path / "same", checkpoint__resume=source, training__steps=6)
    assert [m.learning_rate for m in goes_on.steps] == [m.learning_rate for m in record.steps[SAVED_AT:]]
    changed = run(tmp_path / "new", checkpoint__resume=source, training__steps=6, optimizer__learning_rate=1e-3)
    assert changed.steps[0].learning_rate == pytest.approx(10 * goes_on.steps[0].learning_rate)


# -------------------------------------------------------------------------------------------------------------- saving


def test_a_checkpoint_says_what_it_is(straight, saved):
    """Steps, Adam's step, the config and versions; its model is an ordinary Hugging Face directory; no remains."""
    state = json.loads((saved / "training.json").read_text())
    assert (state["steps_done"], state["adam_step"]) == (SAVED_AT, SAVED_AT)
    assert state["config"] == straight.config.model_dump(mode="json")
    assert set(state["versions"]) == {"slideformer_ray", "torch", "transformers", "ray", "Python"}
    AutoModelForCausalLM.from_pretrained(saved / "model")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-4", "step-8"]


def test_old_checkpoints_go_when_the_new_one_is_complete(tmp_path):
    """`keep` is honoured, the newest stay (open_lm #154, ms-swift #6392)."""
    record = run(tmp_path, training__steps=5, checkpoint__save_every=1, checkpoint__keep=2)
    directory = record.config.run_dir / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["step-4", "step-5"]


def test_all_are_kept_when_asked(tmp_path):
    record = run(tmp_path, training__steps=4, checkpoint__save_every=1, checkpoint__keep=None)
    assert [step for step, _ in complete_checkpoints(record.config.run_dir)] == [1, 2, 3, 4]


def test_a_clock_saves_too(tmp_path):
    """`save_every_minutes` counts from the last checkpoint; a tiny one is due after each step."""
    by_clock = {"checkpoint__save_every": 0, "checkpoint__save_every_minutes": 1e-9}
    record = run(tmp_path, training__steps=3, checkpoint__keep=None, **by_clock)
    assert [step for step, _ in complete_checkpoints(record.config.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("num_actors", [1, 2])
def test_an_asynchronous_save_has_the_bits_of_its_step(tmp_path, straight, saved, monkeypatch, num_actors):
    """Training goes on while a slow disk writes: updates wait for their block, and the saved state is of one step.
    The run itself has the straight run's losses, and so has one that is resumed from there."""
    pwrite = os.pwrite

    def slow_pwrite(descriptor, data, offset):
        time.sleep(0.02)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow_pwrite)
    record = run(tmp_path, checkpoint__async_save=True, placement__num_optimizer_actors=num_actors)
    assert [m.loss for m in record.steps] == [m.loss for m in straight.steps]
    found = [path for _, path in complete_checkpoints(record.config.run_dir)]
    assert [path.name for path in found] == ["step-4", "step-8"]
    assert differing(bits_of(found[0]), bits_of(saved)) == []
    assert differing(bits_of(found[1]), bits_of(checkpoint_dir(straight.config.run_dir, STEPS))) == []
    assert record.trainer.saves[0].update_waited_seconds > 0  # an update did wait
    resumed = run(tmp_path / "resumed", checkpoint__resume=found[0])
    assert [m.loss for m in resumed.steps] == [m.loss for m in straight.steps[SAVED_AT:]]


def test_a_slower_disk_than_save_every_loses_no_checkpoint(tmp_path, straight):
    """A save is due after every step: each waits for the one before, and each has its step's bits."""
    record = run(tmp_path, checkpoint__async_save=True, checkpoint__save_every=1, checkpoint__keep=None)
    assert [m.loss for m in record.steps] == [m.loss for m in straight.steps]
    assert [step for step, _ in complete_checkpoints(record.config.run_dir)] == list(range(1, STEPS + 1))
    for step in (SAVED_AT, STEPS):
        ends = [bits_of(checkpoint_dir(r.config.run_dir, step)) for r in (record, straight)]
        assert differing(*ends) == []


@pytest.mark.parametrize("background", [False, True], ids=["in the foreground", "in the background"])
def test_a_step_is_recorded_before_its_checkpoint_is_complete(tmp_path, background):
    """A run that is killed between the two would go on behind the step, which metrics.jsonl then never has."""
    newest = []

    class Looks(Record):
        def on_step(self, metrics):
            complete = complete_checkpoints(tmp_path / "run")
            newest.append((complete[-1][0] if complete else 0, metrics.step))

    run(tmp_path, [Looks()], checkpoint__save_every=1, checkpoint__async_save=background)
    assert len(newest) == STEPS and all(saved <= step for saved, step in newest), newest


def test_an_interrupted_run_saves_after_its_steps(tmp_path, straight):
    """SIGTERM or Ctrl-C: the steps under way end and are saved; going on gives the straight run's bits."""

    class Interrupts(Record):
        def on_step(self, metrics):
            super().on_step(metrics)
            if metrics.step == 1:
                assert self.trainer.interrupt()

    record = Interrupts()
    config = small_config(tmp_path, num_rows=14, training__steps=STEPS, checkpoint__save_every=100)
    record.trainer = Trainer(config, callbacks=[record], local=True)
    assert not record.trainer.interrupt()  # no step is under way
    with pytest.raises(Interrupted, match=r"after 3 steps; \S+step-3 is saved: continue with checkpoint.resume=auto"):
        record.trainer.train()
    assert not (config.run_dir / "model").exists() and [m.step for m in record.steps] == [0, 1, 2]
    resumed = run(tmp_path, checkpoint__resume="auto", checkpoint__save_every=STEPS)
    assert [m.loss for m in record.steps + resumed.steps] == [m.loss for m in straight.steps]
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS)) for r in (resumed, straight)]
    assert differing(*ends) == []


# ------------------------------------------------------------------------------------------------------ saves that fail


def fails_at(monkeypatch, name, number):
    """The named function of `os` raises from now on, as a disk or a directory that has gone would."""

    def failing(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, failing)


def spoil_second_save(monkeypatch, spoil):
    """Calls spoil(directory of the second save) once its files are laid out and before they are written."""
    begin_save, saves = LocalTiers.begin_save, itertools.count(1)

    def spoiled(tiers, directory, places):
        if next(saves) == 2:
            spoil(directory)
        return begin_save(tiers, directory, places)

    monkeypatch.setattr(LocalTiers, "begin_save", spoiled)


SPOILED = {
    "disk full": (lambda m: lambda directory: fails_at(m, "pwrite", errno.ENOSPC), "No space left on device"),
    "directory gone": (lambda m: lambda directory: shutil.rmtree(directory.parent), "No such file or directory"),
    "file gone": (lambda m: lambda directory: (directory / "state" / "layer.1.safetensors").unlink(), "layer.1"),
    "error of the drive": (lambda m: lambda directory: fails_at(m, "fsync", errno.EIO), "Input/output error"),
}


@pytest.mark.parametrize("what", SPOILED)
@pytest.mark.parametrize("on_error", ["continue", "stop"])
@pytest.mark.parametrize("background", [False, True], ids=["in the foreground", "in the background"])
def test_a_save_that_fails_costs_the_checkpoint_or_stops_the_run(
    tmp_path, monkeypatch, caplog, what, on_error, background
):
    """As the config says; what happened is said with the file's name, and nothing half-written stays."""
    spoil, message = SPOILED[what]
    spoil_second_save(monkeypatch, spoil(monkeypatch))
    arguments = {"training__steps": 2, "checkpoint__save_every": 1, "checkpoint__on_save_error": on_error}
    arguments["checkpoint__async_save"] = background
    if on_error == "stop":
        with pytest.raises(SaveFailed, match=message):
            run(tmp_path, **arguments)
    else:
        record = run(tmp_path, **arguments)
        assert record.summary.steps == 2 and record.summary.failed_saves == 1
        assert re.search(rf"no checkpoint of step 2: /.*{message}", caplog.text)
    monkeypatch.undo()
    if what != "directory gone":
        directory = tmp_path / "run" / "checkpoints"
        assert [path.name for path in directory.iterdir()] == ["step-1"]
        assert complete_checkpoints(tmp_path / "run")


def test_no_space_is_said_before_anything_is_written(tmp_path, monkeypatch, caplog):
    """It had room when the run began: nothing is half written, the log has the bytes, the final model is saved."""
    trainer = Trainer(small_config(tmp_path, num_rows=14, training__steps=2, checkpoint__save_every=2), local=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    summary = trainer.train()
    assert "no checkpoint of step 2" in caplog.text
    assert "a checkpoint needs 11.48 MiB and 1.00 MiB are free; free space" in caplog.text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert summary.steps == 2 and (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_damaged_byte_is_found_and_named_when_it_is_read(tmp_path, straight, saved):
    """A bit that flipped on the disk, anywhere in any tensor: the run ends before its first step (exit 2)."""
    copy = shutil.copytree(saved, tmp_path / "step-4")
    for name in ("model/model.safetensors", "state/layer.2.safetensors"):
        path = copy / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        config = small_config(tmp_path, num_rows=14, training__steps=STEPS, checkpoint__resume=copy)
        with pytest.raises(ValueError, match=rf"{name}: bytes \d+ to \d+ are not those that were saved; remove"):
            Trainer(config, local=True).train()
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


def test_two_runs_in_one_directory_are_refused(tmp_path):
    """The second would remove what the first is writing. The lock goes with its process, however that ends."""
    waiting, end = threading.Event(), threading.Event()

    class Waits(Record):
        def on_step(self, metrics):
            waiting.set()
            end.wait(60)

    config = small_config(tmp_path, num_rows=14, training__steps=2)
    first = threading.Thread(target=Trainer(config, callbacks=[Waits()], local=True).train)
    first.start()
    try:
        assert waiting.wait(60)
        with pytest.raises(ConfigError, match=rf"run_dir: .* is in use by another run \(process {os.getpid()}\)"):
            Trainer(config, local=True).train()
    finally:
        end.set()
        first.join()


def test_the_disk_bytes_of_the_plan_are_those_of_a_checkpoint(straight, saved):
    """Within 2 %: headers, JSON and the tokenizer's files beside the tensors."""
    extras = sum(path.stat().st_size for path in (saved / "model").iterdir() if path.suffix != ".safetensors")
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) - extras
    assert size == pytest.approx(straight.trainer.plan.disk_bytes, rel=0.02)
