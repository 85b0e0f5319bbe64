"""A checkpoint's exact masters as an ordinary Hugging Face directory: what `slideformer-ray export` does.

Reads the files alone: needs neither the run's data nor its GPU, and one tensor of host memory. Tested by
tests/test_export.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from slideformer_ray.actors.slice_files import SavedTensors, StateSlice
from slideformer_ray.checkpoint import checkpoint_dir, complete_checkpoints
from slideformer_ray.checkpoint_layout import PARAM
from slideformer_ray.config import GIB, ConfigError
from slideformer_ray.durable import fsync_path
from slideformer_ray.kernels.layer_adam import join_master
from slideformer_ray.machine import disk_free, readable
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.spec import BlockSpec, ParamSpec
from slideformer_ray.model.weights import WeightFiles, save_model


@dataclass(frozen=True)
class Exported:
    out_dir: str
    checkpoint: str
    steps_done: int
    dtype: str
    num_parameters: int


def export_model(
    run_dir: Path, out_dir: Path, step: int | None = None, dtype: Literal["fp32", "bf16"] = "fp32"
) -> Exported:
    """Write the masters of step `step` (None: the newest) to `out_dir`, which must not hold anything.

    fp32: bit for bit; bf16: rounded to nearest. Raises ConfigError, DamagedCheckpoint and OSError; `out_dir` is then as
    it was.
    """
    steps_done, checkpoint = _find(run_dir, step)
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ConfigError(f"--out: {out_dir} is not an empty directory; give another one")
    saved = SavedTensors(checkpoint)
    config = json.loads((checkpoint / "training.json").read_text())["config"]
    spec = describe_model(load_hf_config(checkpoint / "model"), config["model"]["frozen"])
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    need, free = spec.num_parameters * kind.itemsize, disk_free(out_dir)
    if need > free:
        raise ConfigError(f"--out: the disk of {out_dir} has {readable(free)} free, the model needs {readable(need)}")
    found = {param.name: (block, param) for block in spec.blocks for param in block.params}
    beside = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        save_model(
            beside,
            spec,
            lambda name: _master(saved, *found[name]).to(kind),
            checkpoint / "model",
            int(config["checkpoint"]["shard_gib"] * GIB),
            kind,
        )
        with WeightFiles(beside) as files:
            files.check(spec)
        if out_dir.exists():
            out_dir.rmdir()
        beside.rename(out_dir)
        fsync_path(out_dir.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return Exported(str(out_dir), str(checkpoint), steps_done, dtype, spec.num_parameters)


def _find(run_dir: Path, step: int | None) -> tuple[int, Path]:
    complete = complete_checkpoints(run_dir)
    if not complete:
        raise ConfigError(f"{run_dir} holds no complete checkpoint (RUN/checkpoints/step-N)")
    if step is None:
        return complete[-1]
    for steps_done, path in complete:
        if steps_done == step:
            return steps_done, path
    have = ", ".join(str(steps_done) for steps_done, _ in complete)
    raise ConfigError(f"--step: {checkpoint_dir(run_dir, step)} is no complete checkpoint; there are those of {have}")


def _master(saved: SavedTensors, block: BlockSpec, param: ParamSpec) -> Tensor:
    """A parameter's fp32 master; a frozen one's stored value. Every byte is compared with its checksum."""

    def read(state: str, dtype: torch.dtype) -> Tensor:
        out = torch.empty(param.numel, dtype=dtype)
        saved.fill([StateSlice(block, state, param.offset, param.offset + param.numel, out)])
        return out

    stored = saved.places.places[PARAM, param.name].dtype
    value = read(PARAM, torch.float32 if stored == "F32" else torch.bfloat16)
    if ("lo", param.name) in saved.places.places:
        value = join_master(value, read("lo", torch.int16))
    return value.float().view(param.shape)
