"""`SharedBuffer`: memory that the driver and its actors all read and write, as numpy and torch views without a copy.

The memory is one object of Ray's plasma store. Ray's contract says that objects are immutable; we bend exactly that
clause, by writing through the object's address, and this file holds every rule that makes it sound
(docs/architecture.md): the object is put once and never again, a view of it is kept in each process for as long as the
memory is used, the kernel is asked that all processes map the same bytes of the same memory file, and who may write
when is settled by the version counters. Nothing outside this file knows that plasma is used: POSIX shared memory could
take its place here. Touches Ray and /proc/self. Tested by tests/memory/test_shared_buffer.py.
"""

import contextlib
import ctypes
import dataclasses
import mmap

import numpy as np
import numpy.typing as npt
import ray
import torch

from slideformer_ray.memory.host_limits import PAGE_BYTES, StoreTooSmall, round_to_pages
from slideformer_ray.memory.plasma_store import read_store_stats
from slideformer_ray.memory.proc_maps import FileOffset, find_mapping, is_memory_file

_GET_TIMEOUT_S = 60


class DivergedBuffer(RuntimeError):
    """This process does not see the bytes that the driver sees: what one writes, the other would never read."""


@dataclasses.dataclass(frozen=True)
class BufferHandle:
    """What an actor needs to attach. `refs` is a list of one, since Ray replaces a bare reference by its value."""

    name: str
    nbytes: int
    file_offset: FileOffset
    refs: list[ray.ObjectRef]


class SharedBuffer:
    """One named, page-aligned range of memory of `nbytes` bytes, zero at first, at `address` in this process.

    Made by `create` in the driver, `attach` in an actor, or `private` where no Ray is wanted. Views keep the memory
    alive by themselves: a tensor may outlive its buffer's `close`.
    """

    def __init__(self, name: str, nbytes: int, pin: np.ndarray, ref: ray.ObjectRef | None = None):
        self.name = name
        self.nbytes = nbytes
        self.address = round_to_pages(pin.ctypes.data)
        self._ref = ref
        # A ctypes array is a writable buffer whatever numpy says of plasma's; every view descends from it, and through
        # it from the pin.
        memory = (ctypes.c_char * nbytes).from_address(self.address)
        memory.pin = pin  # type: ignore[attr-defined]
        self._memory = memoryview(memory)

    @classmethod
    def create(cls, name: str, nbytes: int) -> "SharedBuffer":
        """Put a zeroed object into the store, in the driver, which owns it until `close`.

        Raises:
            StoreTooSmall: the object store is full.
        """
        try:
            # np.zeros is untouched memory: reading it maps the kernel's zero page, so only the store's copy takes room.
            ref = ray.put(np.zeros(round_to_pages(nbytes) + PAGE_BYTES, np.uint8))
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
            # Ray reports a full store as a full disk, because falling back to one is what the node was told not to do.
            stats = read_store_stats()
            raise StoreTooSmall(
                f"shared buffer {name!r} needs {_mib(nbytes)}, the object store has "
                f"{_mib(stats.capacity_bytes - stats.used_bytes)} free of {_mib(stats.capacity_bytes)}. "
                "Fix: size the store for all buffers (`store_bytes`)"
            ) from error
        buffer = cls(name, nbytes, ray.get(ref, timeout=_GET_TIMEOUT_S), ref)
        buffer.handle()  # asks the kernel once, here: a store on a disk should not be found out by the first actor
        return buffer

    @classmethod
    def attach(cls, handle: BufferHandle) -> "SharedBuffer":
        """Open the driver's buffer in this process.

        Raises:
            DivergedBuffer: this process maps other bytes than the driver.
            ray.exceptions.RayError: the object is lost: its driver or its store has ended.
        """
        buffer = cls(handle.name, handle.nbytes, ray.get(handle.refs[0], timeout=_GET_TIMEOUT_S))
        if buffer.file_offset != handle.file_offset:
            raise DivergedBuffer(
                f"shared buffer {handle.name!r}: the driver has it at {handle.file_offset}, "
                f"this process at {buffer.file_offset}"
            )
        return buffer

    @classmethod
    def private(cls, name: str, nbytes: int) -> "SharedBuffer":
        """The same over zeroed anonymous memory of this process alone, in huge pages where the kernel has them."""
        # MAP_PRIVATE: Python's default is shared, on which MADV_HUGEPAGE does not act.
        memory = mmap.mmap(-1, round_to_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel built without huge pages refuses the advice
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(name, nbytes, np.frombuffer(memory, np.uint8))

    def handle(self) -> BufferHandle:
        """What to send to actors; the driver's buffer only."""
        assert self._ref is not None, f"shared buffer {self.name!r} is not this process's to hand out"
        return BufferHandle(self.name, self.nbytes, self.file_offset, [self._ref])

    @property
    def file_offset(self) -> FileOffset:
        """Which byte of which memory file the buffer starts at, as the kernel has it now.

        Raises:
            DivergedBuffer: it is private memory, or Ray's store fell back to a file on a disk.
        """
        mapping = find_mapping(self.address, self.nbytes)
        if mapping is None or mapping.permissions[:2] + mapping.permissions[3] != "rws":
            raise DivergedBuffer(f"shared buffer {self.name!r} is not in one writable shared mapping, but in {mapping}")
        if not is_memory_file(mapping.path):
            raise DivergedBuffer(
                f"shared buffer {self.name!r} lies in {mapping.path}, which is on a disk: "
                "Ray's object store fell back to files"
            )
        return mapping.file_offset(self.address)

    @property
    def page_range(self) -> tuple[int, int]:
        """(address, bytes) in whole pages, none of them shared with another buffer: what `pinning.register` takes."""
        return self.address, round_to_pages(self.nbytes)

    def numpy(self, dtype: npt.DTypeLike, offset_bytes: int = 0, count: int | None = None) -> np.ndarray:
        """A flat writable view of `count` elements, to the buffer's end by default.

        Raises:
            ValueError: past the end, or the rest is no whole number of elements.
        """
        return np.frombuffer(self._memory, dtype, -1 if count is None else count, offset_bytes)

    def tensor(self, dtype: torch.dtype, offset_elements: int = 0, numel: int | None = None) -> torch.Tensor:
        """A flat writable CPU view of `numel` elements, to the buffer's end by default.

        Raises:
            ValueError: past the end.
        """
        if numel is None:
            numel = self.nbytes // dtype.itemsize - offset_elements
        if numel == 0:  # an optimizer actor's slice of a layer smaller than the number of actors; frombuffer refuses it
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset_elements * dtype.itemsize)

    def close(self) -> None:
        """Let go of the memory. It is freed when no process holds the buffer or a view of it any more."""
        self.__dict__.pop("_memory", None)
        self._ref = None

    def __repr__(self) -> str:
        return f"SharedBuffer({self.name!r}, {self.nbytes} bytes at {self.address:#x})"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
