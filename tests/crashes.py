"""Lets a save die at its n-th operation on the disk, over the real code path, and lose what was not made durable.

Not a test itself: pyproject.toml puts this folder on the path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

OPERATIONS = ("pwrite", "fsync", "rename", "mkdir", "posix_fallocate", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for SIGKILL or a power cut: nothing after it happens."""


class DyingDisk:
    """Counts the operations of `OPERATIONS`; from number `dies_at` on, none is done and each raises Killed.

    A write that is cut is half done. `lose_unsynced` then overwrites what no fsync has followed, as a power cut may.
    """

    def __init__(self, dies_at: int | None = None):
        self.dies_at = dies_at
        self.done: list[str] = []
        self._unsynced: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (device, inode) -> offset, length
        self._real = {name: getattr(os, name) for name in OPERATIONS}
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[DyingDisk]:
        with mock.patch.multiple(os, **{name: self._wrapped(name) for name in OPERATIONS}):
            yield self

    def _wrapped(self, name: str):
        real = self._real[name]

        def operation(*args, **kwargs):
            with self._lock:
                number = len(self.done)
                if self.dies_at is not None and number > self.dies_at:
                    raise Killed
                self.done.append(name)
                dies = number == self.dies_at
            if dies:
                if name == "pwrite" and len(args[1]) > 8192:
                    self._write(args[0], memoryview(args[1])[: len(args[1]) // 8192 * 4096], args[2])
                raise Killed
            if name == "pwrite":
                return self._write(*args)
            if name == "fsync":
                self._unsynced.pop(_identity(args[0]), None)
                return None  # what it means is kept here; a test machine's drive need not be waited for
            return real(*args, **kwargs)

        return operation

    def _write(self, descriptor: int, data, offset: int) -> int:
        written = self._real["pwrite"](descriptor, data, offset)
        self._unsynced.setdefault(_identity(descriptor), []).append((offset, written))
        return written

    def lose_unsynced(self, directory: Path) -> int:
        """Zero every byte below `directory` that was written and not made durable; returns how many files lost some."""
        lost = 0
        for path in (path for path in directory.rglob("*") if path.is_file()):
            status = path.stat()
            ranges = self._unsynced.get((status.st_dev, status.st_ino), ())
            lost += bool(ranges)
            with path.open("r+b") as file:
                for offset, length in ranges:
                    file.seek(offset)
                    file.write(bytes(length))
        return lost


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
