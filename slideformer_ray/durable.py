"""Files that outlast a power cut. Tested by tests/test_checkpoint.py and tests/model/test_weights.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Make a file's contents (or a directory's entries) durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """`os.pwrite`, which may write less than it was given, until all is written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def write_durably(path: Path, data: bytes) -> None:
    """Contents are on the disk when this returns; the file's name is once its directory has been fsynced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes) -> None:
    """The file holds all of `data`, or what it held before; never a part."""
    beside = path.with_name(f".{path.name}.tmp")
    write_durably(beside, data)
    os.rename(beside, path)
    fsync_path(path.parent)


def create_allocated(path: Path, size: int, head: bytes) -> None:
    """A new file of `size` bytes that begins with `head`; its disk space is taken now, so that it cannot run out later.

    Not durable yet. Where the file system cannot reserve space, the file is only as long.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise OSError(error.errno, error.strerror, str(path)) from None
            os.ftruncate(descriptor, size)
        write_all(descriptor, head, 0)
    finally:
        os.close(descriptor)
