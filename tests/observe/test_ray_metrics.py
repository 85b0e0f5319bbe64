"""ray_metrics.py: every record's numbers become the metric that says so. The real endpoint: tests/test_jobs.py."""

import dataclasses
import time
from unittest import mock

import pytest

from slideformer_ray.observe import ray_metrics
from slideformer_ray.observe.lane_metrics import LaneMetrics
from slideformer_ray.observe.metrics import EvalMetrics, StepMetrics
from slideformer_ray.observe.ray_metrics import METRICS, PREFIX, RayMetrics

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
    tier_bytes={"gpu": 1 << 30},
)
EVAL = EvalMetrics(step=4, eval_loss=2.25, supervised_tokens=600)
LANES = LaneMetrics(
    step=4,
    hiding_factor=1.5,
    forward_hiding_factor=2.5,
    busy_seconds={"gpu.compute": 0.4, "update.0": 0.3},
    gb_per_second={"update.0": 90.0},
    exposed_seconds={"update": 0.1, "tail": 0.0},
    update_queue_layers=3,
    free_gradient_slots=1,
    gpu_sensors={"temperature_celsius": 61.0},
)


class FakeMetric:
    """Gauge and Counter of ray.util.metrics, as far as they are used; remembers what it was told."""

    said: dict = {}

    def __init__(self, name, description, tag_keys):
        assert description and isinstance(tag_keys, tuple)
        self.name, self.keys = name, tag_keys

    def set(self, value, tags):
        assert set(tags) == set(self.keys) and all(isinstance(tag, str) for tag in tags.values())
        self.said[self.name, *(tags[key] for key in self.keys)] = value

    def inc(self, value, tags):
        assert value > 0 and set(tags) == set(self.keys)
        key = (self.name, *(tags[key] for key in self.keys))
        self.said[key] = self.said.get(key, 0) + value


@pytest.fixture
def said():
    FakeMetric.said = {}
    with mock.patch("ray.util.metrics.Gauge", FakeMetric), mock.patch("ray.util.metrics.Counter", FakeMetric):
        yield FakeMetric.said


@pytest.fixture
def metrics():
    """Begun by the test, and ended after it."""
    found = RayMetrics("first")
    yield found
    found.close()


def test_every_record_sets_its_metrics(said, metrics):
    """Mappings give a value a key, under a label; counters add up; each has the run's name."""
    metrics.on_start(10, 0)
    metrics.on_step(STEP)
    metrics.on_step(STEP)
    metrics.on_eval(EVAL)
    metrics.on_lanes(LANES)
    found = {key[0].removeprefix(PREFIX): value for key, value in said.items() if len(key) == 2}
    assert found["loss"] == 2.5 and found["eval_loss"] == 2.25 and found["tokens"] == 200
    assert "skipped_steps" not in found  # none yet
    assert said[PREFIX + "gpu_wait_seconds", "first", "updated"] == 0.01
    assert said[PREFIX + "exposed_seconds", "first", "tail"] == 0.0
    assert said[PREFIX + "gpu_sensor", "first", "temperature_celsius"] == 61.0
    assert {key[1] for key in said} == {"first"}


def test_what_is_not_there_is_not_said(said, metrics):
    """No norm without clipping, no hiding factor where nothing is hidden: None is no number."""
    metrics.on_start(10, 0)
    metrics.on_step(dataclasses.replace(STEP, grad_norm=None))
    metrics.on_lanes(dataclasses.replace(LANES, hiding_factor=None))
    assert not [key for key in said if key[0] in (PREFIX + "grad_norm", PREFIX + "hiding_factor")]


def test_gauges_are_said_again_until_the_end(said, metrics, monkeypatch):
    """Ray's agent forgets a value that nobody repeats, and an evaluation or a long step is minutes away. Counters are
    not raised again."""
    monkeypatch.setattr(ray_metrics, "_REPEAT_SECONDS", 0.01)
    metrics.on_start(10, 0)
    metrics.on_step(STEP)
    metrics.on_eval(EVAL)
    del said[PREFIX + "eval_loss", "first"]
    deadline = time.monotonic() + 10
    while (PREFIX + "eval_loss", "first") not in said and time.monotonic() < deadline:
        time.sleep(0.01)
    metrics.close()
    assert said[PREFIX + "eval_loss", "first"] == 2.25 and said[PREFIX + "tokens", "first"] == 100
    said.clear()
    time.sleep(0.05)
    assert not said


def test_fields_and_names_are_there():
    """Each metric's field is its record's; names are Prometheus' and unlike."""
    assert all(metric.field in metric.of.__dataclass_fields__ for metric in METRICS)
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names) and all(name.replace("_", "").isalpha() for name in names)


def test_a_step_costs_the_driver_less_than_a_millisecond(metrics):
    """With Ray's own classes, which hand the values to its core: 0.5 % of a step of 0.2 s."""
    metrics.on_start(10, 0)
    seconds = []
    for _ in range(50):
        started = time.perf_counter()
        metrics.on_step(STEP)
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[25] < 1e-3
