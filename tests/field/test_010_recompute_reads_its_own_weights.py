"""Field case 10: Soup #331.

In: a weight lies in a ring buffer that is refilled before its layer's backward.
Bad: autograd kept an alias of the buffer: the forward is exact, and 8 of 256 gradients are right.
Good: every gradient equals the resident run's; a unit with another layer's weights is an error, freed memory is NaN.
"""

import dataclasses

import pytest
import torch
from disturb import FEWEST, change_gpu_plan, train
from pipeline import as_torch, make_config, open_tiers, random_batch, relative_error, run_steps, save_small_model

from slideformer_ray.reference import ReferenceTrainer
from slideformer_ray.tiers import TierError

LAYERS = 5


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama", layers=LAYERS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_gradients_equal_the_resident_runs(model, device):
    """Five layers through two units; the second step begins with what the first left in them."""
    config = make_config(model, device=device, **FEWEST)
    reference = ReferenceTrainer(
        model, precision="fp32", device=device, optimizer=config.optimizer, total_steps=config.training.steps
    )
    with open_tiers(config) as tiers:
        for step in range(2):
            batch = random_batch(4, 2, seed=step)
            wanted = reference.step(as_torch(batch)).gradients
            run_steps(tiers, [batch], first=step)
            errors = {name: relative_error(tiers.gradient(name), gradient) for name, gradient in wanted.items()}
            assert len(errors) == 3 + 9 * LAYERS and max(errors.values()) < 5e-5, errors


@pytest.mark.parametrize(
    "kind, message",
    [
        ("forward", r"forward block 4 .*holds \('params', 3\), its reader wants \('params', 4\)"),
        # The other unit's layer is needed no more, so it is free.
        ("backward", r"backward block 4 .*parameter unit\[\d\]: illegal transition free -> busy"),
    ],
)
def test_a_unit_with_another_layers_weights_is_an_error(model, monkeypatch, kind, message):
    """An operation that is pointed to the wrong unit on purpose: it is refused there, and named."""

    def misdirect(op):
        return dataclasses.replace(op, unit=1 - op.unit) if (op.kind, op.block) == (kind, 4) else op

    change_gpu_plan(monkeypatch, misdirect)
    with pytest.raises(TierError, match=message):
        train(model, [random_batch(4, 2, seed=0)], **FEWEST)


def test_freed_units_hold_nan(model):
    """In debug mode whoever kept an alias of a unit computes NaN once it is freed, not something plausible."""
    with open_tiers(make_config(model)) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed=0)])
        for unit in tiers.window.units:
            assert unit.state.value == "free" and torch.isnan(unit.tensor).all()
