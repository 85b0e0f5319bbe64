"""The learning rate of each optimizer step: constant, linear or cosine, after a linear warm-up. Pure functions.

The convention is transformers' (`get_scheduler`): the first step of a warm-up has rate 0, and linear and cosine would
reach 0 at the step after the last. Tested by tests/test_lr_schedule.py.
"""

from __future__ import annotations

import math

KINDS = ("constant", "linear", "cosine")


def check_schedule(total_steps: int, warmup_steps: int) -> None:
    """Raises ValueError, one line, for a warm-up longer than the run: the peak rate would never be reached."""
    if warmup_steps > total_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup_steps}, but the run has {total_steps} optimizer steps; "
            f"lower it to at most {total_steps}"
        )


def learning_rate(step: int, total_steps: int, peak: float, kind: str, warmup_steps: int) -> float:
    """Rate of the optimizer step `step`, counted from 0 in steps that are applied (a skipped one does not count)."""
    if step < warmup_steps:
        return peak * (step / warmup_steps)
    if kind == "constant":
        return peak
    decay_steps = max(1, total_steps - warmup_steps)
    if kind == "linear":
        return peak * max(0.0, (total_steps - step) / decay_steps)
    if kind == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / decay_steps)))
    raise ValueError(f"optimizer.schedule {kind!r} is unknown; known: {', '.join(KINDS)}")
