"""Two short runs of the quickstart model, one through Ray and one as threads, with everything that tests ask of them.

Starting Ray takes most of the time of such a test, so the runs are done once a test session and their records shared.
Not a test itself: pyproject.toml puts this folder on the path.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch

from slideformer_ray.actors.process import ActorReport
from slideformer_ray.checkpoint import checkpoint_dir
from slideformer_ray.config import RunConfig
from slideformer_ray.data.quickstart import quickstart_data, quickstart_model_dir
from slideformer_ray.memory.plasma_store import StoreStats, read_store_stats
from slideformer_ray.observe.metrics import Callback, EvalMetrics, StepMetrics
from slideformer_ray.trainer import Summary, Trainer

NUM_STEPS = 100
SETTLED_STEP = 3  # from here on nothing may grow
NUM_ACTORS, THREADS = 2, 2


def quickstart_rows(path: Path, count: int) -> Path:
    """The first rows of the quickstart's data."""
    with quickstart_data().open() as file:
        path.write_text("".join(line for line, _ in zip(file, range(count), strict=False)))
    return path


def small_config(directory: Path, *, num_rows: int = 6, **changes) -> RunConfig:
    """The quickstart model in bf16 with clipping, 4 rows a step in two micro-batches. `changes`: section__key=value."""
    values: dict = {
        "run_dir": directory / "run",
        "model": {"path": quickstart_model_dir()},
        "data": {
            "train": [quickstart_rows(directory / "rows.jsonl", num_rows)],
            "eval_rows": 2,
            "seq_len": 64,
            "pad_to_multiple": 16,
        },
        "optimizer": {"learning_rate": 5e-3, "weight_decay": 0.1, "warmup_steps": 2},
        "training": {"steps": 10, "rows_per_step": 4, "micro_batch_rows": 2},
        "placement": {"device": "cpu", "num_optimizer_actors": NUM_ACTORS, "threads_per_optimizer_actor": THREADS},
        "debug": {"wait_timeout_s": 60},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return RunConfig.from_dict(values)


def run_in_threads(config: RunConfig) -> Record:
    """A whole run without Ray, and what was seen of it."""
    record = Record()
    record.summary = Trainer(config, callbacks=[record], local=True).train()
    return record


class RecordingTrainer(Trainer):
    """Keeps a hold of its tiers, for callbacks that look into them."""

    tiers = None

    def _load(self, tiers):
        self.tiers = tiers
        return super()._load(tiers)


@dataclass
class Record(Callback):
    """What was seen of a run. `memory[step][process]`: resident bytes after the step."""

    summary: Summary | None = None
    steps: list[StepMetrics] = field(default_factory=list)
    evals: list[EvalMetrics] = field(default_factory=list)
    reports: list[ActorReport] = field(default_factory=list)
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    store: dict[int, StoreStats] = field(default_factory=dict)
    num_puts: int = 0
    checkpoint: Path | None = None
    shm_left: set[str] = field(default_factory=set)
    pids_left: list[int] = field(default_factory=list)
    mappings_left: list[str] = field(default_factory=list)

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.evals.append(metrics)


class _RayRecord(Record):
    """Also reads the store and every process's memory, and counts calls of ray.put from the first step on."""

    def follow(self, trainer: RecordingTrainer) -> None:
        self._trainer = trainer

    def on_start(self, total_steps: int, first_step: int) -> None:
        self._put, ray.put = ray.put, self._count_put
        self.reports = self._trainer.tiers.reports()

    def _count_put(self, *args, **kwargs):
        self.num_puts += 1
        return self._put(*args, **kwargs)

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        if metrics.step == SETTLED_STEP or metrics.step % 10 == 9:
            self.store[metrics.step] = read_store_stats()
            pids = {"driver": os.getpid(), **{report.name: report.pid for report in self.reports}}
            self.memory[metrics.step] = {name: resident_bytes(pid) for name, pid in pids.items()}

    def on_end(self, summary: Summary) -> None:
        ray.put = self._put


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="recorded_run.")  # removed when the test session ends


def _record(record: Record, name: str) -> Record:
    directory = Path(_directory().name) / name
    assert not directory.exists(), "this run has failed before: see the first test that asked for it"
    directory.mkdir()
    local = not isinstance(record, _RayRecord)
    config = small_config(directory, training__steps=NUM_STEPS, checkpoint__save_every=NUM_STEPS)
    trainer = RecordingTrainer(config, callbacks=[record], local=local)
    if isinstance(record, _RayRecord):
        record.follow(trainer)
    record.summary = trainer.train()
    record.checkpoint = checkpoint_dir(config.run_dir, NUM_STEPS)
    return record


@functools.cache
def local_run() -> Record:
    """The tiers as threads of this process, with as many threads a matrix product as the GPU actor takes on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(ray_run().reports[0].threads)
    try:
        return _record(Record(), "local")
    finally:
        torch.set_num_threads(before)


@functools.cache
def ray_run() -> Record:
    """The tiers as Ray actors of a private node, which has ended when this returns."""
    shm_before = set(os.listdir("/dev/shm"))
    record = _record(_RayRecord(), "ray")
    pids = [report.pid for report in record.reports]
    record.pids_left = wait_until_gone(pids, 10)
    record.mappings_left = [line for line in Path("/proc/self/maps").read_text().splitlines() if "plasma" in line]
    record.shm_left = set(os.listdir("/dev/shm")) - shm_before
    return record


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Those of the processes that are still there after that time; zombies are gone."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
