import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slideformer_ray.model.spec import ALIGN_ELEMENTS, BlockSpec, ParamSpec, align, slice_of


def block(*params: tuple[int, bool, bool]) -> BlockSpec:
    """A block of (numel, decay, frozen) parameters, laid out as describe_model does."""
    specs, offset, trainable = [], 0, 0
    for i, (numel, decay, frozen) in enumerate(params):
        specs.append(ParamSpec(f"p{i}", (numel,), offset, decay, frozen))
        offset = align(offset + numel)
        trainable = trainable if frozen else offset
    return BlockSpec(1, "decoder", 0, "full_attention", tuple(specs), trainable, offset)


@given(numel=st.integers(0, 5000), num_actors=st.integers(1, 9))
def test_slices_cover_a_buffer_once_and_cuts_are_aligned(numel, num_actors):
    """Slice k ends where slice k + 1 begins; together they are the buffer; no cut falls inside an aligned group."""
    slices = [slice_of(numel, k, num_actors) for k in range(num_actors)]
    assert slices[0][0] == 0 and slices[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(slices, slices[1:], strict=False))
    assert all(start <= stop for start, stop in slices)
    assert all(start % ALIGN_ELEMENTS == 0 or start == numel for start, _ in slices)


def test_slices_are_of_even_size():
    """No actor has more than one aligned group above its share: the slowest actor sets the time of an update."""
    for start, stop in (slice_of(1_000_000, k, 7) for k in range(7)):
        assert abs((stop - start) - 1_000_000 / 7) <= ALIGN_ELEMENTS


def test_slices_of_a_buffer_past_2_31_elements_are_exact():
    """Python integers, no float: sizes past 2^31 lose nothing."""
    numel = (1 << 33) + 7
    assert slice_of(numel, 2, 3)[1] == numel
    assert slice_of(numel, 0, 3)[1] == slice_of(numel, 1, 3)[0] == align(numel // 3)


def test_decay_runs_merge_neighbours_and_take_padding_with_the_run_before():
    """Two decayed parameters are one run, padding included; the frozen tail is in none."""
    b = block((100, True, False), (300, True, False), (10, False, False), (50, True, True))
    assert b.decay_runs(0, b.trainable_numel) == [(0, 512, True), (512, 640, False)]
    assert b.trainable_numel == 640 and b.numel == 768


@given(
    st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.just(False)), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_decay_runs_of_slices_are_the_decay_runs_of_the_block(params, num_actors):
    """Every trainable element has the same decay whichever actor owns it."""
    b = block(*params)

    def flags(start, stop):
        return [decay for a, z, decay in b.decay_runs(start, stop) for _ in range(a, z)]

    parts = [flags(*slice_of(b.trainable_numel, k, num_actors)) for k in range(num_actors)]
    assert sum(parts, []) == flags(0, b.trainable_numel)
    assert len(flags(0, b.trainable_numel)) == b.trainable_numel


def test_block_names():
    """Messages call a decoder block by its layer number, the others by their kind."""
    assert block((1, True, False)).name == "layer.0"
    assert BlockSpec(0, "embed", None, "", (), 0, 0).name == "embed"


@pytest.mark.parametrize("module", ["torch", "ray"])
def test_spec_imports_neither_torch_nor_ray(module):
    """The planner and the schedule read specs, and must start at once."""
    code = f"import sys, slideformer_ray.model.spec; sys.exit({module!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
