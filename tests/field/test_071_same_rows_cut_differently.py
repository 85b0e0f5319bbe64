"""Field case 71: transformers #37766, #35203, PR #35438, #35651.

In: the same eight rows of unequal lengths as 1 x 8 and as 4 x 2.
Bad: the loss or the gradient is scaled by 4, or averaged over micro-batches instead of tokens.
Good: the sum is divided once, by the supervised tokens of the whole step: loss, norm and masters are equal.
"""

import pytest
from pipeline import make_config, open_tiers, random_batch, relative_error, run_steps, save_small_model

ROWS, STEPS = 8, 3


def run(model, device, micro_batch_rows):
    config = make_config(model, device=device, rows=ROWS, micro_batch_rows=micro_batch_rows)
    batches = [random_batch(ROWS, micro_batch_rows, seed=step, supervised=0.3) for step in range(STEPS)]
    shares = {int((m.targets != -100).sum()) for m in batches[0].micro_batches}
    assert micro_batch_rows == ROWS or len(shares) > 1  # an average over micro-batches would differ
    with open_tiers(config) as tiers:
        reports = run_steps(tiers, batches)
        masters = {p.name: tiers.master(p.name) for block in tiers.spec.blocks for p in block.params}
    return [r.gpu.loss for r in reports], [r.gpu.grad_norm for r in reports], masters


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("micro_batch_rows", [2, 3, 1], ids=["4 x 2", "3 + 3 + 2", "8 x 1"])
def test_the_cut_changes_nothing(tmp_path, micro_batch_rows, device):
    """Three steps in fp32 with clipping active, against all rows at once."""
    model = save_small_model(tmp_path / "model", "qwen2", tied=True)
    losses, norms, masters = run(model, device, micro_batch_rows)
    whole_losses, whole_norms, whole_masters = run(model, device, ROWS)
    assert losses == pytest.approx(whole_losses, rel=1e-5)
    assert norms == pytest.approx(whole_norms, rel=1e-5)
    errors = {name: relative_error(masters[name], master) for name, master in whole_masters.items()}
    assert max(errors.values()) < 5e-5, errors
