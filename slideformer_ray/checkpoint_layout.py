"""Where every byte of a checkpoint lies: pure data that the driver makes and every optimizer actor gets.

    model/model*.safetensors     the parameters that the GPU reads, under Hugging Face's own keys
    state/BLOCK.safetensors      exp_avg, exp_avg_sq and lo of a block's trained parameters, keys STATE.PARAMETER

Every file is an ordinary safetensors file (https://huggingface.co/docs/safetensors: 8 bytes of header length, JSON,
the tensors one after the other). Keys are parameter names and tensors are whole, so nothing in a file says how many
actors wrote it. Imports neither torch nor ray. Tested by tests/test_checkpoint_layout.py.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slideformer_ray.model.spec import BlockSpec, ModelSpec, ParamSpec

# Of memory, offset and length in a file opened with O_DIRECT: a page, which no drive's logical block exceeds.
ALIGN_BYTES = 4096
# One checksum, one write and one bounce buffer each. 8 MiB is past the point where a drive's rate stops to grow.
RANGE_BYTES = 8 << 20
# Threads of an actor that copy, sum and write (or read) ranges, each with a buffer of RANGE_BYTES + ALIGN_BYTES.
IO_THREADS = 4

PARAM = "param"  # the parameters that the GPU reads; the other states are those of AdamShard
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I16": 2}


def state_dtypes(precision: str) -> dict[str, str]:
    """State -> safetensors' name of its dtype. In fp32 the parameters are the masters, and there is no remainder."""
    if precision == "fp32":
        return {PARAM: "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    return {PARAM: "BF16", "exp_avg": "F32", "exp_avg_sq": "F32", "lo": "I16"}


def buffer_bytes(num_actors: int) -> int:
    """Host memory that a save or a resume takes for a moment: the buffers of all actors. 2 actors: 64 MiB."""
    return num_actors * IO_THREADS * (RANGE_BYTES + ALIGN_BYTES)


@dataclass(frozen=True)
class Place:
    """A whole tensor in a file."""

    file: str  # relative to the checkpoint
    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Run:
    """Bytes that lie in one piece both in a file and in a slice."""

    file: str
    offset: int  # in the file
    source: int  # in the slice
    nbytes: int


@dataclass(frozen=True)
class FileLayout:
    name: str
    header: bytes
    size: int


class TensorPlaces:
    """(state, parameter name) -> where it lies; of a checkpoint to write, or of one that was read."""

    def __init__(self, places: Mapping[tuple[str, str], Place]):
        self.places = dict(places)

    def runs(self, block: BlockSpec, state: str, start: int, stop: int) -> list[Run]:
        """Where elements [start, stop) of a block's state lie, padding left out; neighbours are one run."""
        runs: list[Run] = []
        for param in block.params:
            a, b = max(param.offset, start), min(param.offset + param.numel, stop)
            place = self.places.get((state, param.name))
            if a >= b or place is None:
                continue
            size = ITEM_BYTES[place.dtype]
            run = Run(place.file, place.offset + (a - param.offset) * size, (a - start) * size, (b - a) * size)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.file == run.file
                and last.offset + last.nbytes == run.offset
                and last.source + last.nbytes == run.source
            ):
                runs[-1] = Run(last.file, last.offset, last.source, last.nbytes + run.nbytes)
            else:
                runs.append(run)
        return runs


@dataclass(frozen=True)
class CheckpointLayout:
    files: tuple[FileLayout, ...]
    places: TensorPlaces
    model_index: dict[str, str]  # state-dict key -> model file's own name

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @classmethod
    def of(cls, spec: ModelSpec, precision: str, shard_bytes: int) -> CheckpointLayout:
        dtypes = state_dtypes(precision)
        params = [param for block in spec.blocks for param in block.params]
        shards = split_into_shards(params, shard_bytes, ITEM_BYTES[dtypes[PARAM]])
        names = model_file_names(len(shards))
        contents = [
            (f"model/{name}", [(PARAM, param, param.name) for param in shard])
            for name, shard in zip(names, shards, strict=True)
        ]
        states = [state for state in dtypes if state != PARAM]
        for block in spec.blocks:
            # A state of all parameters, then the next: an actor's slice of a state is one piece of the file.
            trained = [param for param in block.params if not param.frozen]
            if trained:
                keys = [(state, param, f"{state}.{param.name}") for state in states for param in trained]
                contents.append((f"state/{block.name}.safetensors", keys))
        files, places = [], {}
        for name, keys in contents:
            header = file_header([(key, dtypes[state], param.shape) for state, param, key in keys])
            at = len(header)
            for state, param, _ in keys:
                place = places[state, param.name] = Place(name, at, dtypes[state], param.shape)
                at += place.nbytes
            files.append(FileLayout(name, header, at))
        index = {param.name: name for name, shard in zip(names, shards, strict=True) for param in shard}
        return cls(tuple(files), TensorPlaces(places), index)


def split_into_shards(params: Sequence[ParamSpec], shard_bytes: int, itemsize: int) -> list[list[ParamSpec]]:
    """Greedy, in order; a tensor larger than `shard_bytes` has a shard of its own."""
    shards: list[list[ParamSpec]] = []
    room = 0
    for param in params:
        size = param.numel * itemsize
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(param)
        room -= size
    return shards


def model_file_names(count: int) -> list[str]:
    """The names that transformers gives to one file, and to several."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def model_index(params: Sequence[ParamSpec], itemsize: int, file_of: Mapping[str, str]) -> bytes:
    """model.safetensors.index.json, as transformers writes it."""
    numel = sum(param.numel for param in params)
    index = {
        "metadata": {"total_parameters": numel, "total_size": numel * itemsize},
        "weight_map": dict(sorted(file_of.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def file_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Everything before the first tensor: (key, dtype, shape) each, padded to a multiple of `ALIGN_BYTES`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text


def cut_into_ranges(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """[start, stop) of the pieces of [offset, offset + nbytes), cut at multiples of `RANGE_BYTES` of the file."""
    cuts = []
    while nbytes:
        count = min(nbytes, RANGE_BYTES - offset % RANGE_BYTES)
        cuts.append((offset, offset + count))
        offset, nbytes = offset + count, nbytes - count
    return cuts
