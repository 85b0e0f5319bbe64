"""Field case 29 (vllm #51080).

In: register 512 GiB or more in one call.
Bad: error 2 whatever memory is free.
Good: register in chunks, all or nothing, unwind on failure.
"""

import pytest

from slideformer_ray.memory.pinning import PinningFailed, register

GIB = 2**30


class LimitedDriver:
    """Refuses any call of 512 GiB or more, as CUDA does, and everything past `room` in all."""

    def __init__(self, room):
        self.room, self.registered = room, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if nbytes >= 512 * GIB or sum(self.registered.values()) + nbytes > self.room:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaGetLastError(self):
        return 2

    def cudaGetErrorString(self, code):
        return "out of memory"


def test_1200_gib_are_registered_in_chunks():
    """An arena of 1200 GiB is pinned whole, without gap or overlap."""
    driver = LimitedDriver(room=2000 * GIB)
    registration = register([(4096, 1200 * GIB)], runtime=driver)
    pieces = sorted(driver.registered.items())
    assert pieces[0][0] == 4096 and registration.pinned_bytes == 1200 * GIB
    ends = [address + nbytes for address, nbytes in pieces]
    assert ends[:-1] == [address for address, _ in pieces[1:]] and ends[-1] == 4096 + 1200 * GIB


def test_failure_in_a_late_chunk_unwinds_all():
    """When the driver has room for 1000 GiB, none of 1200 stays registered."""
    driver = LimitedDriver(room=1000 * GIB)
    with pytest.raises(PinningFailed, match=r"after 768.00 of 1200.00 GiB; nothing is left pinned"):
        register([(4096, 1200 * GIB)], runtime=driver)
    assert driver.registered == {}
