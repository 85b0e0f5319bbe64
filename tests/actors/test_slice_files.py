"""Slices to files and back: any cut into actors, checksums of every byte, with O_DIRECT and without."""

import errno
import json
import os
import zlib

import pytest
import torch
from pipeline import save_small_model

from slideformer_ray import checkpoint_layout
from slideformer_ray.actors import slice_files
from slideformer_ray.actors.slice_files import DamagedCheckpoint, SavedTensors, SliceWriter, StateSlice, read_index
from slideformer_ray.checkpoint_layout import CheckpointLayout, state_dtypes
from slideformer_ray.durable import create_allocated
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.spec import slice_of

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I16": torch.int16}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    """Ranges of two pages, so that a small model has many."""
    monkeypatch.setattr(checkpoint_layout, "RANGE_BYTES", 8192)
    monkeypatch.setattr(slice_files, "RANGE_BYTES", 8192)


@pytest.fixture
def spec(tmp_path):
    return describe_model(load_hf_config(save_small_model(tmp_path / "model", "llama")))


def whole_states(spec):
    """Random bits of every state of every block; padding too, which is not saved."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n, dtype: torch.randint(-(2**15), 2**15, (n * dtype.itemsize // 2,), generator=generator).short()  # noqa: E731
    return {
        (block.index, state): draw(block.numel, DTYPES[dtype]).view(DTYPES[dtype])
        for block in spec.blocks
        for state, dtype in state_dtypes("bf16").items()
    }


def slices(spec, tensors, actor, num_actors):
    for block in spec.blocks:
        start, stop = slice_of(block.numel, actor, num_actors)
        for state in state_dtypes("bf16") if stop > start else ():
            yield StateSlice(block, state, start, stop, tensors[block.index, state][start:stop])


def write(spec, tensors, directory, num_actors):
    """A directory that `SavedTensors` reads, written by so many actors; returns whether O_DIRECT served."""
    layout = CheckpointLayout.of(spec, "bf16", 30_000)
    for part in ("model", "state"):
        (directory / part).mkdir(parents=True)
    files, direct = {}, True
    for file in layout.files:
        create_allocated(directory / file.name, file.size, file.header)
        files[file.name] = [(0, len(file.header), zlib.crc32(file.header))]
    for actor in range(num_actors):
        writer = SliceWriter(directory, layout.places)
        for piece in slices(spec, tensors, actor, num_actors):
            writer.write(piece)
        writer.finish()
        writer.close()
        direct &= writer.direct
        for name, ranges in writer.ranges.items():
            files[name] += ranges
    index = {"files": {name: sorted(ranges) for name, ranges in files.items()}}
    (directory / "index.json").write_text(json.dumps(index))
    return direct


def read(spec, directory, num_actors):
    """Every state as so many actors fill it, into memory that is not zero."""
    tensors = {key: torch.full_like(t.view(torch.int16), 77).view(t.dtype) for key, t in whole_states(spec).items()}
    for actor in range(num_actors):
        SavedTensors(directory).fill(slices(spec, tensors, actor, num_actors))
    return tensors


def assert_params_equal(spec, found, wanted):
    for block in spec.blocks:
        for state in state_dtypes("bf16"):
            a, b = found[block.index, state].view(torch.int16), wanted[block.index, state].view(torch.int16)
            width = a.numel() // block.numel
            covered = torch.zeros(block.numel, dtype=torch.bool)
            for p in block.params:
                own = slice(p.offset * width, (p.offset + p.numel) * width)
                assert torch.equal(a[own], b[own]), (p.name, state)
                covered[p.offset : p.offset + p.numel] = True
            assert not a.view(block.numel, width)[~covered].any(), "padding is zero"


@pytest.mark.parametrize("writers, readers", [(1, 1), (3, 2), (2, 7), (40, 1)])
def test_what_some_actors_wrote_others_read(spec, tmp_path, writers, readers):
    """Bits come back in their own dtype, whoever wrote and whoever asks."""
    tensors = whole_states(spec)
    write(spec, tensors, tmp_path / "saved", writers)
    assert_params_equal(spec, read(spec, tmp_path / "saved", readers), tensors)


@pytest.mark.parametrize("refused_by", ["open", "pwrite"])
def test_without_o_direct_the_page_cache_serves(spec, tmp_path, monkeypatch, refused_by):
    """A file system without it says so when a file is opened, or when it is written: the same bytes, and it is said."""
    tensors = whole_states(spec)
    direct, real_open, real_pwrite = set(), os.open, os.pwrite

    def refusing_open(path, flags, *args):
        if flags & os.O_DIRECT:
            if refused_by == "open":
                raise OSError(errno.EINVAL, "no O_DIRECT")
            flags &= ~os.O_DIRECT
            descriptor = real_open(path, flags, *args)
            direct.add(descriptor)
            return descriptor
        descriptor = real_open(path, flags, *args)
        direct.discard(descriptor)
        return descriptor

    def refusing_pwrite(descriptor, data, offset):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    assert write(spec, tensors, tmp_path / "saved", 2) is False
    monkeypatch.undo()
    assert_params_equal(spec, read(spec, tmp_path / "saved", 3), tensors)


def test_the_checksums_cover_every_byte(spec, tmp_path):
    """Ranges in order, without a gap, and the CRC-32 of what lies there."""
    write(spec, whole_states(spec), tmp_path / "saved", 3)
    for name, ranges in read_index(tmp_path / "saved").items():
        content = (tmp_path / "saved" / name).read_bytes()
        assert [0, *(stop for _, stop, _ in ranges)] == [*(start for start, _, _ in ranges), len(content)]
        assert all(zlib.crc32(content[a:b]) == crc for a, b, crc in ranges)


@pytest.mark.parametrize("name", ["model/model-00001-of-00006.safetensors", "state/embed.safetensors"])
def test_any_flipped_bit_is_found(spec, tmp_path, name):
    """Also one that another reader's slice has, in a range that both read."""
    tensors = whole_states(spec)
    write(spec, tensors, tmp_path / "saved", 2)
    path = tmp_path / "saved" / name
    content = path.read_bytes()
    for at in (4096, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=rf"{name}: bytes \d+ to \d+ are not those that were saved"):
            read(spec, tmp_path / "saved", 1)
    path.write_bytes(content)
    read(spec, tmp_path / "saved", 1)


def test_an_error_names_the_file(spec, tmp_path, monkeypatch):
    """ENOSPC, EIO: the system's word and the path, and nothing is being written any more."""
    layout = CheckpointLayout.of(spec, "bf16", 30_000)
    writer = SliceWriter(tmp_path, layout.places)
    for piece in slices(spec, whole_states(spec), 0, 1):
        writer.write(piece)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '\S+safetensors'"):
        writer.finish()
    writer.close()
