"""Where bytes lie: ordinary safetensors files, aligned data, and runs that cover each element of a slice once."""

import json
import struct

import pytest
import torch
from pipeline import save_small_model
from safetensors import safe_open

from slideformer_ray.checkpoint_layout import (
    ALIGN_BYTES,
    ITEM_BYTES,
    PARAM,
    RANGE_BYTES,
    CheckpointLayout,
    cut_into_ranges,
    state_dtypes,
)
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.spec import slice_of


@pytest.fixture
def spec(tmp_path):
    model = save_small_model(tmp_path / "model", "qwen2", tied=True)
    return describe_model(load_hf_config(model), ("model.layers.1.*",))


def test_files_are_safetensors_that_the_library_reads(spec, tmp_path):
    """Header and length alone: names, dtypes and shapes; data begin at a page."""
    layout = CheckpointLayout.of(spec, "bf16", 30_000)
    shapes = {}
    for file in layout.files:
        assert len(file.header) % ALIGN_BYTES == 0
        path = tmp_path / file.name.replace("/", "_")
        path.write_bytes(file.header + bytes(file.size - len(file.header)))
        with safe_open(path, "pt") as opened:
            shapes.update({key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()})
    params = [p for block in spec.blocks for p in block.params]
    assert {p.name: p.shape for p in params}.items() <= shapes.items()
    states = {f"{s}.{p.name}": p.shape for p in params if not p.frozen for s in ("exp_avg", "exp_avg_sq", "lo")}
    assert shapes == states | {p.name: p.shape for p in params}


def test_the_model_is_cut_into_shards_as_transformers_names_them(spec):
    """Every file but a single large tensor's is at most as large as asked, data counted; the index names each key."""
    layout = CheckpointLayout.of(spec, "bf16", 30_000)
    shards = [file for file in layout.files if file.name.startswith("model/")]
    assert len(shards) > 2
    assert [s.name for s in shards] == [
        f"model/model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    for shard in shards:
        header = json.loads(shard.header[8 : 8 + struct.unpack("<Q", shard.header[:8])[0]])
        assert shard.size - len(shard.header) <= 30_000 or len(header) == 2
        assert all(f"model/{layout.model_index[key]}" == shard.name for key in header if key != "__metadata__")
    (single,) = [f.name for f in CheckpointLayout.of(spec, "fp32", 1 << 30).files if f.name.startswith("model/")]
    assert single == "model/model.safetensors"


@pytest.mark.parametrize("num_actors", [1, 3, 40])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_runs_of_all_actors_cover_every_file_once(spec, precision, num_actors):
    """Whoever owns which slice: each byte after the headers is written by one actor, and from the right element."""
    layout = CheckpointLayout.of(spec, precision, 30_000)
    written = {file.name: torch.zeros(file.size, dtype=torch.int32) for file in layout.files}
    for file in layout.files:
        written[file.name][: len(file.header)] = 1
    for block in spec.blocks:
        for actor in range(num_actors):
            trained = slice_of(block.trainable_numel, actor, num_actors)
            frozen = [
                block.trainable_numel + e for e in slice_of(block.numel - block.trainable_numel, actor, num_actors)
            ]
            for state, dtype in state_dtypes(precision).items():
                for start, stop in (trained, frozen) if state == PARAM else (trained,):
                    for run in layout.places.runs(block, state, start, stop):
                        written[run.file][run.offset : run.offset + run.nbytes] += 1
                        assert 0 <= run.source and run.source + run.nbytes <= (stop - start) * ITEM_BYTES[dtype]
    assert all((count == 1).all() for count in written.values())


@pytest.mark.parametrize(
    "offset, nbytes", [(0, 1), (100, 3 * RANGE_BYTES), (RANGE_BYTES - 1, 2), (RANGE_BYTES, RANGE_BYTES)]
)
def test_ranges_end_at_multiples_of_their_size(offset, nbytes):
    """So that all but the first and the last begin and end at pages."""
    cuts = cut_into_ranges(offset, nbytes)
    assert cuts[0][0] == offset and cuts[-1][1] == offset + nbytes
    assert all(a[1] == b[0] and a[1] % RANGE_BYTES == 0 for a, b in zip(cuts, cuts[1:], strict=False))
