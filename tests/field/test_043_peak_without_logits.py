"""TRL PR #7003, SkyRL PR #1841.

In: 262K x 248K vocabulary, or 8B at 16K.
Bad: logits dominate; a "fused" cross-entropy that fuses time, not memory, used 1.7x more.
Good: peak independent of sequence x vocabulary; chunks are cut BEFORE the projection.
"""

import pytest
import torch
from live_bytes import LiveBytes

from slideformer_ray.kernels.linear_cross_entropy import linear_cross_entropy

HIDDEN = 8
BUDGET = 1 << 20


def peak_beside_results(num_rows, vocab, dtype):
    hidden_NH = torch.randn(num_rows, HIDDEN).to(dtype)
    weight_VH = torch.randn(vocab, HIDDEN).to(dtype)
    targets_N, grad_weight_VH = torch.randint(0, vocab, (num_rows,)), torch.zeros(vocab, HIDDEN)
    with LiveBytes() as live:
        linear_cross_entropy(
            hidden_NH, weight_VH, targets_N, gradient_scale=1.0, grad_weight_VH=grad_weight_VH, budget_bytes=BUDGET
        )
    return live.peak - num_rows * HIDDEN * dtype.itemsize - num_rows * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(64, 2003), (640, 2003), (64, 20_011), (640, 20_011)])
def test_peak_is_the_budget(num_rows, vocab, dtype):
    """A megabyte pays for it, be it a tenth of the logits' size or a fiftieth; on a GPU it is measured in
    tests/kernels/test_linear_cross_entropy.py."""
    assert BUDGET / 2 < peak_beside_results(num_rows, vocab, dtype) <= BUDGET
