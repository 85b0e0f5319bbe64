"""A save that dies at any write, fsync, rename or removal leaves a complete checkpoint, and the run goes on from it.

The operations are those of the real code path, in the driver and in the actors' threads (tests/crashes.py). Each time
what no fsync has followed is lost, too.
"""

import itertools
import json
import shutil

import pytest
from crashes import DyingDisk, Killed
from pipeline import (
    differing,
    make_config,
    open_tiers,
    random_batch,
    run_steps,
    save,
    save_small_model,
    saved_tensors,
    state_of,
)
from recorded_run import Record, small_config

from slideformer_ray.checkpoint import complete_checkpoints, remove_remains
from slideformer_ray.tiers import TierError
from slideformer_ray.trainer import Trainer


def bits(tiers):
    return state_of(tiers, []).tensors


@pytest.mark.timeout(300)
def test_a_crash_at_any_operation_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    """The one before or the new one, with every bit as saved; never a third thing, and never none (Lightning #19970).

    Two steps are saved, the second while the disk dies at operation 0, 1, 2, ... until it survives. What is left is
    loaded into fresh tiers of another number of actors. Then the remains are removed, and the save succeeds.
    """
    model = save_small_model(tmp_path / "model", "qwen2", layers=2)
    changes = {"precision": "bf16", "checkpoint__save_every": 1, "checkpoint__keep": 1}
    config = make_config(model, placement__num_optimizer_actors=2, **changes)
    other = make_config(model, placement__num_optimizer_actors=3, **changes)
    wanted, kinds, lost = {}, {}, 0
    with open_tiers(config) as tiers, open_tiers(other, load=False) as resumed:
        run_steps(tiers, [random_batch(4, 2, seed=0)])
        wanted[1] = bits(tiers)
        save(tiers, config, 1)
        run_steps(tiers, [random_batch(4, 2, seed=1)], first=1)
        wanted[2] = bits(tiers)
        directory = config.run_dir / "checkpoints"
        shutil.copytree(directory, tmp_path / "before")
        for dies_at in itertools.count():
            with DyingDisk(dies_at).installed() as disk:
                try:
                    save(tiers, config, 2)
                except (Killed, TierError):  # in the driver, or in an actor
                    assert len(disk.done) > dies_at
            lost += disk.lose_unsynced(directory)
            step, newest = complete_checkpoints(config.run_dir)[-1]
            resumed.load_checkpoint(newest, json.loads((newest / "training.json").read_text())["adam_step"])
            found = bits(resumed)
            assert differing(found, wanted[step]) == [], (dies_at, step)
            if len(disk.done) <= dies_at:  # it survived
                break
            kinds.setdefault(disk.done[-1], set()).add(step)
            remove_remains(config.run_dir)
            assert {path.name for path in directory.iterdir()} <= {"step-1", "step-2"}
            shutil.rmtree(directory)
            shutil.copytree(tmp_path / "before", directory)
    assert step == 2
    assert kinds.keys() >= {"pwrite", "fsync", "rename", "mkdir", "posix_fallocate"}
    assert kinds["rename"] == {1, 2} and kinds["unlink"] == {2} and lost > 20 and dies_at > 80


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["pwrite", "fsync", "rename", "mkdir", "posix_fallocate", "unlink"])
def test_a_run_that_died_in_a_save_goes_on_to_the_same_bits(tmp_path, kind):
    """The whole way round: a run dies at the last operation of each kind, is started again with `resume: auto`, and
    ends with the losses, norms and states of the run that never stopped."""

    def run(directory, **changes):
        directory.mkdir(exist_ok=True)
        record = Record()
        fixed = {"training__steps": 4, "checkpoint__save_every": 2, "checkpoint__keep": 1, "checkpoint__resume": "auto"}
        config = small_config(directory, num_rows=14, **{**fixed, **changes})
        trainer = Trainer(config, callbacks=[record], local=True)
        try:
            trainer.train()
        except (Killed, TierError):
            pass
        return record, saved_tensors(complete_checkpoints(config.run_dir)[-1][1])

    with DyingDisk().installed() as disk:
        straight, end = run(tmp_path / "straight", checkpoint__save_final=False)
    last = max(number for number, name in enumerate(disk.done) if name == kind)
    with DyingDisk(last).installed() as disk:
        died, _ = run(tmp_path / "died", checkpoint__save_final=False)
    disk.lose_unsynced(tmp_path / "died")
    resumed, found = run(tmp_path / "died", checkpoint__save_final=False, placement__num_optimizer_actors=3)
    steps = {m.step: (m.loss, m.grad_norm) for m in died.steps} | {m.step: (m.loss, m.grad_norm) for m in resumed.steps}
    assert steps == {m.step: (m.loss, m.grad_norm) for m in straight.steps}
    assert differing(found, end) == []
