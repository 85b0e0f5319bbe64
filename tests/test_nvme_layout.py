"""States of layers in slots and files: every byte has one place, aligned, whatever the cut."""

import itertools

import pytest

from slideformer_ray.model.spec import slice_of
from slideformer_ray.nvme_layout import ALIGN_BYTES, FileLayout, region_bytes, staged_blocks, state_parts


@pytest.mark.parametrize(("numel", "actors"), [(77_000_064, 2), (1000, 3), (128, 2), (4096 * 7 + 13, 5)])
def test_every_actor_has_its_own_aligned_bytes(numel, actors):
    """Parts follow one another without overlap, begin at pages, and cover the actors' slices."""
    at = 0
    for k, part in enumerate(state_parts(numel, actors)):
        assert (part.start, part.stop) == slice_of(numel, k, actors)
        for offset in (part.exp_avg, part.exp_avg_sq):
            assert offset == at and offset % ALIGN_BYTES == 0
            at += -(-part.numel * 4 // ALIGN_BYTES) * ALIGN_BYTES
    assert at == region_bytes(numel, actors)


@pytest.mark.parametrize("fraction", [0, 0.01, 0.3, 0.5, 0.75, 0.99, 1])
@pytest.mark.parametrize("layers", [1, 3, 36])
def test_a_fraction_is_a_true_one(fraction, layers):
    """At least the fraction, less than a layer more, spread evenly: no two neighbours' distances differ by more than
    one."""
    staged = staged_blocks((True,) * (layers + 2), fraction)
    assert fraction * layers - 1e-6 <= len(staged) < fraction * layers + 1
    assert all(1 <= block <= layers for block in staged)
    distances = {b - a for a, b in itertools.pairwise(staged)}
    assert not distances or max(distances) - min(distances) <= 1


def test_frozen_layers_have_no_states_to_stage():
    assert staged_blocks((True, False, True, False, True, True), 1.0) == (2, 4)


@pytest.mark.parametrize("stripe", [None, ALIGN_BYTES, 3 * ALIGN_BYTES])
@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_every_byte_of_every_region_has_one_place(stripe, num_files):
    """No two bytes share a place, files have no hole, and a part of a region lies where the whole says."""
    regions = tuple(ALIGN_BYTES * n for n in (5, 1, 8, 5))
    layout = FileLayout(regions, num_files, stripe)
    taken = set()
    for region, nbytes in enumerate(regions):
        whole = {}
        for extent in layout.extents(region, 0, nbytes):
            for page in range(0, extent.nbytes, ALIGN_BYTES):
                whole[extent.offset + page] = (extent.file, extent.file_offset + page)
        assert sorted(whole) == list(range(0, nbytes, ALIGN_BYTES))
        assert not taken & set(whole.values())
        taken |= set(whole.values())
        for offset in range(0, nbytes, ALIGN_BYTES):
            (extent,) = layout.extents(region, offset, ALIGN_BYTES)
            assert (extent.file, extent.file_offset) == whole[offset] and extent.offset == 0
    assert sum(layout.file_sizes()) >= sum(regions)
    spare = (stripe or 0) * num_files
    assert sum(layout.file_sizes()) <= sum(regions) + spare
