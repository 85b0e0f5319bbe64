"""Field case 4: Megatron-LM #1842.

In: save at step 10, resume with the optimizer offloaded.
Bad: the loss jumps from 0.31 to 10.
Good: the first resumed loss is the uninterrupted run's, to the last digit, and so is the held-out loss before it.
"""

from recorded_run import run_in_threads, small_config

from slideformer_ray.checkpoint import checkpoint_dir


def test_the_first_resumed_loss_is_the_uninterrupted_ones(tmp_path):
    """Ten steps in a row over four rows, so that the loss has fallen far; two actors saved, three resume."""
    fixed = {"training__steps": 12, "checkpoint__save_every": 10, "checkpoint__save_final": False}
    straight = run_in_threads(small_config(tmp_path, training__eval_every=10, **fixed))
    saved = checkpoint_dir(tmp_path / "run", 10)
    again = tmp_path / "again"
    again.mkdir()
    changes = {"checkpoint__resume": saved, "placement__num_optimizer_actors": 3}
    resumed = run_in_threads(small_config(again, **fixed, **changes))
    assert resumed.steps[0].step == 10
    assert resumed.steps[0].loss == straight.steps[10].loss < straight.steps[0].loss - 2
    assert resumed.evals[0] == next(metrics for metrics in straight.evals if metrics.step == 10)
