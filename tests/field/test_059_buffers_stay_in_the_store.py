"""Field case 59 (ray #15886, #13443, #13093).

In: a working set larger than the object store.
Bad: ObjectStoreFullError, or a hang when spilled objects are read.
Good: a fixed set of buffers, allocated once, no `put` in a step; spilled bytes are 0 after 100 steps.
"""

import numpy as np
import pytest
import ray

from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.plasma_store import StoreTooSmall, read_store_stats
from slideformer_ray.memory.shared_buffer import SharedBuffer
from tests.memory.conftest import ray_node  # noqa: F401

MIB = 2**20
COUNTERS = ["grad", "params"]
STEPS = 100


@ray.remote(num_cpus=0)
class Optimizer:
    def run(self, control, params, grad):
        control, params, grad = (SharedBuffer.attach(handle) for handle in (control, params, grad))
        page = CounterPage(control.numpy(np.uint8), COUNTERS)
        for step in range(1, STEPS + 1):
            page.wait("grad", step, timeout_s=30)
            params.numpy(np.int32)[:] += grad.numpy(np.int32)
            page.signal("params", step)


def test_100_steps_put_nothing_and_spill_nothing(ray_node):  # noqa: F811
    """Gradients go out and parameters come back a hundred times through one memory; the store's books stand still."""
    control = SharedBuffer.create("control", CounterPage.nbytes(len(COUNTERS)))
    params, grad = (SharedBuffer.create(name, 16 * MIB) for name in ("params", "grad"))
    page = CounterPage(control.numpy(np.uint8), COUNTERS)
    done = Optimizer.remote().run.remote(control.handle(), params.handle(), grad.handle())
    before = None
    for step in range(1, STEPS + 1):
        grad.numpy(np.int32)[:] = step
        page.signal("grad", step)
        page.wait("params", step, timeout_s=30)
        if step == 1:
            before = read_store_stats()
    assert read_store_stats() == before
    assert ray_node.spilled_bytes() == 0
    ray.get(done)
    assert (params.numpy(np.int32) == STEPS * (STEPS + 1) // 2).all()


def test_a_set_beyond_the_store_is_refused_at_allocation(ray_node):  # noqa: F811
    """The buffer that does not fit fails when it is created, and the others stay what they were."""
    kept = SharedBuffer.create("kept", 16 * MIB)
    kept.numpy(np.uint8)[:] = 7
    with pytest.raises(StoreTooSmall, match="'one too many' needs 100.0 MiB, the object store has"):
        SharedBuffer.create("one too many", 100 * MIB)
    assert (kept.numpy(np.uint8) == 7).all() and ray_node.spilled_bytes() == 0
