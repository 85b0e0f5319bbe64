"""What the machine has for a run: GPU, RAM, cores; or a machine that `plan` is asked to pretend.

Reads /proc, /sys and, where there is a GPU, CUDA. Tested by tests/test_budget.py.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from slideformer_ray.memory.host_limits import GIB, HostLimits, read_host_limits


@dataclass(frozen=True)
class Machine:
    """What there is to use. The GPU's fields are None without one."""

    limits: HostLimits
    physical_cores: int
    gpu_name: str | None = None
    gpu_bytes: int | None = None
    gpu_free_bytes: int | None = None

    @classmethod
    def read(cls, device: str = "auto") -> Machine:
        import torch

        name = total = free = None
        if device != "cpu" and torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            free, total = torch.cuda.mem_get_info(0)
        return cls(read_host_limits(), physical_cores(), name, total, free)

    def like(self, *, gpu_gib: float | None = None, ram_gib: float | None = None, cores: int | None = None) -> Machine:
        """Another machine: with so much free GPU memory, so much free RAM, so many cores. None leaves this one's.

        /dev/shm of another RAM is half of it, which is Linux's default, and no cgroup limits it.
        """
        machine = self
        if ram_gib is not None:
            ram = int(ram_gib * GIB)
            machine = replace(machine, limits=HostLimits(ram, ram, None, 0, ram // 2, ram // 2))
        if gpu_gib is not None:
            gpu = int(gpu_gib * GIB)
            machine = replace(machine, gpu_name=f"a GPU with {gpu_gib:g} GiB free", gpu_bytes=gpu, gpu_free_bytes=gpu)
        return replace(machine, physical_cores=cores) if cores is not None else machine


def device_name(machine: Machine, device: str) -> str:
    """What a measurement was made on. device: "cuda" or "cpu"."""
    return f"{machine.gpu_name if device == 'cuda' else 'CPU'}, {machine.physical_cores} cores"


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                siblings.add(file.read().strip())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def readable(nbytes: int) -> str:
    """A size in its largest fitting unit: 1.30 GiB, 12.50 MiB, 4.00 KiB, 0 bytes."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def existing_part(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def disk_free(path: Path) -> int:
    """Free bytes of the file system on which `path` is, or will be."""
    return shutil.disk_usage(existing_part(path)).free
