"""What a race needs to show: lanes that are slow, and plans with waits taken out. For tests of LocalTiers.

Not a test itself: pyproject.toml puts this folder on the path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline import State, make_config, open_tiers, run_steps, state_of

from slideformer_ray.actors import sliding_window
from slideformer_ray.data.batches import StepBatch
from slideformer_ray.schedule import Op, StepPlan
from slideformer_ray.tiers import LocalTiers

# As few of everything as there may be: each slot, unit and cell is used again as soon as it can be.
FEWEST = {
    "placement__param_units": 2,
    "placement__gradient_units": 1,
    "placement__activation_slots": 3,
}
SECONDS = 4e-3
# For a plan that is broken on purpose: long enough for the other lanes to run into it on a busy machine too.
LONG_SECONDS = 0.1
_GPU_CYCLES_A_SECOND = 1.5e9


def slow_down(tiers: LocalTiers, kinds: Iterable[str], seconds: float = SECONDS) -> None:
    """Make operations of these kinds start late, whatever has been told to go on: on a GPU the stream sleeps."""

    def late(execute: Callable[[Op], object], on_stream: bool) -> Callable[[Op], object]:
        def run(op: Op) -> object:
            if on_stream:
                torch.cuda._sleep(int(seconds * _GPU_CYCLES_A_SECOND))
            else:
                time.sleep(seconds)
            return execute(op)

        return run

    for kind in kinds:
        if kind == "update":
            for shard in tiers.shards:
                shard._update = late(shard._update, on_stream=False)
        else:
            operations = tiers.window._ops
            operations[kind] = late(operations[kind], on_stream=tiers.layout.device == "cuda")


def train(
    model: Path,
    batches: list[StepBatch],
    *,
    slow: Iterable[str] = (),
    seconds: float = SECONDS,
    **changes,
) -> State:
    """Everything that training on these batches leaves behind: masters, moments, losses, norms."""
    rows = sum(len(m.ids) for m in batches[0].micro_batches)
    config = make_config(model, **{"rows": rows, **changes})
    with open_tiers(config) as tiers:
        slow_down(tiers, slow, seconds)
        return state_of(tiers, run_steps(tiers, batches))


def change_gpu_plan(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Op], Op]) -> None:
    """The GPU actor runs plans in which `edit` has changed operations; all others go by the right ones."""
    build_step = sliding_window.build_step

    def build_changed(shape) -> StepPlan:
        plan = build_step(shape)
        lanes = {name: replace(lane, ops=tuple(map(edit, lane.ops))) for name, lane in plan.lanes.items()}
        assert lanes != plan.lanes, "nothing was changed"
        return replace(plan, lanes=lanes)

    monkeypatch.setattr(sliding_window, "build_step", build_changed)


def without_waits(op: Op, lane: str) -> Op:
    """The operation, not waiting for that lane any more."""
    return replace(op, waits=tuple(wait for wait in op.waits if wait[0] != lane))
