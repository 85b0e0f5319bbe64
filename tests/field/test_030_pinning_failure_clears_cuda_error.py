"""Field case 30 (Soup PR #989, #901).

In: pinning fails and the code goes on with pageable memory.
Bad: CUDA's last error stays set; the next kernel launch says "out of memory" with 7 GB free.
Good: the error is cleared; pinned and unpinned bytes are reported.
"""

import pytest
import torch

from slideformer_ray.memory.pinning import PinningFailed, register
from slideformer_ray.memory.shared_buffer import SharedBuffer

GIB = 2**30


class StickyDriver:
    """Has room for nothing, and remembers its last error until somebody asks for it."""

    last_error = 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.last_error = 2
        return 2

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error

    def cudaGetErrorString(self, code):
        return "out of memory"


def test_no_error_is_left_for_the_next_launch():
    """After the refusal the driver's last error is clean, and the refusal says what was and was not pinned."""
    driver = StickyDriver()
    with pytest.raises(PinningFailed, match="out of memory.* after 0.00 of 7.00 GiB; nothing is left pinned"):
        register([(4096, 7 * GIB)], runtime=driver)
    assert driver.last_error == 0


def test_pageable_bytes_are_reported():
    """A run that goes on without pinning knows how many bytes are pageable."""
    registration = register([(4096, 7 * GIB)], device="cpu")
    assert (registration.pinned_bytes, registration.unpinned_bytes) == (0, 7 * GIB)
    assert registration.report == "not pinned: no GPU (7.00 GiB pageable)"


@pytest.mark.gpu
def test_gpu_next_launch_succeeds():
    """A real refusal (memory that is registered already), then a kernel and a copy from the pageable memory."""
    buffer = SharedBuffer.private("grad.0", 1 << 20)
    registration = register([buffer.page_range])
    with pytest.raises(PinningFailed):
        register([buffer.page_range])
    pageable = SharedBuffer.private("grad.1", 1 << 20).tensor(torch.int32).fill_(3)
    assert (pageable.to("cuda") * 2).sum().item() == 6 * pageable.numel()
    registration.unregister()
