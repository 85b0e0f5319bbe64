"""Field case 21: torchtune #2254, ao PR #1124.

In: weights of a usual size (0.02) held in pure bf16, lr 1e-5, 100 steps of a constant small gradient.
Bad: each update is below half of bf16's spacing (6e-5 there), is rounded away, and the weights never move.
Good: fp32 master weights: after 100 steps the masters, and the bf16 parameters that the GPU reads, have moved by about
100 x lr.
"""

import pytest
import torch

from slideformer_ray.kernels.layer_adam import AdamHyper, LayerAdam, join_master, split_master

LR, NUM_STEPS, NUMEL, BETAS, EPS = 1e-5, 100, 1000, (0.9, 0.999), 1e-12
WEIGHT = torch.full((NUMEL,), 0.02, dtype=torch.bfloat16)
GRAD = torch.full((NUMEL,), 1e-6, dtype=torch.bfloat16)


def test_pure_bf16_weights_never_move():
    """The trap is real: torch's AdamW on bf16 weights changes none of them."""
    param = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.AdamW([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    for _ in range(NUM_STEPS):
        param.grad = GRAD.clone()
        optimizer.step()
    assert torch.equal(param.detach(), WEIGHT)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_split_masters_move_by_the_sum_of_the_updates(backend):
    """Adam moves a weight by lr a step under a constant gradient; nothing of it is lost, and hi follows."""
    hi, lo = torch.empty_like(WEIGHT), torch.empty(NUMEL, dtype=torch.int16)
    split_master(WEIGHT.float(), hi, lo)
    exp_avg, exp_avg_sq = torch.zeros(NUMEL), torch.zeros(NUMEL)
    adam = LayerAdam(1, backend=backend)
    for step in range(1, NUM_STEPS + 1):
        hyper = AdamHyper(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=0.0, step=step)
        adam.step_split(hi, lo, exp_avg, exp_avg_sq, GRAD, hyper)
    expected = WEIGHT.float() - NUM_STEPS * LR
    torch.testing.assert_close(join_master(hi, lo), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(hi.float(), expected, rtol=2**-8, atol=0)
    assert not torch.equal(hi, WEIGHT)
