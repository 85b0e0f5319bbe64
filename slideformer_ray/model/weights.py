"""Weights between safetensors files and the flat buffers of blocks, in both directions, in bounded memory.

Reading takes slices straight from the mapped files into a block's slice and its exact fp32 masters; writing streams one
tensor at a time into an ordinary Hugging Face directory. Holds no state of the run. Tested by
tests/model/test_weights.py.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from slideformer_ray.checkpoint_layout import file_header, model_file_names, model_index, split_into_shards
from slideformer_ray.durable import fsync_path, write_durably
from slideformer_ray.kernels.layer_adam import split_master
from slideformer_ray.model.families import FAMILIES
from slideformer_ray.model.spec import BlockSpec, ModelSpec, ParamSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Every dtype whose values are all exact in fp32, so that a master made from it loses nothing.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# 16M elements are 64 MiB as fp32: the largest temporary of a load, whatever the tensor.
PIECE_ELEMENTS = 1 << 24
# Elements of one parameter that one seeded generator draws. Small, because a slice that cuts a chunk draws all of it.
INIT_CHUNK_ELEMENTS = 1 << 18


class WeightFiles:
    """The safetensors files of a model directory, their headers checked against the index and against the files' sizes.

    Tensors are read through memory maps that stay open until `close`; only the pages read take memory, and the kernel
    can drop them. `notes` lists what was ignored, for the log. Raises ValueError that names the file and the key.
    """

    def __init__(self, model_dir: Path | str):
        self.model_dir = Path(model_dir)
        self.notes: list[str] = []
        self._handles: dict[Path, Any] = {}
        self._entries: dict[str, tuple[Path, dict[str, Any]]] = {}  # key -> (file, its entry in the file's header)
        for file, indexed in _shards_of(self.model_dir):
            header = _read_header(file)
            if indexed is not None:
                _check_index(file, indexed, set(header))
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file}: refused by safetensors: {error}") from None
            self._entries.update((key, (file, entry)) for key, entry in header.items())

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._handles.clear()

    def keys(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][1]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._entries[name][1]["dtype"]]

    def check(self, spec: ModelSpec) -> None:
        """Compare keys, shapes and dtypes with the model, both ways. Raises ValueError with one line a mistake.

        A stored copy of a tied head is accepted when it equals the embedding bit for bit, and refused otherwise: a head
        that diverged is a model of its own, which tying would silently change.
        """
        family = FAMILIES[spec.family]
        wanted = {p.name: p for block in spec.blocks for p in block.params}
        wrong = []
        for name, param in wanted.items():
            if name not in self._entries:
                wrong.append(f"{self.model_dir}: {name} is missing; the model of config.json needs it")
                continue
            file, entry = self._entries[name]
            if tuple(entry["shape"]) != param.shape:
                wrong.append(f"{file}: {name} has shape {entry['shape']}, config.json asks for {list(param.shape)}")
            elif entry["dtype"] not in _DTYPES:
                wrong.append(f"{file}: {name} is stored as {entry['dtype']}; supported: {', '.join(_DTYPES)}")
        for name in sorted(self._entries.keys() - wanted.keys()):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored_keys):
                self.notes.append(f"{name} is ignored: it is computed from config.json")
            elif not (spec.tied and name == family.head_key):
                wrong.append(
                    f"{self._entries[name][0]}: {name} is not a parameter of the model that config.json describes"
                )
        if not wrong and spec.tied and family.head_key in self._entries:  # last, because it reads both tensors
            if self._equal(family.head_key, family.embed_key):
                self.notes.append(f"{family.head_key} is ignored: it equals {family.embed_key}, to which it is tied")
            else:
                wrong.append(
                    f"{self._entries[family.head_key][0]}: {family.head_key} differs from {family.embed_key}, "
                    "but config.json ties them; set tie_word_embeddings to false to train both"
                )
        if wrong:
            raise ValueError("\n".join(wrong))

    def _equal(self, name: str, other: str) -> bool:
        if self.shape(name) != self.shape(other) or self.dtype(name) != self.dtype(other):
            return False
        bits = torch.int32 if self.dtype(name) == torch.float32 else torch.int16  # a NaN equals itself in bits alone
        return all(
            torch.equal(self.read_range(name, a, b).view(bits), self.read_range(other, a, b).view(bits))
            for a, b in _pieces(0, math.prod(self.shape(name)))
        )

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor: 1-D, in the stored dtype.

        Only the pages of those rows are read. The result may be a view of the mapped file: do not write into it.
        """
        file, entry = self._entries[name]
        tensor = self._handles[file].get_slice(name)
        row = math.prod(entry["shape"][1:])
        first = start // row
        rows = tensor[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row]


def _shards_of(model_dir: Path) -> list[tuple[Path, set[str] | None]]:
    """The files of a model directory, each with the keys that the index places in it (None: there is no index)."""
    single, index = model_dir / SINGLE_NAME, model_dir / INDEX_NAME
    if single.exists():  # transformers' own order of preference
        return [(single, None)]
    if not index.exists():
        raise ValueError(
            f"{model_dir}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; "
            "convert other formats with transformers' save_pretrained"
        )
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[str, set[str]] = {}
        for key, file_name in weight_map.items():
            shards.setdefault(file_name, set()).add(key)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: not an index of safetensors shards (JSON with a weight_map)") from None
    for file_name, keys in shards.items():
        if not (model_dir / file_name).exists():
            raise ValueError(
                f"{model_dir / file_name}: this shard is missing; "
                f"{INDEX_NAME} places {len(keys)} tensors in it, such as {min(keys)}"
            )
    return [(model_dir / file_name, keys) for file_name, keys in sorted(shards.items())]


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """key -> {dtype, shape, data_offsets}. Raises ValueError for a file shorter than its header says.

    Read here and not by the library, whose error for a torn file names no key.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file}: torn: {size} bytes, which is shorter than its own header; fetch the file again")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            ends = {key: 8 + length + entry["data_offsets"][1] for key, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}: not a safetensors file: its header cannot be read") from None
    torn = [key for key, end in ends.items() if end > size]
    if torn:
        raise ValueError(
            f"{file}: torn: {size} bytes, but its header needs {max(ends.values())}; "
            f"tensors cut: {len(torn)}, such as {torn[0]}; fetch the file again"
        )
    return header


def _check_index(file: Path, indexed: set[str], stored: set[str]) -> None:
    if missing := indexed - stored:
        raise ValueError(
            f"{file}: {INDEX_NAME} places {min(missing)} in this shard, "
            f"which does not hold it ({len(missing)} such keys)"
        )
    if extra := stored - indexed:
        raise ValueError(
            f"{file}: holds {min(extra)}, which {INDEX_NAME} does not place in this shard ({len(extra)} such keys)"
        )


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, PIECE_ELEMENTS):
        yield a, min(a + PIECE_ELEMENTS, stop)


def load_block_slice(
    files: WeightFiles, block: BlockSpec, start: int, stop: int, hi: Tensor, lo: Tensor | None, precision: str
) -> None:
    """Fill elements [start, stop) of a block from the files.

    hi: 1-D, those stop - start elements alone, of the compute dtype. lo: int16, as long, or None where no master is
    kept: for frozen parameters in bf16 (hi is then the stored value rounded to nearest) and always in fp32 (hi is the
    master). Masters are exact in the stored dtype. Padding is zero. Temporary memory: `PIECE_ELEMENTS` fp32 values.
    """
    _fill(block, start, stop, hi, lo, precision, lambda p, a, b: files.read_range(p.name, a, b).float())


def init_block_slice(
    hf_config: PretrainedConfig,
    block: BlockSpec,
    start: int,
    stop: int,
    hi: Tensor,
    lo: Tensor | None,
    precision: str,
    seed: int,
) -> None:
    """Fill elements [start, stop) of a block as a fresh model's; hi and lo as in `load_block_slice`.

    Matrices are normal(0, initializer_range), norms' weights 1, biases 0. A value depends on the seed, the parameter's
    name and the element alone, so any cut into slices gives the same model. In bf16 they are rounded to bf16, as a bf16
    checkpoint's.
    """

    def draw(param: ParamSpec, a: int, b: int) -> Tensor:
        values = _initial_values(param, a, b, hf_config.initializer_range, seed)
        return values.bfloat16().float() if precision == "bf16" else values

    _fill(block, start, stop, hi, lo, precision, draw)


def _initial_values(param: ParamSpec, start: int, stop: int, std: float, seed: int) -> Tensor:
    if param.name.endswith(".bias"):
        return torch.zeros(stop - start)
    if len(param.shape) == 1:
        return torch.ones(stop - start)
    values = torch.empty(stop - start)
    for chunk in range(start // INIT_CHUNK_ELEMENTS, -(-stop // INIT_CHUNK_ELEMENTS)):
        a = chunk * INIT_CHUNK_ELEMENTS
        # Always the whole chunk: torch's normal generator gives other values for another count.
        count = min(INIT_CHUNK_ELEMENTS, param.numel - a)
        digest = hashlib.blake2b(f"{seed}/{param.name}/{chunk}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        drawn = torch.empty(count).normal_(0.0, std, generator=generator)
        begin, end = max(a, start), min(a + count, stop)
        values[begin - start : end - start] = drawn[begin - a : end - a]
    return values


def _fill(
    block: BlockSpec,
    start: int,
    stop: int,
    hi: Tensor,
    lo: Tensor | None,
    precision: str,
    values: Callable[[ParamSpec, int, int], Tensor],
) -> None:
    """Write values(param, a, b), fp32 elements [a, b) of a parameter, into hi and lo; zero between the parameters."""
    assert hi.numel() == stop - start and (lo is None or lo.numel() == hi.numel()), "hi and lo hold the slice alone"
    assert hi.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert lo is None or precision == "bf16", "in fp32 hi is the master"
    cursor = start
    for param in block.params:
        begin, end = max(param.offset, start), min(param.offset + param.numel, stop)
        if begin >= end:
            continue
        _zero(hi, lo, cursor - start, begin - start)
        for a, b in _pieces(begin, end):
            piece = values(param, a - param.offset, b - param.offset)
            if lo is None:
                hi[a - start : b - start].copy_(piece)
            else:
                split_master(piece, hi[a - start : b - start], lo[a - start : b - start])
        cursor = end
    _zero(hi, lo, cursor - start, stop - start)


def _zero(hi: Tensor, lo: Tensor | None, a: int, b: int) -> None:
    hi[a:b].zero_()
    if lo is not None:
        lo[a:b].zero_()


# What a Hugging Face directory holds beside weights and config.json, and what a fine-tuned model keeps unchanged.
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def save_model(
    out_dir: Path | str,
    spec: ModelSpec,
    tensors: Callable[[str], Tensor],
    source_dir: Path | str,
    shard_bytes: int,
    dtype: torch.dtype,
) -> None:
    """Write an ordinary Hugging Face directory; every file, and the directory, is on the disk when this returns.

    tensors(name): the parameter of that state-dict key, called once each, in file order; one tensor is in memory at a
    time. The key set is transformers' own: a tied head is not saved again. config.json and the tokenizer's files are
    those of `source_dir` (a directory, or its config.json), byte for byte; config.json's dtype alone is changed where
    `dtype` is another. Raises ValueError when out_dir already holds weights: a loader could mix the two.
    """
    out_dir, source_dir = Path(out_dir), Path(source_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    if present := sorted(p.name for p in out_dir.glob("*.safetensors*")):
        raise ValueError(f"{out_dir}: already holds {present[0]}; give an empty directory or remove it")
    if out_dir.resolve() == source_dir.resolve():
        raise ValueError(f"{out_dir}: is the model's own directory; a save would replace what it reads from")

    params = [p for block in spec.blocks for p in block.params]
    shards = split_into_shards(params, shard_bytes, dtype.itemsize)
    weight_map = {}
    for name, shard in zip(model_file_names(len(shards)), shards, strict=True):
        _write_shard(out_dir / name, shard, tensors, dtype)
        weight_map.update({p.name: name for p in shard})
    if len(shards) > 1:
        write_durably(out_dir / INDEX_NAME, model_index(params, dtype.itemsize, weight_map))
    for name, data in companion_files(source_dir, _DTYPE_NAMES[dtype]).items():
        write_durably(out_dir / name, data)
    fsync_path(out_dir)


def companion_files(source_dir: Path, dtype: str) -> dict[str, bytes]:
    """What stands beside the weights, by name: `source_dir`'s own files, byte for byte.

    config.json's dtype alone is changed where `dtype` (safetensors' name) is another. source_dir: a directory, or its
    config.json alone.
    """
    config = source_dir / "config.json" if source_dir.is_dir() else source_dir
    found = {"config.json": _config_with_dtype(config.read_bytes(), _DTYPES[dtype])}
    for name in _COPIED_FILES if source_dir.is_dir() else ():
        if (source_dir / name).exists():
            found[name] = (source_dir / name).read_bytes()
    return found


def _write_shard(path: Path, params: list[ParamSpec], tensors: Callable[[str], Tensor], dtype: torch.dtype) -> None:
    # The file is written here and not by the library, which wants all tensors of a file in memory at once.
    header = file_header([(p.name, _DTYPE_NAMES[dtype], p.shape) for p in params])
    with path.open("wb") as f:
        f.write(header)
        for p in params:
            # A call of its own, so that no name here keeps the tensor alive while the next one is made.
            _write_tensor(f, p, tensors(p.name), dtype)
        f.flush()
        os.fsync(f.fileno())


def _write_tensor(f: BinaryIO, param: ParamSpec, tensor: Tensor, dtype: torch.dtype) -> None:
    assert tuple(tensor.shape) == param.shape, f"{param.name}: {tuple(tensor.shape)} given, {param.shape} wanted"
    flat = tensor.detach().to(device="cpu", dtype=dtype).reshape(-1)
    f.write(flat.view(torch.uint8).numpy().data)


def _config_with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    values = json.loads(config)
    key = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
    name = str(dtype).removeprefix("torch.")
    if values.get(key) == name:
        return config
    values[key] = name
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
