"""Field case 42: prime-rl PR #3200, #3522.

In: accumulation over several micro-batches.
Bad: a second full set of pinned staging buffers appears when the first such step runs.
Good: the plan asks for the number of micro-batches, and every buffer is there before the first step.
"""

import dataclasses

import pytest
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.budget import PINNED
from slideformer_ray.schedule import build_step

SLOTS = {"placement__activation_slots": 4}


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama")


def plan_of(model, micro_batches):
    with open_tiers(make_config(model, rows=2 * micro_batches, **SLOTS), load=False) as tiers:
        return tiers.plan


def test_pinned_bytes_grow_with_the_micro_batches(model):
    """Four slots on the device hold the four cells of one micro-batch; of eight micro-batches' 32 cells, 24 are in
    host memory at a time."""
    pinned, cells = [], []
    for micro_batches in (1, 2, 8):
        plan = plan_of(model, micro_batches)
        pinned.append(plan.total(PINNED))
        cells.append(plan.layout.num_host_cells)
        (item,) = [item for item in plan.items if item.what.endswith("offloaded activations")]
        assert item.nbytes == plan.layout.num_host_cells * plan.layout.cell_numel * plan.layout.element_bytes
    assert cells == [0, 2, 24]
    assert pinned[2] - pinned[1] >= (cells[2] - cells[1]) * 2 * 40 * 48 * 4


def test_no_step_needs_more_than_was_planned(model):
    """A last step with fewer micro-batches, and an evaluation, have plans of their own; all share the cells."""
    layout = plan_of(model, 8).layout
    for clip in (False, True):
        layout = dataclasses.replace(layout, clip=clip)
        for count in range(1, 9):
            for train in (False, True):
                assert build_step(layout.shape(count, train)).num_host_cells <= layout.num_host_cells


def test_no_buffer_appears_after_the_start(model):
    """Their bytes are the plan's, before and after steps of 8, 3 and 1 micro-batches."""
    with open_tiers(make_config(model, rows=16, **SLOTS)) as tiers:
        before = {name: (buffer.address, buffer.nbytes) for name, buffer in tiers.buffers.items()}
        assert sum(nbytes for _, nbytes in before.values()) == tiers.plan.total(PINNED)
        run_steps(tiers, [random_batch(rows, 2, seed=rows) for rows in (16, 6, 2)])
        assert {name: (buffer.address, buffer.nbytes) for name, buffer in tiers.buffers.items()} == before
