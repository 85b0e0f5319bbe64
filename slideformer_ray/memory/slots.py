"""The life of one slot of pre-allocated memory: free -> filling -> ready -> busy -> free.

A slot is reused many times a step by lanes that only meet through counters and events. The state machine turns a
schedule's mistake (filled while read, read before filled, read with another layer's content) into an error at the
guilty line instead of a wrong gradient. In debug mode freed memory is poisoned, so that a late reader computes NaN.
Touches only the tensors it is given. Tested by tests/memory/test_slots.py.
"""

import enum
import threading
from collections.abc import Hashable, Iterator, Sequence

import torch


class SlotState(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    BUSY = "busy"


class IllegalSlotTransition(RuntimeError):
    """A slot was asked to go where its state does not lead."""

    def __init__(self, slot: str, from_state: str, to_state: str):
        super().__init__(slot, from_state, to_state)
        self.slot, self.from_state, self.to_state = slot, from_state, to_state

    def __str__(self) -> str:
        return f"slot {self.slot}: illegal transition {self.from_state} -> {self.to_state}"


class WrongSlotContent(RuntimeError):
    """A slot is ready, but with other content than its reader wants."""

    def __init__(self, slot: str, found: Hashable, expected: Hashable):
        super().__init__(slot, found, expected)
        self.slot, self.found, self.expected = slot, found, expected

    def __str__(self) -> str:
        return f"slot {self.slot}: holds {self.found!r}, its reader wants {self.expected!r}"


class Slot:
    """One slot: its state and a tag of what it holds, for instance ("hi", layer, version).

    Every method is one transition, checked and done under a lock, since the lanes that share a slot are threads.
    """

    def __init__(self, name: str, tensor: torch.Tensor | None = None, debug_poison: bool = False):
        self.name = name
        self.tensor = tensor
        self.state = SlotState.FREE
        self.content: Hashable = None
        self._poisoned = tensor if debug_poison else None
        self._lock = threading.Lock()
        self._empty()

    def begin_fill(self, content: Hashable) -> None:
        """free -> filling: its writer starts; `content` is what the slot will hold."""
        with self._lock:
            self._move(SlotState.FREE, SlotState.FILLING)
            self.content = content

    def end_fill(self) -> None:
        """filling -> ready: the last byte has landed."""
        with self._lock:
            self._move(SlotState.FILLING, SlotState.READY)

    def begin_use(self, expected: Hashable = None) -> None:
        """ready -> busy: a reader starts.

        Raises:
            WrongSlotContent: `expected` is given and the slot holds something else; the state stays as it is.
        """
        with self._lock:
            if self.state is SlotState.READY and expected is not None and self.content != expected:
                raise WrongSlotContent(self.name, self.content, expected)
            self._move(SlotState.READY, SlotState.BUSY)

    def end_use(self, release: bool = True) -> None:
        """busy -> free, or busy -> ready with `release=False`: the content will be read again."""
        with self._lock:
            self._move(SlotState.BUSY, SlotState.FREE if release else SlotState.READY)
            if release:
                self._empty()

    def free(self) -> None:
        """ready -> free: the content is not needed any more."""
        with self._lock:
            self._move(SlotState.READY, SlotState.FREE)
            self._empty()

    def _move(self, from_state: SlotState, to_state: SlotState) -> None:
        if self.state is not from_state:
            raise IllegalSlotTransition(self.name, self.state.value, to_state.value)
        self.state = to_state

    def _empty(self) -> None:
        self.content = None
        if self._poisoned is not None:
            poison(self._poisoned)

    def __repr__(self) -> str:
        return f"Slot({self.name}, {self.state.value}, {self.content!r})"


class SlotPool:
    """The slots of one ring, over equally shaped tensors; slot i is called `name[i]`.

    Args:
        debug_poison: fill every free slot with NaN (floats) or 0x7f bytes (integers). On a GPU the fill runs on the
            current stream, so a slot must be freed under the stream that read it.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], debug_poison: bool = False):
        self.name = name
        self._slots = [Slot(f"{name}[{i}]", tensor, debug_poison) for i, tensor in enumerate(tensors)]

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)


def poison(tensor: torch.Tensor) -> None:
    """Make a tensor's old values unusable: NaN where the type has it, else every byte 0x7f."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.view(torch.uint8).fill_(0x7F)
