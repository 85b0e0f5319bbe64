"""transformers #12878, #18947.

In: evaluation of 1,000 x 512 tokens.
Bad: all logits kept, 14 GB and more.
Good: evaluation keeps scalars only.
"""

import torch
from live_bytes import LiveBytes

from slideformer_ray.kernels.linear_cross_entropy import linear_cross_entropy


def test_a_loss_without_gradients_leaves_one_number():
    """Over 20 batches whose logits are 4 MB each: a quarter of a megabyte at a time, and 4 bytes a batch are kept."""
    hidden_NH, weight_VH = torch.randn(512, 8), torch.randn(2003, 8)
    targets_N = torch.randint(0, 2003, (512,))
    with LiveBytes() as live:
        losses = []
        for _ in range(20):
            loss, grad_hidden = linear_cross_entropy(
                hidden_NH, weight_VH, targets_N, gradient_scale=1.0, need_grad_hidden=False, budget_bytes=1 << 18
            )
            assert grad_hidden is None
            losses.append(loss)
        assert live.now == 20 * 4
    assert live.peak <= (1 << 18) + 512 * 4 + 20 * 4
