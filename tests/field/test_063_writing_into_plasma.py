"""Field case 63 (ray #46438, #48086).

In: write in place into a plasma buffer, or pin it.
Bad: there is no API; numpy calls the memory read-only and torch ignores that.
Good: one class bends exactly one clause of Ray's contract (immutability), says so, and what it relies on is tested:
writable views, memory that a dead actor does not take along, and a store that was restarted is never taken for the old.
"""

import os
import signal

import numpy as np
import pytest
import ray
import torch

from slideformer_ray.memory import shared_buffer
from slideformer_ray.memory.plasma_store import start_local_node
from slideformer_ray.memory.shared_buffer import SharedBuffer

STORE_BYTES = 80 << 20


@ray.remote(num_cpus=0)
class Writer:
    def __init__(self, handle):
        self.buffer = SharedBuffer.attach(handle)

    def fill(self, value):
        view = self.buffer.numpy(np.float32)
        assert view.flags.writeable
        view[:] = value

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def no_node_left():
    yield
    ray.shutdown()


def test_bent_clause_is_documented():
    """The file that writes into Ray's objects says which rule it bends."""
    assert "immutable; we bend exactly that\nclause" in shared_buffer.__doc__


def test_contents_outlive_actors_and_never_pass_to_another_store(no_node_left):
    """A killed writer leaves what it wrote; after a restart of the store, the old handle is refused, not re-used."""
    node = start_local_node(STORE_BYTES, num_cpus=1, num_gpus=0)
    buffer = SharedBuffer.create("params", 1 << 20)
    handle = buffer.handle()
    writer = Writer.remote(handle)
    ray.get(writer.fill.remote(1.5))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.die.remote())
    assert (buffer.tensor(torch.float32) == 1.5).all()
    ray.get(Writer.remote(handle).fill.remote(2.5))
    assert (buffer.tensor(torch.float32) == 2.5).all()
    node.shutdown()

    node = start_local_node(STORE_BYTES, num_cpus=1, num_gpus=0)
    SharedBuffer.create("other run's", 1 << 20)
    with pytest.raises(ValueError, match="owner is unknown"):
        Writer.remote(handle)
    node.shutdown()
