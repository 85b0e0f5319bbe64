"""Proof on the user's own model and rows: a few steps through the three tiers, compared with the same training in plain
PyTorch (`reference.py`) and with themselves under other schedules.

What is compared, in fp32 always, and in bf16 too when the config trains in bf16:

    loaded weights    the masters that training starts from are the reference's, bit for bit
    loss, gradients   of each step, with the reference's AT THE PIPELINE'S WEIGHTS
    gradient norm     with the norm of the gradients that were sent to the host
    masters           after each step, with those of a reference that trains by itself from the first step to the last
    1 x 8             the same rows as one micro-batch: losses, gradients and masters with those of 4 x 2
    identical bits    overlap off, 2 and 3 optimizer actors, activations in host memory: losses, masters, Adam states
    learning rate 0   changes no bit of any parameter, with weight decay on

Clipping, weight decay, a warm-up and a falling rate are in effect whatever the config says: see `proof_config`.

Errors are relative, ||a - b|| / ||b|| of a tensor. Each kind of tensor (`self_attn.q_proj.weight`) has one row, its
worst layer and step. The tolerance is 1e-6, or `SPREAD_FACTOR` x the spread of the kind where that is more: how far two
reference runs are apart that are equally right, one with micro-batches of 2 rows and fused attention, one with
micro-batches of 1 row and attention written out. It is measured anew on every model, device and precision.

Why fp32 needs the spread too: on the shipped model the gradients of q_proj and k_proj nearly cancel in the softmax. On
a CPU plain PyTorch's are 2e-6 (attention written out) to 4e-6 (fused) off those of float64, and the pipeline's 3e-6.
Why gradients are compared at equal weights: one master that is off by an ulp draws all the rounding of the next forward
anew, so two trainings side by side never have gradients closer than that, whatever trains them.

On CUDA all this holds with TF32 off, which is PyTorch's default. Touches no file but a temporary directory for the Adam
states. Tested by tests/test_verify.py, which breaks the pipeline on purpose.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slideformer_ray.budget import autograd_bytes, resolve
from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.data.batches import DataSet, StepBatch
from slideformer_ray.machine import Machine
from slideformer_ray.memory.host_limits import gib
from slideformer_ray.model.layers import describe_model, flat_views, load_hf_config
from slideformer_ray.model.weights import init_block_slice
from slideformer_ray.reference import MicroBatch, ReferenceTrainer
from slideformer_ray.shortfalls import host_ceiling
from slideformer_ray.tiers import LocalTiers, RayTiers, StepReport, Tiers
from slideformer_ray.trainer import load_tokenizer, submit_batch

Precision = Literal["fp32", "bf16"]

TOLERANCE = 1e-6
# A spread is one draw of rounding noise, an error another. Their ratio on the shipped model, in fp32 and bf16, where
# 1e-6 does not decide: 0.1 to 1.4 over 12 seeds on a CPU, and once 2.1; 0.1 to 2.0 over 3 seeds on an H200.
SPREAD_FACTOR = 3.0

ROWS = 8  # of a step
CUT = 2  # rows of a micro-batch, except where a check says otherwise: 4 x 2
WARMUP_STEPS = 2  # the first has rate 0, so the first two steps start from the same weights in every run

# Bytes a parameter of a ReferenceTrainer: parameters, masters, sums of gradients, what AdamW consumes, its states,
# and autograd's gradients. fp32: 4 + 0 + 4 + 4 + 8 + 4. bf16: 2 + 4 + 4 + (2 + 4) + 8 + 2.
_REFERENCE_BYTES: dict[Precision, int] = {"fp32": 24, "bf16": 26}


@dataclass(frozen=True)
class CheckRow:
    """One line of the report: the worst tensor of a check."""

    check: str
    tensor: str
    error: float  # relative, or the number of elements that differ where bits must be identical; inf for NaN
    tolerance: float
    origin: str  # where the tolerance comes from

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    settings: dict[str, Any]  # what was run, as `proof_config` chose it
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def to_json(self) -> str:
        rows = [dataclasses.asdict(row) | {"passed": row.passed} for row in self.rows]
        return json.dumps({"passed": self.passed, "settings": self.settings, "rows": rows}, indent=1)


def verify(
    config: RunConfig, *, steps: int = 5, local: bool, on_line: Callable[[str], None] = lambda line: None
) -> VerifyReport:
    """Run every check on the config's model and the first `steps` x 8 rows of its order.

    local: the tiers run as threads of this process instead of Ray actors. on_line: is told what runs. Raises
    ConfigError, or another ValueError of the user's files, before anything is allocated; TierError when an actor fails.
    """
    proof = Proof(config, steps, local, on_line)
    limit = proof.clipping_norm()
    rows = [row for precision in proof.precisions for row in proof.run(precision, limit)]
    return VerifyReport(proof.settings(limit), tuple(rows))


def proof_config(config: RunConfig, steps: int, precision: Precision, max_grad_norm: float | None = None) -> RunConfig:
    """The config with what a proof needs: few steps, every feature of the optimizer in effect, all gradients kept."""
    o = config.optimizer
    optimizer = {
        "learning_rate": o.learning_rate or 1e-5,
        "weight_decay": o.weight_decay or 0.1,
        "schedule": "cosine" if o.schedule == "constant" else o.schedule,
        "warmup_steps": WARMUP_STEPS,
        "max_grad_norm": max_grad_norm or o.max_grad_norm,
    }
    training = {
        "steps": steps,
        "epochs": None,
        "rows_per_step": ROWS,
        "micro_batch_rows": CUT,
        "precision": precision,
        "overlap": True,
    }
    placement = {"num_optimizer_actors": 1, "gradient_slots": None, "activation_slots": None}
    return changed(
        config,
        optimizer=optimizer,
        training=training,
        placement=placement,
        checkpoint={"resume": "none"},
        debug={"poison_freed_slots": True},
    )


def changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """A validated copy with some fields of some sections replaced."""
    values = config.model_dump()
    for section, fields in sections.items():
        values[section] |= fields
    return RunConfig.from_dict(values, where="verify")


# ------------------------------------------------------------------------------------------------------------ comparing

Tensors = Mapping[str, Tensor]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, in float64. inf where either is not finite, or wanted is 0 and found is not."""
    wanted = wanted.double().cpu()
    difference, norm = float((found.double().cpu() - wanted).norm()), float(wanted.norm())
    if difference == 0.0:
        return 0.0
    error = difference / norm if norm > 0.0 else math.inf
    return error if math.isfinite(error) else math.inf


def kind_of(name: str) -> str:
    """A parameter's name without the number of its layer, and without the model's own prefix."""
    return re.sub(r"^model\.(layers\.\d+\.)?", "", name)


class Errors:
    """The worst relative error of each kind, and the tensor and step that had it."""

    def __init__(self) -> None:
        self.worst: dict[str, tuple[float, str]] = {}

    def add(self, when: str, found: Tensors, wanted: Tensors) -> None:
        for name, tensor in wanted.items():
            kind, error = kind_of(name), relative_error(found[name], tensor)
            if kind not in self.worst or error > self.worst[kind][0]:
                self.worst[kind] = error, f"{name}, {when}"

    def rows(self, check: str, spread: Errors | None = None) -> list[CheckRow]:
        """A row a kind. `spread`: the same between two reference runs."""
        rows = []
        for kind, (error, where) in self.worst.items():
            between = spread.worst[kind][0] if spread else 0.0
            tolerance, origin = TOLERANCE, "fixed"
            if SPREAD_FACTOR * between > TOLERANCE:
                tolerance = SPREAD_FACTOR * between
                origin = f"{SPREAD_FACTOR:g} x {between:.1e} between two reference runs"
            rows.append(CheckRow(check, where, error, tolerance, origin))
        return rows


class Differences:
    """How many elements have other bits."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def add(self, where: str, found: Tensors, wanted: Tensors) -> None:
        for name, tensor in wanted.items():
            differing = int((_bits(found[name]) != _bits(tensor)).sum())
            if differing and not self.count:
                self.first = f"{name}, {where}"
            self.count += differing

    def row(self, check: str) -> CheckRow:
        return CheckRow(check, self.first or "all", float(self.count), 0.0, "identical bits")


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN here, and 0.0 is not -0.0."""
    return (
        tensor.contiguous()
        .cpu()
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    )


# -------------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Step:
    """What a step of the pipeline left, on the host."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]  # before clipping, fp32
    masters: dict[str, Tensor]

    @property
    def norm_of_gradients(self) -> float:
        return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in self.gradients.values()))


@dataclass(frozen=True)
class Run:
    """A run of the pipeline: the masters it began with, its steps, and Adam's states after the last."""

    initial: dict[str, Tensor]
    steps: list[Step]
    states: dict[str, Tensor]

    @property
    def losses(self) -> dict[str, Tensor]:
        return {"loss": torch.tensor([step.loss for step in self.steps], dtype=torch.float64)}

    def weights_before(self, step: int) -> dict[str, Tensor]:
        return self.steps[step - 1].masters if step else self.initial


class Proof:
    """The checks of one config. Reads and refuses when made; nothing runs yet."""

    def __init__(self, config: RunConfig, steps: int, local: bool, on_line: Callable[[str], None]):
        if steps <= WARMUP_STEPS:
            raise ConfigError(f"verify: steps is {steps}; at least {WARMUP_STEPS + 1}, of which {WARMUP_STEPS} warm up")
        self.config, self.steps, self.local, self.on_line = config, steps, local, on_line
        self.precisions: list[Precision] = ["fp32", "bf16"] if config.training.precision == "bf16" else ["fp32"]
        self.hf_config = load_hf_config(config.model.path)
        self.spec = describe_model(self.hf_config, config.model.frozen)
        self.trained = [p.name for b in self.spec.blocks for p in b.params if not p.frozen]
        machine = Machine.read(config.placement.device)
        self.device = "cuda" if machine.gpu_bytes is not None else "cpu"
        if self.device == "cuda" and (found := torch.get_float32_matmul_precision()) != "highest":
            raise ConfigError(f"verify: torch's float32_matmul_precision is {found!r}: set it to 'highest' (no TF32)")
        for precision in self.precisions:
            self._check_memory(precision, machine)
        self.data = DataSet.load(proof_config(config, steps, "fp32"), load_tokenizer(config.model.path))

    def _check_memory(self, precision: Precision, machine: Machine) -> None:
        """Refuse a model whose resident reference cannot fit. The pipeline's own bytes are checked where it starts."""
        data, spec, element = self.config.data, self.spec, 2 if precision == "bf16" else 4
        tokens = CUT * -(-data.seq_len // data.pad_to_multiple) * data.pad_to_multiple
        # Two references at once; activations of all layers of a micro-batch; its logits, in fp32 and their gradients.
        activations = spec.num_layers * autograd_bytes(spec, self.hf_config.intermediate_size, tokens, element)
        resident = 2 * _REFERENCE_BYTES[precision] * spec.num_parameters + activations + 12 * tokens * spec.vocab_size
        # fp32 masters and gradients of every step.
        needed = {"host memory": 8 * self.steps * spec.num_parameters, "GPU memory": 0}
        needed["GPU memory" if self.device == "cuda" else "host memory"] += resident
        free = {"host memory": host_ceiling(self.config, machine.limits), "GPU memory": machine.gpu_free_bytes or 0}
        for where, nbytes in needed.items():
            if nbytes > free[where]:
                raise ConfigError(
                    f"verify: plain PyTorch holds the whole model, for which {gib(nbytes)} of {where} are needed and "
                    f"{gib(free[where])} are free; verify a model of the same family with fewer layers "
                    "(model.path: a config.json with a lower num_hidden_layers, model.random_init: true)"
                )

    def batch(self, step: int, cut: int) -> StepBatch:
        """The rows of a step as micro-batches of `cut` rows."""
        return dataclasses.replace(self.data, micro_batch_rows=cut).step_batch(step)

    def torch_batch(self, step: int, cut: int) -> list[MicroBatch]:
        return [(torch.from_numpy(m.ids), torch.from_numpy(m.targets)) for m in self.batch(step, cut).micro_batches]

    def clipping_norm(self) -> float:
        """A max_grad_norm that clips: the config's, or half of the first step's norm where that is less."""
        self.on_line("plain PyTorch: the first step's gradient norm")
        norm = self.reference(proof_config(self.config, self.steps, "fp32")).step(self.torch_batch(0, CUT)).grad_norm
        return min(norm / 2, self.config.optimizer.max_grad_norm or math.inf)

    def settings(self, max_grad_norm: float) -> dict[str, Any]:
        """What was run, for the report."""
        o = proof_config(self.config, self.steps, "fp32", max_grad_norm).optimizer
        batches = [self.batch(step, CUT) for step in range(self.steps)]
        return {
            "model": str(self.config.model.path),
            "device": self.device,
            "tiers": "threads" if self.local else "Ray actors",
            "steps": self.steps,
            "micro_batch_shapes": [[list(m.ids.shape) for m in batch.micro_batches] for batch in batches],
            "learning_rate": o.learning_rate,
            "schedule": o.schedule,
            "warmup_steps": o.warmup_steps,
            "weight_decay": o.weight_decay,
            "max_grad_norm": o.max_grad_norm,
        }

    # ------------------------------------------------------------------------------------------------------- the checks

    def run(self, precision: Precision, max_grad_norm: float) -> list[CheckRow]:
        """Every check in one precision."""
        config = proof_config(self.config, self.steps, precision, max_grad_norm)
        base = self.pipeline(config, f"{precision}: {ROWS // CUT} x {CUT} rows")
        self.on_line(f"{precision}: plain PyTorch at the pipeline's weights, twice")
        loaded, gradients, gradient_spread = self._compare_at_equal_weights(config, base)
        self.on_line(f"{precision}: plain PyTorch by itself, twice")
        masters, master_spread = self._compare_with_own_runs(config, base)
        norms = Errors()
        for i, step in enumerate(base.steps):
            norms.add(
                f"step {i}",
                {"gradient norm": _scalar(step.grad_norm)},
                {"gradient norm": _scalar(step.norm_of_gradients)},
            )
        rows = [
            loaded.row(f"{precision}: loaded weights"),
            *gradients.rows(f"{precision}: loss and gradients", gradient_spread),
            *norms.rows(f"{precision}: gradient norm"),
            *masters.rows(f"{precision}: masters", master_spread),
        ]

        whole = f"{precision}: 1 x {ROWS} rows"
        gradients, masters = self._compare_cuts(changed(config, training={"micro_batch_rows": ROWS}), whole, base)
        rows += gradients.rows(f"{whole}: loss and gradients", gradient_spread)
        rows += masters.rows(f"{whole}: masters", master_spread)

        variants: dict[str, dict[str, dict[str, Any]]] = {
            "overlap off": {"training": {"overlap": False}},
            "2 optimizer actors": {"placement": {"num_optimizer_actors": 2}},
            "3 optimizer actors": {"placement": {"num_optimizer_actors": 3}},
            "activations in host memory": {"placement": {"activation_slots": 3}},
        }
        for name, sections in variants.items():
            rows.append(self._compare_bits(changed(config, **sections), f"{precision}: {name}", base))
        rows.append(self._rate_zero(changed(config, optimizer={"learning_rate": 0.0}), f"{precision}: learning rate 0"))
        return rows

    def _compare_at_equal_weights(self, config: RunConfig, base: Run) -> tuple[Differences, Errors, Errors]:
        """Loaded weights; losses and gradients of each step; the same between the two references."""
        loaded, errors, spread = Differences(), Errors(), Errors()
        reference, other = self.references(config)
        loaded.add("before step 0", base.initial, {name: reference.masters()[name] for name in self.trained})
        losses: list[tuple[float, float]] = []
        for step, found in enumerate(base.steps):
            for trainer in (reference, other):
                _set_weights(trainer, base.weights_before(step))
            wanted, as_right = reference.step(self.torch_batch(step, CUT)), other.step(self.torch_batch(step, 1))
            losses.append((wanted.loss, as_right.loss))
            errors.add(f"step {step}", found.gradients, wanted.gradients)
            spread.add(f"step {step}", as_right.gradients, wanted.gradients)
        # All steps as one vector: the spread of a single number can be 0 by chance.
        of_reference, of_other = torch.tensor(losses, dtype=torch.float64).unbind(1)
        errors.add("all steps", base.losses, {"loss": of_reference})
        spread.add("all steps", {"loss": of_other}, {"loss": of_reference})
        return loaded, errors, spread

    def _compare_with_own_runs(self, config: RunConfig, base: Run) -> tuple[Errors, Errors]:
        """Masters after each step, of references that train by themselves; the same between the two."""
        errors, spread = Errors(), Errors()
        reference, other = self.references(config)
        for step, found in enumerate(base.steps):
            reference.step(self.torch_batch(step, CUT))
            other.step(self.torch_batch(step, 1))
            wanted = {name: reference.masters()[name] for name in self.trained}
            errors.add(f"step {step}", found.masters, wanted)
            spread.add(f"step {step}", other.masters(), wanted)
        return errors, spread

    def _compare_cuts(self, config: RunConfig, what: str, base: Run) -> tuple[Errors, Errors]:
        """Losses and gradients, and masters, of the same rows in other micro-batches."""
        gradients, masters = Errors(), Errors()
        losses: list[float] = []

        def compare(step: int, found: Step) -> None:
            wanted = base.steps[step]
            losses.append(found.loss)
            if step < WARMUP_STEPS:  # later the weights differ by the rounding of the updates before
                gradients.add(f"step {step}", found.gradients, wanted.gradients)
            masters.add(f"step {step}", found.masters, wanted.masters)

        self._steps(config, what, compare)
        gradients.add("all steps", {"loss": torch.tensor(losses, dtype=torch.float64)}, base.losses)
        return gradients, masters

    def _compare_bits(self, config: RunConfig, what: str, base: Run) -> CheckRow:
        differences = Differences()

        def compare(step: int, found: Step) -> None:
            wanted, when = base.steps[step], f"step {step}"
            differences.add(when, {"loss": _scalar(found.loss)}, {"loss": _scalar(wanted.loss)})
            differences.add(when, found.gradients, wanted.gradients)
            differences.add(when, found.masters, wanted.masters)

        _, states = self._steps(config, what, compare)
        differences.add("after the last step", states, base.states)
        return differences.row(what)

    def _rate_zero(self, config: RunConfig, what: str) -> CheckRow:
        """Parameters as the GPU reads them, and masters (in bf16: hi and lo together), before and after."""
        differences = Differences()
        parameters: dict[str, Tensor] = {}
        masters: dict[str, Tensor] = {}

        def at_start(tiers: Tiers) -> None:
            parameters.update(_parameter_bytes(tiers))
            masters.update(self._masters(tiers))

        def at_end(tiers: Tiers) -> None:
            differences.add("after the last step", _parameter_bytes(tiers), parameters)

        def compare(step: int, found: Step) -> None:
            differences.add(f"step {step}", found.masters, masters)

        self._steps(config, what, compare, at_start, at_end)
        return differences.row(what)

    # -------------------------------------------------------------------------------------------------------- pipeline

    def pipeline(self, config: RunConfig, what: str) -> Run:
        steps: list[Step] = []
        initial, states = self._steps(config, what, lambda _, step: steps.append(step))
        return Run(initial, steps, states)

    def _steps(
        self,
        config: RunConfig,
        what: str,
        visit: Callable[[int, Step], None],
        at_start: Callable[[Tiers], None] = lambda tiers: None,
        at_end: Callable[[Tiers], None] = lambda tiers: None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Train all steps, showing each to `visit`. Returns the first masters and the last Adam states."""
        self.on_line(what)
        machine = Machine.read(config.placement.device)
        plan = resolve(config, self.spec, self.hf_config.intermediate_size, machine, local=self.local)
        tiers_class = LocalTiers if self.local else RayTiers
        with tiers_class(config, self.hf_config, self.spec, plan, self.steps) as tiers:
            tiers.load_weights(None if config.model.random_init else config.model.path)
            initial = self._masters(tiers)
            at_start(tiers)
            for step in range(self.steps):
                batch = self.batch(step, config.micro_batch_rows)
                report = tiers.gather(submit_batch(tiers, batch, step, step, train=True))
                visit(step, self._read(tiers, report))
            at_end(tiers)
            states = self._states(tiers, config.training.precision)
        _free_memory()
        return initial, states

    def _read(self, tiers: Tiers, report: StepReport) -> Step:
        assert report.gpu.grad_norm is not None
        gradients = {name: tiers.gradient(name) for name in self.trained}
        return Step(report.gpu.loss, report.gpu.grad_norm, gradients, self._masters(tiers))

    def _masters(self, tiers: Tiers) -> dict[str, Tensor]:
        return {name: tiers.master(name) for name in self.trained}

    def _states(self, tiers: Tiers, precision: Precision) -> dict[str, Tensor]:
        """exp_avg and exp_avg_sq of every trained parameter, whole, and lo where masters are split."""
        kinds = ("exp_avg", "exp_avg_sq", *(("lo",) if precision == "bf16" else ()))
        return {
            f"{kind} of {param.name}": tiers.state(kind, param.name)
            for block in self.spec.blocks
            for param in block.params
            for kind in (kinds if not param.frozen else ())
        }

    # ------------------------------------------------------------------------------------------------------- reference

    def references(self, config: RunConfig) -> tuple[ReferenceTrainer, ReferenceTrainer]:
        """Two that differ in rounding alone: the second's attention is written out, and it gets rows one by one."""
        reference, other = self.reference(config), self.reference(config)
        cast(PreTrainedModel, other.model).set_attn_implementation("eager")
        return reference, other

    def reference(self, config: RunConfig) -> ReferenceTrainer:
        precision = config.training.precision
        return ReferenceTrainer(
            config.model.path,
            precision=precision,
            device=self.device,
            optimizer=config.optimizer,
            total_steps=self.steps,
            frozen=config.model.frozen,
            state_dict=self._drawn_weights(precision) if config.model.random_init else None,
        )

    def _drawn_weights(self, precision: Precision) -> dict[str, Tensor]:
        """What the tiers draw for a random model, by state-dict key."""
        drawn: dict[str, Tensor] = {}
        for block in self.spec.blocks:
            flat = torch.empty(block.numel)
            init_block_slice(self.hf_config, block, 0, block.numel, flat, None, "fp32", self.config.training.seed)
            drawn |= flat_views(block, flat.bfloat16().float() if precision == "bf16" else flat)
        return drawn


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _set_weights(reference: ReferenceTrainer, masters: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            if name in masters:
                reference.masters()[name].copy_(masters[name])
                parameter.copy_(masters[name])  # bf16: rounded; fp32: the same memory


def _parameter_bytes(tiers: Tiers) -> dict[str, Tensor]:
    """Every shared parameter buffer as the GPU reads it, frozen parameters and padding included."""
    return {
        f"parameters of {block.name}": torch.from_numpy(tiers.buffers[f"hi.{block.index}"].numpy(np.uint8).copy())
        for block in tiers.spec.blocks
    }


def _free_memory() -> None:
    """What a run held goes back now, not when Python gets to it; compiled layers too, so that every run compiles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()
