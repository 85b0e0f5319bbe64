"""Runs in processes of their own, to be killed or measured: what no thread of the test's own process can stand for.

Not a test itself: pyproject.toml puts this folder on the path. A server that has imported everything forks each run, so
that starting one takes a tenth of a second.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from recorded_run import Record, run_in_threads

from slideformer_ray.config import RunConfig
from slideformer_ray.observe.metrics import StepMetrics
from slideformer_ray.trainer import Trainer

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["killable"])


def start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """function(*args) in a process of its own; `kill()` is SIGKILL."""
    process = _context.Process(target=function, args=args)
    process.start()
    return process


def train(config: RunConfig) -> None:
    """The whole run, its tiers as threads of that process."""
    torch.set_num_threads(1)
    run_in_threads(config)


def train_and_note_memory(config: RunConfig, note: Path) -> None:
    """The same; writes to `note` the most bytes that were resident before the first step's end, and until the end."""
    torch.set_num_threads(1)
    peaks = []

    class Notes(Record):
        def on_step(self, metrics: StepMetrics) -> None:
            peaks.append(peak_resident_bytes())

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    Trainer(config, callbacks=[Notes()], local=True).train()
    note.write_text(json.dumps({"first step": peaks[0], "end": peak_resident_bytes()}))


def peak_resident_bytes() -> int:
    """VmHWM of this process."""
    return int(re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024
