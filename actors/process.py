"""What every actor does first in its process, and what it reports of itself. Tested by tests/actors/test_process.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig

from slideformer_ray.actors.lanes import SCALARS
from slideformer_ray.budget import RunLayout
from slideformer_ray.config import RunConfig
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.shared_buffer import BufferHandle, SharedBuffer
from slideformer_ray.model.spec import ModelSpec


@dataclass(frozen=True)
class ActorSetup:
    """What every actor is made from."""

    config: RunConfig
    hf_config: PretrainedConfig
    spec: ModelSpec
    layout: RunLayout
    handles: tuple[BufferHandle, ...]
    total_steps: int  # of the run; the learning rate's schedule ends there


@dataclass(frozen=True)
class ActorReport:
    name: str
    pid: int
    threads: int
    niceness: int
    cpus: int  # that the process may run on
    private_bytes: int  # resident memory that no other process shares
    detail: str

    @classmethod
    def of(cls, name: str, detail: str) -> ActorReport:
        return cls(
            name,
            os.getpid(),
            torch.get_num_threads(),
            os.nice(0),
            len(os.sched_getaffinity(0)),
            private_memory(),
            detail,
        )


def prepare_process(threads: int) -> None:
    """Ray starts workers with one OpenMP thread and at nice 15: set both before anything computes.

    Our own node starts workers at nice 0 already; on a given cluster root alone may go back, so a failure is only
    reported (by `ActorReport.niceness`).
    """
    torch.set_num_threads(threads)
    if os.nice(0) > 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except PermissionError:
            pass


def attach_buffers(handles: Sequence[BufferHandle]) -> Mapping[str, SharedBuffer]:
    return {handle.name: SharedBuffer.attach(handle) for handle in handles}


def open_page(setup: ActorSetup, buffers: Mapping[str, SharedBuffer]) -> CounterPage:
    return CounterPage(buffers["control"].numpy(np.uint8), setup.layout.counter_names(), SCALARS)


def private_memory(pid: int | str = "self") -> int:
    """Resident bytes of a process that are not shared memory: its anonymous pages."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
