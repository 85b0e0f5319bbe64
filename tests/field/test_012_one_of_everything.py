"""Field case 12: DeepSpeed #7925.

In: one GPU.
Bad: a KeyError on an empty bucket map: only several had been tried.
Good: one device is the first case that is tested: one layer, one micro-batch, one row, one actor, one slot.
"""

import pytest
from disturb import FEWEST
from pipeline import as_torch, make_config, open_tiers, random_batch, relative_error, run_steps, save_small_model

from slideformer_ray.reference import ReferenceTrainer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_of_everything_trains(tmp_path, tied, device):
    """Three steps equal plain PyTorch's."""
    model = save_small_model(tmp_path / "model", "llama", tied=tied, layers=1)
    config = make_config(model, device=device, rows=1, micro_batch_rows=1, placement__gradient_slots=1, **FEWEST)
    reference = ReferenceTrainer(
        model, precision="fp32", device=device, optimizer=config.optimizer, total_steps=config.training.steps
    )
    with open_tiers(config) as tiers:
        for step in range(3):
            batch = random_batch(1, 1, seed=step)
            wanted = reference.step(as_torch(batch))
            (report,) = run_steps(tiers, [batch], first=step)
            assert report.gpu.loss == pytest.approx(wanted.loss, rel=1e-5)
        for name, master in reference.masters().items():
            assert relative_error(tiers.master(name), master) < 5e-5, name
