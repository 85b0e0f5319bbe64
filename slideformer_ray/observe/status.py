"""What `slideformer-ray status` shows of a run: the last records of its metrics.jsonl, as a table.

Every run of this user notes its directory while it goes (`RunNote`), so that `status` finds it, in a Ray job or not.
Needs neither torch nor ray. Tested by tests/observe/test_status.py.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from slideformer_ray.config import ConfigError
from slideformer_ray.machine import readable
from slideformer_ray.observe.metrics import Callback

log = logging.getLogger(__name__)

# The end of metrics.jsonl that is read: some hundred records.
_TAIL_BYTES = 1 << 18


class RunNote(Callback):
    """A file of this user's that names the run directory, from the first step to the end of the run."""

    def __init__(self, run_dir: Path):
        self._run_dir, self._path = run_dir, notes_dir() / f"{os.getpid()}.json"

    def on_start(self, total_steps: int, first_step: int) -> None:
        note = {"run_dir": str(self._run_dir), "total_steps": total_steps, "started": time.time()}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.write_text(json.dumps(note) + "\n")
        except OSError as error:  # no reason to end a run
            log.warning("`slideformer-ray status` will not find this run by itself: %s", error)

    def close(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def notes_dir() -> Path:
    return Path(tempfile.gettempdir()) / f"slideformer-ray-{os.getuid()}" / "runs"


def running() -> list[dict[str, Any]]:
    """Notes of the runs that go on, each with its process's id as `pid`. Those of killed ones are removed."""
    found = []
    for path in sorted(notes_dir().glob("*.json")):
        if not Path(f"/proc/{path.stem}").exists():
            path.unlink(missing_ok=True)
            continue
        try:
            found.append(json.loads(path.read_text()) | {"pid": int(path.stem)})
        except (OSError, ValueError):  # it has just ended, or is being written
            continue
    return found


def last_records(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The last record of each kind (step, eval, lanes). Raises ConfigError where there is no metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a run's directory") from None
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the first line, cut, or the last one, being written
            continue
        found[record["kind"]] = record
    return found


def status_table(title: str, records: Mapping[str, Mapping[str, Any]]) -> Table:
    """Figures, a line each; of a mapping, a line a key. The names are those of docs/metrics.md."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(records):
        table.add_row(name, value)
    return table


def _rows(records: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for kind in ("step", "eval", "lanes"):
        record = records.get(kind, {})
        if kind == "step" and record:
            yield "written", f"{max(0.0, time.time() - record['time']):.0f} s ago"
        for name, value in record.items():
            if name in ("kind", "time") or (name == "step" and kind != "step"):
                continue
            if isinstance(value, Mapping):
                yield from ((f"{name} {key}", _shown(name, number)) for key, number in value.items())
            else:
                yield name, _shown(name, value)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") and not isinstance(value, bool):
        return readable(int(value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
