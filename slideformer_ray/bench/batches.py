"""The steps' tokens: ids drawn at random, every token supervised. The same for every system that is compared.

Tested by tests/bench/test_batches.py.
"""

from __future__ import annotations

import numpy as np

from slideformer_ray.data.batches import IGNORE_INDEX, MicroBatch, StepBatch


def random_batch(rows: int, seq_len: int, micro_batch_rows: int, vocab_size: int, seed: int) -> StepBatch:
    """Full rows: no padding, so that a token is a token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, (rows, seq_len), dtype=np.int32)
    targets = np.full_like(ids, IGNORE_INDEX)
    targets[:, :-1] = ids[:, 1:]
    micro_batches = tuple(
        MicroBatch(ids[start : start + micro_batch_rows], targets[start : start + micro_batch_rows])
        for start in range(0, rows, micro_batch_rows)
    )
    return StepBatch(micro_batches, rows * (seq_len - 1), rows * seq_len, tuple(range(rows)))
