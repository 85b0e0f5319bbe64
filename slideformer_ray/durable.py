"""Making files outlast a power cut. Tested by tests/test_checkpoint.py and tests/model/test_weights.py."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Make a file's contents (or a directory's entries) durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
