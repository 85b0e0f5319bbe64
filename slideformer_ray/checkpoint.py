"""Checkpoints: RUN/checkpoints/step-N, written beside, made durable, renamed, then marked complete.

    model/           an ordinary Hugging Face directory (the parameters that the GPU reads)
    state/           exp_avg, exp_avg_sq and lo, whole tensors by parameter name (checkpoint_layout.py)
    training.json    steps done, Adam's step, the position in the data, the config, versions
    index.json       every file's checksums
    COMPLETE         written last: a directory without it is not a checkpoint

The driver lays out the files and owns the order in which things become durable; the optimizer actors write their slices
straight into the files, in parallel (actors/slice_files.py). Tested by tests/test_checkpoint.py and
tests/test_checkpoint_crashes.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slideformer_ray.actors.block_saver import SaveReport
from slideformer_ray.actors.slice_files import INDEX_NAME, Range
from slideformer_ray.checkpoint_layout import ITEM_BYTES, PARAM, CheckpointLayout, model_index, state_dtypes
from slideformer_ray.config import GIB, RunConfig
from slideformer_ray.durable import create_allocated, fsync_path, replace_durably, write_durably
from slideformer_ray.machine import readable
from slideformer_ray.model.spec import ModelSpec
from slideformer_ray.model.weights import INDEX_NAME as MODEL_INDEX_NAME
from slideformer_ray.model.weights import companion_files
from slideformer_ray.tiers import Tiers

log = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"\.step-\d+\.\w+\.tmp")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the complete ones are as they were."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a save took; for the log and for benchmarks."""

    path: Path
    steps_done: int
    nbytes: int
    seconds: float
    write_seconds: float  # of the slowest actor, before files are made durable
    update_waited_seconds: float  # how long the slowest actor's updates were held up
    direct: bool  # past the page cache


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def complete_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of those that are complete, the newest last."""
    found = []
    for path in _entries(run_dir):
        match = _NAME.fullmatch(path.name)
        if match and (path / COMPLETE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def remove_remains(run_dir: Path) -> list[Path]:
    """Remove what saves that were cut short have left; only while no other run lives in `run_dir`."""
    removed = []
    for path in _entries(run_dir):
        unmarked = _NAME.fullmatch(path.name) and (path / INDEX_NAME).is_file() and not (path / COMPLETE).exists()
        if _TEMPORARY.fullmatch(path.name) or unmarked:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _entries(run_dir: Path) -> list[Path]:
    directory = run_dir / "checkpoints"
    return sorted(directory.iterdir()) if directory.is_dir() else []


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time: `begin`, then `poll` between steps or `finish`."""

    def __init__(self, config: RunConfig, spec: ModelSpec, tiers: Tiers):
        self.config, self.spec, self.tiers = config, spec, tiers
        precision = tiers.layout.precision
        self.layout = CheckpointLayout.of(spec, precision, int(config.checkpoint.shard_gib * GIB))
        self._dtype = state_dtypes(precision)[PARAM]
        self._save: _Save | None = None

    @property
    def steps_done(self) -> int | None:
        """Of the save that is under way."""
        return self._save.steps_done if self._save is not None else None

    def begin(self, steps_done: int) -> None:
        """Save the state after the steps submitted so far; returns as soon as files are laid out. Raises SaveFailed."""
        assert self._save is None, "one save at a time"
        final = checkpoint_dir(self.config.run_dir, steps_done)
        beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
        started = time.perf_counter()
        try:
            self._check_space(final.parent)
            for directory in (beside / "model", beside / "state"):
                directory.mkdir(parents=True)
            for file in self.layout.files:
                create_allocated(beside / file.name, file.size, file.header)
        except OSError as error:
            self._give_up(beside, error)
        begun = self.tiers.begin_save(beside, self.layout.places)
        waiting = set(range(self.tiers.layout.num_optimizer_actors))
        self._save = _Save(steps_done, beside, final, started, begun, waiting, [])

    def poll(self, training: dict[str, Any]) -> SavedCheckpoint | None:
        """Complete the save if every actor has written its part. Raises SaveFailed."""
        save = self._save
        if save is None:
            return None
        for actor in sorted(save.waiting):
            report = self.tiers.poll_save(actor)
            if report is not None:
                save.reports.append(report)
                save.waiting.discard(actor)
        return None if save.waiting else self._complete(training)

    def finish(self, training: dict[str, Any]) -> SavedCheckpoint | None:
        """Wait for the save that is under way, if there is one. Raises SaveFailed."""
        save = self._save
        if save is None:
            return None
        save.reports += self.tiers.wait_saves(save.begun, sorted(save.waiting))
        save.waiting.clear()
        return self._complete(training)

    def _complete(self, training: dict[str, Any]) -> SavedCheckpoint:
        """Everything after the actors' part: small files, fsync, rename, mark, then the old checkpoints."""
        save, self._save = self._save, None
        assert save is not None
        try:
            for report in save.reports:
                if report.error is not None:
                    raise report.error
            self._make_durable(save, training)
        except OSError as error:
            self._give_up(save.beside, error)
        self._remove_old(save.steps_done)
        return SavedCheckpoint(
            save.final,
            save.steps_done,
            self.layout.nbytes,
            time.perf_counter() - save.started,
            max(report.seconds for report in save.reports),
            max(report.update_waited_seconds for report in save.reports),
            all(report.direct for report in save.reports),
        )

    def _make_durable(self, save: _Save, training: dict[str, Any]) -> None:
        adam_steps = {report.adam_step for report in save.reports}
        assert len(adam_steps) == 1, f"actors disagree on Adam's step: {adam_steps}"
        training = {"steps_done": save.steps_done, "adam_step": adam_steps.pop(), **training}
        small = {f"model/{name}": data for name, data in companion_files(self.config.model.path, self._dtype).items()}
        small["training.json"] = _json(training)
        if len(set(self.layout.model_index.values())) > 1:
            params = [param for block in self.spec.blocks for param in block.params]
            index = model_index(params, ITEM_BYTES[self._dtype], self.layout.model_index)
            small[f"model/{MODEL_INDEX_NAME}"] = index
        for name, data in small.items():
            write_durably(save.beside / name, data)
        files = {name: [(0, len(data), zlib.crc32(data))] for name, data in small.items()} | self._ranges(save.reports)
        index = _json({"format": 1, "files": files}, indent=None)
        write_durably(save.beside / INDEX_NAME, index)
        for file in self.layout.files:
            fsync_path(save.beside / file.name)
        for directory in (save.beside / "model", save.beside / "state", save.beside):
            fsync_path(directory)
        if save.final.exists():  # no complete one: a run goes on from the newest
            shutil.rmtree(save.final)
        os.rename(save.beside, save.final)
        fsync_path(save.final.parent)
        mark = {"steps_done": save.steps_done, "index_crc32": zlib.crc32(index)}
        replace_durably(save.final / COMPLETE, _json(mark))

    def _ranges(self, reports: Sequence[SaveReport]) -> dict[str, list[Range]]:
        """All actors' ranges in order; they cover every file."""
        merged = {}
        for file in self.layout.files:
            head = (0, len(file.header), zlib.crc32(file.header))
            ranges = sorted([head, *(r for report in reports for r in report.ranges.get(file.name, ()))])
            ends = [0, *(stop for _, stop, _ in ranges)]
            assert [start for start, _, _ in ranges] == ends[:-1] and ends[-1] == file.size, f"{file.name}: not covered"
            merged[file.name] = ranges
        return merged

    def _check_space(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        free, need = shutil.disk_usage(directory).free, self.layout.nbytes
        if free < need:
            raise SaveFailed(
                f"{directory}: a checkpoint needs {readable(need)} and {readable(free)} are free; free space, lower "
                "checkpoint.keep or save less often"
            )

    def _give_up(self, beside: Path, error: OSError) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        raise SaveFailed(f"{error.filename or beside}: {error.strerror or error}") from error

    def _remove_old(self, newest: int) -> None:
        """All but the newest `checkpoint.keep`: now that the new one is complete."""
        keep = self.config.checkpoint.keep
        for step, path in complete_checkpoints(self.config.run_dir)[: -keep if keep else None] if keep else ():
            assert step != newest
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                os.rename(path, gone)  # at once no checkpoint any more, however far the removal comes
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("%s: an old checkpoint could not be removed: %s", path, error.strerror)


@dataclass
class _Save:
    steps_done: int
    beside: Path
    final: Path
    started: float
    begun: list[Any]
    waiting: set[int]  # actors that have not reported
    reports: list[SaveReport]


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent) + "\n").encode()
