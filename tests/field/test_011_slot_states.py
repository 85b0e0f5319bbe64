"""Field case 11: axolotl PR #3512 (review).

In: layer 0 is fetched ahead while one step ends and the next begins.
Bad: "resident" was set before the copy had ended, so an offload raced it.
Good: free -> filling -> ready -> busy, and nothing else, for every unit, across steps.
"""

import pytest
from disturb import FEWEST, LONG_SECONDS, change_gpu_plan, slow_down, train, without_waits
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.schedule import COMPUTE, UPLOAD
from slideformer_ray.tiers import TierError

LEGAL = {
    ("free", "filling"),
    ("filling", "ready"),
    ("ready", "busy"),
    ("busy", "ready"),
    ("busy", "free"),  # the step's last use of the layer
    ("ready", "free"),  # the layer comes again later in the step
}


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama")


def test_units_go_through_their_states_in_order(model):
    """Three steps, one always submitted ahead, slow copies: each unit's history is a walk along legal edges, and each
    filling and each use of a layer shows."""
    history = {}
    with open_tiers(make_config(model, **FEWEST)) as tiers:
        slow_down(tiers, ["upload_params"])
        for unit in tiers.window.units:
            move = unit._move

            def recorded(old, new, unit=unit, move=move):
                move(old, new)
                history.setdefault(unit.name, []).append((old.value, new.value))

            unit._move = recorded
        run_steps(tiers, [random_batch(4, 2, seed=step) for step in range(3)])
    for edges in history.values():
        assert set(edges) <= LEGAL
        assert edges[0] == ("free", "filling")
        assert all(before[1] == after[0] for before, after in zip(edges, edges[1:], strict=False))
    moves = [edge for edges in history.values() for edge in edges]
    # Forward and backward of three layers and two micro-batches in three steps; in two units the backward finds the
    # last two layers still there.
    assert moves.count(("ready", "busy")) == 3 * 2 * 3 * 2
    assert moves.count(("filling", "ready")) == 3 * (3 + 1)


def test_a_reader_that_does_not_wait_for_the_copy_is_an_error(model, monkeypatch):
    """The compute lane's waits for the upload lane taken out: it is refused at the unit, and told which one."""
    change_gpu_plan(monkeypatch, lambda op: without_waits(op, UPLOAD) if op.lane == COMPUTE else op)
    with pytest.raises(TierError, match=r"forward block 1 .*parameter unit\[0\]: illegal transition (free|filling)"):
        batches = [random_batch(4, 2, seed=0)]
        train(model, batches, slow=["upload_params"], seconds=LONG_SECONDS)
