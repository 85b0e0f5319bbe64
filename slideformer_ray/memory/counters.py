"""Version counters in a shared page: how lanes in different processes wait for each other without a Ray call.

A counter is a 64-bit number that only grows and that one lane writes; "the gradient of layer 3 for step 7 has landed"
is a counter reaching 7. Waiting spins briefly, then sleeps on a futex; every wait has a deadline and looks at the
page's abort word (docs/architecture.md). The page is any uint8 array: plasma, an anonymous mapping, or private
memory between threads. Touches nothing but that array. Tested by tests/memory/test_counters.py, with threads and with
processes.
"""

import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np

from slideformer_ray.memory import futex

# A counter has a cache line to itself: its writer and the readers of its neighbours must not fight over one.
LINE_BYTES = 64
_INT64_PER_LINE = LINE_BYTES // 8
_UINT32_PER_INT64 = 2

# The page, in lines: fingerprint of the names | doorbell | abort claim | abort state | 16 lines of reason | counters |
# scalars
_FINGERPRINT_LINE, _DOORBELL_LINE, _CLAIM_LINE, _ABORT_LINE, _REASON_LINE = range(5)
_REASON_BYTES = 1024
_HEADER_LINES = _REASON_LINE + _REASON_BYTES // LINE_BYTES

_SPIN_SECONDS = 50e-6  # a futex round trip costs 11 us: spinning longer than a few of those only burns a core
_SLEEP_SECONDS = 0.05  # the longest sleep between two looks at the abort word
_PUBLISH_SECONDS = 0.1  # how long a second aborter waits for the first one's reason


class WaitTimeout(RuntimeError):
    """A counter did not reach the wanted value before the deadline."""

    def __init__(self, name: str, wanted: int, found: int, what: str, seconds: float):
        # As args, so that the error survives pickling across processes.
        super().__init__(name, wanted, found, what, seconds)
        self.name, self.wanted, self.found, self.what, self.seconds = name, wanted, found, what, seconds

    def __str__(self) -> str:
        purpose = f" ({self.what})" if self.what else ""
        goal = f"counter {self.name!r} to reach {self.wanted}"
        return f"waited {self.seconds:.1f} s for {goal}, it is at {self.found}{purpose}"


class Aborted(RuntimeError):
    """Another lane ended the run; `reason` is what the first one to abort said."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


_fence_lock = threading.Lock()


def _fence() -> None:
    """Order memory: what was written before a counter is seen by whoever has seen the counter.

    x86 keeps that order by itself, Arm does not. POSIX has lock operations synchronise memory, and Python offers no
    other fence.
    """
    with _fence_lock:
        pass


class CounterPage:
    """Named counters, named float64 scalars and an abort word over one uint8 array.

    Every process builds it over the same memory with the same names; a name's place is its position. Zeroed memory is a
    fresh page.

    Args:
        view: uint8, at least `nbytes(...)` long, writable, aligned to a cache line. Kept for as long as the page lives.
        names: the counters.
        scalar_names: small values that travel with counters (a norm, a loss): write the scalar, then signal the
            counter.
    """

    def __init__(self, view: np.ndarray, names: Sequence[str], scalar_names: Sequence[str] = ()):
        size = self.nbytes(len(names), len(scalar_names))
        assert view.dtype == np.uint8 and view.nbytes >= size and view.ctypes.data % LINE_BYTES == 0
        assert len(set(names)) == len(names) and len(set(scalar_names)) == len(scalar_names)
        self._address = view.ctypes.data
        self._bytes = view.data[:size]
        # Indexing a cast memoryview is one aligned load or store, and twice as fast as indexing the array.
        self._int64 = self._bytes.cast("q")
        self._uint32 = self._bytes.cast("I")
        self._float64 = self._bytes.cast("d")
        first_scalar = _HEADER_LINES + len(names)
        self._counter = {name: (_HEADER_LINES + i) * _INT64_PER_LINE for i, name in enumerate(names)}
        self._scalar = {name: (first_scalar + i) * _INT64_PER_LINE for i, name in enumerate(scalar_names)}
        self._check_layout(names, scalar_names)

    @staticmethod
    def nbytes(num_counters: int, num_scalars: int = 0) -> int:
        """Bytes that a page of so many counters and scalars takes."""
        return (_HEADER_LINES + num_counters + num_scalars) * LINE_BYTES

    # ---- counters

    def read(self, name: str) -> int:
        value = self._int64[self._counter[name]]
        _fence()
        return value

    def signal(self, name: str, value: int) -> None:
        """Set a counter, which only its one writer may do and never downwards, and wake who waits for it."""
        word = self._counter[name]
        found = self._int64[word]
        assert value >= found, f"counter {name!r} would go back from {found} to {value}"
        _fence()
        self._int64[word] = value
        self._wake(word)

    def wait(self, name: str, value: int, timeout_s: float, what: str = "") -> float:
        """Wait until the counter is at least `value`; return the seconds it took.

        Args:
            what: what the wait is for, in the error's words: "update of layer 3".
        Raises:
            WaitTimeout: `timeout_s` seconds after the last signal of any counter.
            Aborted: as soon as the page is aborted, even if the counter is there.
        """
        word = self._counter[name]
        index, seconds = self._wait([(word, value)], word, timeout_s)
        if index is None:
            raise WaitTimeout(name, value, self._int64[word], what, seconds)
        return seconds

    def wait_any(self, names_values: Sequence[tuple[str, int]], timeout_s: float, what: str = "") -> int:
        """Wait until one of the counters is at least its value; return the index of the first one that is.

        Raises: as `wait`; a timeout names every counter waited for in `name`, and the first one's numbers.
        """
        targets = [(self._counter[name], value) for name, value in names_values]
        index, seconds = self._wait(targets, _DOORBELL_LINE * _INT64_PER_LINE, timeout_s)
        if index is None:
            (first_word, first_value), names = targets[0], " | ".join(name for name, _ in names_values)
            raise WaitTimeout(names, first_value, self._int64[first_word], what, seconds)
        return index

    @property
    def signals(self) -> int:
        """A number that changes with every signal of any counter: while it does, somebody makes progress."""
        return self._uint32[_DOORBELL_LINE * _INT64_PER_LINE * _UINT32_PER_INT64]

    # ---- scalars

    def write_scalar(self, name: str, value: float) -> None:
        """Write a scalar. Its readers must wait for a counter signalled after it."""
        self._float64[self._scalar[name]] = value

    def read_scalar(self, name: str) -> float:
        return self._float64[self._scalar[name]]

    # ---- abort

    def abort(self, reason: str) -> None:
        """End the run for all who wait or will wait on this page. The first reason is kept, up to 1 KiB of UTF-8."""
        first = futex.claim(self._address + _CLAIM_LINE * LINE_BYTES)
        if not first and self._published():
            return  # else the claimer died before it could say why: speak in its place
        text = reason.encode()[:_REASON_BYTES]
        start = _REASON_LINE * LINE_BYTES
        self._bytes[start : start + _REASON_BYTES] = text.ljust(_REASON_BYTES, b"\0")
        _fence()
        self._int64[_ABORT_LINE * _INT64_PER_LINE] = 1
        for word in self._counter.values():
            self._wake(word)

    @property
    def aborted(self) -> bool:
        return self._int64[_ABORT_LINE * _INT64_PER_LINE] != 0

    @property
    def abort_reason(self) -> str:
        """What the first aborter said; empty while nobody has."""
        if not self.aborted:
            return ""
        _fence()
        start = _REASON_LINE * LINE_BYTES
        return bytes(self._bytes[start : start + _REASON_BYTES]).rstrip(b"\0").decode(errors="ignore")

    def raise_if_aborted(self) -> None:
        if self.aborted:
            raise Aborted(self.abort_reason)

    # ---- inside

    def _wait(self, targets: list[tuple[int, int]], sleep_word: int, timeout_s: float) -> tuple[int | None, float]:
        """Index of the first satisfied (word, value), or None at the deadline, and the seconds waited.

        The deadline is `timeout_s` after the last signal of any counter: a long step in which every lane moves on is no
        hang, however long one of them has to wait.

        Sleeps on the low half of the int64 at `sleep_word`, which changes whenever a target may have. That half is read
        BEFORE the targets: if a signal comes in between, the kernel sees another value than expected and does not
        sleep.
        """
        low_half = sleep_word * _UINT32_PER_INT64  # little-endian, as every platform PyTorch and Ray run on
        started = moved = time.perf_counter()
        signals = self.signals
        while True:
            self.raise_if_aborted()
            expected = self._uint32[low_half]
            _fence()
            for index, (word, value) in enumerate(targets):
                if self._int64[word] >= value:
                    _fence()
                    return index, time.perf_counter() - started
            now = time.perf_counter()
            if signals != (signals := self.signals):
                moved = now
            left = timeout_s - (now - moved)
            if left <= 0:
                return None, now - started
            if now - started < _SPIN_SECONDS:
                time.sleep(0)  # gives up the GIL: the lane we wait for may be a thread of this process
            else:
                futex.wait(self._address + sleep_word * 8, expected, min(_SLEEP_SECONDS, left))

    def _wake(self, word: int) -> None:
        futex.wake(self._address + word * 8, self._address + _DOORBELL_LINE * LINE_BYTES)

    def _published(self) -> bool:
        deadline = time.perf_counter() + _PUBLISH_SECONDS
        while not self.aborted and time.perf_counter() < deadline:
            time.sleep(1e-3)
        return self.aborted

    def _check_layout(self, names: Sequence[str], scalar_names: Sequence[str]) -> None:
        """Compare a fingerprint kept in the page: processes that disagree on the names would share counters wrongly."""
        word = _FINGERPRINT_LINE * _INT64_PER_LINE
        listing = "\n".join([*names, "", *scalar_names]).encode()
        fingerprint = (len(listing) << 32) | zlib.crc32(listing)
        found = self._int64[word]
        assert found in (0, fingerprint), "this page was laid out with other counter names"
        self._int64[word] = fingerprint
