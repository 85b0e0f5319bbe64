"""An optimizer actor's slices to and from the files of a checkpoint: in parallel, checksummed, past the page cache.

The bulk goes by O_DIRECT through page-aligned buffers, which costs one copy in memory and leaves the page cache to
others; what is left of a page at both ends goes through the cache, and so does everything where the file system has no
O_DIRECT (`SliceWriter.direct` says so). Memory: `checkpoint_layout.buffer_bytes`. Pure: no Ray. Tested by
tests/actors/test_slice_files.py.
"""

from __future__ import annotations

import bisect
import errno
import json
import mmap
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slideformer_ray.checkpoint_layout import (
    ALIGN_BYTES,
    IO_THREADS,
    PARAM,
    RANGE_BYTES,
    Place,
    TensorPlaces,
    cut_into_ranges,
)
from slideformer_ray.durable import write_all
from slideformer_ray.model.spec import BlockSpec, ModelSpec

INDEX_NAME = "index.json"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I16": torch.int16}

Range = tuple[int, int, int]  # first byte, end, CRC-32


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, torn, altered, or of another model. The message names it."""


@dataclass(frozen=True)
class StateSlice:
    """Elements [start, stop) of one state of a block, as memory to be read or filled: 1-D, contiguous.

    state: `PARAM`, "exp_avg", "exp_avg_sq" or "lo".
    """

    block: BlockSpec
    state: str
    start: int
    stop: int
    data: Tensor

    def as_bytes(self) -> np.ndarray:
        return self.data.view(torch.uint8).numpy()


class _Buffers:
    """IO_THREADS page-aligned buffers of one range each, lent to one thread at a time."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(IO_THREADS):
            # Private, so that the run's own account of its memory has them: shared pages count as the store's.
            self._free.put(mmap.mmap(-1, RANGE_BYTES + ALIGN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @contextmanager
    def lend(self) -> Iterator[np.ndarray]:
        buffer = self._free.get()
        try:
            yield np.frombuffer(buffer, np.uint8)
        finally:
            self._free.put(buffer)


class _Files:
    """Descriptors of a checkpoint's files by name, one through the page cache and one past it, opened when needed."""

    def __init__(self, directory: Path, flags: int):
        self.directory, self.flags = directory, flags
        self._open: dict[tuple[str, bool], int] = {}
        self._refused: set[str] = set()  # by the file system, which has no O_DIRECT
        self._lock = threading.Lock()

    def get(self, name: str) -> int:
        descriptor = self._get(name, False)
        assert descriptor is not None
        return descriptor

    def get_direct(self, name: str) -> int | None:
        """None: the file system has no O_DIRECT."""
        return self._get(name, True)

    def _get(self, name: str, direct: bool) -> int | None:
        with self._lock:
            if direct and name in self._refused:
                return None
            if (name, direct) not in self._open:
                try:
                    flags = self.flags | (os.O_DIRECT if direct else 0)
                    self._open[name, direct] = os.open(self.directory / name, flags)
                except OSError as error:
                    if not (direct and error.errno == errno.EINVAL):
                        raise
                    self._refused.add(name)
                    return None
            return self._open[name, direct]

    def refuse_direct(self, name: str) -> None:
        """A write past the cache was refused; the descriptor stays open, for another thread may be using it."""
        with self._lock:
            self._refused.add(name)

    @property
    def direct(self) -> bool:
        """O_DIRECT has served every file so far."""
        return not self._refused

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


class SliceWriter:
    """Writes slices into files that are there already, in their full length. `ranges` has every byte's checksum."""

    def __init__(self, directory: Path, places: TensorPlaces):
        self.places = places
        self.ranges: dict[str, list[Range]] = {}
        self._files, self._buffers = _Files(directory, os.O_WRONLY), _Buffers()
        self._pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="save")
        self._writing: list[tuple[str, Future[Range]]] = []

    @property
    def direct(self) -> bool:
        return self._files.direct

    def write(self, piece: StateSlice) -> None:
        """Begin to write; `finish` must be called before the slice's memory changes."""
        source = piece.as_bytes()
        for run in self.places.runs(piece.block, piece.state, piece.start, piece.stop):
            for start, stop in cut_into_ranges(run.offset, run.nbytes):
                at = run.source + start - run.offset
                part = source[at : at + stop - start]
                self._writing.append((run.file, self._pool.submit(self._write, run.file, part, start)))

    def finish(self) -> None:
        """Wait for what `write` began. Raises OSError, with the file's name; nothing is being written afterwards."""
        writing, self._writing = self._writing, []
        try:
            for file, call in writing:
                self.ranges.setdefault(file, []).append(call.result())
        finally:
            for _, call in writing:
                call.cancel()
            for _, call in writing:
                if not call.cancelled():
                    call.exception()  # waits

    def _write(self, file: str, source: np.ndarray, offset: int) -> Range:
        try:
            plain, direct = self._files.get(file), self._files.get_direct(file)
            with self._buffers.lend() as buffer:
                skew = offset % ALIGN_BYTES  # file and memory are then aligned at the same bytes
                data = buffer[skew : skew + source.size]
                np.copyto(data, source)
                self._put(file, plain, direct, data.data, offset)
                return offset, offset + source.size, zlib.crc32(data.data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._files.directory / file)) from None

    def _put(self, file: str, plain: int, direct: int | None, data: memoryview, offset: int) -> None:
        first = min(-offset % ALIGN_BYTES, len(data))
        last = len(data) - (offset + len(data)) % ALIGN_BYTES
        if direct is None or last <= first:
            write_all(plain, data, offset)
            return
        try:
            write_all(direct, data[first:last], offset + first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._files.refuse_direct(file)
            write_all(plain, data[first:last], offset + first)
        write_all(plain, data[:first], offset)
        write_all(plain, data[last:], offset + last)

    def close(self) -> None:
        self._pool.shutdown()
        self._files.close()


class SavedTensors:
    """The tensors of a complete checkpoint, by state and parameter, and the checksums of all its files.

    Making one looks at names, sizes and headers; `fill` checks every byte that it reads. Raises DamagedCheckpoint.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._ranges = read_index(directory)
        places: dict[tuple[str, str], Place] = {}
        for name in self._ranges:
            if name.endswith(".safetensors"):
                places.update(self._places_in(name))
        self.places = TensorPlaces(places)

    def check(self, spec: ModelSpec, dtypes: dict[str, str]) -> None:
        """Every state of every parameter is there, in its shape and dtype, and no other tensor is."""
        wanted = {
            (state, param.name): (dtype, param.shape)
            for block in spec.blocks
            for param in block.params
            for state, dtype in dtypes.items()
            if state == PARAM or not param.frozen
        }
        found = {key: (place.dtype, place.shape) for key, place in self.places.places.items()}
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                state, name = key
                raise DamagedCheckpoint(
                    f"{self.directory}: {state} of {name}: saved as {_words(found.get(key))}, the run needs "
                    f"{_words(wanted.get(key))}; the checkpoint is of another model or precision"
                )

    def fill(self, pieces: Iterable[StateSlice]) -> None:
        """Fill every slice; one is full before the next is asked for."""
        files, buffers = _Files(self.directory, os.O_RDONLY), _Buffers()
        with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="resume") as pool:
            try:
                for piece in pieces:
                    self._fill(piece, pool, files, buffers)
            finally:
                files.close()

    def _fill(self, piece: StateSlice, pool: ThreadPoolExecutor, files: _Files, buffers: _Buffers) -> None:
        target = piece.as_bytes()
        runs = self.places.runs(piece.block, piece.state, piece.start, piece.stop)
        if sum(run.nbytes for run in runs) < target.size:
            target.fill(0)  # padding between the parameters
        calls = []
        for run in runs:
            ranges = self._ranges[run.file]
            at = bisect.bisect_right(ranges, run.offset, key=lambda r: r[0]) - 1
            while at < len(ranges) and ranges[at][0] < run.offset + run.nbytes:
                start, stop = max(ranges[at][0], run.offset), min(ranges[at][1], run.offset + run.nbytes)
                source = run.source + start - run.offset
                out = target[source : source + stop - start]
                calls.append(pool.submit(self._read, run.file, ranges[at], start, out, files, buffers))
                at += 1
        for call in calls:
            call.result()

    def _read(self, file: str, of: Range, start: int, out: np.ndarray, files: _Files, buffers: _Buffers) -> None:
        """Read a whole range, for its checksum, and copy the bytes from `start` on that are wanted."""
        first, stop, crc = of
        with buffers.lend() as buffer:
            skew = first % ALIGN_BYTES
            data = buffer[skew : skew + stop - first]
            descriptor, begin = files.get_direct(file), first - skew
            if descriptor is not None:
                aligned = buffer[: -(-(skew + stop - first) // ALIGN_BYTES) * ALIGN_BYTES]
                count = _read_all(descriptor, aligned.data, begin, stop - begin)
            else:
                count = skew + _read_all(files.get(file), data.data, first, stop - first)
            if count < stop - begin or zlib.crc32(data.data) != crc:
                raise self._altered(file, first, stop)
            np.copyto(out, data[start - first : start - first + out.size])

    def _altered(self, file: str, first: int, stop: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.directory / file}: bytes {first} to {stop} are not those that were saved; {remedy(self.directory)}"
        )

    def _places_in(self, name: str) -> dict[tuple[str, str], Place]:
        path = self.directory / name
        first, stop, crc = self._ranges[name][0]
        with path.open("rb") as file:
            header = file.read(stop)
        if first or zlib.crc32(header) != crc:
            raise self._altered(name, first, stop)
        entries = json.loads(header[8 : 8 + struct.unpack("<Q", header[:8])[0]])
        entries.pop("__metadata__")
        places = {}
        for key, entry in entries.items():
            state, param = (PARAM, key) if name.startswith("model/") else key.split(".", 1)
            places[state, param] = Place(name, stop + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        return places


def _read_all(descriptor: int, out: memoryview, offset: int, wanted: int) -> int:
    """Bytes read, which are fewer than `wanted` at the file's end only."""
    done = 0
    while done < wanted:
        count = os.preadv(descriptor, [out[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _words(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def remedy(checkpoint: Path) -> str:
    return f"remove {checkpoint} and continue from the checkpoint before it (checkpoint.resume=auto)"


def read_index(directory: Path) -> dict[str, list[Range]]:
    """File name -> its ranges in order, which cover it; every file is there in its length. Raises DamagedCheckpoint.

    Small files, those with one range, are compared with their checksum here.
    """
    path = directory / INDEX_NAME
    try:
        files = json.loads(path.read_text())["files"]
        found = {name: [(int(a), int(b), int(crc)) for a, b, crc in ranges] for name, ranges in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy(directory)}"
        ) from None
    for name, ranges in found.items():
        size = ranges[-1][1]
        try:
            there = (directory / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{directory / name}: {error.strerror}; {remedy(directory)}") from None
        if there != size:
            raise DamagedCheckpoint(f"{directory / name}: torn: {there} of {size} bytes; {remedy(directory)}")
        if len(ranges) == 1 and zlib.crc32((directory / name).read_bytes()) != ranges[0][2]:
            raise DamagedCheckpoint(f"{directory / name}: is not what was saved; {remedy(directory)}")
    return found
