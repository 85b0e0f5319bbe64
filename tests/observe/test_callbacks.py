"""callbacks.py: what TensorBoard and Weights & Biases are given, and that a missing package is said beforehand."""

import sys
import types

import pytest
from recorded_run import small_config

from slideformer_ray.config import ConfigError
from slideformer_ray.observe.callbacks import configured_callbacks, scalars
from slideformer_ray.observe.metrics import Callback
from slideformer_ray.tiers import TierError
from slideformer_ray.trainer import Trainer


def a_run(directory, **changes):
    return small_config(directory, **{"training__steps": 3, "placement__num_optimizer_actors": 1} | changes)


def test_tensorboard_has_every_number_at_the_steps_done(tmp_path):
    """Event files that TensorBoard itself reads: a step's numbers at the steps done after it, evaluations likewise."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = Trainer(a_run(tmp_path, observe__tensorboard=True), local=True)
    steps = list(trainer.fit())
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["train/loss"] == [(m.step + 1, pytest.approx(m.loss)) for m in steps]
    assert {tag for tag in found if tag.startswith("train/")} == {f"train/{name}" for name in scalars(steps[0])}
    assert [step for step, _ in found["eval/eval_loss"]] == [0, 3]
    assert [step for step, _ in found["lanes/exposed_seconds/update"]] == [3]


class FakeRun:
    """What wandb.init returns, as far as we call it. The calls are those of wandb 0.31."""

    def __init__(self, **arguments):
        self.arguments, self.logged, self.summary, self.exit_code = arguments, [], {}, None

    def define_metric(self, name, step_metric=None): ...

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module of that name; `runs` are those that were begun."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.runs = []
    module.init = lambda **arguments: module.runs.append(FakeRun(**arguments)) or module.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_configuration_steps_and_summary(tmp_path, wandb):
    """The whole configuration, each record with its step, the summary; finished with 0."""
    trainer = Trainer(a_run(tmp_path, observe__wandb_project="definitions"), local=True)
    summary = trainer.train()
    (run,) = wandb.runs
    assert run.arguments["project"] == "definitions"
    assert run.arguments["config"]["training"]["steps"] == 3
    assert [values["step"] for values in run.logged] == [0, 1, 2, 3, 3, 3]
    assert run.logged[3]["train/loss"] == summary.last_loss
    assert run.summary["last_eval_loss"] == summary.last_eval_loss and run.exit_code == 0


def test_a_run_that_fails_is_a_failed_run_for_wandb(tmp_path, wandb):
    """`close` comes however the run ends, and says 1 when it did not come to its end."""

    class Fails(Callback):
        def on_step(self, metrics):
            raise TierError("enough")

    with pytest.raises(TierError, match="enough"):
        Trainer(a_run(tmp_path, observe__wandb_project="x"), callbacks=[Fails()], local=True).train()
    assert wandb.runs[0].exit_code == 1


@pytest.mark.parametrize(
    "setting, value, package",
    [("tensorboard", True, "tensorboard"), ("wandb_project", "definitions", "wandb")],
)
def test_a_package_that_is_missing_is_said_before_anything_starts(tmp_path, monkeypatch, setting, value, package):
    """One message with the command that mends it, from the trainer's constructor; nothing runs without its logs."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"observe.{setting} is .*, but {package} is not installed. Fix: pip install"
    ):
        configured_callbacks(a_run(tmp_path, **{f"observe__{setting}": value}), local=True)
