"""Version counters: between threads over private memory, between processes over a shared file. No Ray."""

import mmap
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from slideformer_ray.memory import counters, futex
from slideformer_ray.memory.counters import LINE_BYTES, Aborted, CounterPage, WaitTimeout

NAMES = ["grad.0", "grad.1", "params.0"]
SCALARS = ["norm", "loss"]
LONG_SLEEP_SECONDS = 20


def new_page(names=NAMES, scalars=SCALARS):
    # Anonymous memory is page-aligned, which an ordinary numpy array need not be.
    memory = np.frombuffer(mmap.mmap(-1, CounterPage.nbytes(len(names), len(scalars))), np.uint8)
    return CounterPage(memory, names, scalars), memory


class Child:
    """Another process with `page` over the same file; it runs `code` and prints."""

    def __init__(self, path, code):
        prelude = (
            "import mmap, time, sys, numpy as np\n"
            "from slideformer_ray.memory import counters\n"
            "from slideformer_ray.memory.counters import *\n"
            f"counters._SLEEP_SECONDS = {LONG_SLEEP_SECONDS}\n"
            f"file = open({str(path)!r}, 'r+b')\n"
            f"page = CounterPage(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8), {NAMES}, {SCALARS})\n"
            "print('up', flush=True)\n"
        )
        self.process = subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "up\n"

    def output(self):
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return out.strip()


@pytest.fixture
def long_sleeps(monkeypatch):
    """Sleeps so long between two looks that a wake-up which does not come fails the test (children sleep so always)."""
    monkeypatch.setattr(counters, "_SLEEP_SECONDS", LONG_SLEEP_SECONDS)


@pytest.fixture
def shared(tmp_path):
    """A page over a file that another process can map too."""
    path = tmp_path / "page"
    path.write_bytes(bytes(CounterPage.nbytes(len(NAMES), len(SCALARS))))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return CounterPage(np.frombuffer(memory, np.uint8), NAMES, SCALARS), path


def test_counters_start_at_zero_and_keep_what_is_signalled():
    """A zeroed page is a fresh page; every counter has its own value, past 32 bits too."""
    page, _ = new_page()
    page.signal("grad.1", 2**40)
    assert [page.read(name) for name in NAMES] == [0, 2**40, 0]


def test_each_counter_has_its_own_cache_line():
    """Two lanes that write neighbouring counters never write the same line."""
    page, memory = new_page()
    for name in NAMES:
        page.signal(name, 1)
    written = np.flatnonzero(memory[CounterPage.nbytes(0) :])
    assert (written // LINE_BYTES).tolist() == [0, 1, 2]


def test_counter_never_goes_back():
    """Signalling less than the counter holds is a mistake of ours; the same value again is not."""
    page, _ = new_page()
    page.signal("grad.0", 3)
    page.signal("grad.0", 3)
    with pytest.raises(AssertionError, match="grad.0.*from 3 to 2"):
        page.signal("grad.0", 2)


def test_wait_for_a_reached_counter_returns_at_once():
    """A wait that is satisfied costs no sleep."""
    page, _ = new_page()
    page.signal("grad.0", 5)
    assert page.wait("grad.0", 4, timeout_s=1) < 0.01


def test_wait_is_woken_by_the_signal(long_sleeps):
    """A sleeping waiter runs on as soon as its counter is signalled, and says how long it waited."""
    page, _ = new_page()
    threading.Timer(0.1, page.signal, ("grad.0", 1)).start()
    assert 0.05 < page.wait("grad.0", 1, timeout_s=60) < 10


def test_timeout_names_counter_numbers_and_purpose():
    """Every wait is bounded, and the error says which counter stood where and what for (ray #26772)."""
    page, _ = new_page()
    page.signal("grad.0", 6)
    with pytest.raises(WaitTimeout) as caught:
        page.wait("grad.0", 7, timeout_s=0.12, what="update of layer 0")
    error = caught.value
    assert (error.name, error.wanted, error.found, error.what) == ("grad.0", 7, 6, "update of layer 0")
    assert 0.12 <= error.seconds < 2
    error.seconds = 0.125
    assert str(error) == "waited 0.1 s for counter 'grad.0' to reach 7, it is at 6 (update of layer 0)"


@pytest.mark.parametrize("error", [WaitTimeout("grad.0", 7, 6, "update", 0.5), Aborted("lane gpu.upload: disk full")])
def test_errors_survive_pickling(error):
    """An actor's error reaches the driver with all it says."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_wait_any_returns_the_first_satisfied():
    """A lane that takes whatever is ready gets the earliest in its own order."""
    page, _ = new_page()
    page.signal("params.0", 1)
    page.signal("grad.1", 1)
    assert page.wait_any([("grad.0", 1), ("grad.1", 1), ("params.0", 1)], timeout_s=1) == 1


def test_wait_any_is_woken_by_each_of_its_counters(long_sleeps):
    """The doorbell rings for every signal on the page."""
    for index, name in enumerate(NAMES):
        page, _ = new_page()
        threading.Timer(0.05, page.signal, (name, 1)).start()
        started = time.perf_counter()
        assert page.wait_any([(each, 1) for each in NAMES], timeout_s=60) == index
        assert time.perf_counter() - started < 10


def test_wait_any_timeout_names_all_counters():
    """The error lists everything that could have ended the wait."""
    page, _ = new_page()
    with pytest.raises(WaitTimeout, match=r"'grad.0 \| params.0' to reach 3, it is at 0 \(next layer\)"):
        page.wait_any([("grad.0", 3), ("params.0", 1)], timeout_s=0.06, what="next layer")


def test_scalar_travels_with_its_counter():
    """What is written before a signal is read after its wait."""
    page, _ = new_page()

    def lane():
        page.write_scalar("norm", 0.1)
        page.write_scalar("loss", float("inf"))
        page.signal("grad.0", 1)

    threading.Thread(target=lane).start()
    page.wait("grad.0", 1, timeout_s=10)
    assert (page.read_scalar("norm"), page.read_scalar("loss")) == (0.1, float("inf"))


def test_other_names_on_the_same_page_are_refused():
    """Processes that disagree on the counters would wait for each other's."""
    _, memory = new_page()
    with pytest.raises(AssertionError, match="other counter names"):
        CounterPage(memory, list(reversed(NAMES)), SCALARS)


def test_abort_ends_waits_and_keeps_the_first_reason():
    """After an abort every wait raises, also one that is satisfied; later reasons are dropped."""
    page, _ = new_page()
    assert not page.aborted and page.abort_reason == ""
    page.raise_if_aborted()
    page.abort("optimizer actor 1, layer 3: killed")
    page.abort("a consequence")
    page.signal("grad.0", 1)
    for ended in (lambda: page.wait("grad.0", 1, 1), lambda: page.wait_any([("grad.0", 1)], 1), page.raise_if_aborted):
        with pytest.raises(Aborted) as caught:
            ended()
        assert caught.value.reason == page.abort_reason == "optimizer actor 1, layer 3: killed"


def test_concurrent_aborts_leave_one_whole_reason():
    """However many lanes abort at once, the reason is that of one, never a mixture."""
    reasons = [letter * 1000 for letter in "abcdefgh"]

    def lane(barrier, page, reason):
        barrier.wait()
        page.abort(reason)

    for _ in range(20):
        page, _ = new_page()
        barrier = threading.Barrier(len(reasons))
        threads = [threading.Thread(target=lane, args=(barrier, page, reason)) for reason in reasons]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert page.abort_reason in reasons


def test_abort_speaks_for_a_lane_that_died_while_aborting():
    """A process killed between claiming the abort and saying why does not leave the others waiting."""
    page, memory = new_page()
    assert futex.claim(memory.ctypes.data + 2 * LINE_BYTES)  # what the killed process got done
    page.abort("the driver lost an actor")
    assert page.abort_reason == "the driver lost an actor"


def test_long_reason_is_cut_at_a_character():
    """At most 1 KiB of UTF-8 is kept, and half a character is dropped."""
    page, _ = new_page()
    page.abort("x" + "é" * 1000)
    assert page.abort_reason == "x" + "é" * 511


def test_hops_between_threads_give_up_the_gil(long_sleeps):
    """A waiting lane never keeps the lane it waits for from running: 300 hops take milliseconds, not one sleep."""
    page, _ = new_page()

    def echo():
        for i in range(1, 301):
            page.wait("grad.0", i, timeout_s=10)
            page.signal("grad.1", i)

    thread = threading.Thread(target=echo)
    thread.start()
    started = time.perf_counter()
    for i in range(1, 301):
        page.signal("grad.0", i)
        page.wait("grad.1", i, timeout_s=10)
    assert time.perf_counter() - started < 10
    thread.join()


def test_waits_work_without_futex(monkeypatch):
    """Where the system call is missing, waits poll: signals, deadlines and aborts act as before."""
    monkeypatch.setattr(futex, "AVAILABLE", False)
    page, _ = new_page()
    threading.Timer(0.02, page.signal, ("grad.0", 1)).start()
    assert page.wait("grad.0", 1, timeout_s=10) < 5
    with pytest.raises(WaitTimeout):
        page.wait("grad.0", 2, timeout_s=0.02)
    page.abort("first")
    page.abort("second")
    with pytest.raises(Aborted, match="first"):
        page.wait("grad.0", 1, timeout_s=1)


def test_signal_and_scalar_cross_processes(shared):
    """A counter signalled here wakes a waiter there, which sees what was written before."""
    page, path = shared
    child = Child(path, "page.wait('grad.0', 2**33, 30); print(page.read_scalar('loss'))")
    page.write_scalar("loss", 2.5)
    page.signal("grad.0", 2**33)
    assert child.output() == "2.5"


def test_abort_reaches_another_process_within_0_2_s(shared):
    """A lane asleep in another process learns of an abort, and why, at once."""
    page, path = shared
    code = (
        "try: page.wait('grad.0', 1, 30)\n"
        "except Aborted as error: print(time.clock_gettime(time.CLOCK_MONOTONIC), error.reason)"
    )
    child = Child(path, code)
    time.sleep(0.2)  # the child's spin is over, it sleeps
    aborted_at = time.clock_gettime(time.CLOCK_MONOTONIC)
    page.abort("GPU actor: out of memory")
    seen_at, _, reason = child.output().partition(" ")
    assert reason == "GPU actor: out of memory"
    assert float(seen_at) - aborted_at < 0.2


def test_ten_thousand_hops_between_two_processes(shared, long_sleeps):
    """No wake-up is ever lost: one lost would cost a sleep of 20 s here."""
    page, path = shared
    child = Child(path, "for i in range(1, 10_001): page.wait('grad.0', i, 30); page.signal('grad.1', i)")
    started = time.perf_counter()
    for i in range(1, 10_001):
        page.signal("grad.0", i)
        page.wait("grad.1", i, timeout_s=30)
    assert time.perf_counter() - started < LONG_SLEEP_SECONDS
    child.output()


def test_ten_thousand_hops_through_the_doorbell(shared, long_sleeps):
    """The same for lanes that wait for any of several counters."""
    page, path = shared
    child = Child(
        path,
        "for i in range(1, 10_001):\n    page.wait_any([('params.0', 1), ('grad.0', i)], 30); page.signal('grad.1', i)",
    )
    started = time.perf_counter()
    for i in range(1, 10_001):
        page.signal("grad.0", i)
        assert page.wait_any([("params.0", 1), ("grad.1", i)], timeout_s=30) == 1
    assert time.perf_counter() - started < LONG_SLEEP_SECONDS
    child.output()


def test_the_deadline_starts_anew_with_every_signal():
    """A lane that waits through a long step is not hung while others move: the bound is on standing still."""
    page, _ = new_page(("own", "other"), ())

    def others() -> None:
        for value in range(1, 9):
            time.sleep(0.1)
            page.signal("other", value)
        page.signal("own", 1)

    thread = threading.Thread(target=others)
    thread.start()
    assert page.wait("own", 1, timeout_s=0.4) > 0.7
    thread.join()
    with pytest.raises(WaitTimeout):
        page.wait("own", 2, timeout_s=0.2)
