"""Registration with a pretended CUDA runtime; with the real one in the tests marked `gpu`."""

import mmap
import platform
import resource

import numpy as np
import pytest
import torch

from slideformer_ray.memory.pinning import CHUNK_BYTES, PinningFailed, register, touch_parallel
from slideformer_ray.memory.shared_buffer import SharedBuffer

GIB = 2**30


class FakeRuntime:
    """Keeps the books of a CUDA runtime; the call number `fail_at` (from 0) is refused with `code`."""

    def __init__(self, fail_at=None, code=2):
        self.fail_at, self.code = fail_at, code
        self.calls, self.registered, self.last_error = [], {}, 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append((address, nbytes))
        if len(self.calls) - 1 == self.fail_at:
            self.last_error = self.code
            return self.code
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        if address not in self.registered:
            self.last_error = 713
            return 713
        del self.registered[address]
        return 0

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error

    def cudaGetErrorString(self, code):
        return {1: "invalid argument", 2: "out of memory", 713: "not registered"}[code]


def test_every_range_is_registered_whole():
    """A range below the chunk size is one call: a copy inside it crosses no border."""
    runtime = FakeRuntime()
    registration = register([(4096, 8192), (40960, 4096)], runtime=runtime)
    assert runtime.calls == [(4096, 8192), (40960, 4096)]
    assert (registration.pinned_bytes, registration.unpinned_bytes) == (12288, 0)
    assert registration.report.startswith("pinned 0.00 GiB in 2 pieces")


def test_large_range_is_cut_into_chunks():
    """Chunks cover the range exactly, without overlap."""
    runtime = FakeRuntime()
    register([(0, 10 * GIB)], chunk_bytes=4 * GIB, runtime=runtime)
    assert runtime.calls == [(0, 4 * GIB), (4 * GIB, 4 * GIB), (8 * GIB, 2 * GIB)]


def test_default_chunk_is_below_the_drivers_limit():
    """512 GiB in one call fails whatever is free, and chunks end on pages."""
    assert CHUNK_BYTES < 512 * GIB and CHUNK_BYTES % 4096 == 0


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_failure_unwinds_and_clears_the_error(fail_at):
    """All or nothing: after a refusal nothing stays registered and CUDA's last error is clean."""
    runtime = FakeRuntime(fail_at)
    with pytest.raises(PinningFailed, match=r"out of memory \(error 2\) at a piece of 1.00 GiB"):
        register([(0, 3 * GIB), (8 * GIB, GIB)], chunk_bytes=GIB, runtime=runtime)
    assert len(runtime.calls) == fail_at + 1
    assert runtime.registered == {} and runtime.last_error == 0


def test_unregister_gives_all_back_once():
    """Unregistering is complete, and doing it again does nothing."""
    runtime = FakeRuntime()
    registration = register([(0, 2 * GIB)], chunk_bytes=GIB, runtime=runtime)
    registration.unregister()
    registration.unregister()
    assert runtime.registered == {}
    assert registration.report == "not pinned: unregistered (2.00 GiB pageable)"


def test_refused_unregister_is_reported():
    """The others are unregistered all the same, and the error does not stay behind in CUDA."""
    runtime = FakeRuntime()
    registration = register([(0, GIB), (4 * GIB, GIB)], runtime=runtime)
    del runtime.registered[4 * GIB]
    with pytest.raises(RuntimeError, match="1 of 2 pieces could not be unregistered: not registered"):
        registration.unregister()
    assert runtime.registered == {} and runtime.last_error == 0


def test_without_a_gpu_nothing_is_registered():
    """On the CPU path the report says that memory is pageable and why."""
    registration = register([(0, GIB)], device="cpu", runtime=FakeRuntime(fail_at=0))
    assert (registration.pinned_bytes, registration.unpinned_bytes) == (0, GIB)
    assert registration.report == "not pinned: no GPU (1.00 GiB pageable)"


def test_unlimited_memlock_is_not_blamed(monkeypatch):
    """Where memlock is no limit the message does not send the user to raise it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    with pytest.raises(PinningFailed, match=r"\(`ulimit -l`\) is unlimited.*Fix: free host memory"):
        register([(0, GIB)], runtime=FakeRuntime(fail_at=0))


def test_touch_keeps_contents_and_backs_every_page():
    """Touching makes pages resident and changes no byte, for a size that threads do not divide."""
    pages = 1001
    array = np.frombuffer(mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array[4096 * 7] = 9
    before = resident_bytes()
    assert touch_parallel(array, threads=3) >= 0
    assert resident_bytes() - before > 0.95 * array.nbytes
    assert array[4096 * 7] == 9 and array.sum() == 9


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.gpu
def test_gpu_registered_memory_is_pinned_and_copies():
    """Registered memory is pinned to PyTorch, copies both ways without blocking, and is pageable again afterwards."""
    buffer = SharedBuffer.private("buffer", 64 << 20)
    host = buffer.tensor(torch.int32)
    registration = register([buffer.page_range])
    assert host.is_pinned()
    host.copy_(torch.arange(host.numel(), dtype=torch.int32))
    on_gpu = host.to("cuda", non_blocking=True)
    on_gpu += 1
    host.copy_(on_gpu, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(1, host.numel() + 1, dtype=torch.int32))
    registration.unregister()
    assert not host.is_pinned()


@pytest.mark.gpu
def test_gpu_failure_leaves_no_error_behind():
    """A refused registration unwinds, and the next kernel launch knows nothing of it (Soup PR #989)."""
    buffer = SharedBuffer.private("buffer", 8 << 20)
    first = register([buffer.page_range])
    other = SharedBuffer.private("other", 8 << 20)
    with pytest.raises(PinningFailed, match="could not pin host memory"):
        register([other.page_range, buffer.page_range])  # the second is registered already
    assert not other.tensor(torch.uint8).is_pinned()
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    first.unregister()
