"""Field case 1: DeepSpeed PR #7967.

In: gradient accumulation over 4 micro-batches, optimizer states on the host.
Bad: only micro-step 0 reached the host's copy: the norm was far too small, and the other gradients were lost.
Good: loss, norm and every gradient equal the run that has the rows in one batch.
"""

import pytest
from pipeline import make_config, open_tiers, random_batch, relative_error, run_steps, save_small_model

ROWS = 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_four_micro_batches_equal_one_batch(tmp_path, device):
    """The same eight rows, as 4 x 2 and as 1 x 8, in fp32: only the order of sums differs."""
    model = save_small_model(tmp_path / "model", "qwen2")
    found = []
    for micro_batch_rows in (2, ROWS):
        config = make_config(model, device=device, rows=ROWS, micro_batch_rows=micro_batch_rows)
        with open_tiers(config) as tiers:
            (report,) = run_steps(tiers, [random_batch(ROWS, micro_batch_rows, seed=0)])
            names = [p.name for block in tiers.spec.blocks for p in block.params]
            found.append((report.gpu, {name: tiers.gradient(name) for name in names}))
    (parts, part_grads), (whole, whole_grads) = found
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    errors = {name: relative_error(part_grads[name], gradient) for name, gradient in whole_grads.items()}
    assert max(errors.values()) < 5e-5, errors
