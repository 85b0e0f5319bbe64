"""The Linux futex: sleep until a 32-bit word of shared memory changes, wake who sleeps on it, claim a word once.

Three functions over one system call, used by `counters.py` alone. The words may lie in memory shared between processes,
so the PRIVATE flag is never set. Every call goes through ctypes, which gives up the GIL while the kernel holds the
thread. Where the call does not exist (not Linux) waiting becomes a short sleep: the caller polls its word in any case,
so only latency is lost. Tested through tests/memory/test_counters.py.
"""

import ctypes
import platform
import sys
import time

_SYSCALL_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
AVAILABLE = sys.platform == "linux" and _SYSCALL_NUMBER is not None

_FUTEX_WAIT, _FUTEX_WAKE_OP, _FUTEX_TRYLOCK_PI = 0, 5, 8
_EVERYBODY = 2**31 - 1
# WAKE_OP adds 1 to the second word in the kernel (so that no bump is ever lost between processes) and then wakes its
# sleepers if the old value was not -1. Encoded as in futex(2): operation ADD = 1, operand 1, comparison NE = 1, operand
# -1 in 12 bits.
_ADD_ONE_AND_WAKE = (1 << 28) | (1 << 24) | (1 << 12) | 0xFFF
_POLL_SECONDS = 1e-4


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if AVAILABLE:
    _syscall = ctypes.CDLL(None).syscall
    _syscall.restype = ctypes.c_long
    # number, word, operation, value, timeout or second count, second word, encoded operation
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_long,
    )


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the uint32 at `address` is `expected`, at most so long. May return early: the caller looks again."""
    if not AVAILABLE:
        time.sleep(min(timeout_s, _POLL_SECONDS))
        return
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _syscall(_SYSCALL_NUMBER, address, _FUTEX_WAIT, expected, ctypes.addressof(timeout), None, 0)


def wake(address: int, doorbell_address: int) -> None:
    """Wake all sleepers on `address`, add 1 atomically to the uint32 at `doorbell_address`, wake its sleepers too."""
    if AVAILABLE:
        _syscall(_SYSCALL_NUMBER, address, _FUTEX_WAKE_OP, _EVERYBODY, _EVERYBODY, doorbell_address, _ADD_ONE_AND_WAKE)


def claim(address: int) -> bool:
    """True for the one caller, of all threads and processes, that first claims the uint32 at `address`, 0 before.

    The kernel's TRYLOCK_PI is the compare-and-swap from 0 to the caller's thread id that Python lacks; the lock is
    never released.
    """
    if AVAILABLE:
        return _syscall(_SYSCALL_NUMBER, address, _FUTEX_TRYLOCK_PI, 0, None, None, 0) == 0
    word = ctypes.c_uint32.from_address(address)
    first = word.value == 0
    word.value = 1
    return first
