"""Field case 47: DeepSpeed #2082, #7549.

In: save with states in another tier than the default, and load again.
Bad: unsupported; later a FileExistsError between the processes that save, and a deadlock after the load.
Good: saving and resuming give the same bits in every tier, and a tier may change on resume.
"""

import itertools
import json

import pytest
from disturb import FEWEST
from pipeline import make_config, open_tiers, random_batch, run_steps, save, save_small_model, state_of

STEPS = 3
BATCHES = [random_batch(6, 2, seed=step) for step in range(2 * STEPS)]
# How a run may be laid out over GPU, host memory and actors. None of it may show in a checkpoint.
TIERS = {
    "as the plan chooses": {},
    "activations and gradients in the fewest slots": FEWEST,
    "more optimizer actors": {"placement__num_optimizer_actors": 3},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(configs, checkpoints, end of the run that never stopped) with each layout of the tiers."""
    directory = tmp_path_factory.mktemp("tiers")
    model = save_small_model(directory / "model", "qwen2", tied=True)
    configs, checkpoints, ends = {}, {}, {}
    for name, changes in TIERS.items():
        run_dir = directory / name.replace(" ", "_")
        config = make_config(model, precision="bf16", rows=6, **changes).changed([f"run_dir={run_dir}"])
        with open_tiers(config) as tiers:
            run_steps(tiers, BATCHES[:STEPS])
            checkpoints[name] = save(tiers, config, STEPS)
            ends[name] = state_of(tiers, run_steps(tiers, BATCHES[STEPS:], first=STEPS))
        configs[name] = config
    return configs, checkpoints, ends


@pytest.mark.parametrize("before, after", list(itertools.product(TIERS, TIERS)))
def test_any_tiers_go_on_where_any_others_stopped(saved, before, after):
    """Every pair, the same one included: losses, norms, masters and moments."""
    configs, checkpoints, ends = saved
    with open_tiers(configs[after], load=False) as tiers:
        path = checkpoints[before]
        tiers.load_checkpoint(path, json.loads((path / "training.json").read_text())["adam_step"])
        found = state_of(tiers, run_steps(tiers, BATCHES[STEPS:]))
    assert found == ends[before], found.differing(ends[before])
    assert found == ends[after]
