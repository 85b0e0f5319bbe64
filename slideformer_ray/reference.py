"""The same training, resident, in plain PyTorch: what every tier, kernel and schedule of this package is compared with.

Deliberately shares no arithmetic with the rest: transformers' whole model, autograd, torch's gradient clipping and
`torch.optim.AdamW`. Only the learning rate's formula is common, which is tested against transformers on its own. Used
by `verify` and by tests. Tested by tests/test_reference.py.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slideformer_ray.config import OptimizerSection
from slideformer_ray.lr_schedule import check_schedule, learning_rate

IGNORED_TARGET = -100

# (ids, targets), int [rows, seq] both. targets[t] is the token that follows ids[t], or IGNORED_TARGET. Rows are
# right-padded.
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    loss: float  # sum over the step's supervised tokens / their number
    grad_norm: float  # global, before clipping, of `gradients`
    num_supervised: int
    gradients: dict[str, Tensor]  # by state-dict key, before clipping, in the dtype that the optimizer consumes
    applied: bool  # False: the norm was not finite, and nothing was changed


class ReferenceTrainer:
    """Trains the model of `model_dir`, all of it on `device`.

    fp32: parameters, gradients and states in fp32. bf16: compute and the step's gradient in bf16, gradients of
    micro-batches summed in fp32, fp32 masters and states. frozen: shell patterns of state-dict keys. state_dict: fp32
    weights to start from instead of the directory's (which may then hold config.json alone).
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        precision: Literal["fp32", "bf16"],
        device: torch.device | str,
        optimizer: OptimizerSection,
        total_steps: int,
        frozen: Sequence[str] = (),
        state_dict: dict[str, Tensor] | None = None,
    ):
        check_schedule(total_steps, optimizer.warmup_steps)
        self.device = torch.device(device)
        self.model = _load_fp32(Path(model_dir), state_dict).to(self.device).train()
        self._settings = optimizer
        self._total_steps = total_steps
        self._num_applied = 0

        parameters = dict(self.model.named_parameters())  # a tied head appears once, under the embedding's name
        self._masters = {name: p.detach() for name, p in parameters.items()}
        if precision == "bf16":
            self._masters = {name: master.clone() for name, master in self._masters.items()}
            for p in parameters.values():
                # Parameters alone: model.to(bfloat16) would cast the rotary frequencies too.
                p.data = p.data.bfloat16()
        self._trained = {
            name: p
            for name, p in parameters.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen)
        }
        for name, p in parameters.items():
            p.requires_grad_(name in self._trained)

        decayed = [m for name, m in self._masters.items() if name in self._trained and _decays(name, m)]
        others = [m for name, m in self._masters.items() if name in self._trained and not _decays(name, m)]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            # CUDA's fused kernel computes bias corrections in fp32, which moves masters by 1e-6 (measured on an H200).
            fused=self.device.type == "cpu",
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> ReferenceStep:
        """One optimizer step over all micro-batches, each of its own shape.

        Raises ValueError when no token is supervised, and FloatingPointError for a non-finite gradient without
        max_grad_norm (with it, the step is skipped: no state changes and Adam's step is not counted).
        """
        num_supervised = _count_supervised(micro_batches)
        loss = 0.0
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._trained.items()}
        for ids, targets in micro_batches:
            share = self._summed_loss(ids, targets) / num_supervised
            loss += share.item()
            gradients = torch.autograd.grad(share, list(self._trained.values()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += gradient
        consumed = {name: total.to(self._trained[name].dtype) for name, total in sums.items()}

        for name, gradient in consumed.items():
            self._masters[name].grad = gradient.float().clone()
        max_norm = self._settings.max_grad_norm
        norm = _global_norm(consumed.values())
        torch.nn.utils.clip_grads_with_norm_(
            [self._masters[name] for name in consumed],
            math.inf if max_norm is None else max_norm,
            torch.tensor(norm, dtype=torch.float32, device=self.device),
        )
        if math.isfinite(norm):
            self._update()
        elif max_norm is None:
            raise FloatingPointError(f"the gradient norm is {norm} at step {self._num_applied}")
        return ReferenceStep(loss, norm, num_supervised, consumed, applied=math.isfinite(norm))

    def masters(self) -> dict[str, Tensor]:
        """Every parameter in fp32 by state-dict key, frozen ones too. Live tensors: clone what must outlast a step."""
        return self._masters

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss of a supervised token."""
        total = sum(self._summed_loss(ids, targets).item() for ids, targets in micro_batches)
        return total / _count_supervised(micro_batches)

    def _summed_loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        # No attention mask: padding is on the right, so under a causal mask no supervised token sees it.
        logits = self.model(input_ids=ids.to(self.device).long(), use_cache=False).logits
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.to(self.device).long().flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )

    def _update(self) -> None:
        settings = self._settings
        rate = learning_rate(
            self._num_applied, self._total_steps, settings.learning_rate, settings.schedule, settings.warmup_steps
        )
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()
        self._num_applied += 1
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(self._masters[name])  # in fp32 the two share their memory


def _load_fp32(model_dir: Path, state_dict: dict[str, Tensor] | None) -> torch.nn.Module:
    if state_dict is None:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    missing = dict(model.named_parameters()).keys() - state_dict.keys()
    assert not missing, f"state_dict lacks {sorted(missing)}"
    model.load_state_dict(state_dict, strict=False)  # a tied head may be absent
    return model


def _global_norm(gradients: Iterable[Tensor]) -> float:
    # In float64: the fp32 sum of `clip_grad_norm_` is off by up to 2e-5 of a million elements' norm on the CPU, which
    # every clipped gradient would inherit.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and not name.endswith(".bias")


def _count_supervised(micro_batches: Iterable[MicroBatch]) -> int:
    count = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in micro_batches)
    if count == 0:
        raise ValueError("no token is supervised: every target is -100")
    return count
