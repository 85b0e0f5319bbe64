"""Liger #968 / PR #1298, #678; ml-cross-entropy #48, #14.

In: per-token reduction with weights; Gemma-2 softcap.
Bad: forward right, weight gradient wrong; softcap ignored.
Good: dX AND dW in fp32 equal torch's for reduction x softcap x ignore_index x odd sizes.
"""

import pytest
import torch
import torch.nn.functional as F

from slideformer_ray.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy, supervised_cross_entropy


def torch_loss(hidden_NH, weight_VH, targets_N, softcap, reduction):
    logits = hidden_NH @ weight_VH.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets_N, ignore_index=IGNORED, reduction=reduction)


@pytest.mark.parametrize("sizes", [(47, 31, 123), (1, 5, 7), (130, 64, 129)], ids=str)
@pytest.mark.parametrize("every", [None, 2, 3], ids=["all supervised", "half", "two thirds"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no softcap", "softcap"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("fused", ["explicit", "autograd"])
def test_both_gradients_equal_torch(fused, reduction, softcap, every, sizes):
    """The loss is a sum here and a mean is the caller's one division: by gradient_scale, or by the count returned."""
    num_rows, hidden_size, vocab = sizes
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (num_rows,), generator=generator)
    if every is not None:
        targets[1::every] = IGNORED
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    wanted = torch_loss(*leaves, targets, softcap, reduction)
    wanted_grads = torch.autograd.grad(wanted, leaves)

    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    if fused == "autograd":
        loss, count = supervised_cross_entropy(*single, targets, softcap=softcap)
        loss = loss / count if reduction == "mean" else loss
        grads = torch.autograd.grad(loss, single)
    else:
        scale = 1.0 if reduction == "sum" else 1 / int((targets != IGNORED).sum())
        grad_weight = torch.zeros(vocab, hidden_size)
        loss, grad_hidden = linear_cross_entropy(
            *single, targets, gradient_scale=scale, grad_weight_VH=grad_weight, softcap=softcap
        )
        loss, grads = loss * scale, (grad_hidden, grad_weight)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-6, atol=0)
    for found, true in zip(grads, wanted_grads, strict=True):
        assert (found.double() - true).norm() < 2e-6 * true.norm()
