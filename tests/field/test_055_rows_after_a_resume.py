"""Field case 55: accelerate PR #4071, #2016, #4233; transformers PR #46628.

In: resume in the middle of the second epoch.
Bad: the permutation of the first epoch again, or a generator that skipped batches have used up: 15 of 20 rows twice.
Good: the rows of ten resumed steps are those of the uninterrupted run, token by token, in its order.
"""

import numpy as np
from recorded_run import run_in_threads, small_config

from slideformer_ray import trainer
from slideformer_ray.checkpoint import checkpoint_dir

STEPS, SAVED_AT = 15, 5
EPOCH = 3  # steps: 12 rows, 4 a step


def test_ten_resumed_steps_have_the_rows_of_the_straight_run(tmp_path, monkeypatch):
    """What is submitted to the tiers: ids of the rows and their tokens."""
    submitted = []
    submit = trainer.submit_batch

    def recorded(tiers, batch, *args, train, **kwargs):
        if train:
            submitted.append((batch.row_ids, np.concatenate([m.ids.ravel() for m in batch.micro_batches]).tolist()))
        return submit(tiers, batch, *args, train=train, **kwargs)

    monkeypatch.setattr(trainer, "submit_batch", recorded)
    fixed = {"num_rows": 14, "training__steps": STEPS, "checkpoint__save_final": False}
    run_in_threads(small_config(tmp_path, checkpoint__save_every=SAVED_AT, checkpoint__keep=None, **fixed))
    straight, submitted = submitted, []
    again = tmp_path / "again"
    again.mkdir()
    run_in_threads(small_config(again, checkpoint__resume=checkpoint_dir(tmp_path / "run", SAVED_AT), **fixed))
    assert submitted == straight[SAVED_AT:] and len(submitted) == 10
    epochs = [[row for ids, _ in straight[at : at + EPOCH] for row in ids] for at in range(0, STEPS, EPOCH)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)  # each row once an epoch
    assert len({tuple(epoch) for epoch in epochs}) == STEPS // EPOCH  # each epoch in an order of its own
