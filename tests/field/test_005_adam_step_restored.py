"""Field case 5: SkyRL PR #1403.

In: resume.
Bad: Adam's `step` comes from the fresh optimizer, so bias correction is wrong.
Good: it is restored in every shard, and the next update has the bits of the run that went on.
"""

import json

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save, save_small_model

STEPS = 4


@pytest.mark.parametrize("forgets", [False, True], ids=["restored", "forgotten"])
def test_bias_correction_goes_on(tmp_path, forgets):
    """Two actors save, three resume. With the step forgotten on purpose, all else restored, every master differs."""
    model = save_small_model(tmp_path / "model", "llama")
    batches = [random_batch(4, 2, seed=step) for step in range(STEPS + 1)]
    changes = {"precision": "bf16", "optimizer__schedule": "constant"}
    config = make_config(model, placement__num_optimizer_actors=2, **changes)
    with open_tiers(config) as tiers:
        run_steps(tiers, batches[:STEPS])
        saved = save(tiers, config, STEPS)
        run_steps(tiers, batches[STEPS:], first=STEPS)
        wanted = {p.name: tiers.master(p.name) for block in tiers.spec.blocks for p in block.params}

    with open_tiers(make_config(model, placement__num_optimizer_actors=3, **changes), load=False) as tiers:
        tiers.load_checkpoint(saved, json.loads((saved / "training.json").read_text())["adam_step"])
        assert [shard.applied_steps for shard in tiers.shards] == [STEPS] * 3
        if forgets:
            for shard in tiers.shards:
                shard.applied_steps = 0
        run_steps(tiers, batches[STEPS:])
        same = [torch.equal(tiers.master(name), master) for name, master in wanted.items()]
    assert not any(same) if forgets else all(same)
