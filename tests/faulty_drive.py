"""A drive that fails under the real code: errors, short transfers, calls that do not return. For tests of nvme_store.

Not a test itself: pyproject.toml puts this folder on the path.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from slideformer_ray.nvme_layout import ALIGN_BYTES


class FaultyDrive:
    """Stands in for os.preadv and os.pwritev. `number` counts the calls of `call`; the fault comes from `from_call` on.

    fault: an errno's name, "short" (each call moves one page), "odd" (each call moves a page and a half, where more is
    asked for), or "stall" (calls wait until the drive is let go).
    """

    def __init__(self, call: str, fault: str, from_call: int = 0):
        self.call, self.fault, self.from_call = call, fault, from_call
        self.number = 0
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[FaultyDrive]:
        real = getattr(os, self.call)

        def faulty(descriptor, buffers, offset):
            with self._lock:
                number, self.number = self.number, self.number + 1
            if number < self.from_call:
                return real(descriptor, buffers, offset)
            if self.fault == "stall":
                self.let_go.wait(30)
                return real(descriptor, buffers, offset)
            if self.fault == "short":
                return real(descriptor, [memoryview(buffers[0])[:ALIGN_BYTES]], offset)
            if self.fault == "odd":
                count = real(descriptor, [memoryview(buffers[0])[: 2 * ALIGN_BYTES]], offset)
                return min(count, ALIGN_BYTES * 3 // 2)
            raise OSError(getattr(errno, self.fault), os.strerror(getattr(errno, self.fault)))

        with mock.patch.object(os, self.call, faulty):
            try:
                yield self
            finally:
                self.let_go.set()
