"""What this machine can give a run, and whether the run's bytes fit it.

Asked before anything is allocated, by `plan` too, so this file needs neither Ray nor torch. Touches /proc,
/sys/fs/cgroup and /dev/shm, for reading. Tested by tests/memory/test_host_limits.py on pretended machines.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

PAGE_BYTES = 4096
GIB = 2**30

# Ray refuses to start with a smaller store.
_SMALLEST_STORE_BYTES = 75 * 2**20
# What an object costs beside its own bytes: the page it is aligned in, Ray's header around the array, the allocator's
# bookkeeping.
_BYTES_PER_OBJECT = 2 * PAGE_BYTES
# A cgroup without a limit says "max" (v2) or about 2**63 (v1).
_UNLIMITED_BYTES = 2**60


class StoreTooSmall(ValueError):
    """The shared buffers do not fit: /dev/shm, memory, the cgroup's limit, or the object store that is running."""


@dataclasses.dataclass(frozen=True)
class HostLimits:
    """What this machine, and the container around this process, can give, in bytes.

    `cgroup_limit` is None without a limit; `cgroup_used` leaves out page cache that the kernel would drop.
    """

    ram_total: int
    ram_available: int
    cgroup_limit: int | None
    cgroup_used: int
    shm_total: int
    shm_free: int


def read_host_limits(root: pathlib.Path = pathlib.Path("/")) -> HostLimits:
    """Read the limits from /proc, /sys/fs/cgroup (v1 and v2) and /dev/shm; `root` is another "/" for tests."""
    meminfo = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, value = line.split(":")
        meminfo[key] = int(value.split()[0]) * 1024
    cgroup_limit, cgroup_used = _read_cgroup(root)
    shm = os.statvfs(root / "dev/shm")
    return HostLimits(
        ram_total=meminfo["MemTotal"],
        ram_available=meminfo["MemAvailable"],
        cgroup_limit=cgroup_limit,
        cgroup_used=cgroup_used,
        shm_total=shm.f_blocks * shm.f_frsize,
        shm_free=shm.f_bavail * shm.f_frsize,
    )


def store_bytes(buffer_sizes: Sequence[int]) -> int:
    """The size of an object store for these buffers: their sum, the largest once more against fragmentation, and 5 %.

    Worked: 36 layers of 154 MB and 8 slots of 154 MB: 44 x 154 + 154 = 6.93 GB, with 5 % 7.28 GB.
    """
    sizes = [round_to_pages(size) + _BYTES_PER_OBJECT for size in buffer_sizes]
    return max(round_to_pages((sum(sizes) + max(sizes)) * 105 // 100), _SMALLEST_STORE_BYTES)


def check_store_fits(store_bytes: int, private_bytes: int, limits: HostLimits) -> None:
    """Refuse, before anything is allocated, a store and private memory of the actors that this host cannot give.

    The ceiling is the least of three: what is free in /dev/shm (for the store), and available memory and the cgroup's
    limit (for both).

    Raises:
        StoreTooSmall: one line for each ceiling that is too low, with the number found, the number needed and the fix.
    """
    needed = store_bytes + private_bytes
    parts = f"{gib(needed)} ({gib(store_bytes)} object store + {gib(private_bytes)} private)"
    problems = []
    if store_bytes > limits.shm_free:
        size = -(-(store_bytes + limits.shm_total - limits.shm_free) // GIB)
        problems.append(
            f"/dev/shm has {gib(limits.shm_free)} free of {gib(limits.shm_total)}, the object store needs "
            f"{gib(store_bytes)}. Fix: in a container `docker run --shm-size={size}g ...`, else "
            f"`sudo mount -o remount,size={size}G /dev/shm`."
        )
    if needed > limits.ram_available:
        problems.append(
            f"the machine has {gib(limits.ram_available)} of memory available of {gib(limits.ram_total)}, the run "
            f"needs {parts}. Fix: end other programs, or plan a smaller run (fewer gradient slots, optimizer states "
            "on NVMe)."
        )
    if limits.cgroup_limit is not None and needed > limits.cgroup_limit - limits.cgroup_used:
        size = -(-(needed + limits.cgroup_used) // GIB)
        problems.append(
            f"the cgroup's limit leaves {gib(limits.cgroup_limit - limits.cgroup_used)} of {gib(limits.cgroup_limit)}, "
            f"the run needs {parts}. Fix: in a container `docker run --memory={size}g ...`, else raise the memory "
            "limit of the service or job."
        )
    if problems:
        raise StoreTooSmall("not enough host memory: " + "\n".join(problems))


def round_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _read_cgroup(root: pathlib.Path) -> tuple[int | None, int]:
    """(limit, used) of the cgroup that leaves least: limits bind from this process's own cgroup up to the root."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        # Inside a container the path may be the host's, which is not there: the container's own cgroup is then the
        # mount itself.
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if (directory / names[0]).exists():
                found.append(_read_limit(directory, *names))
            if directory == mount:
                break
    limited = [(limit, used) for limit, used in found if limit is not None]
    return min(limited, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _read_limit(directory: pathlib.Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int | None, int]:
    text = (directory / limit_name).read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED_BYTES:
        return None, 0
    # Page cache that the kernel would drop is not in use: without this, reading a model's files looks like a full
    # container.
    stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return int(text), int((directory / used_name).read_text()) - int(stat[cache_name])


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
