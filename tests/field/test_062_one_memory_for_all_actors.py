"""Field case 62 (ray #12317, #26229, docs PR #59084).

In: share a torch tensor between actors.
Bad: each `get` copies; zero-copy is opt-in by environment, and a write is then visible to others unawares.
Good: numpy and torch views of one memory, asserted to be the same bytes in all actors; a single writer per phase.
"""

import numpy as np
import ray
import torch

from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.proc_maps import find_mapping
from slideformer_ray.memory.shared_buffer import SharedBuffer
from tests.memory.conftest import ray_node  # noqa: F401

PHASES = ["written by gpu", "written by optimizer"]


def file_offset_of(tensor):
    """The byte of the memory file behind a tensor's first element: the address as all processes have it in common."""
    address = tensor.data_ptr()
    return find_mapping(address, tensor.nbytes).file_offset(address)


@ray.remote(num_cpus=0)
class Tier:
    def __init__(self, control, params):
        self.buffers = [SharedBuffer.attach(control), SharedBuffer.attach(params)]
        self.page = CounterPage(self.buffers[0].numpy(np.uint8), PHASES)
        self.params = self.buffers[1].tensor(torch.bfloat16)

    def where(self):
        view = self.buffers[1].numpy(np.uint16)
        return file_offset_of(self.params), view.ctypes.data == self.params.data_ptr()

    def double_after(self, awaited, signalled):
        self.page.wait(awaited, 1, timeout_s=30)
        self.params *= 2
        self.page.signal(signalled, 1)


def test_views_are_the_same_bytes_everywhere(ray_node):  # noqa: F811
    """Two actors and the driver have tensors over one memory, and hand it on writer by writer."""
    control = SharedBuffer.create("control", CounterPage.nbytes(len(PHASES)))
    params = SharedBuffer.create("params", 1 << 20)
    here = params.tensor(torch.bfloat16)
    tiers = [Tier.remote(control.handle(), params.handle()) for _ in range(2)]
    assert ray.get([tier.where.remote() for tier in tiers]) == [(file_offset_of(here), True)] * 2

    page = CounterPage(control.numpy(np.uint8), PHASES)
    done = tiers[0].double_after.remote("written by gpu", "written by optimizer")
    here.fill_(3)
    page.signal("written by gpu", 1)
    page.wait("written by optimizer", 1, timeout_s=30)
    ray.get(done)
    assert (here == 6).all()
