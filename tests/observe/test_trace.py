"""Spans to a Chrome trace and to a Timeline."""

import json

import pytest

from slideformer_ray.observe.trace import Span, measured_timeline, write_chrome_trace
from slideformer_ray.schedule import StepShape, build_step
from slideformer_ray.simulator import Durations, simulate

SHAPE = StepShape(4, 2, (True,) * 6, True, gradient_slots=4, clip=False, activation_slots=5, num_optimizer_actors=2)


@pytest.fixture(scope="module")
def simulated():
    plans = [build_step(SHAPE)] * 3
    seconds = {}
    for op in plans[0].ops:
        seconds[Durations.key(op, SHAPE)] = 1e-3 * (1 + len(op.kind) % 5)
    return plans, simulate(plans, Durations(seconds))


def spans_of(timeline, offset=100.0):
    return [Span.of(run.step + 7, run.op, run.start + offset, run.end + offset) for run in timeline.runs]


def test_a_measured_timeline_answers_as_the_simulated_one(simulated):
    """The same times give the same exposure, hiding factor and length of the critical path, whatever the clock's zero
    and the steps' numbers."""
    plans, timeline = simulated
    measured = measured_timeline(plans, spans_of(timeline))
    assert measured.exposed_seconds == pytest.approx(timeline.exposed_seconds, abs=1e-9)
    assert measured.hiding_factor == pytest.approx(timeline.hiding_factor)
    assert measured.step_seconds == pytest.approx(timeline.step_seconds)


def test_a_missing_span_is_refused(simulated):
    """A trace with a hole would blame the wrong lane."""
    plans, timeline = simulated
    with pytest.raises(KeyError):
        measured_timeline(plans, spans_of(timeline)[:-1])


def test_the_chrome_trace_has_a_named_track_a_lane(simulated, tmp_path):
    """Perfetto shows one track for each lane, times in microseconds from the first span."""
    _, timeline = simulated
    write_chrome_trace(tmp_path / "trace.json", spans_of(timeline))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"gpu.compute", "gpu.upload", "gpu.download", "update.0", "update.1"}
    work = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in work) == 0
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(timeline.seconds * 1e6)
