"""Field case 28 (vllm #56410, RoundPipe docs).

In: pin a 2.1 GB tensor with torch.
Bad: the pinned allocator rounds up to the next power of two, about 1.9 times the memory.
Good: memory is registered where it lies; accounted bytes within 5 % of RSS.
"""

import numpy as np
import pytest

from slideformer_ray.memory.pinning import register, touch_parallel
from slideformer_ray.memory.shared_buffer import SharedBuffer


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_accounted_bytes_are_resident_bytes():
    """A buffer just above a power of two takes its own size once touched, and that is what is accounted for pinning."""
    before = resident_bytes()
    buffer = SharedBuffer.private("states", (64 << 20) + 4097)
    touch_parallel(buffer.numpy(np.uint8), threads=2)
    registration = register([buffer.page_range], device="cpu")
    assert resident_bytes() - before == pytest.approx(registration.unpinned_bytes, rel=0.05)


@pytest.mark.gpu
def test_gpu_pinned_bytes_are_resident_bytes():
    """The report's own size: registering 2.1 GB in place makes 2.1 GB resident, not 4."""
    first = SharedBuffer.private("warm-up", 4096)
    register([first.page_range]).unregister()  # starts CUDA, which takes memory of its own
    before = resident_bytes()
    buffer = SharedBuffer.private("states", 2_100_000_000)
    registration = register([buffer.page_range])
    assert buffer.numpy(np.uint8).any() == 0
    assert resident_bytes() - before == pytest.approx(registration.pinned_bytes, rel=0.05)
    registration.unregister()
