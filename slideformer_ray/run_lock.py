"""One run at a time in a run directory: a lock that the kernel gives back however the run ends.

Tested by tests/test_run_lock.py.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slideformer_ray.config import ConfigError

LOCK_NAME = ".lock"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold RUN/.lock (flock). Raises ConfigError while another process holds it. The file stays, and means nothing."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip()
            raise ConfigError(
                f"run_dir: {run_dir} is in use by another run (process {holder or 'unknown'}); wait for it, stop it, "
                "or give another run_dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
