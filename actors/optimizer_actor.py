"""A CPU optimizer actor: a thin Ray class over `AdamShard`. One call a step; `ctl` answers while a step runs.

`max_restarts=0`: a restarted actor would come back with empty states. Recovery is from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import ray
from torch import Tensor

from slideformer_ray.actors.adam_shard import AdamShard, UpdateStepResult
from slideformer_ray.actors.block_saver import SaveReport
from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.actors.process import ActorReport, ActorSetup, attach_buffers, open_page, prepare_process
from slideformer_ray.checkpoint_layout import TensorPlaces
from slideformer_ray.machine import readable
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.model.spec import BlockSpec
from slideformer_ray.model.weights import WeightFiles, init_block_slice, load_block_slice


# Ray's stubs do not know concurrency groups.
@ray.remote(concurrency_groups={"ctl": 1}, max_restarts=0, max_task_retries=0)  # type: ignore[call-overload]
class OptimizerActor:
    _description = "optimizer actor"  # Ray asks also when __init__ has failed

    def __init__(self, setup: ActorSetup, actor: int):
        prepare_process(setup.layout.threads_per_optimizer_actor)
        self.setup, self.actor = setup, actor
        self.buffers = attach_buffers(setup.handles)
        self.shard = make_shard(setup, actor, self.buffers, open_page(setup, self.buffers))
        part = f"slice {actor + 1} of {setup.layout.num_optimizer_actors}"
        self._description = f"{self.shard.name}, {part}, {readable(self.shard.state_bytes)} of states"

    def load_weights(self, model_dir: Path) -> None:
        load_weights(self.shard, self.setup, model_dir)

    def draw_weights(self) -> None:
        draw_weights(self.shard, self.setup)

    def run_step(self, inputs: StepInputs) -> UpdateStepResult:
        return self.shard.run_step(inputs)

    def master(self, name: str) -> tuple[int, np.ndarray]:
        return self.shard.master(name)

    def state(self, state: str, name: str) -> tuple[int, Tensor]:
        return self.shard.state(state, name)

    def begin_save(self, directory: Path, places: TensorPlaces) -> None:
        self.shard.begin_save(directory, places)

    def wait_save(self) -> SaveReport:
        return self.shard.wait_save()

    @ray.method(concurrency_group="ctl")
    def poll_save(self) -> SaveReport | None:
        return self.shard.poll_save()

    def load(self, directory: Path, adam_step: int) -> None:
        self.shard.load(directory, adam_step)

    @ray.method(concurrency_group="ctl")
    def report(self) -> ActorReport:
        shard = self.shard
        detail = (
            f"{shard.adam.backend} {shard.adam.isa}, {shard.state_bytes / 2**30:.2f} GiB of states; {shard.adam.reason}"
        )
        return ActorReport.of(shard.name, detail)

    def __repr__(self) -> str:
        return self._description


def make_shard(setup: ActorSetup, actor: int, buffers: Mapping[str, SharedBuffer], page: CounterPage) -> AdamShard:
    return AdamShard(
        setup.spec,
        setup.layout,
        actor,
        buffers,
        page,
        setup.config.optimizer,
        setup.total_steps,
        timeout_s=setup.config.debug.wait_timeout_s,
    )


def load_weights(shard: AdamShard, setup: ActorSetup, model_dir: Path) -> None:
    """Masters are made from the loaded weights, exactly; every actor reads its own slices."""
    with WeightFiles(model_dir) as files:

        def fill(block: BlockSpec, start: int, stop: int, hi: Tensor, lo: Tensor | None) -> None:
            load_block_slice(files, block, start, stop, hi, lo, setup.layout.precision)

        shard.fill(fill)


def draw_weights(shard: AdamShard, setup: ActorSetup) -> None:
    def fill(block: BlockSpec, start: int, stop: int, hi: Tensor, lo: Tensor | None) -> None:
        init_block_slice(
            setup.hf_config, block, start, stop, hi, lo, setup.layout.precision, setup.config.training.seed
        )

    shard.fill(fill)
