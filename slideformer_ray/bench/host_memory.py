"""Host memory at machine level: what is gone from MemAvailable, which no sum over processes can miss.

Tested by tests/bench/test_host_memory.py.
"""

from __future__ import annotations

import threading
from typing import Self

_EVERY_SECONDS = 0.05


class MachineMemory:
    """Peak of what the whole machine uses more than at the start. Anything else that runs meanwhile is in it."""

    def __init__(self) -> None:
        self._base = self._lowest = available_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._lowest = min(self._lowest, available_bytes())

    @property
    def peak_bytes(self) -> int:
        self._lowest = min(self._lowest, available_bytes())
        return self._base - self._lowest


def available_bytes() -> int:
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
