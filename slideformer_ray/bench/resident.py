"""The same training with everything on one device: what a user whose GPU holds the model would run.

The Hugging Face model in bf16 with Liger's kernels where they are installed (its fused loss among them), SDPA, every
layer checkpointed, fused AdamW on bf16 parameters and states: an optimizer of half the precision of ours, with nothing
to wait for. No micro-batches: the whole step is one batch. Tested by tests/bench/test_resident.py.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from slideformer_ray.bench.batches import random_batch
from slideformer_ray.bench.case import Case
from slideformer_ray.bench.host_memory import MachineMemory
from slideformer_ray.bench.result import BenchResult, Failure, Outcome
from slideformer_ray.data.batches import IGNORE_INDEX, StepBatch
from slideformer_ray.machine import Machine, device_name
from slideformer_ray.model.layers import load_hf_config
from slideformer_ray.observe.report import version_numbers

# A batch twice as large that is not faster by this much is not worth its memory: the best one has been found.
_WORTH = 1.01


def measure_resident(
    cases: Sequence[Case], memory: MachineMemory, on_outcome: Callable[[Outcome], None], *, larger: bool
) -> None:
    """Each case's rows as one batch; `larger`: then twice as many rows, as long as that is faster.

    One model serves all cases. `on_outcome` hears of each as it comes. `memory`: begun before this process imported
    torch.
    """
    model = ResidentModel(cases[0])
    rates = [0.0]
    waiting = list(cases)
    while waiting:
        case = waiting.pop(0)
        try:
            seconds, losses = model.run(case)
        except torch.OutOfMemoryError:
            for refused in (case, *waiting):
                on_outcome(Failure(refused, f"{refused.rows} rows in one batch do not fit in GPU memory"))
            return
        result = model.result(case, seconds, losses, memory.peak_bytes)
        on_outcome(result)
        rates.append(result.tokens_per_second)
        if larger and not waiting and rates[-1] > rates[-2] * _WORTH:
            waiting = [dataclasses.replace(case, label=f"{2 * case.rows} rows", rows=2 * case.rows)]


class ResidentModel:
    def __init__(self, case: Case):
        config = case.config(Path("unused"))
        self.machine = Machine.read(config.placement.device)
        cuda = config.placement.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.max_grad_norm = config.optimizer.max_grad_norm
        self.hf_config = load_hf_config(config.model.path)
        self.liger = self.device.type == "cuda" and _apply_liger(self.hf_config)
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        torch.manual_seed(0)
        with self.device:
            self.model = AutoModelForCausalLM.from_config(self.hf_config, dtype=dtype, attn_implementation="sdpa")
        self.model.train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optimizer.learning_rate, fused=True)

    def run(self, case: Case) -> tuple[list[float], list[float]]:
        """(seconds of each timed step, losses of all). Raises torch.OutOfMemoryError."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        batch = random_batch(case.rows, case.seq_len, case.rows, self.hf_config.vocab_size, seed=0)
        ids, labels = (tensor.to(self.device) for tensor in as_labels(batch))
        seconds, losses = [], []
        for step in range(case.warmup + case.steps):
            begin = time.perf_counter()
            loss = self.model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device: all of the step was issued before it
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if step >= case.warmup:
                seconds.append(time.perf_counter() - begin)
        return seconds, losses

    def result(self, case: Case, seconds: Sequence[float], losses: Sequence[float], machine_bytes: int) -> BenchResult:
        cuda = self.device.type == "cuda"
        return BenchResult(
            label=case.label,
            system=case.system,
            shape=case.shape,
            settings=case.settings,
            rows=case.rows,
            seq_len=case.seq_len,
            micro_batch_rows=case.rows,
            tokens=case.rows * case.seq_len,
            parameters=sum(p.numel() for p in self.model.parameters()),
            seconds=tuple(seconds),
            gpu_peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            gpu_reserved_bytes=torch.cuda.memory_reserved() if cuda else 0,
            machine_bytes=machine_bytes,
            device=device_name(self.machine, self.device.type),
            versions=version_numbers(),
            losses=tuple(losses),
            notes={"liger": self.liger},
        )


def as_labels(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """(ids, labels) of a batch of one micro-batch, as transformers wants them: labels not shifted."""
    (micro_batch,) = batch.micro_batches
    ids = torch.from_numpy(micro_batch.ids).long()
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, 1:] = torch.from_numpy(micro_batch.targets[:, :-1])
    return ids, labels


def _apply_liger(hf_config: PretrainedConfig) -> bool:
    """Liger's kernels in transformers' classes, for the rest of this process."""
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError:
        return False
    getattr(liger, f"apply_liger_kernel_to_{hf_config.model_type}")(
        fused_linear_cross_entropy=True, cross_entropy=False
    )
    return True
