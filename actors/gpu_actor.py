"""The GPU compute actor: a thin Ray class over `SlidingWindow`. One call a step; `ctl` answers while a step runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import ray
import torch

from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.actors.process import (
    ActorReport,
    ActorSetup,
    attach_buffers,
    open_page,
    prepare_process,
    private_memory,
)
from slideformer_ray.actors.sliding_window import GpuStepResult, SlidingWindow
from slideformer_ray.budget import CUDA_CONTEXT_BYTES
from slideformer_ray.config import GIB, RunConfig
from slideformer_ray.machine import physical_cores, readable
from slideformer_ray.memory import pinning
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer


# Ray's stubs do not know concurrency groups.
@ray.remote(concurrency_groups={"ctl": 1}, max_restarts=0, max_task_retries=0)  # type: ignore[call-overload]
class GpuActor:
    _description = "gpu actor"  # Ray asks also when __init__ has failed

    def __init__(self, setup: ActorSetup, run_name: str):
        # On a GPU the threads look up embedding rows, while the optimizer actors wait for the step to begin.
        prepare_process(max(1, physical_cores() // 2))
        self.setup, self._run_name = setup, run_name
        self.device = torch.device(setup.layout.device)
        if self.device.type == "cuda":
            _prepare_gpu(setup.config)
        self.buffers = attach_buffers(setup.handles)
        self.registration = pinning.register([b.page_range for b in self.buffers.values()], device=self.device)
        self.window = make_window(setup, self.buffers, open_page(setup, self.buffers))
        held = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else private_memory()
        self._description = f"gpu actor on {self.device}, {readable(held)}"

    def run_step(self, inputs: StepInputs) -> GpuStepResult:
        return self.window.run_step(inputs)

    @ray.method(concurrency_group="ctl")
    def report(self) -> ActorReport:
        return ActorReport.of(
            "gpu actor", f"{self.device}; {self.registration.report}; layers {self.window.layers_in_use}"
        )

    @ray.method(concurrency_group="ctl")
    def run_name(self) -> str:
        """Asked by another run that wants the same cluster."""
        return self._run_name

    def __repr__(self) -> str:
        return self._description


def make_window(setup: ActorSetup, buffers: Mapping[str, SharedBuffer], page: CounterPage) -> SlidingWindow:
    return SlidingWindow(
        setup.spec,
        setup.hf_config,
        setup.layout,
        buffers,
        page,
        torch.device(setup.layout.device),
        layers=setup.config.placement.layers,
        poison=setup.config.debug.poison_freed_slots,
        timeout_s=setup.config.debug.wait_timeout_s,
        max_grad_norm=setup.config.optimizer.max_grad_norm,
    )


def _prepare_gpu(config: RunConfig) -> None:
    """Before CUDA starts: the allocator's habits, the budget as a hard limit on what it may take, determinism."""
    # Layers of several shapes leave holes that segments which can grow do not.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # The compiler's worker processes, one a core by default, take 250 MB of host memory each.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    if config.training.deterministic:
        # cuBLAS repeats its bits across streams only with workspaces of its own, which PyTorch asks for by this name.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # A check for stray reads, not needed for the bits. (To mypy the module is what it is before it is imported.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    limit_gib = config.budget.gpu_gib
    if limit_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_gib * GIB - CUDA_CONTEXT_BYTES) / total))
