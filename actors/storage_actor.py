"""The storage actor: writes the Hugging Face model out of the shared parameters. A thin Ray class over `ModelFiles`.

So far it serves checkpoints; the NVMe tier's states and activations come through it next.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ray
import torch

from slideformer_ray.actors.process import ActorReport, ActorSetup, attach_buffers, prepare_process
from slideformer_ray.config import GIB
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.model.layers import flat_views
from slideformer_ray.model.weights import WeightFiles, save_model


class ModelFiles:
    """Saves and checks the model that lies in the shared buffers."""

    def __init__(self, setup: ActorSetup, buffers: Mapping[str, SharedBuffer]):
        self.setup = setup
        self._tensors: dict[str, torch.Tensor] = {}
        for block in setup.spec.blocks:
            self._tensors.update(flat_views(block, buffers[f"hi.{block.index}"].tensor(setup.layout.dtype)))

    def save(self, out_dir: Path) -> None:
        """Parameters as the GPU reads them: bf16, or with precision fp32 the fp32 masters. Durable when it returns."""
        config = self.setup.config
        save_model(
            out_dir,
            self.setup.spec,
            self._tensors.__getitem__,
            config.model.path,
            int(config.checkpoint.shard_gib * GIB),
            self.setup.layout.dtype,
        )

    def check(self, model_dir: Path) -> list[str]:
        """Read every header of a saved model and compare names and shapes. Returns notes; raises ValueError."""
        with WeightFiles(model_dir) as files:
            files.check(self.setup.spec)
            return files.notes


# Ray's stubs do not know concurrency groups.
@ray.remote(concurrency_groups={"ctl": 1}, max_restarts=0, max_task_retries=0)  # type: ignore[call-overload]
class StorageActor:
    def __init__(self, setup: ActorSetup):
        prepare_process(1)
        self.buffers = attach_buffers(setup.handles)
        self.files = ModelFiles(setup, self.buffers)

    def save_model(self, out_dir: Path) -> None:
        self.files.save(out_dir)

    def check_model(self, model_dir: Path) -> list[str]:
        return self.files.check(model_dir)

    @ray.method(concurrency_group="ctl")
    def report(self) -> ActorReport:
        return ActorReport.of("storage actor", "checkpoints")

    def __repr__(self) -> str:
        return "storage actor, model files"
