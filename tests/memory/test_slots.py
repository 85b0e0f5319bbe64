"""The slot state machine: the one legal round, every illegal step, content tags, poison."""

import itertools
import pickle

import pytest
import torch

from slideformer_ray.memory.slots import IllegalSlotTransition, Slot, SlotPool, SlotState, WrongSlotContent, poison

# How a slot gets into each state, and the methods that lead on from it.
PATHS = {
    SlotState.FREE: [],
    SlotState.FILLING: ["begin_fill"],
    SlotState.READY: ["begin_fill", "end_fill"],
    SlotState.BUSY: ["begin_fill", "end_fill", "begin_use"],
}
LEGAL = {
    SlotState.FREE: {"begin_fill"},
    SlotState.FILLING: {"end_fill"},
    SlotState.READY: {"begin_use", "free"},
    SlotState.BUSY: {"end_use"},
}
METHODS = ["begin_fill", "end_fill", "begin_use", "end_use", "free"]
CONTENT = ("hi", 3, 7)


def step(slot, method):
    getattr(slot, method)(*([CONTENT] if method == "begin_fill" else []))


def slot_in(state):
    slot = Slot("unit[0]")
    for method in PATHS[state]:
        step(slot, method)
    assert slot.state is state
    return slot


def test_one_round():
    """free -> filling -> ready -> busy -> free, with the content known from fill to release."""
    slot = slot_in(SlotState.BUSY)
    assert slot.content == CONTENT
    slot.end_use()
    assert slot.state is SlotState.FREE and slot.content is None


@pytest.mark.parametrize(
    "state, method", [(s, m) for s, m in itertools.product(SlotState, METHODS) if m not in LEGAL[s]]
)
def test_illegal_transition_raises_and_changes_nothing(state, method):
    """Every step that the state does not lead to is an error naming slot, state and goal."""
    slot = slot_in(state)
    content = slot.content
    with pytest.raises(IllegalSlotTransition, match=rf"slot unit\[0\]: illegal transition {state.value} -> "):
        step(slot, method)
    assert slot.state is state and slot.content == content


def test_content_can_be_read_again():
    """A use that does not release leaves the slot ready, with its content."""
    slot = slot_in(SlotState.BUSY)
    slot.end_use(release=False)
    slot.begin_use(expected=CONTENT)
    assert slot.state is SlotState.BUSY


def test_unused_content_can_be_dropped():
    """A ready slot may be freed without a use (a prefetch that the run's end makes useless)."""
    slot = slot_in(SlotState.READY)
    slot.free()
    assert slot.state is SlotState.FREE and slot.content is None


def test_reader_must_find_what_it_expects():
    """Swapped slots are caught at the read: the error names both contents and the slot stays ready."""
    slot = slot_in(SlotState.READY)
    with pytest.raises(WrongSlotContent, match=r"holds \('hi', 3, 7\), its reader wants \('hi', 4, 7\)"):
        slot.begin_use(expected=("hi", 4, 7))
    assert slot.state is SlotState.READY


@pytest.mark.parametrize("error", [IllegalSlotTransition("u[0]", "free", "busy"), WrongSlotContent("u[0]", 1, 2)])
def test_errors_survive_pickling(error):
    """An actor's error reaches the driver with all it says."""
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_free_slots_are_nan_in_debug_mode(dtype):
    """A late reader of a freed slot, or an early reader of a fresh one, computes NaN (Soup #331)."""
    pool = SlotPool("gunit", [torch.zeros(5, dtype=dtype) for _ in range(2)], debug_poison=True)
    assert [slot.name for slot in pool] == ["gunit[0]", "gunit[1]"] and len(pool) == 2
    assert pool[1].tensor.isnan().all()
    for method in PATHS[SlotState.BUSY]:
        step(pool[1], method)
    pool[1].tensor.fill_(1)
    pool[1].end_use(release=False)
    assert (pool[1].tensor == 1).all()
    pool[1].free()
    assert pool[1].tensor.isnan().all()


def test_integers_are_poisoned_with_a_pattern():
    """Types without NaN get 0x7f in every byte."""
    tensor = torch.zeros(3, dtype=torch.int16)
    poison(tensor)
    assert (tensor == 0x7F7F).all()


def test_no_poison_by_default():
    """Outside debug mode a freed slot's memory is not touched."""
    slot = SlotPool("unit", [torch.ones(3)])[0]
    for method in [*PATHS[SlotState.BUSY], "end_use"]:
        step(slot, method)
    assert (slot.tensor == 1).all()
