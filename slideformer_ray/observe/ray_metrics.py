"""A run's figures as Ray metrics, which the node's agent offers to Prometheus and the Dashboard shows.

`METRICS` is the whole list: what Prometheus calls each (Ray puts `ray_` before the name), its labels, and where its
value comes from. docs/metrics.md and the Grafana dashboard are held to it by tests/test_docs.py and
tests/cluster_configs/test_grafana.py. Imports ray where the metrics are made. Tested by
tests/observe/test_ray_metrics.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slideformer_ray.observe.lane_metrics import LaneMetrics
from slideformer_ray.observe.metrics import Callback, EvalMetrics, StepMetrics

PREFIX = "slideformer_"
RUN = "run"  # a label of every metric: the run directory's name

# (value of the second label or None, value)
Values = Iterable[tuple[str | None, float]]


@dataclass(frozen=True)
class Metric:
    """`of`: the record that it comes from. `label`: the one besides `run`, whose values are the mapping's keys."""

    name: str
    kind: str  # "gauge" or "counter"
    of: type
    field: str
    meaning: str
    label: str | None = None

    @property
    def prometheus_name(self) -> str:
        """As the node's agent exports it."""
        return f"ray_{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")

    def values(self, record: StepMetrics | EvalMetrics | LaneMetrics) -> Values:
        value: Any = getattr(record, self.field)
        if isinstance(value, Mapping):
            return [(key, float(number)) for key, number in value.items()]
        return [] if value is None else [(None, float(value))]


def _gauge(name: str, of: type, field: str, meaning: str, label: str | None = None) -> Metric:
    return Metric(name, "gauge", of, field, meaning, label)


METRICS = (
    _gauge("step", StepMetrics, "step", "Optimizer steps before the last one that ended"),
    _gauge("loss", StepMetrics, "loss", "Training loss of the last step, nats a token"),
    _gauge("grad_norm", StepMetrics, "grad_norm", "Global gradient norm before clipping"),
    _gauge("learning_rate", StepMetrics, "learning_rate", "Learning rate of the last step"),
    _gauge("step_seconds", StepMetrics, "step_seconds", "Seconds of the last step"),
    _gauge("tokens_per_second", StepMetrics, "tokens_per_second", "Tokens a second of the last step, without padding"),
    Metric("tokens", "counter", StepMetrics, "tokens", "Tokens trained on by this process, without padding"),
    Metric("skipped_steps", "counter", StepMetrics, "skipped", "Steps skipped for a norm that was not finite"),
    _gauge("gpu_wait_seconds", StepMetrics, "gpu_wait_seconds", "Waits of the GPU actor's lanes in a step", "counter"),
    _gauge("tier_bytes", StepMetrics, "tier_bytes", "Bytes in use of each tier", "tier"),
    _gauge("tier_reserved_bytes", StepMetrics, "tier_reserved_bytes", "Bytes reserved in each tier", "tier"),
    _gauge("eval_loss", EvalMetrics, "eval_loss", "Held-out loss of the last evaluation, nats a token"),
    _gauge(
        "hiding_factor", LaneMetrics, "hiding_factor", "Backward over what it can hide; 1 or more hides all updates"
    ),
    _gauge("lane_busy_seconds", LaneMetrics, "busy_seconds", "Work of each lane in a step", "lane"),
    _gauge("lane_gb_per_second", LaneMetrics, "gb_per_second", "GB/s of each lane while it was busy", "lane"),
    _gauge("exposed_seconds", LaneMetrics, "exposed_seconds", "Idle time of the compute lane in a step", "cause"),
    _gauge("update_queue_layers", LaneMetrics, "update_queue_layers", "Most gradients that waited for their update"),
    _gauge("free_gradient_slots", LaneMetrics, "free_gradient_slots", "Fewest gradient slots that were free"),
    _gauge("gpu_sensor", LaneMetrics, "gpu_sensors", "The GPU's utilisation (%) and temperature (Celsius)", "sensor"),
)


# Ray's agent forgets a gauge that has not been set since it was last read (Ray 2.60), and steps may take minutes.
_REPEAT_SECONDS = 5.0


class RayMetrics(Callback):
    """Sets every metric when its record comes, and its gauges again and again, until the run ends.

    Runs in the driver, which is connected to Ray by `on_start`.
    """

    def __init__(self, run: str):
        self._run = run
        self._set: dict[Metric, Callable[[float, dict[str, str]], None]] = {}
        self._gauges: dict[tuple[Metric, str | None], float] = {}  # their last values
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, total_steps: int, first_step: int) -> None:
        from ray.util.metrics import Counter, Gauge

        for metric in METRICS:
            labels = (RUN,) if metric.label is None else (RUN, metric.label)
            if metric.kind == "gauge":
                self._set[metric] = Gauge(PREFIX + metric.name, metric.meaning, labels).set
            else:
                self._set[metric] = Counter(PREFIX + metric.name, metric.meaning, labels).inc
        self._gauges.clear()
        self._ended.clear()
        self._thread = threading.Thread(target=self._repeat, name="ray-metrics", daemon=True)
        self._thread.start()

    def on_step(self, metrics: StepMetrics) -> None:
        self._report(metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._report(metrics)

    def on_lanes(self, metrics: LaneMetrics) -> None:
        self._report(metrics)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _report(self, record: StepMetrics | EvalMetrics | LaneMetrics) -> None:
        for metric in self._set:
            if isinstance(record, metric.of):
                for key, value in metric.values(record):
                    if metric.kind == "gauge":
                        self._gauges[metric, key] = value
                    if metric.kind == "gauge" or value > 0:  # a counter cannot be raised by 0
                        self._say(metric, key, value)

    def _say(self, metric: Metric, key: str | None, value: float) -> None:
        label = {metric.label: key} if metric.label and key else {}
        self._set[metric](value, {RUN: self._run} | label)

    def _repeat(self) -> None:
        while not self._ended.wait(_REPEAT_SECONDS):
            for (metric, key), value in list(self._gauges.items()):
                self._say(metric, key, value)
