"""Checkpoints: RUN/checkpoints/step-N, written beside, made durable, renamed, then marked complete.

    model/           an ordinary Hugging Face directory (the parameters that the GPU reads)
    state/           lo, exp_avg, exp_avg_sq in their own dtypes, keyed by parameter name and element (state_files.py)
    training.json    steps done, Adam's step, the config, versions
    COMPLETE         written last: a directory without it is not a checkpoint

The tiers write their own parts in parallel; this file owns the order in which things become durable. Tested by
tests/test_checkpoint.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ray
import torch
import transformers

import slideformer_ray
from slideformer_ray.actors.state_files import StateReader
from slideformer_ray.config import GIB, ConfigError, RunConfig
from slideformer_ray.durable import fsync_path
from slideformer_ray.tiers import Tiers

COMPLETE = "COMPLETE"

# What a resumed run must have in common with the saved one: with another value its next step would train other rows, or
# parameters without states.
_SAME_ON_RESUME = (
    ("training", "precision"),
    ("training", "seed"),
    ("training", "rows_per_step"),
    ("data", "seq_len"),
    ("data", "eval_rows"),
    ("model", "frozen"),
)


class CheckpointDoesNotFit(RuntimeError):
    """The disk has no room for the checkpoint; nothing was written."""


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def save_checkpoint(tiers: Tiers, config: RunConfig, steps_done: int, applied_steps: int, train_rows: int) -> Path:
    """Write the state after `steps_done` steps; no step may be running. Returns the complete checkpoint."""
    final = checkpoint_dir(config.run_dir, steps_done)
    final.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(final.parent).free
    if free < tiers.plan.disk_bytes:
        raise CheckpointDoesNotFit(
            f"{final.parent}: a checkpoint needs {tiers.plan.disk_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB are "
            "free; free space or set checkpoint.save_every to 0"
        )
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "state").mkdir(parents=True)
    tiers.save_model(temporary / "model")
    tiers.save_states(temporary / "state")
    _write_json(
        temporary / "training.json",
        {
            "steps_done": steps_done,
            "adam_step": applied_steps,
            "train_rows": train_rows,
            "config": config.model_dump(mode="json"),
            "versions": {
                "slideformer_ray": slideformer_ray.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "ray": ray.__version__,
            },
        },
    )
    for path in (temporary / "state", temporary):
        fsync_path(path)
    if final.exists():
        # First: a removal that is cut short must not leave a marked checkpoint.
        (final / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(final)
    temporary.rename(final)
    _write_json(final / COMPLETE, {"steps_done": steps_done})
    for path in (final, final.parent):
        fsync_path(path)
    return final


def check_checkpoint(path: Path, config: RunConfig) -> dict[str, Any]:
    """training.json of a complete checkpoint that this config can continue. Raises ConfigError, or StateError.

    Opens the headers of all its files, so that a torn one is found before anything is started.
    """
    where = "checkpoint.resume"
    if not path.is_dir():
        raise ConfigError(f"{where}: {path} is no directory; give RUN/checkpoints/step-N")
    if not (path / COMPLETE).exists():
        raise ConfigError(
            f"{where}: {path} has no {COMPLETE} marker, so its save did not end; give another step-N directory"
        )
    try:
        state = json.loads((path / "training.json").read_text())
        saved = {(section, key): state["config"][section][key] for section, key in _SAME_ON_RESUME}
        int(state["steps_done"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {path / 'training.json'} is torn ({type(error).__name__}: {error}); "
            "give another step-N directory"
        ) from None
    now = config.model_dump(mode="json")
    for (section, key), value in saved.items():
        if now[section][key] != value:
            raise ConfigError(
                f"{where}: {path} was saved with {section}.{key} {value}, this config has {now[section][key]}; "
                f"set it to {value}"
            )
    StateReader(path / "state")
    return state


def load_checkpoint(tiers: Tiers, path: Path) -> None:
    """Fill parameters, masters and Adam states, Adam's own step included."""
    tiers.load_weights(path / "model")
    tiers.load_states(path / "state")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
    fsync_path(path)
