"""Field case 34: LlamaFactory #6755, #6687, #1138; DeepSpeed #4571.

In: a 32B model, one row a step, 744 GB of RAM.
Bad: exit -9 without a message; the estimator had said that it fits.
Good: refused before anything is loaded, with the bytes of every item; a cgroup's limit counts as RAM does.
"""

import dataclasses

import pytest
import ray

from slideformer_ray.actors.process import private_memory
from slideformer_ray.budget import DoesNotFit, format_table
from slideformer_ray.config import GIB, RunConfig
from slideformer_ray.machine import Machine
from slideformer_ray.model.shapes import write_shape
from slideformer_ray.trainer import Trainer

RAM_GIB = 744e9 / GIB


@pytest.fixture
def config(tmp_path):
    """The directory has config.json alone: a run that gets as far as the weights says so."""
    return RunConfig.from_dict(
        {
            "run_dir": tmp_path / "run",
            "model": {"path": write_shape("qwen2.5-32b", tmp_path)},
            "data": {"train": [tmp_path / "none.jsonl"]},
            "training": {"steps": 1, "rows_per_step": 1},
        }
    )


def machine(ram_gib, **limits):
    found = Machine.read("cpu").like(gpu_gib=24, ram_gib=ram_gib, cores=16)
    shm = {"shm_total": found.limits.ram_total, "shm_free": found.limits.ram_total}
    return dataclasses.replace(found, limits=dataclasses.replace(found.limits, **shm, **limits))


@pytest.mark.parametrize(
    "host, named",
    [
        (machine(RAM_GIB / 2), "available RAM is 346.45 GiB"),
        (machine(RAM_GIB, cgroup_limit=128 * GIB), "what the cgroup's limit leaves is 128.00 GiB"),
    ],
    ids=["half the RAM", "cgroup"],
)
def test_a_model_that_cannot_fit_is_refused_with_its_bytes(config, host, named):
    """Shortfall and ceiling in one message; a table of all items comes with it; nothing was read or started."""
    before = private_memory()
    with pytest.raises(DoesNotFit, match=named) as caught:
        Trainer(config, machine=host)
    assert private_memory() - before < 64 << 20
    assert not ray.is_initialized() and not config.run_dir.exists()
    plan = caught.value.plan
    assert plan.host_bytes > plan.host_limit
    rows = format_table(plan.items)
    assert sum(what == "total" for _, what, _ in rows) == 3
    (moments,) = [item for item in plan.items if item.what == "exp_avg and exp_avg_sq, fp32"]
    assert moments.nbytes == pytest.approx(8 * 32.76e9, rel=0.01)


def test_the_reports_machine_is_enough(config):
    """With 744 GB the plan fits, 12 bytes a parameter and a gradient for each layer: the weights are looked for."""
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        Trainer(config, machine=machine(RAM_GIB))
