"""Which row comes when: a pure function of (seed, epoch, position), so a resumed run continues at the exact next row.

Nothing is consumed and nothing is saved: step k of a resumed run asks the same question as step k of an uninterrupted
one (accelerate #4071: the permutation of epoch 0 again, or a random state used up by skipped batches). Imports numpy
only. Tested by tests/data/test_order.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


# A step reads one permutation, or two where epochs meet; more only if it has more rows than the data.
@lru_cache(maxsize=8)
def permutation(num_rows: int, seed: int, *stream: int) -> np.ndarray:
    """A read-only permutation of range(num_rows), int64[num_rows], one for each (seed, stream).

    Sorted raw 64-bit draws, not `Generator.permutation`: numpy keeps the streams of its bit generators and of
    SeedSequence for ever, but may change what Generator makes of them (NEP 19), and a run that is resumed under a newer
    numpy must go on in the same order.
    """
    draws = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(num_rows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class RowOrder:
    """Rows in the order of training: position p is place p % num_rows of the permutation of epoch p // num_rows.

    Step k takes positions [k * rows_per_step, (k + 1) * rows_per_step), so a step may reach into the next epoch and no
    row is left out where epochs meet. Only the very last step may be short: it takes what is left of `num_positions`.
    """

    num_rows: int
    rows_per_step: int
    seed: int
    num_positions: int

    @property
    def num_steps(self) -> int:
        """Steps to `num_positions`, a short last one included."""
        return -(-self.num_positions // self.rows_per_step)

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.num_rows)
        return int(permutation(self.num_rows, self.seed, epoch)[place])

    def step_rows(self, step: int) -> list[int]:
        """Row indices of step `step` (0 is the first)."""
        assert 0 <= step < self.num_steps, f"no step {step} of {self.num_steps}"
        start = step * self.rows_per_step
        stop = min(start + self.rows_per_step, self.num_positions)
        return [self.row(position) for position in range(start, stop)]
