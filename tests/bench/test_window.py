"""window.py: a case through the tiers, as threads of this process."""

import json

import pytest

from slideformer_ray.bench.case import window_cases
from slideformer_ray.bench.host_memory import MachineMemory
from slideformer_ray.bench.window import measure_window
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.schedule import COMPUTE, GPU_LANES, update_lane


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "trace-4.json"
    settings = ["placement.device=cpu", "placement.num_optimizer_actors=2", "placement.threads_per_optimizer_actor=1"]
    (case,) = window_cases(
        "tiny", quickstart_model_dir(), [4], 32, 2, settings, warmup=1, steps=5, local=True, out=path.parent
    )
    return measure_window(case, MachineMemory()), path


def test_each_timed_step_has_its_seconds(measured):
    """Neither warm-up nor traced steps are among them."""
    result, _ = measured
    assert len(result.seconds) == 5 and min(result.seconds) > 0
    assert len(result.losses) == 1 + 5 + 3
    assert (result.tokens, result.rows, result.micro_batch_rows) == (128, 4, 2)


def test_what_the_gpu_waits_for_comes_from_the_traced_steps(measured):
    """Exposed seconds and the compute lane's own work are a step, as the trace saw it."""
    result, _ = measured
    assert result.busy_seconds.keys() == {*GPU_LANES, update_lane(0), update_lane(1)}
    seconds = result.busy_seconds[COMPUTE] + sum(result.exposed_seconds.values())
    assert 0.2 < seconds / result.traced_step_seconds < 2
    assert result.forward_hiding_factor > 0 and result.backward_hiding_factor > 0


def test_memory_is_counted_once(measured):
    """Without Ray the buffers are pages of the process: parameters, states and what Python takes."""
    result, _ = measured
    assert 12 * result.parameters < result.process_bytes < 4 << 30
    assert result.planned_host_bytes > 12 * result.parameters and result.gpu_peak_bytes == 0


def test_the_traced_steps_are_written(measured):
    """All lanes of three steps, for Perfetto."""
    events = json.loads(measured[1].read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {6, 7, 8}
