"""The order of rows: pure, complete, and the same after a resume."""

import numpy as np
import pytest

from slideformer_ray.data.order import RowOrder, permutation


def test_permutations_are_pinned():
    """The order belongs to a run's identity: no version of numpy and no refactor may change it."""
    assert permutation(8, 0, 0).tolist() == [6, 3, 1, 4, 5, 2, 7, 0]
    assert permutation(8, 0, 1).tolist() == [1, 3, 6, 2, 0, 7, 5, 4]
    assert permutation(8, 7).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]


def test_permutation_cannot_be_written():
    """It is cached, so one caller must not change it for the next."""
    with pytest.raises(ValueError):
        permutation(8, 0, 0)[0] = 1


def test_each_epoch_takes_every_row_once_in_its_own_order():
    """Each window of num_rows positions is a permutation; epochs and seeds differ."""
    order = RowOrder(num_rows=31, rows_per_step=1, seed=3, num_positions=93)
    epochs = np.array([order.row(position) for position in range(93)]).reshape(3, 31)
    assert all(sorted(epoch) == list(range(31)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(epochs[0]) != tuple(permutation(31, 4, 0))


def test_steps_cut_one_continuous_sequence_of_positions():
    """A step reaches into the next epoch; no row is left out where two meet, and only the last step is short."""
    order = RowOrder(num_rows=7, rows_per_step=4, seed=0, num_positions=14)
    steps = [order.step_rows(step) for step in range(order.num_steps)]
    assert [len(step) for step in steps] == [4, 4, 4, 2]
    assert sum(steps, []) == [*permutation(7, 0, 0), *permutation(7, 0, 1)]


def test_a_step_may_be_larger_than_the_data():
    """Then it holds rows several times, once for each epoch that it spans."""
    order = RowOrder(num_rows=3, rows_per_step=8, seed=0, num_positions=16)
    assert sum((order.step_rows(step) for step in range(2)), []) == [
        *(row for epoch in range(5) for row in permutation(3, 0, epoch)),
        permutation(3, 0, 5)[0],
    ]


def test_a_resumed_run_takes_the_same_rows():
    """Steps asked for in any order, by a new object after the cache is gone, give the rows of the uninterrupted run."""
    sizes = {"num_rows": 15, "rows_per_step": 4, "seed": 11}
    uninterrupted = RowOrder(**sizes, num_positions=80)
    expected = [uninterrupted.step_rows(step) for step in range(20)]
    permutation.cache_clear()
    resumed = RowOrder(**sizes, num_positions=80)
    assert [resumed.step_rows(step) for step in range(10, 20)] == expected[10:]
    longer = RowOrder(**sizes, num_positions=400)
    assert [longer.step_rows(step) for step in range(20)] == expected


def test_no_step_after_the_last():
    order = RowOrder(num_rows=7, rows_per_step=4, seed=0, num_positions=7)
    with pytest.raises(AssertionError, match="no step 2 of 2"):
        order.step_rows(2)
