"""What a run reports: one record a step, to a file and to whoever listens. Tested by tests/observe/test_metrics.py."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slideformer_ray.durable import replace_durably

if TYPE_CHECKING:
    from slideformer_ray.observe.lane_metrics import LaneMetrics


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Names are `phase_unit`; the table of them is in docs/metrics.md."""

    step: int
    loss: float  # mean over the step's supervised tokens, before the update
    grad_norm: float | None  # global, BEFORE clipping
    learning_rate: float
    skipped: bool
    tokens: int  # padding not counted
    supervised_tokens: int
    step_seconds: float
    tokens_per_second: float
    update_busy_seconds: float  # longest of the optimizer actors
    gpu_wait_seconds: Mapping[str, float] = field(default_factory=dict)  # GPU actor's host waits, by counter family
    gpu_peak_bytes: int = 0
    tier_bytes: Mapping[str, int] = field(default_factory=dict)  # in use, by tier: gpu, pinned, private
    tier_reserved_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalMetrics:
    step: int
    eval_loss: float
    supervised_tokens: int


class Callback:
    """Override what you want to hear of. Called in the driver, between steps; keep it short. An error ends the run."""

    def on_start(self, total_steps: int, first_step: int) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_eval(self, metrics: EvalMetrics) -> None: ...

    def on_lanes(self, metrics: LaneMetrics) -> None: ...

    def on_end(self, summary: Any) -> None: ...

    def close(self) -> None:
        """Comes last, however the run ended; `on_end` only when it came to its end."""


class MetricsFile(Callback):
    """RUN/metrics.jsonl: each record is a line of JSON. A run from step n keeps what is there of the steps before."""

    def __init__(self, path: Path):
        self.path = path

    def on_start(self, total_steps: int, first_step: int) -> None:
        kept = [line for line in _lines(self.path) if _step_of(line) < first_step]
        replace_durably(self.path, "".join(kept).encode())  # a run that is killed here must not lose them

    def on_step(self, metrics: StepMetrics) -> None:
        self._write("step", metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write("eval", metrics)

    def on_lanes(self, metrics: LaneMetrics) -> None:
        self._write("lanes", metrics)

    def _write(self, kind: str, metrics: Any) -> None:
        with self.path.open("a") as file:
            file.write(to_json({"kind": kind, "time": time.time(), **dataclasses.asdict(metrics)}) + "\n")


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON has no NaN: a number that is not there, such as the norm of a skipped step, is null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, indent=indent, allow_nan=False)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> float:
    """The step that a record is of; a line that a killed run left half written is of no step before another."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf
