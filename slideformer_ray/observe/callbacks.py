"""Callbacks that a run's `observe` section asks for: Ray's metrics, TensorBoard, Weights & Biases.

Each is a `Callback` like any of the user's own, given what every callback gets. A package that is not installed is an
error before anything starts, never a run without its logs. Tested by tests/observe/test_callbacks.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.observe.lane_metrics import LaneMetrics
from slideformer_ray.observe.metrics import Callback, EvalMetrics, StepMetrics
from slideformer_ray.observe.ray_metrics import RayMetrics


def configured_callbacks(config: RunConfig, local: bool) -> list[Callback]:
    """One callback for each setting of `observe` that asks for one. Raises ConfigError for a missing package.

    local: the tiers are threads, so there is no Ray to report to.
    """
    found: list[Callback] = []
    if config.observe.ray_metrics and not local:
        found.append(RayMetrics(config.run_dir.name))
    if config.observe.tensorboard:
        _require("observe.tensorboard is true", "tensorboard")
        found.append(TensorBoard(config.run_dir / "tensorboard"))
    if config.observe.wandb_project is not None:
        _require(f"observe.wandb_project is {config.observe.wandb_project!r}", "wandb")
        found.append(WeightsAndBiases(config))
    return found


def scalars(metrics: StepMetrics | EvalMetrics | LaneMetrics) -> dict[str, float]:
    """A record's numbers by name; those of a mapping are `name/key`. `step` is left out: it is where they belong."""
    found: dict[str, float] = {}
    for name, value in dataclasses.asdict(metrics).items():
        if isinstance(value, Mapping):
            found.update({f"{name}/{key}": float(number) for key, number in value.items()})
        elif value is not None and name != "step":
            found[name] = float(value)
    return found


class TensorBoard(Callback):
    """Event files for `tensorboard --logdir RUN`. A step's numbers are at the number of steps done after it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._writer: Any = None

    def on_start(self, total_steps: int, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run replaces what a killed one wrote of the steps that it does again.
        self._writer = SummaryWriter(str(self.directory), purge_step=first_step + 1 if first_step else None)

    def on_step(self, metrics: StepMetrics) -> None:
        self._write("train", metrics, metrics.step + 1)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write("eval", metrics, metrics.step)

    def on_lanes(self, metrics: LaneMetrics) -> None:
        self._write("lanes", metrics, metrics.step + 1)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, metrics: StepMetrics | EvalMetrics | LaneMetrics, step: int) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class WeightsAndBiases(Callback):
    """A run of Weights & Biases with the whole configuration. Modes and keys are wandb's own: WANDB_MODE=offline."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._run: Any = None
        self._ended = False

    def on_start(self, total_steps: int, first_step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=self.config.observe.wandb_project,
            dir=str(self.config.run_dir),
            config=self.config.model_dump(mode="json"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, metrics: StepMetrics) -> None:
        self._log("train", metrics, metrics.step + 1)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._log("eval", metrics, metrics.step)

    def on_lanes(self, metrics: LaneMetrics) -> None:
        self._log("lanes", metrics, metrics.step + 1)

    def on_end(self, summary: Any) -> None:
        self._run.summary.update(dataclasses.asdict(summary))
        self._ended = True

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended else 1)

    def _log(self, group: str, metrics: StepMetrics | EvalMetrics | LaneMetrics, step: int) -> None:
        self._run.log({"step": step} | {f"{group}/{name}": value for name, value in scalars(metrics).items()})


def _require(setting: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}, but {package} is not installed. Fix: pip install {package}")
