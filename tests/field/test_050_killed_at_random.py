"""Field case 50: Lightning #688, #19970; speculators PR #739.

In: SIGKILL during a save.
Bad: a truncated file is chosen on resume.
Good: whenever a run is killed, the same command goes on from the newest COMPLETE checkpoint to the same bits.

Here: real kills at random moments. A crash at each single write, fsync and rename: tests/test_checkpoint_crashes.py.
"""

import json
import random
import time
from collections import Counter

import pytest
from killable import start, train
from pipeline import differing, saved_tensors
from recorded_run import small_config

from slideformer_ray.checkpoint import checkpoint_dir, complete_checkpoints

EVERY = {"num_rows": 14, "checkpoint__resume": "auto", "checkpoint__save_final": False, "checkpoint__save_every": 1}


def steps_of(run_dir):
    """step -> loss, norm and rate of metrics.jsonl: each step once, although some were done more than once."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(len(steps)))
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in steps]


def newest_step(run_dir):
    return max((step for step, _ in complete_checkpoints(run_dir)), default=0)


@pytest.mark.parametrize(
    "kills", [3, pytest.param(50, marks=[pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_run_that_is_killed_again_and_again_has_the_straight_runs_bits(tmp_path, kills):
    """It saves after every step, so most kills fall into a save. From one start to the next the number of actors
    changes, and whether saves are in the background."""
    num_steps, moments = 6 * kills, random.Random(kills)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for directory in (straight, killed):
        directory.mkdir()
    fixed = EVERY | {"training__steps": num_steps}
    process = start(train, small_config(straight, **fixed | {"checkpoint__save_every": num_steps}))
    process.join()
    assert process.exitcode == 0

    found, reached = Counter(), 0
    while True:
        free = {
            "placement__num_optimizer_actors": moments.choice([1, 2, 3]),
            "checkpoint__async_save": moments.choice([True, False]),
        }
        last = found.total() == kills
        if last:
            free["checkpoint__save_every"] = num_steps
        process = start(train, small_config(killed, **fixed | free))
        if last:
            process.join()
            assert process.exitcode == 0
            break
        if moments.random() < 0.7:  # on a busy machine the start alone would get all kills
            while newest_step(killed / "run") == reached and process.is_alive():
                time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.7))
        assert process.exitcode is None, "it was done before it could be killed: give it more steps"
        process.kill()
        process.join()
        directory = killed / "run" / "checkpoints"
        found["in a save" if list(directory.glob(".step-*.tmp")) else "between saves"] += 1
        before, reached = reached, newest_step(killed / "run")
        assert reached >= before  # what was complete stays so
    print(f"{kills} kills: {dict(found)}, the last at step {reached} of {num_steps}")
    assert reached > 0
    assert steps_of(killed / "run") == steps_of(straight / "run")
    ends = [saved_tensors(checkpoint_dir(directory / "run", num_steps)) for directory in (killed, straight)]
    assert differing(*ends) == []
