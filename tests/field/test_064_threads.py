"""Field case 64: ray #28594, #10755, PR #30496.

In: an optimizer actor on the CPU.
Bad: Ray starts it with one OpenMP thread, at nice 15: the update takes ten times as long, and nobody says so.
Good: each actor sets its threads first and reports what it has; over all actors they are no more than there are cores.
"""

import pytest
from pipeline import make_config, save_small_model
from recorded_run import NUM_ACTORS, THREADS, ray_run

from slideformer_ray.budget import resolve
from slideformer_ray.machine import Machine
from slideformer_ray.model.layers import describe_model, load_hf_config


def test_actors_report_the_threads_they_were_given():
    """Through Ray: threads and niceness as they are in the process, and which kernel runs on them."""
    reports = {report.name: report for report in ray_run().reports}
    for actor in range(NUM_ACTORS):
        report = reports[f"optimizer actor {actor}"]
        assert (report.threads, report.niceness) == (THREADS, 0)
        assert report.detail.startswith(("native ", "torch "))
    assert {report.niceness for report in reports.values()} == {0}
    assert len({report.pid for report in reports.values()}) == 2 + NUM_ACTORS


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 16, 64])
def test_default_threads_leave_cores_for_the_others(tmp_path, cores):
    """All optimizer threads together, and one core each for the GPU actor's lanes and the driver."""
    model = save_small_model(tmp_path / "model", "llama", layers=1)
    changes = {"num_optimizer_actors": None, "threads_per_optimizer_actor": None}
    config = make_config(model, **{f"placement__{key}": value for key, value in changes.items()})
    hf_config = load_hf_config(model)
    machine = Machine.read("cpu").like(cores=cores)
    layout = resolve(config, describe_model(hf_config), hf_config.intermediate_size, machine).layout
    total = layout.num_optimizer_actors * layout.threads_per_optimizer_actor
    assert 1 <= total <= max(1, cores - 2)
    assert total >= (cores - 2) * 0.8
