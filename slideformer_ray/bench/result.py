"""What was measured of a case: a line of the table, and a line of JSON. Tested by tests/bench/test_result.py."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slideformer_ray.bench.case import Case, System


@dataclass(frozen=True)
class BenchResult:
    """Of one system on one batch. None where a system has no such thing."""

    label: str
    system: System
    shape: str
    settings: tuple[str, ...]
    rows: int
    seq_len: int
    micro_batch_rows: int
    tokens: int  # a step, padding not counted
    parameters: int
    seconds: tuple[float, ...]  # of each timed step
    gpu_peak_bytes: int  # allocated through PyTorch
    gpu_reserved_bytes: int
    machine_bytes: int  # host memory, at machine level
    device: str
    versions: Mapping[str, str]
    losses: tuple[float, ...] = ()
    process_bytes: int | None = None  # host memory: own pages of all processes, and the shared buffers once
    planned_gpu_bytes: int | None = None
    planned_host_bytes: int | None = None
    offloaded_bytes: int = 0  # activations in host memory
    forward_hiding_factor: float | None = None
    backward_hiding_factor: float | None = None
    exposed_seconds: Mapping[str, float] = field(default_factory=dict)  # a step, by cause
    busy_seconds: Mapping[str, float] = field(default_factory=dict)  # a step, by lane
    gb_per_second: Mapping[str, float] = field(default_factory=dict)  # by lane that moves bytes
    traced_step_seconds: float | None = None  # median of the traced steps: what tracing costs shows here
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it ran: actors, slots, seconds until the first step

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def tflops(self, a_parameter: int) -> float:
        """6 operations a parameter and token are what training needs; 8 with the forward that is done twice."""
        return a_parameter * self.parameters * self.tokens_per_second / 1e12

    def record(self) -> dict[str, Any]:
        """For JSON, with what follows from the fields."""
        return dataclasses.asdict(self) | {
            "step_seconds": self.step_seconds,
            "min_seconds": min(self.seconds),
            "max_seconds": max(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "tflops_6n": self.tflops(6),
            "tflops_8n": self.tflops(8),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BenchResult:
        values = {f.name: record[f.name] for f in dataclasses.fields(cls)}
        for name in ("settings", "seconds", "losses"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Failure:
    """A case that was not measured, and why: a batch that does not fit, say."""

    case: Case
    reason: str
    crashed: bool = False  # a fault, and neither a limit of the machine nor of the time

    def record(self) -> dict[str, Any]:
        return {"case": self.case.record(), "reason": self.reason, "crashed": self.crashed}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        return cls(Case.from_record(record["case"]), record["reason"], record["crashed"])


Outcome = BenchResult | Failure


def to_line(outcome: Outcome) -> str:
    """A line of JSON: {"result": ...} or {"failure": ...}."""
    return json.dumps({"result" if isinstance(outcome, BenchResult) else "failure": outcome.record()})


def from_line(line: str) -> Outcome:
    record = json.loads(line)
    if "result" in record:
        return BenchResult.from_record(record["result"])
    return Failure.from_record(record["failure"])


def of_system(outcomes: Sequence[Outcome], system: System) -> list[BenchResult]:
    return [found for found in outcomes if isinstance(found, BenchResult) and found.system == system]
