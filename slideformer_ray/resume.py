"""What a run continues from, and whether its config may: the checks before anything is started.

Which settings may change is `RULES`, which docs/checkpoints.md shows as a table. Tested by tests/test_resume.py.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slideformer_ray.actors.slice_files import INDEX_NAME, DamagedCheckpoint, SavedTensors, remedy
from slideformer_ray.checkpoint import COMPLETE, complete_checkpoints
from slideformer_ray.checkpoint_layout import state_dtypes
from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.data.chat import EncodedRow
from slideformer_ray.model.spec import ModelSpec

log = logging.getLogger(__name__)

Rule = Literal["free", "warns", "refused"]

# A section's name stands for those of its fields that are not named. What is free changes no bit, or only the order in
# which sums are made; what warns changes the training from here on; what is refused would train other rows, or
# parameters without their states.
RULES: dict[str, Rule] = {
    "run_dir": "free",
    "model.path": "free",
    "model.random_init": "free",
    "model.frozen": "refused",
    "data.train": "free",  # the rows themselves are compared
    "data.eval": "warns",
    "data.eval_rows": "refused",
    "data.pad_to_multiple": "free",
    "data": "refused",
    "optimizer": "warns",
    "training.rows_per_step": "refused",
    "training.precision": "refused",
    "training.seed": "refused",
    "training.steps": "warns",
    "training.epochs": "warns",
    "training": "free",
    "budget": "free",
    "placement": "free",
    "checkpoint": "free",
    "observe": "free",
    "debug": "free",
}


def rule_of(section: str, field: str | None = None) -> Rule:
    """The rule of a setting. One in a section that no rule names is refused: nobody has thought about it."""
    name = section if field is None else f"{section}.{field}"
    return RULES.get(name, RULES.get(section, "refused"))


@dataclass(frozen=True)
class Resumed:
    """A complete checkpoint that a run continues."""

    path: Path
    steps_done: int
    adam_step: int
    training: dict[str, Any]  # training.json


def find_source(config: RunConfig) -> Path | None:
    """The checkpoint to continue from; None: a run from the start. Raises ConfigError.

    A run directory has one history: a run goes on from its newest checkpoint, or finds none.
    """
    resume, complete = config.checkpoint.resume, complete_checkpoints(config.run_dir)
    newest = complete[-1][1] if complete else None
    if resume == "auto":
        return newest
    if resume == "none":
        if newest is not None:
            raise ConfigError(
                f"run_dir: {config.run_dir} holds checkpoints of an earlier run, the newest {newest.name}; set "
                "checkpoint.resume=auto to continue it, give another run_dir, or remove "
                f"{config.run_dir / 'checkpoints'}"
            )
        return None
    if not resume.is_dir():
        raise ConfigError(f"checkpoint.resume: {resume} is no directory; give auto, none or RUN/checkpoints/step-N")
    if not (resume / COMPLETE).is_file():
        raise ConfigError(
            f"checkpoint.resume: {resume} has no {COMPLETE} marker, so its save did not end; give another step-N "
            "directory"
        )
    if newest is not None and newest.resolve() != resume.resolve():
        raise ConfigError(
            f"checkpoint.resume: {resume}: run_dir {config.run_dir} holds {newest.name}, which a run from there would "
            "mix with its own; give another run_dir, or remove the later ones"
        )
    return resume


def read_checkpoint(path: Path, config: RunConfig) -> Resumed:
    """What the checkpoint says of itself, with the settings compared. Raises ConfigError and DamagedCheckpoint.

    Reads the small files; the tensors' files are only looked at by size. Warnings go to the log.
    """
    index = path / INDEX_NAME
    try:
        mark = json.loads((path / COMPLETE).read_text())
        steps, crc = int(mark["steps_done"]), int(mark["index_crc32"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(
            f"{path / COMPLETE}: cannot be read ({type(error).__name__}: {error}); {remedy(path)}"
        ) from None
    try:
        content = index.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{index}: {error.strerror}; {remedy(path)}") from None
    if zlib.crc32(content) != crc:
        raise DamagedCheckpoint(f"{index}: is not what was saved; {remedy(path)}")
    SavedTensors(path)  # compares all other small files, and every header
    training = json.loads((path / "training.json").read_text())
    assert training["steps_done"] == steps
    _compare(training["config"], config, path)
    return Resumed(path, steps, int(training["adam_step"]), training)


def check_tensors(path: Path, spec: ModelSpec, config: RunConfig) -> None:
    """Names, shapes and dtypes are those of the run's model. Raises DamagedCheckpoint."""
    SavedTensors(path).check(spec, state_dtypes(config.training.precision))


def _compare(saved: dict[str, Any], config: RunConfig, path: Path) -> None:
    wrong = []
    for section, field, found, wanted in _changed(config.model_dump(mode="json"), saved):
        rule, name = rule_of(section, field), section if field is None else f"{section}.{field}"
        if rule == "warns":
            log.warning("%s is %s, was %s when %s was saved: training goes on with it", name, found, wanted, path)
        elif rule == "refused":
            wrong.append(
                f"checkpoint.resume: {path} was saved with {name} {wanted}, this config has {found}; set it to {wanted}"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))


def _changed(now: dict[str, Any], saved: dict[str, Any]) -> Iterator[tuple[str, str | None, Any, Any]]:
    """(section, field, value now, value then) of every setting that differs; one that is new since then does not."""
    for section, values in now.items():
        then = saved.get(section)
        if isinstance(values, dict):
            for field, value in values.items():
                if isinstance(then, dict) and then.get(field, value) != value:
                    yield section, field, value, then[field]
        elif then != values:
            yield section, None, values, then


def rows_digest(rows: Iterable[EncodedRow]) -> str:
    """Of the training rows as they are trained on: their tokens, which of them are supervised, and their order."""
    digest, count = 0, 0
    for row in rows:
        digest = zlib.crc32(row.ids.tobytes(), digest)
        digest = zlib.crc32(row.supervised.tobytes(), digest)
        count += 1
    return f"{count} rows, crc32 {digest:08x}"
