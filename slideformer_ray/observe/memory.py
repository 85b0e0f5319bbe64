"""Host memory of a run, read from /proc while it goes. Tested by tests/observe/test_memory.py."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

from slideformer_ray.actors.process import private_memory


def process_tree(root: int) -> set[int]:
    """The process and all its descendants: of a run's driver, its own Ray node and so the actors."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    # The command's name, in brackets, may hold spaces and brackets of its own.
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # ended since the listing
                continue
            children[parent].append(int(name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children[pid]
    return found


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Pages that belong to these processes alone; one that has ended has none.

    Shared memory is not in it, which the run counts once, nor are file pages, which the kernel can drop.
    """
    total = 0
    for pid in pids:
        try:
            total += private_memory(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
