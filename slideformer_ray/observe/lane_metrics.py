"""What the lanes did in two consecutive steps: busy and exposed seconds, GB/s, the hiding factor, the longest queue.

Every so often two steps in a row are traced; their spans become one `LaneMetrics`, by the questions that
`simulator.Timeline` answers of a simulated run too. Two steps, so that the gap between steps is seen. Tested by
tests/observe/test_lane_metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slideformer_ray.model.spec import ModelSpec, slice_of
from slideformer_ray.observe.trace import Span, measured_timeline
from slideformer_ray.schedule import DOWNLOAD, UPLOAD, Op, build_step
from slideformer_ray.simulator import Timeline

if TYPE_CHECKING:
    from slideformer_ray.actors.lanes import StepInputs
    from slideformer_ray.budget import RunLayout

NUM_STEPS = 2


@dataclass(frozen=True)
class LaneMetrics:
    """Means over two traced steps, the later one being `step`; the table of them is in docs/metrics.md."""

    step: int
    hiding_factor: float | None  # backward over what it can hide; None where nothing has to be hidden
    forward_hiding_factor: float | None  # the same for the forward and the uploads of its layers
    busy_seconds: Mapping[str, float]  # by lane
    gb_per_second: Mapping[str, float]  # by lane that moves bytes, while it was busy
    exposed_seconds: Mapping[str, float]  # idle time of the compute lane, by cause
    update_queue_layers: int  # most gradients that had landed and were not updated yet
    free_gradient_slots: int  # fewest, of those for decoder layers
    gpu_sensors: Mapping[str, float] = field(default_factory=dict)  # utilisation_percent, temperature_celsius


class LaneSampler:
    """Chooses the steps to trace, and turns each pair of them into metrics. `every`: steps between pairs; 0: never."""

    def __init__(self, every: int, spec: ModelSpec, layout: RunLayout):
        self._every, self._spec, self._layout = every, spec, layout
        self._before: tuple[StepInputs, Sequence[Span]] | None = None

    def wants(self, step: int) -> bool:
        """Not the first of a run, in which kernels are compiled."""
        return self._every > 0 and step % self._every in (1, 2)

    def interrupt(self) -> None:
        """Something came between two steps, such as an evaluation: they are no pair."""
        self._before = None

    def add(self, inputs: StepInputs, spans: Sequence[Span], sensors: Mapping[str, float]) -> LaneMetrics | None:
        """A step that has ended, with all actors' spans; none if it was not traced. The second of a pair gives both."""
        before, self._before = self._before, (inputs, spans) if spans else None
        if before is None or not spans:
            return None
        self._before = None
        pair = (before, (inputs, spans))
        plans = [build_step(step.shape) for step, _ in pair]
        timeline = measured_timeline(plans, [span for _, of_step in pair for span in of_step])
        return lane_metrics(timeline, [step for step, _ in pair], self._spec, self._layout, sensors)


def lane_metrics(
    timeline: Timeline,
    steps: Sequence[StepInputs],
    spec: ModelSpec,
    layout: RunLayout,
    sensors: Mapping[str, float],
) -> LaneMetrics:
    count = len(steps)
    busy = {lane: seconds / count for lane, seconds in timeline.busy_seconds.items()}
    moved = dict.fromkeys(busy, 0)
    for run in timeline.runs:
        moved[run.lane] += op_bytes(run.op, spec, layout, steps[run.step])
    queue = longest_queue(timeline)
    return LaneMetrics(
        step=steps[-1].step,
        hiding_factor=_finite(timeline.hiding_factor),
        forward_hiding_factor=_finite(timeline.forward_hiding_factor),
        busy_seconds=busy,
        gb_per_second={lane: moved[lane] / count / busy[lane] / 1e9 for lane in busy if moved[lane] and busy[lane]},
        exposed_seconds={cause: seconds / count for cause, seconds in timeline.exposed_seconds.items()},
        update_queue_layers=queue,
        free_gradient_slots=max(0, layout.gradient_slots - queue),
        gpu_sensors=dict(sensors),
    )


def _finite(factor: float) -> float | None:
    return factor if math.isfinite(factor) else None


def op_bytes(op: Op, spec: ModelSpec, layout: RunLayout, step: StepInputs) -> int:
    """Bytes that an operation moves: over the bus for the GPU's lanes, in and out of host memory for an update.

    An update reads and writes each element's parameter, lo and moments, and reads its gradient. Worked, bf16: (2 + 2 +
    8) x 2 + 2 = 26 bytes. Compute moves nothing that is counted.
    """
    e = layout.element_bytes
    block = spec.blocks[op.block]
    if op.lane == UPLOAD:
        if op.kind == "upload_params":
            return block.numel * e
        if op.kind == "upload_head":
            return (block.numel + (spec.embed.numel if spec.tied else 0)) * e
        if op.kind == "gather_embedding":
            rows, seq = step.micro_batch_shapes[op.micro_batch]
            return rows * seq * spec.hidden_size * e
        return layout.cell_numel * e
    if op.lane == DOWNLOAD:
        return {"download_gradient": block.trainable_numel, "download_activation": layout.cell_numel}.get(
            op.kind, 0
        ) * e
    if op.kind == "update":  # update_rows does a part of the same elements
        start, stop = slice_of(block.trainable_numel, int(op.lane.split(".")[1]), layout.num_optimizer_actors)
        return (stop - start) * ((e + layout.private_bytes_per_parameter) * 2 + e)
    return 0


def longest_queue(timeline: Timeline) -> int:
    """Most decoder layers' gradients at one time that were in host memory and not updated by every actor."""
    landed: dict[tuple[int, int], float] = {}
    updated: dict[tuple[int, int], float] = {}
    for run in timeline.runs:
        if run.op.grad_slot < 0:
            continue
        key = run.step, run.op.block
        if run.op.kind == "download_gradient":
            landed[key] = run.end
        elif run.op.kind == "update":
            updated[key] = max(run.end, updated.get(key, 0.0))
    changes = [(time, 1) for time in landed.values()] + [(updated[key], -1) for key in landed if key in updated]
    depth = most = 0
    for _, change in sorted(changes):
        depth += change
        most = max(most, depth)
    return most
