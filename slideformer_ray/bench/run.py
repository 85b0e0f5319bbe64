"""Plans the cases of a benchmark and has each measured in a process of its own. Imports neither torch nor ray.

Tested by tests/bench/test_run.py.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slideformer_ray.bench.case import Case
from slideformer_ray.bench.result import Failure, Outcome, from_line
from slideformer_ray.bench.worker import WRONG_INPUT
from slideformer_ray.config import ConfigError

# A worker that was told to end gives back Ray's node and pinned memory first.
_GRACE_SECONDS = 60.0
_LAST_WORDS = 20  # lines


@dataclass(frozen=True)
class Benchmark:
    """What `slideformer-ray bench` was asked for."""

    cases: Sequence[Case]  # of the window
    compare_resident: bool = False
    time_limit: float | None = None  # seconds after which nothing more is begun
    debug: bool = False

    def run(self, on_outcome: Callable[[Outcome], None], on_line: Callable[[str], None]) -> list[Outcome]:
        """Measure everything, the resident model first. A case that cannot be measured is a Failure among the others.

        Raises ConfigError when every case of the window is refused.
        """
        begin, longest = time.monotonic(), 0.0
        outcomes: list[Outcome] = []
        for job in self._jobs():
            now = time.monotonic()
            if self.time_limit is not None and now - begin + longest > self.time_limit:
                found = job.failures(f"not begun: it might not end within {self.time_limit:g} s")
            else:
                on_line(f"measuring {job.cases[0].system}: {', '.join(case.label for case in job.cases)}")
                found = job.run(self.debug)
                longest = max(longest, time.monotonic() - now)
            for outcome in found:
                outcomes.append(outcome)
                on_outcome(outcome)
        failed = [outcome for outcome in outcomes if isinstance(outcome, Failure) and outcome.case.system == "window"]
        if len(failed) == len(self.cases) and not any(failure.crashed for failure in failed):
            raise ConfigError(failed[0].reason)
        return outcomes

    def _jobs(self) -> Iterator[_Job]:
        if self.compare_resident:
            # Of cases that differ in the window's settings alone the batch is the same.
            by_rows = {case.rows: case for case in reversed(self.cases)}
            yield _Job([_resident(by_rows[rows]) for rows in sorted(by_rows)], larger=True)
        yield from (_Job([case]) for case in self.cases)


def _resident(case: Case) -> Case:
    return dataclasses.replace(case, system="resident", label=f"{case.rows} rows", trace_path=None)


@dataclass(frozen=True)
class _Job:
    """Cases that one process measures."""

    cases: Sequence[Case]
    larger: bool = False  # the resident model: also larger batches, while they get faster

    def run(self, debug: bool) -> list[Outcome]:
        """Outcomes in order; what the process did not come to is a Failure with its last words."""
        with tempfile.TemporaryDirectory(prefix="slideformer-ray-bench-") as folder:
            path = Path(folder) / "outcomes.jsonl"
            path.touch()
            cases = [case.record() for case in self.cases]
            request = {"cases": cases, "outcomes": str(path), "larger": self.larger, "debug": debug}
            code, words = _run_worker(request, debug)
            told = [from_line(line) for line in path.read_text().splitlines()]
        if code == 0:
            return told
        missing = _Job(self.cases[len(told) :])
        return told + missing.failures(words or f"its process ended with code {code}", crashed=code != WRONG_INPUT)

    def failures(self, reason: str, crashed: bool = False) -> list[Outcome]:
        return [Failure(case, reason, crashed) for case in self.cases]


def _run_worker(request: dict[str, Any], debug: bool) -> tuple[int, str]:
    """(exit code, its last words). With `debug` its stderr is this one's."""
    command = [sys.executable, "-m", "slideformer_ray.bench.worker"]
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=None if debug else words, stdout=subprocess.DEVNULL, text=True
        )
        try:
            process.communicate(json.dumps(request))
        except BaseException:
            process.terminate()
            process.wait(_GRACE_SECONDS)
            raise
        words.seek(0)
        lines = [line.rstrip() for line in words if line.strip()]
    return process.returncode, "\n".join(lines[-_LAST_WORDS:])
