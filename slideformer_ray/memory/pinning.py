"""Registering host memory with the GPU's driver (pinning), so that copies run at full PCIe speed and beside compute.

Memory is registered where it lies, instead of allocated pinned: PyTorch's pinned allocator rounds 2.1 GB up to 4 GB,
and plasma memory must be pinned in place. All ranges are registered or none. Uses PyTorch's handle on the CUDA runtime,
which on ROCm builds is HIP's. Tested by tests/memory/test_pinning.py with a pretended runtime, and on a GPU by its
tests marked `gpu`.
"""

import concurrent.futures
import ctypes
import dataclasses
import pathlib
import platform
import resource
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from slideformer_ray.memory.host_limits import PAGE_BYTES

# One cudaHostRegister call of 512 GiB or more fails with error 2 whatever memory is free (vllm #51080). A copy should
# not cross a chunk's border, so chunks are as large as that allows: only a buffer beyond 256 GiB is ever cut.
CHUNK_BYTES = 256 << 30


class PinningFailed(ValueError):
    """The driver refused to register memory. Nothing is left registered, and CUDA's last error is cleared."""


class CudaRuntime(Protocol):
    """The four calls that registration needs, with CUDA's names and integer error codes."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...

    def cudaGetLastError(self) -> int: ...

    def cudaGetErrorString(self, code: int) -> str: ...


@dataclasses.dataclass
class Registration:
    """What `register` did. `seconds` is the time it took; `reason` says why nothing is pinned, else it is empty."""

    pinned_bytes: int
    unpinned_bytes: int
    seconds: float
    reason: str = ""
    _pieces: list[tuple[int, int]] = dataclasses.field(default_factory=list, repr=False)
    _runtime: CudaRuntime | None = dataclasses.field(default=None, repr=False)

    @property
    def report(self) -> str:
        if self.reason:
            return f"not pinned: {self.reason} ({self.unpinned_bytes / 2**30:.2f} GiB pageable)"
        return f"pinned {self.pinned_bytes / 2**30:.2f} GiB in {len(self._pieces)} pieces, {self.seconds:.2f} s"

    def unregister(self) -> None:
        """Make the memory pageable again, once every copy on it has ended. Does nothing the second time.

        Raises:
            RuntimeError: the driver refused; the other pieces are unregistered all the same.
        """
        pieces, self._pieces = self._pieces, []
        self.unpinned_bytes, self.pinned_bytes = self.unpinned_bytes + self.pinned_bytes, 0
        if pieces:
            assert self._runtime is not None
            self.reason = "unregistered"
            failed = _unregister(pieces, self._runtime)
            if failed:
                error = self._runtime.cudaGetErrorString(failed[0])
                raise RuntimeError(f"{len(failed)} of {len(pieces)} pieces could not be unregistered: {error}")


def register(
    ranges: Sequence[tuple[int, int]],
    device: str | torch.device = "cuda",
    chunk_bytes: int = CHUNK_BYTES,
    runtime: CudaRuntime | None = None,
) -> Registration:
    """Pin every range of memory, or none.

    Args:
        ranges: (address, bytes) pairs, whole pages (`SharedBuffer.page_range`); no two share a page.
        device: where copies go. On "cpu" nothing is registered and the report says so.
        chunk_bytes: the most that one call registers, whole pages.
        runtime: the CUDA runtime; tests pass a pretended one.
    Raises:
        PinningFailed: with the driver's error, the memlock limit of this process and what to do.
    """
    total = sum(nbytes for _, nbytes in ranges)
    if torch.device(device).type == "cpu":
        return Registration(0, total, 0.0, reason="no GPU")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    runtime = runtime or _TorchCudaRuntime()
    pieces = [
        (address + start, min(chunk_bytes, nbytes - start))
        for address, nbytes in ranges
        for start in range(0, nbytes, chunk_bytes)
    ]
    started = time.perf_counter()
    for i, (address, nbytes) in enumerate(pieces):
        code = runtime.cudaHostRegister(address, nbytes, 0)
        if code != 0:
            # The failed call leaves CUDA's last error set, and the next kernel launch would report it as its own (Soup
            # PR #989): _unregister clears it, too.
            _unregister(pieces[:i], runtime)
            error = runtime.cudaGetErrorString(code)
            done = sum(size for _, size in pieces[:i])
            raise PinningFailed(_failure_message(f"{error} (error {code})", nbytes, done, total, memlock))
    return Registration(total, 0, time.perf_counter() - started, _pieces=pieces, _runtime=runtime)


def touch_parallel(array: np.ndarray, threads: int) -> float:
    """Have the kernel back every page of a fresh array, on several threads; contents stay. Returns the seconds it took.

    One thread faults pages in at about 4 GB/s. Pages land on the NUMA node of the thread that touches them first, so
    set the process's CPU affinity before.

    Args:
        array: contiguous, writable.
        threads: how many; NumPy gives up the GIL inside.
    """
    pages = array.reshape(-1).view(np.uint8)[::PAGE_BYTES]
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        # OR with 0 writes each byte back as it was: a write, since reading a fresh page maps the kernel's shared zero
        # page instead.
        list(pool.map(lambda part: np.bitwise_or(part, 0, out=part), np.array_split(pages, threads)))
    return time.perf_counter() - started


class _TorchCudaRuntime:
    """PyTorch's CUDA runtime handle, plus cudaGetLastError, which PyTorch does not bind."""

    def __init__(self) -> None:
        self._cudart = torch.cuda.cudart()  # initialises CUDA: raises on a machine without a GPU
        self._get_last_error = _find_get_last_error()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return int(self._cudart.cudaHostRegister(address, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))

    def cudaGetLastError(self) -> int:
        return self._get_last_error()

    def cudaGetErrorString(self, code: int) -> str:
        return self._cudart.cudaGetErrorString(self._cudart.cudaError(code))


def _find_get_last_error() -> Callable[[], int]:
    """cudaGetLastError of the runtime that PyTorch uses (hipGetLastError on ROCm).

    Other packages bring runtimes of their own into the process (torchvision does), each with its own last error. A
    look-up in PyTorch's library searches that library's dependencies, so it finds the right one.
    """
    hip = torch.version.hip is not None
    library, symbol = ("libc10_hip.so", "hipGetLastError") if hip else ("libc10_cuda.so", "cudaGetLastError")
    return getattr(ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / library)), symbol)


def _unregister(pieces: Sequence[tuple[int, int]], runtime: CudaRuntime) -> list[int]:
    """Unregister all, last first; return the error codes of those that the driver refused."""
    codes = [runtime.cudaHostUnregister(address) for address, _ in reversed(pieces)]
    runtime.cudaGetLastError()
    return [code for code in codes if code != 0]


def _failure_message(error: str, nbytes: int, done: int, total: int, memlock: int) -> str:
    limit = "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock // 1024} KiB"
    parts = [
        f"could not pin host memory: {error} at a piece of {nbytes / 2**30:.2f} GiB, after {done / 2**30:.2f} of "
        f"{total / 2**30:.2f} GiB; nothing is left pinned. The memlock limit (`ulimit -l`) is {limit}, "
        f"{total // 1024} KiB were asked for."
    ]
    if memlock != resource.RLIM_INFINITY and memlock < total:
        parts.append(
            "Fix: `ulimit -l unlimited` before starting (in a container: `docker run --ulimit memlock=-1`; for good: "
            "`* - memlock unlimited` in /etc/security/limits.conf)."
        )
    if "microsoft" in platform.release().lower():
        parts.append(
            "Fix on WSL2, which pins only part of its memory: raise `memory=` under [wsl2] in "
            "%UserProfile%\\.wslconfig, then `wsl --shutdown`."
        )
    if len(parts) == 1:
        parts.append("Fix: free host memory, or plan with fewer pinned bytes.")
    return " ".join(parts)
