"""Regions of bytes in pre-allocated files, one a directory, read and written past the page cache by several threads.

The storage actor moves a layer's Adam states with it, and the optimizer actors use the same files for checkpoints. The
files are scratch: they belong to one run, which holds a lock on each (flock, so that the kernel gives it back however
the run ends), and `remove_dead_files` takes away those that nobody holds. Pure: no Ray. Tested by
tests/actors/test_nvme_store.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slideformer_ray.config import ConfigError
from slideformer_ray.machine import readable
from slideformer_ray.nvme_layout import ALIGN_BYTES, FileLayout

FILE_PATTERN = "slideformer-ray-*.states"
_LOCK_NAME = ".slideformer-ray.lock"


class NvmeError(RuntimeError):
    """A drive failed, is full or stands still. The message names the file, what was done, and what is needed."""


@dataclass(frozen=True)
class StoreFiles:
    """What a process needs to open a run's files."""

    paths: tuple[Path, ...]
    layout: FileLayout
    direct: bool  # past the page cache; False: some file system has no O_DIRECT
    queue_depth: int  # transfers at a time and directory, each way
    chunk_bytes: int  # of one transfer, at the most
    stall_s: float
    reason: str  # how the way of access and its numbers were chosen

    def describe(self) -> str:
        layout = self.layout
        way = "O_DIRECT, preadv and pwritev" if self.direct else "through the page cache, preadv and pwritev"
        spread = ""
        if layout.num_files > 1:
            spread = ", a layer a directory" if layout.stripe_bytes is None else ", every layer in stripes"
        return (
            f"{readable(sum(layout.regions))} in {', '.join(str(path.parent) for path in self.paths)}{spread}; {way}, "
            f"{self.queue_depth} at a time of up to {readable(self.chunk_bytes)}; {self.reason}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Files of a run: made, held, found dead.


class HeldFiles:
    """New files of full length that this process holds until `close`, which removes them."""

    def __init__(self, directories: Sequence[Path], layout: FileLayout):
        """Raises NvmeError when the space cannot be had; nothing is left behind then."""
        self.paths: list[Path] = []
        self._descriptors: list[int] = []
        name = FILE_PATTERN.replace("*", f"{os.getpid()}-{secrets.token_hex(4)}")
        try:
            for directory, size in zip(directories, layout.file_sizes(), strict=True):
                with _locked(directory):  # else another run could find the file before it is held, and remove it
                    path = directory / name
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    self.paths.append(path)
                    self._descriptors.append(descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if size:
                    _allocate(path, descriptor, size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.paths, self._descriptors = [], []


def _allocate(path: Path, descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)  # its bytes read as 0, as new Adam states are
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise NvmeError(
            f"{path}: {readable(size)} could not be set aside: {error.strerror} ({readable(free)} are free); free "
            "space, lower nvme.states, or give another directory in nvme.paths"
        ) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time makes or removes files in the directory."""
    descriptor = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def dead_files(directory: Path) -> list[tuple[Path, int]]:
    """(file, bytes on the disk) of those that no process holds: their runs have ended, however."""
    found = []
    for path in sorted(directory.glob(FILE_PATTERN)):
        with suppress(FileNotFoundError):
            if not _is_held(path):
                found.append((path, path.stat().st_blocks * 512))
    return found


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_dead_files(directories: Sequence[Path]) -> list[tuple[Path, int]]:
    """Remove what dead runs have left, and nothing of a living one. Returns (file, bytes)."""
    removed = []
    for directory in directories:
        with _locked(directory):
            for path, nbytes in dead_files(directory):
                path.unlink()
                removed.append((path, nbytes))
    return removed


def has_direct_io(path: Path) -> bool:
    """Whether the file's file system lets O_DIRECT past its page cache; some refuse to open, some to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    try:
        os.preadv(descriptor, [aligned_buffer(ALIGN_BYTES).data], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Memory that O_DIRECT takes: it begins at a multiple of `ALIGN_BYTES`. uint8."""
    memory = np.empty(nbytes + ALIGN_BYTES, np.uint8)
    skew = -memory.ctypes.data % ALIGN_BYTES
    return memory[skew : skew + nbytes]


# ----------------------------------------------------------------------------------------------------------------------
# Reading and writing.


class NvmeStore:
    """A run's open files. Reads and writes may run at the same time, each from one thread."""

    def __init__(self, files: StoreFiles):
        self.files = files
        flags = os.O_RDWR | (os.O_DIRECT if files.direct else 0)
        self._descriptors = [os.open(path, flags) for path in files.paths]
        threads = files.queue_depth * len(files.paths)
        self._readers, self._writers = _Workers(threads, "nvme-read"), _Workers(threads, "nvme-write")

    def read(self, region: int, memory: np.ndarray, offset: int = 0) -> None:
        """Fill `memory` (uint8; address, length and offset aligned) from the region, from byte `offset` on.

        Raises NvmeError, when the drive has failed, or has moved nothing for `stall_s`. What `memory` holds then is
        nothing; a transfer that stands still may still write into it.
        """
        self._move(self._readers, os.preadv, "reading", region, memory, offset)

    def write(self, region: int, memory: np.ndarray, offset: int = 0) -> None:
        """Write `memory` over the region's bytes, from `offset` on. Raises as `read` does."""
        self._move(self._writers, os.pwritev, "writing", region, memory, offset)

    def _move(
        self,
        workers: _Workers,
        move: Callable[..., int],
        doing: str,
        region: int,
        memory: np.ndarray,
        offset: int,
    ) -> None:
        data = memory.data
        chunks = [
            (extent.file, extent.file_offset + at, data[extent.offset + at : extent.offset + min(end, extent.nbytes)])
            for extent in self.files.layout.extents(region, offset, memory.nbytes)
            for at in range(0, extent.nbytes, self.files.chunk_bytes)
            for end in (at + self.files.chunk_bytes,)
        ]

        def work(chunk: tuple[int, int, memoryview]) -> None:
            file, begin, part = chunk
            descriptor, done = self._descriptors[file], 0
            while done < len(part):  # a transfer may be shorter than it was asked for
                try:
                    count = move(descriptor, [part[done:]], begin + done)
                except OSError as error:
                    raise self._error(doing, file, begin + done, len(part) - done, error) from error
                if count == 0:
                    raise NvmeError(f"{self.files.paths[file]}: {doing}: the file ends at byte {begin + done}")
                if self.files.direct and count % ALIGN_BYTES:  # go on from where a drive can
                    count -= count % ALIGN_BYTES
                    if not count:
                        raise NvmeError(f"{self.files.paths[file]}: {doing} at byte {begin + done}: less than a page")
                done += count

        stalled = workers.run(work, chunks, self.files.stall_s)
        if stalled is not None:
            file, begin, part = stalled
            raise NvmeError(
                f"{self.files.paths[file]}: the drive stands still: {doing} {readable(len(part))} at byte {begin} has "
                f"not ended after {self.files.stall_s:g} s (nvme.stall_s)"
            )

    def _error(self, doing: str, file: int, begin: int, nbytes: int, error: OSError) -> NvmeError:
        path = self.files.paths[file]
        name = errno.errorcode.get(error.errno or 0, "no number")
        text = f"{path}: {doing} {readable(nbytes)} at byte {begin}: {error.strerror} ({name})"
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(path.parent).free
            size = self.files.layout.file_sizes()[file]
            text += f"; the file needs {readable(size)} in all, {readable(free)} are free: free space"
        elif error.errno == errno.EROFS:
            text += "; the file system has become read-only: look at the kernel's log (dmesg)"
        elif error.errno == errno.EIO:
            text += "; the drive has failed: look at the kernel's log (dmesg), and take it out of nvme.paths"
        return NvmeError(text)

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class _Workers:
    """Threads that share out the chunks of one transfer at a time.

    Daemons: a call to a drive that never answers cannot be ended, and must not keep the process from ending.
    """

    def __init__(self, count: int, name: str):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def run(
        self,
        work: Callable[[tuple[int, int, memoryview]], None],
        chunks: Sequence[tuple[int, int, memoryview]],
        stall_s: float,
    ) -> tuple[int, int, memoryview] | None:
        """Work on every chunk. Raises the first error, once nothing is at work any more.

        Returns a chunk that is still at work when none has ended for `stall_s`; None: all are done.
        """
        changed = threading.Condition()
        left, failed = set(range(len(chunks))), list[BaseException]()

        def task(i: int) -> Callable[[], None]:
            def run() -> None:
                try:
                    if not failed:
                        work(chunks[i])
                except BaseException as error:
                    failed.append(error)
                with changed:
                    left.discard(i)
                    changed.notify()

            return run

        for i in range(len(chunks)):
            self._tasks.put(task(i))
        with changed:
            moved, remaining = time.monotonic(), len(left)
            while left:
                changed.wait(max(0.0, moved + stall_s - time.monotonic()))
                if len(left) < remaining:
                    moved, remaining = time.monotonic(), len(left)
                elif time.monotonic() - moved >= stall_s:
                    return chunks[min(left)]
        if failed:
            raise failed[0]
        return None

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        """Ends the threads that are not in a call that never returns."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(1.0)


# ----------------------------------------------------------------------------------------------------------------------
# What the drives are asked at the start.

# Smaller regions are not worth asking for; the numbers of a usual NVMe drive are taken.
PROBED_BYTES = 64 << 20
DEFAULT_QUEUE_DEPTH, DEFAULT_CHUNK_BYTES = 4, 4 << 20
_CANDIDATES = ((2, 4 << 20), (4, 1 << 20), (4, 4 << 20), (8, 4 << 20), (4, 16 << 20))
_STRIPE_BYTES = 16 << 20  # a multiple of every candidate's chunk


@dataclass(frozen=True)
class Measured:
    """What one way of access moved while it read one region and wrote another, bytes a second each way."""

    read: float
    written: float


def open_files(directories: Sequence[Path], regions: Sequence[int], stall_s: float) -> tuple[HeldFiles, StoreFiles]:
    """Make a run's files, and choose how they are best read and written: a second or two of measuring, with large
    regions. Raises NvmeError and ConfigError.

    The drives are asked in files of their own, with bytes that no controller makes smaller.
    """
    direct = all(_probe_direct(directory) for directory in directories)
    depth, chunk, stripe = DEFAULT_QUEUE_DEPTH, DEFAULT_CHUNK_BYTES, _stripes(len(directories))
    reason = "regions are too small to measure"
    if direct and min(regions, default=0) >= PROBED_BYTES:
        depth, chunk, stripe, found = _fastest(directories, stall_s)
        reason = f"measured {found.read / 1e9:.2f} GB/s of reads while {found.written / 1e9:.2f} GB/s were written"
    elif not direct:
        reason = "the file system has no O_DIRECT, so the page cache takes memory too"
    held = HeldFiles(directories, layout := FileLayout(tuple(regions), len(directories), stripe))
    return held, StoreFiles(tuple(held.paths), layout, direct, depth, chunk, stall_s, reason)


def _stripes(num_directories: int) -> int | None:
    return _STRIPE_BYTES if num_directories > 1 else None


def _probe_direct(directory: Path) -> bool:
    held = HeldFiles([directory], FileLayout((ALIGN_BYTES,), 1, None))
    try:
        return has_direct_io(held.paths[0])
    finally:
        held.close()


def _fastest(directories: Sequence[Path], stall_s: float) -> tuple[int, int, int | None, Measured]:
    """(queue depth, chunk bytes, stripe bytes or None, what they moved) of the fastest candidate."""
    stripes = [_STRIPE_BYTES, None] if len(directories) > 1 else [None]
    best: tuple[int, int, int | None, Measured] | None = None
    for stripe in stripes:
        layout = FileLayout((PROBED_BYTES,) * 2 * len(directories), len(directories), stripe)
        held = HeldFiles(directories, layout)
        try:
            for depth, chunk in _CANDIDATES:
                files = StoreFiles(tuple(held.paths), layout, True, depth, chunk, stall_s, "")
                found = measure(files)
                if best is None or found.read + found.written > best[3].read + best[3].written:
                    best = depth, chunk, stripe, found
        finally:
            held.close()
    assert best is not None
    return best


def measure(files: StoreFiles) -> Measured:
    """Read the first half of the regions while the second half is written, which is what a step does."""
    store, regions = NvmeStore(files), files.layout.regions
    half = len(regions) // 2
    source = aligned_buffer(max(regions))
    source[:] = np.frombuffer(np.random.default_rng(0).bytes(source.size), np.uint8)
    target = aligned_buffer(max(regions))
    try:
        for region in range(half):  # bytes that were never written are read from nowhere
            store.write(region, source[: regions[region]])
        seconds: dict[str, float] = {}

        def timed(name: str, move: Callable[[int, np.ndarray], None], memory: np.ndarray, chosen: range) -> None:
            started = time.perf_counter()
            for region in chosen:
                move(region, memory[: regions[region]])
            seconds[name] = time.perf_counter() - started

        writing = threading.Thread(target=timed, args=("write", store.write, source, range(half, 2 * half)))
        writing.start()
        timed("read", store.read, target, range(half))
        writing.join()
        if "write" not in seconds:
            raise NvmeError(f"{files.paths[0].parent}: could not be written while it was measured")
        moved = sum(regions[:half])
        return Measured(moved / seconds["read"], moved / seconds["write"])
    finally:
        store.close()


def check_directories(directories: Sequence[Path]) -> None:
    """Each is there, may be written in, is on a disk, and is not another one again. Raises ConfigError."""
    seen: dict[tuple[int, int], Path] = {}
    for directory in directories:
        if not directory.is_dir():
            # Not made here: on a drive that is not mounted, it would be made on the one below.
            raise ConfigError(f"nvme.paths: {directory} is no directory; mount the drive and make it, or give another")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"nvme.paths: {directory}: this user may not write there; give another directory")
        if (kind := file_system(directory)) in ("tmpfs", "ramfs"):
            raise ConfigError(f"nvme.paths: {directory} is {kind}, which is RAM; give a directory on a drive")
        status = directory.stat()
        if (other := seen.setdefault((status.st_dev, status.st_ino), directory)) is not directory:
            raise ConfigError(f"nvme.paths: {directory} and {other} are one directory; name it once")


def file_system(directory: Path) -> str:
    """The kernel's name of the file system that the directory is on, such as ext4; empty if it is not known."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""
