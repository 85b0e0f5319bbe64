"""Field case 23: KempnerForge #114.

In: save at step 8, resume to 16.
Bad: weights are exact and Adam's moments were rounded, so that the run diverges two steps later.
Good: moments are saved in their own dtype; the gradient norm of the SECOND resumed step is the uninterrupted one's.
"""

import json

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save, save_small_model, saved_tensors

STEPS = 4


@pytest.mark.parametrize("rounded", [False, True], ids=["as they were", "rounded"])
def test_the_second_resumed_norm_shows_the_moments(tmp_path, rounded):
    """Rounded to bf16 on purpose, they leave the first resumed step as it was and change the second."""
    config = make_config(save_small_model(tmp_path / "model", "llama"), precision="bf16", optimizer__learning_rate=1e-2)
    batches = [random_batch(4, 2, seed=step) for step in range(STEPS + 2)]
    with open_tiers(config) as tiers:
        run_steps(tiers, batches[:STEPS])
        saved = save(tiers, config, STEPS)
        wanted = [report.gpu.grad_norm for report in run_steps(tiers, batches[STEPS:], first=STEPS)]
    moments = {key: tensor.dtype for key, tensor in saved_tensors(saved).items() if key.startswith("exp_avg")}
    assert set(moments.values()) == {torch.float32} and len(moments) > 50
    with open_tiers(config, load=False) as tiers:
        tiers.load_checkpoint(saved, json.loads((saved / "training.json").read_text())["adam_step"])
        for piece in (piece for block in tiers.spec.blocks for piece in tiers.shards[0].slices(block.index)):
            if rounded and piece.state.startswith("exp_avg"):
                piece.data.copy_(piece.data.bfloat16())
        found = [report.gpu.grad_norm for report in run_steps(tiers, batches[STEPS:])]
    assert found[0] == wanted[0]
    assert (found[1] == wanted[1]) is not rounded
