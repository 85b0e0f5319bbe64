"""What a run says of itself: the byte table of `plan`, the lines before the first step, the summary.

Pure: turns plans, trainers and summaries into lines, and prints nothing. Tested by tests/observe/test_report.py.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slideformer_ray.budget import GPU, BytePlan
from slideformer_ray.config import RunConfig
from slideformer_ray.machine import Machine, disk_free, readable
from slideformer_ray.model.spec import ModelSpec, ParamSpec
from slideformer_ray.shortfalls import checkpoints_at_peak, host_ceilings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from slideformer_ray.actors.process import ActorReport
    from slideformer_ray.trainer import Summary, Trainer
    from slideformer_ray.verify import VerifyReport

_NAME_WIDTH = 15
_ITEM_WIDTH = 50


def field(name: str, text: str) -> str:
    return f"{name:<{_NAME_WIDTH}}{text}"


# ----------------------------------------------------------------------------------------------------------------- plan


def plan_lines(config: RunConfig, spec: ModelSpec, machine: Machine, plan: BytePlan) -> list[str]:
    """Bytes of every tier, an item a line, beside what the machine has; then the counts that were chosen."""
    lines = [field("model", _model(config, spec)), field("machine", _machine(config, machine)), "", *byte_lines(plan)]
    lines.append("in all")
    source, ceiling = min(host_ceilings(config, machine.limits), key=lambda pair: pair[1])
    lines.append(_item("host", plan.host_bytes, f"of {readable(ceiling)} ({source})"))
    lines.append(_item("/dev/shm (object store)", plan.store_bytes, f"of {readable(machine.limits.shm_free)} free"))
    lines.append(_item("a save or a resume, for a moment", plan.save_peak_bytes))
    free = f"of {readable(disk_free(config.run_dir))} free at {config.run_dir}"
    lines.append(_item("disk: a checkpoint", plan.disk_bytes, free))
    if count := checkpoints_at_peak(config):
        lines.append(_item(f"disk: {count} checkpoints, while one is saved", count * plan.disk_bytes))
    lines.append(_item("disk: the final model", plan.model_bytes))
    return [*lines, "", *_counts(config, plan)]


def byte_lines(plan: BytePlan) -> list[str]:
    """Bytes of every tier, an item a line."""
    lines = []
    for tier in dict.fromkeys(item.tier for item in plan.items):
        lines.append(tier)
        lines += [_item(item.what, item.nbytes) for item in plan.items if item.tier == tier and item.nbytes]
        limit = f"of {readable(plan.gpu_limit)}" if tier == GPU and plan.gpu_limit is not None else ""
        lines.append(_item("total", plan.total(tier), limit))
    return lines


def _item(what: str, nbytes: int, note: str = "") -> str:
    return f"  {what:<{_ITEM_WIDTH}}{readable(nbytes):>13}  {note}".rstrip()


def _machine(config: RunConfig, machine: Machine) -> str:
    limits = machine.limits
    cgroup = "no cgroup limit"
    if limits.cgroup_limit is not None:
        cgroup = f"cgroup limit {readable(limits.cgroup_limit)} ({readable(limits.cgroup_used)} used)"
    return (
        f"{_device(config, machine)}; RAM {readable(limits.ram_available)} of {readable(limits.ram_total)} available; "
        f"{cgroup}; /dev/shm {readable(limits.shm_free)} of {readable(limits.shm_total)} free"
    )


def _device(config: RunConfig, machine: Machine) -> str:
    if config.placement.device == "cpu" or machine.gpu_free_bytes is None or machine.gpu_bytes is None:
        return f"CPU, {machine.physical_cores} cores"
    return f"{machine.gpu_name}, {readable(machine.gpu_free_bytes)} of {readable(machine.gpu_bytes)} free"


def _model(config: RunConfig, spec: ModelSpec) -> str:
    tied = ", tied embeddings" if spec.tied else ""
    weights = "random weights" if config.model.random_init else "weights"
    size = f"{spec.num_parameters:,} parameters, {spec.num_layers} layers{tied}"
    return f"{spec.family}, {size}; {weights} of {config.model.path}"


def _counts(config: RunConfig, plan: BytePlan) -> list[str]:
    """Counts that the user may leave open: what each is in this run, and whether the user or the plan chose it."""
    p, layout = config.placement, plan.layout
    found = [
        ("num_optimizer_actors", layout.num_optimizer_actors, p.num_optimizer_actors),
        ("threads_per_optimizer_actor", layout.threads_per_optimizer_actor, p.threads_per_optimizer_actor),
        ("gradient_slots", layout.gradient_slots, p.gradient_slots),
        ("activation_slots", layout.activation_slots, p.activation_slots),
    ]
    origins = [f"{name} {value} ({_origin(value, given)})" for name, value, given in found]
    rows = config.micro_batch_rows
    origins.append(f"micro_batch_rows {rows} ({_origin(rows, config.training.micro_batch_rows)})")
    return [field("chosen", ", ".join(origins))]


def _origin(value: int, given: int | None) -> str:
    if given is None:
        return "default"
    return "config" if given == value else f"config says {given}, no more are of use"


def plan_record(
    config: RunConfig,
    spec: ModelSpec,
    machine: Machine,
    plan: BytePlan,
    shortfalls: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The same for programs. Every number is in bytes."""
    layout = dataclasses.asdict(plan.layout)
    layout["trainable"] = sum(plan.layout.trainable)
    return {
        "fits": not shortfalls,
        "shortfalls": list(shortfalls),
        "notes": list(notes),
        "model": {
            "family": spec.family,
            "parameters": spec.num_parameters,
            "layers": spec.num_layers,
            "tied": spec.tied,
        },
        "machine": dataclasses.asdict(machine),
        "layout": layout,
        "items": [dataclasses.asdict(item) for item in plan.items],
        "gpu_bytes": plan.gpu_bytes,
        "gpu_limit": plan.gpu_limit,
        "host_bytes": plan.host_bytes,
        "host_limit": plan.host_limit,
        "store_bytes": plan.store_bytes,
        "save_peak_bytes": plan.save_peak_bytes,
        "checkpoint_disk_bytes": plan.disk_bytes,
        "model_disk_bytes": plan.model_bytes,
        "disk_free_bytes": disk_free(config.run_dir),
    }


def plan_notes(config: RunConfig, hf_config: PretrainedConfig) -> list[str]:
    """A run's notes, and data files and weights that are not there: a plan does not need them, a run will."""
    data_files = (*config.data.train, *config.data.eval)
    found = [f"{path} is not there; the plan does not count its rows" for path in data_files if not path.exists()]
    if not config.model.random_init and not any(Path(config.model.path).glob("*.safetensors")):
        found.append(f"{config.model.path} holds no *.safetensors; the plan needs none, a run does")
    return [*run_notes(config, hf_config), *found]


def run_notes(config: RunConfig, hf_config: PretrainedConfig) -> list[str]:
    """Settings without effect, and rows longer than the model was made for."""
    longest = getattr(hf_config, "max_position_embeddings", None)
    beyond = []
    if longest is not None and config.data.seq_len > longest:
        beyond = [
            f"data.seq_len is {config.data.seq_len}, the model's max_position_embeddings {longest}: a longer row has "
            "positions that the model never saw"
        ]
    return [*config.settings_without_effect(), *beyond]


# ------------------------------------------------------------------------------------------------------------ the start


def start_lines(trainer: Trainer) -> list[str]:
    """Everything that was read, chosen or defaulted, before anything is started."""
    config, spec, plan = trainer.config, trainer.spec, trainer.plan
    o = config.optimizer
    clip = f"gradients clipped to norm {o.max_grad_norm:g}" if o.max_grad_norm is not None else "no clipping"
    masters = "fp32 masters split into hi and lo" if plan.layout.split_masters else "fp32 masters"
    decayed, undecayed, frozen = decay_lists(spec)
    lines = [
        field("versions", versions()),
        field("model", _model(config, spec)),
        field("device", f"{_device(config, trainer.machine)}; {config.training.precision} compute, {masters}"),
        *_data_lines(trainer),
        field("steps", _steps(trainer)),
        field("schedule", f"{o.schedule}, peak {o.learning_rate:g} after {o.warmup_steps} warm-up steps"),
        field("AdamW", f"betas {o.betas[0]:g} and {o.betas[1]:g}, eps {o.eps:g}, {clip}"),
        field("weight decay", f"{o.weight_decay:g} for {_tensors(decayed)}"),
        field("", f"none for {_tensors(undecayed)}"),
    ]
    if frozen:
        lines.append(field("frozen", _tensors(frozen)))
    lines += [field("memory", _memory(trainer)), *_counts(config, plan)]
    lines += [field("note", line) for line in run_notes(config, trainer.hf_config)]
    if trainer.resumed:
        lines.append(field("resumed", f"{trainer.resumed.path}, {trainer.resumed.steps_done} steps done"))
    return lines


def versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in version_numbers().items())


def version_numbers() -> dict[str, str]:
    import ray
    import torch
    import transformers

    import slideformer_ray

    found = {module.__name__: module.__version__ for module in (slideformer_ray, torch, transformers, ray)}
    return found | {"Python": platform.python_version()}


def decay_lists(spec: ModelSpec) -> tuple[list[ParamSpec], list[ParamSpec], list[ParamSpec]]:
    """(decayed, not decayed, frozen) parameters, in the model's order."""
    params = [p for block in spec.blocks for p in block.params]
    trained = [p for p in params if not p.frozen]
    return [p for p in trained if p.decay], [p for p in trained if not p.decay], [p for p in params if p.frozen]


def condense(names: Iterable[str]) -> list[str]:
    """Names that differ in the layer's number alone, as one pattern."""
    return list(dict.fromkeys(re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in names))


def _tensors(params: Sequence[ParamSpec]) -> str:
    return f"{len(params)} tensors: {', '.join(condense(p.name for p in params))}" if params else "no tensor"


def _data_lines(trainer: Trainer) -> list[str]:
    lines: list[str] = []
    for name, counts in (("training", trainer.data.train_counts), ("held-out", trainer.data.eval_counts)):
        if not counts.rows:
            continue
        text = f"{counts.rows:,} {name} rows, {counts.tokens:,} tokens, {counts.supervised_tokens:,} supervised"
        if counts.truncated:
            text += f"; {counts.truncated:,} cut to data.seq_len"
        if counts.dropped:
            text += f"; {counts.dropped:,} left out for want of a supervised token"
        lines.append(field("" if lines else "data", text))
    return lines


def _steps(trainer: Trainer) -> str:
    config, data = trainer.config, trainer.data
    rows = config.training.rows_per_step
    epochs = data.num_steps * rows / len(data.train)
    cut = f"{config.num_micro_batches} micro-batches of {config.micro_batch_rows}"
    return f"{data.num_steps} of {rows} rows ({cut}), {epochs:.2f} epochs"


def _memory(trainer: Trainer) -> str:
    plan = trainer.plan
    gpu = f"GPU {readable(plan.gpu_bytes)} of {readable(plan.gpu_limit)}, " if plan.gpu_limit is not None else ""
    shared = (
        ""
        if trainer.local
        else f", /dev/shm {readable(plan.store_bytes)} of {readable(trainer.machine.limits.shm_free)}"
    )
    return f"{gpu}host {readable(plan.host_bytes)} of {readable(plan.host_limit)}{shared}"


def actor_lines(reports: Sequence[ActorReport]) -> list[str]:
    """Where the tiers run: each actor's process, threads and, for the optimizer, the code that does AdamW."""
    return [
        field("" if i else "actors", f"{r.name}: process {r.pid}, {r.threads} threads, nice {r.niceness}; {r.detail}")
        for i, r in enumerate(reports)
    ]


# -------------------------------------------------------------------------------------------------------------- the end


def summary_lines(summary: Summary) -> list[str]:
    speed = f"{summary.tokens_per_second:,.0f} tokens/s in the steps"
    lines = [field("done", f"{summary.steps} steps in {summary.seconds:.1f} s, {speed}")]
    if summary.first_eval_loss is not None and summary.last_eval_loss is not None:
        losses = f"{summary.first_eval_loss:.4f} before, {summary.last_eval_loss:.4f} after"
        lines.append(field("held-out loss", losses))
    if summary.skipped_steps:
        lines.append(field("skipped", f"{summary.skipped_steps} steps, for a gradient norm that was not finite"))
    gpu = f", GPU {readable(summary.peak_gpu_bytes)}" if summary.peak_gpu_bytes else ""
    host = f"host {readable(summary.peak_host_bytes)} ({summary.peak_host_bytes:,} bytes)"
    lines.append(field("peak memory", f"{host}{gpu}; Ray spilled {summary.spilled_bytes} bytes"))
    if summary.model_dir:
        lines.append(field("model", summary.model_dir))
    return lines


def verify_lines(report: VerifyReport) -> list[str]:
    """A row of a check a line: the worst tensor's error, beside what is tolerated."""
    lines = []
    for row in report.rows:
        verdict, relation = ("ok", "<=") if row.passed else ("FAIL", "> ")
        numbers = f"{row.error:.2e} {relation} {row.tolerance:.2e}"
        lines.append(f"{verdict:<5}{row.check:<40}{numbers}  {row.tensor} (tolerance: {row.origin})")
    failed = sum(not row.passed for row in report.rows)
    return [*lines, f"{len(report.rows)} checks, {failed} failed"]
