"""Field case 2: DeepSpeed #7292, PR #7302.

In: a gradient changes between backward and step.
Bad: the norm was computed before, cached, and stays the old one.
Good: the norm is that of the very bits that the optimizer consumes.
"""

import math

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.actors.lanes import CLIP_COEFFICIENT

LIMIT = 0.5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_norm_is_of_the_gradients_in_their_slots(tmp_path, device):
    """The last change is the rounding to bf16: the norm is of what lies in host memory after it, in each of three
    steps, and the optimizers' coefficient comes from that norm."""
    model = save_small_model(tmp_path / "model", "llama")
    config = make_config(model, device=device, precision="bf16", optimizer__max_grad_norm=LIMIT)
    norms = []
    with open_tiers(config) as tiers:
        names = [p.name for block in tiers.spec.blocks for p in block.params]
        for step in range(3):
            (report,) = run_steps(tiers, [random_batch(4, 2, seed=step)], first=step)
            consumed = math.sqrt(sum(tiers.gradient(name).double().square().sum().item() for name in names))
            # fp64 sums of the same bits; the fp32 sums before rounding have a norm that differs by 1e-5 and more.
            assert report.gpu.grad_norm == pytest.approx(consumed, rel=1e-9)
            coefficient = torch.tensor(LIMIT) / (torch.tensor(consumed, dtype=torch.float32) + 1e-6)
            assert tiers.page.read_scalar(CLIP_COEFFICIENT) == pytest.approx(coefficient.item(), rel=1e-7)
            norms.append(consumed)
    assert len(set(norms)) == 3
