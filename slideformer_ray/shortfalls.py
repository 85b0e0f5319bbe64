"""Which tiers a run does not fit, and what would mend it: the messages of `budget.DoesNotFit`.

A setting is offered only after the plan was made anew with it and fitted. Pure. Tested by tests/test_budget.py.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from slideformer_ray.config import GIB, ConfigError, RunConfig
from slideformer_ray.machine import Machine, disk_free, existing_part, readable
from slideformer_ray.memory.host_limits import HostLimits, StoreTooSmall, check_store_fits, gib

if TYPE_CHECKING:
    from slideformer_ray.budget import BytePlan, Draft


def gpu_ceiling(config: RunConfig, machine: Machine) -> int:
    """GPU memory that the run may take: what is free, and the budget."""
    assert machine.gpu_free_bytes is not None
    return min([machine.gpu_free_bytes, *_budget(config.budget.gpu_gib)])


def host_ceiling(config: RunConfig, limits: HostLimits) -> int:
    """Host memory that the run may take: the least of what RAM and the cgroup have left, and the budget."""
    return min(nbytes for _, nbytes in host_ceilings(config, limits))


def host_ceilings(config: RunConfig, limits: HostLimits) -> list[tuple[str, int]]:
    found = [("available RAM", limits.ram_available)]
    if limits.cgroup_limit is not None:
        found.append(("what the cgroup's limit leaves", limits.cgroup_limit - limits.cgroup_used))
    return found + [("budget.ram_gib", nbytes) for nbytes in _budget(config.budget.ram_gib)]


def _budget(gib_given: float | None) -> list[int]:
    return [] if gib_given is None else [int(gib_given * GIB)]


def find_shortfalls(draft: Draft, plan: BytePlan) -> list[str]:
    """One line a tier that `plan`, the best that the draft could do, does not fit; none if all is well."""
    found = []
    if not draft.fits_gpu():
        found.append(_gpu_shortfall(draft))
    if not draft.fits_host(plan):
        found.append(_host_shortfall(draft, plan))
    if not draft.fits_shm(plan):
        found.append(_shm_shortfall(draft, plan))
    return found


def _gpu_shortfall(draft: Draft) -> str:
    assert draft.gpu_limit is not None
    source = "budget.gpu_gib" if draft.gpu_limit in _budget(draft.config.budget.gpu_gib) else "what is free"
    short = gib(draft.gpu_bytes() - draft.gpu_limit)
    return (
        f"GPU memory: this run needs {gib(draft.gpu_bytes())} and {source} is {gib(draft.gpu_limit)}, {short} short; "
        f"{_gpu_mend(draft)}"
    )


def _gpu_mend(draft: Draft) -> str:
    config = draft.config
    given = [
        name
        for name in ("activation_slots", "kept_attention", "kept_gate_up")
        if getattr(config.placement, name) is not None
    ]
    draft = draft.changed("placement", **dict.fromkeys(given))
    if draft.fits_gpu():
        names = " and ".join(f"placement.{name}" for name in given)
        return f"leave {names} out, and as many are taken as fit"
    rows = _largest(config.micro_batch_rows - 1, lambda n: draft.changed("training", micro_batch_rows=n).fits_gpu())
    if rows:
        return f"lower training.micro_batch_rows from {config.micro_batch_rows} to {rows}"
    single = draft.changed("training", micro_batch_rows=1)
    step = config.data.pad_to_multiple
    steps = _largest((config.data.seq_len - 1) // step, lambda n: single.changed("data", seq_len=n * step).fits_gpu())
    if steps:
        return f"lower training.micro_batch_rows to 1 and data.seq_len from {config.data.seq_len} to {steps * step}"
    return "not even one short row fits: give it a larger budget.gpu_gib or GPU, or take a smaller model"


def _host_shortfall(draft: Draft, plan: BytePlan) -> str:
    need = plan.host_bytes + plan.save_peak_bytes
    source, limit = min(host_ceilings(draft.config, draft.machine.limits), key=lambda pair: pair[1])
    saving = f" ({gib(plan.save_peak_bytes)} of it for a moment, in a save or a resume)" if plan.save_peak_bytes else ""
    return (
        f"host memory: this run needs {gib(need)}{saving} and {source} is {gib(limit)}, {gib(need - limit)} short; "
        f"{_host_mend(draft, plan)}"
    )


def _host_mend(draft: Draft, plan: BytePlan) -> str:
    def fits(changed: Draft) -> bool:
        return changed.fits_host(changed.best_plan())

    config, mends = draft.config, []
    if plan.layout.clip and fits(draft.changed("optimizer", max_grad_norm=None)):
        mends.append("set optimizer.max_grad_norm to null, which needs no slot for every layer's gradient")
    if config.placement.gradient_slots and fits(draft.changed("placement", gradient_slots=None)):
        mends.append("leave placement.gradient_slots out, and as many are taken as fit")
    actors = config.placement.num_optimizer_actors or 1
    fewer = _largest(actors - 1, lambda n: fits(draft.changed("placement", num_optimizer_actors=n)))
    if fewer:
        mends.append(f"lower placement.num_optimizer_actors from {actors} to {fewer}")
    if plan.layout.num_host_cells or draft.device == "cpu":  # there, all activations are host memory
        rows = _largest(config.training.rows_per_step - 1, lambda n: fits(_with_rows_per_step(draft, n)))
        if rows:
            mends.append(f"lower training.rows_per_step from {config.training.rows_per_step} to {rows}")
    if config.checkpoint.enabled and fits(draft.changed("checkpoint", save_every=0, save_every_minutes=None)):
        mends.append("set checkpoint.save_every to 0")
    need = plan.host_bytes + plan.save_peak_bytes
    if fits(draft.changed("budget", ram_gib=None)):
        mends.append(f"raise budget.ram_gib to {math.ceil(10 * need / GIB) / 10}")
    return ", or ".join(mends) or f"no setting mends that: take a machine with {gib(need)} free, or a smaller model"


def _with_rows_per_step(draft: Draft, rows: int) -> Draft:
    micro_batch_rows = min(rows, draft.config.micro_batch_rows)
    return draft.changed("training", rows_per_step=rows, micro_batch_rows=micro_batch_rows)


def _shm_shortfall(draft: Draft, plan: BytePlan) -> str:
    # Memory is another line, with every private byte in it: here only /dev/shm may be too small.
    limits = replace(draft.machine.limits, ram_available=sys.maxsize, cgroup_limit=None)
    try:
        check_store_fits(plan.store_bytes, 0, limits)
    except StoreTooSmall as error:
        return str(error).removeprefix("not enough host memory: ")
    raise AssertionError("fits_shm and check_store_fits disagree")


def check_disk(config: RunConfig, plan: BytePlan) -> None:
    """Refuse a run_dir that cannot be written, or whose disk cannot take the checkpoints that stay, one more, and the
    final model.

    Raises ConfigError.
    """
    directory = existing_part(config.run_dir)
    if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(f"run_dir: {directory} is no directory that this user may write in; give another run_dir")
    there = sum(1 for _ in (config.run_dir / "checkpoints").glob("step-*/COMPLETE"))
    peak = checkpoints_at_peak(config)
    model_bytes = plan.model_bytes if config.checkpoint.save_final else 0
    need = max(0, peak - there) * plan.disk_bytes + model_bytes
    free = disk_free(config.run_dir)
    if need > free:
        what = [f"up to {peak} checkpoints"] * (peak > 0) + ["the final model"] * (model_bytes > 0)
        mend = f", lower checkpoint.keep ({config.checkpoint.keep}), or set checkpoint.save_every to 0" if peak else ""
        raise ConfigError(
            f"run_dir: the disk of {config.run_dir} has {readable(free)} free, {readable(need)} "
            f"are needed for {' and '.join(what)}; free space, give another run_dir{mend}"
        )


def checkpoints_at_peak(config: RunConfig) -> int:
    """Checkpoints that the disk holds at the most: those that stay, and the new one until it is complete."""
    saving, steps = config.checkpoint, config.training.steps
    if not saving.enabled:
        return 0
    most = saving.keep + 1 if saving.keep else 1
    if steps is None or saving.save_every_minutes is not None:
        return most
    planned = max(1, steps // saving.save_every)
    return min(most, planned) if saving.keep else planned


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number in 1..most that fits, where everything smaller fits too; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
