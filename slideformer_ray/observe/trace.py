"""What each lane did and when: spans on one clock for all processes, as a Chrome trace and as a Timeline to judge.

Every process reads CLOCK_MONOTONIC, which is one clock for the whole machine. GPU lanes record CUDA events around their
operations and are put on that clock by one event whose host time is known. Imports neither torch nor ray. Tested by
tests/observe/test_trace.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slideformer_ray.schedule import GPU_LANES, Op, StepPlan, describe
from slideformer_ray.simulator import PlannedOp, PlanOrder, Run, Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one step. Seconds of CLOCK_MONOTONIC."""

    step: int
    lane: str
    kind: str
    block: int
    micro_batch: int
    start: float
    end: float

    @classmethod
    def of(cls, step: int, op: Op, start: float, end: float) -> Span:
        return cls(step, op.lane, op.kind, op.block, op.micro_batch, start, end)

    @property
    def name(self) -> str:
        return describe(self.kind, self.block, self.micro_batch)


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """A file that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process a tier, a track a lane."""
    spans = sorted(spans, key=lambda span: span.start)
    begin = spans[0].start if spans else 0.0
    lanes = list(dict.fromkeys([*GPU_LANES, *sorted({span.lane for span in spans})]))
    tier = {lane: 0 if lane in GPU_LANES else 1 for lane in lanes}
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in enumerate(("GPU actor", "optimizer actors"))
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": tier[lane], "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": tier[span.lane],
            "tid": lanes.index(span.lane),
            "ts": (span.start - begin) * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"step": span.step},
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def measured_timeline(plans: Sequence[StepPlan], spans: Iterable[Span]) -> Timeline:
    """The spans of consecutive steps as the simulator's Timeline, so that one set of questions serves both.

    What let an operation start is, of everything that it had to wait for, what ended last. Raises KeyError when a span
    is missing.
    """
    spans = list(spans)
    steps = sorted({span.step for span in spans})
    found = {(steps.index(s.step), s.lane, s.kind, s.block, s.micro_batch, i): s for s, i in _numbered(spans)}
    begin = min(span.start for span in spans)

    span_of: dict[PlannedOp, Span] = {}
    waits_for: dict[PlannedOp, list[PlannedOp]] = {}
    seen: dict[tuple, int] = {}
    for node in PlanOrder(plans).nodes:
        # The edge between two steps is no operation: who waits for it waits for what it waits for.
        waits_for[node] = [
            real for earlier in node.after for real in (waits_for[earlier] if earlier.is_edge else [earlier])
        ]
        if not node.is_edge:
            key = (node.step, node.lane, node.op.kind, node.op.block, node.op.micro_batch)
            seen[key] = seen.get(key, -1) + 1
            span_of[node] = found[(*key, seen[key])]

    run_of: dict[PlannedOp, Run] = {}
    last_of_lane: dict[str, Run] = {}
    for node in sorted(span_of, key=lambda node: span_of[node].start):
        span = span_of[node]
        before = [run_of[earlier] for earlier in waits_for[node] if earlier in run_of]
        before += [last_of_lane[node.lane]] if node.lane in last_of_lane else []
        after = max(before, key=lambda run: run.end, default=None)
        run = Run(node.lane, node.op, node.step, span.start - begin, span.end - begin, after)
        run_of[node] = last_of_lane[node.lane] = run
    return Timeline(list(run_of.values()))


def _numbered(spans: Sequence[Span]) -> Iterable[tuple[Span, int]]:
    """An operation may come twice in a step (an activation fetched again): number the occurrences in order of time."""
    seen: dict[tuple, int] = {}
    for span in sorted(spans, key=lambda span: span.start):
        key = (span.step, span.lane, span.kind, span.block, span.micro_batch)
        seen[key] = seen.get(key, -1) + 1
        yield span, seen[key]
