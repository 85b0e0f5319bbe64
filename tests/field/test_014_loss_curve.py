"""Field case 14: DeepSpeed #493.

In: the same seed with and without offload.
Bad: the loss is stuck at 4.0 instead of 2.0.
Good: the two curves are equal within a stated tolerance, over a run in which the model learns.
"""

import pytest
from pipeline import as_torch, make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.reference import ReferenceTrainer

STEPS = 30
# Largest relative difference of a step's loss. fp32: 1.5e-7 was seen, from sums in another order. bf16: 0.4 % was seen,
# and as much between two resident runs with their rows cut into other micro-batches.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_the_loss_curve_is_the_resident_runs(tmp_path, precision, device):
    """Thirty steps over three batches, from 5.3 to below 2, with clipping, decay, warm-up and a cosine."""
    model = save_small_model(tmp_path / "model", "llama")
    changes = {"optimizer__learning_rate": 3e-3, "optimizer__warmup_steps": 3, "training__steps": STEPS}
    config = make_config(model, device=device, precision=precision, **changes)
    reference = ReferenceTrainer(
        model, precision=precision, device=device, optimizer=config.optimizer, total_steps=STEPS
    )
    batches = [random_batch(4, 2, seed=step % 3) for step in range(STEPS)]
    wanted = [reference.step(as_torch(batch)).loss for batch in batches]
    with open_tiers(config) as tiers:
        found = [report.gpu.loss for report in run_steps(tiers, batches)]
    assert wanted[0] > 5 and wanted[-1] < 2
    assert found == pytest.approx(wanted, rel=TOLERANCE[precision])
