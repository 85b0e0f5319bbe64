"""What one line of the benchmark's table measures, and the run configuration that it stands for.

A case travels as JSON to the process that measures it. Tested by tests/bench/test_case.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slideformer_ray.config import ConfigError, RunConfig

System = Literal["window", "resident"]


@dataclass(frozen=True)
class Case:
    """One measurement, in a process of its own."""

    label: str
    shape: str  # a name, for the table
    model_dir: str  # a directory with config.json
    rows: int  # of a step
    seq_len: int
    system: System = "window"
    settings: tuple[str, ...] = ()  # `section.key=value`, over the benchmark's own
    warmup: int = 2  # steps before the timed ones: kernels are compiled, pages touched
    steps: int = 7  # timed
    traced: int = 3  # steps after those, whose lanes are recorded
    local: bool = False  # the tiers as threads of one process, without Ray
    trace_path: str | None = None  # window only: where the traced steps' lanes are written

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps + self.traced

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Case:
        return cls(**{**record, "settings": tuple(record["settings"])})

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def config(self, run_dir: Path) -> RunConfig:
        """The run that the case stands for. Nothing is read from, or written to, `run_dir`. Raises ConfigError."""
        base = RunConfig.from_dict(
            {
                "run_dir": run_dir,
                "model": {"path": self.model_dir, "random_init": True},
                "data": {"train": [run_dir / "none.jsonl"], "seq_len": self.seq_len},
                "training": {"steps": self.total_steps, "rows_per_step": self.rows},
                # Random weights on random ids: a rate that moves them and does not blow them up.
                "optimizer": {"learning_rate": 1e-5, "schedule": "constant", "max_grad_norm": None},
            }
        )
        return base.changed(self.settings)


def window_cases(
    shape: str,
    model_dir: Path,
    rows: Sequence[int],
    seq_len: int,
    micro_batch_rows: int | None,
    settings: Sequence[str],
    out: Path | None = None,
    **more: Any,
) -> list[Case]:
    """A case for each number of rows, checked as far as a config is without its model. Raises ConfigError.

    out: where the traced steps of each are written, as trace-ROWS.json.
    """
    cases = []
    for count in rows:
        cut = [] if micro_batch_rows is None else [f"training.micro_batch_rows={min(micro_batch_rows, count)}"]
        label = f"{count} rows"
        more["trace_path"] = str(out.absolute() / f"trace-{count}.json") if out is not None else None
        cases.append(Case(label, shape, str(model_dir), count, seq_len, settings=(*cut, *settings), **more))
        cases[-1].config(Path("unused"))
    return cases


def model_directory(shape: str, scratch: Path) -> tuple[str, Path]:
    """(name, directory with config.json) of a named shape, a config.json or a model directory. Raises ConfigError."""
    from slideformer_ray.model.shapes import SHAPES, write_shape

    if shape in SHAPES:
        return shape, write_shape(shape, scratch / shape)
    path = Path(shape).expanduser().absolute()
    directory = path.parent if path.name == "config.json" else path
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"shape {shape!r}: no such name and no config.json there; give a config.json, a directory that holds one, "
            f"or one of {', '.join(SHAPES)}"
        )
    return directory.name, directory
