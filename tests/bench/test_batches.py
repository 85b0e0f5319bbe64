"""batches.py: what the steps of a benchmark train on."""

import numpy as np

from slideformer_ray.bench.batches import random_batch
from slideformer_ray.data.batches import IGNORE_INDEX


def test_every_token_counts():
    """Full rows; each position's target is the next token, and the last one of a row has none."""
    batch = random_batch(5, 16, 2, vocab_size=97, seed=3)
    assert [m.ids.shape for m in batch.micro_batches] == [(2, 16), (2, 16), (1, 16)]
    assert batch.num_tokens == 80 and batch.num_supervised == 75
    for m in batch.micro_batches:
        assert np.array_equal(m.targets[:, :-1], m.ids[:, 1:]) and (m.targets[:, -1] == IGNORE_INDEX).all()
        assert 0 <= m.ids.min() and m.ids.max() < 97


def test_the_cut_changes_no_token():
    """Systems with other micro-batches train on the same rows."""
    whole, cut = (random_batch(4, 16, rows, vocab_size=97, seed=0) for rows in (4, 1))
    assert np.array_equal(whole.micro_batches[0].ids, np.concatenate([m.ids for m in cut.micro_batches]))
