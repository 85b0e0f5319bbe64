"""The interpreter that runs a lane of a StepPlan, and the streams that a GPU lane runs on.

Every actor uses it: `run_in_order` for the GPU actor's lanes, `run_ready_first` for an optimizer actor's update lane.
It knows waits, signals and errors; what an operation does is the `execute` function it is given. Tested by
tests/actors/test_lanes.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from slideformer_ray.memory.counters import Aborted, CounterPage, WaitTimeout
from slideformer_ray.observe.trace import Span
from slideformer_ray.schedule import GPU_LANES, GRAD_LANDED, Lane, Op, StepPlan, StepShape, build_step, pick

# Scalars that travel with norm.ready (see CounterPage): what the optimizer multiplies gradients by, and whether it
# skips the step.
CLIP_COEFFICIENT, SKIP_STEP = "clip_coefficient", "skip_step"
SCALARS = (CLIP_COEFFICIENT, SKIP_STEP)


@dataclass(frozen=True)
class StepInputs:
    """What a step's one call carries to every actor. Token ids travel through the batch buffer, never through Ray."""

    step: int  # optimizer steps submitted before this one
    shape: StepShape
    train_steps: int  # training steps before this one in this process: where the shared counters stand
    batch_slot: int  # which batch buffer holds ids and targets
    micro_batch_shapes: tuple[tuple[int, int], ...]  # (rows, tokens a row)
    num_supervised: int  # supervised tokens of the whole step; the loss is divided by it, once
    next_batch: tuple[int, int] | None = (
        None  # (batch buffer, tokens) of the training step that follows, if it is known
    )
    trace: bool = False  # record what each lane does and when
    peak_learning_rate: float | None = None  # None: optimizer.learning_rate


class LaneError(RuntimeError):
    """An operation failed. Says which actor, lane and operation, so that the driver can."""

    def __init__(self, actor: str, lane: str, op: str, step: int, cause: str):
        super().__init__(f"{actor}: step {step}: {lane}: {op}: {cause}")
        self.args = (actor, lane, op, step, cause)  # what pickle rebuilds the error from, on its way through Ray

    def __str__(self) -> str:
        actor, lane, op, step, cause = self.args
        return f"{actor}: step {step}: {lane}: {op}: {cause}"


class Stopwatch:
    """Seconds a lane spent waiting for shared counters, by counter family, and doing its operations' host work.

    With `trace`, also a (operation, begin, end) of each, in marks of the lane's stream.
    """

    def __init__(self, trace: bool = False) -> None:
        self.waited: dict[str, float] = {}
        self.busy = 0.0
        self.trace = trace
        self.marks: list[tuple[Op, Any, Any]] = []

    def time(self, op: Op, execute: Callable[[Op], Any], stream: HostStream | CudaStream) -> Any:
        """Execute the operation and note what it took."""
        begin = stream.mark() if self.trace else None
        started = time.perf_counter()
        result = execute(op)
        self.busy += time.perf_counter() - started
        if self.trace:
            self.marks.append((op, begin, stream.mark()))
        return result

    def spans(self, step: int, stream: HostStream | CudaStream) -> list[Span]:
        return [Span.of(step, op, stream.seconds(begin), stream.seconds(end)) for op, begin, end in self.marks]

    def add_wait(self, counter: str, seconds: float) -> None:
        family = counter.split(".")[0]
        self.waited[family] = self.waited.get(family, 0.0) + seconds


class HostStream:
    """The CPU's stand-in for a stream: work is done when the call returns, so events are nothing."""

    def context(self):
        return nullcontext()

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None

    def mark(self) -> float:
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        return mark

    def synchronize(self) -> None:
        return None


class CudaStream:
    """A CUDA (or ROCm) stream; the compute lane wraps the stream that is current where it is made."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def context(self):
        return torch.cuda.stream(self.stream)

    def record(self) -> torch.cuda.Event:
        # blocking: a host thread that waits for it sleeps, instead of spinning on a core that the optimizer needs
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        """Like `record`, with a time that `seconds` reads once the stream is synchronised."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When the stream came to the mark, on CLOCK_MONOTONIC. `set_clock` comes first."""
        reference, host_seconds = self._clock
        return host_seconds + reference.elapsed_time(mark) * 1e-3

    def set_clock(self, reference: torch.cuda.Event, host_seconds: float) -> None:
        """`reference` was reached at `host_seconds`: from then on the device's times are the machine's."""
        self._clock = (reference, host_seconds)

    def synchronize(self) -> None:
        self.stream.synchronize()


_HOST = HostStream()  # update lanes work on the CPU alone


class LaneProgress:
    """How far a GPU lane is issued, with the events that the actor's other lanes wait for. One a lane and step."""

    def __init__(self, page: CounterPage):
        self._page = page
        self._issued = 0
        self._events: dict[int, Any] = {}
        self._condition = threading.Condition()

    def issue(self, value: int, stream: HostStream | CudaStream, awaited: bool) -> None:
        """The operation is on its stream; record an event after it if another lane waits for it."""
        with self._condition:
            self._issued = value
            if awaited:
                self._events[value] = stream.record()
            self._condition.notify_all()

    def wait_issued(self, value: int, timeout_s: float, what: str) -> Any:
        """Block the host until the operation has been issued to its stream; returns its event (None on the CPU)."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._issued < value:
                self._page.raise_if_aborted()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout_s:.1f} s for {what}")
                self._condition.wait(0.05)
            return self._events[value]  # None on the CPU


def counter_base(inputs: StepInputs) -> dict[str, int]:
    """Values of the shared counters before the step: every training step added the same, an evaluation nothing."""
    increments = build_step(replace(inputs.shape, train=True)).increments
    return {name: added * inputs.train_steps for name, added in increments.items()}


@dataclass
class LaneContext:
    """What the lanes of one actor share during a step."""

    actor: str
    plan: StepPlan
    inputs: StepInputs
    page: CounterPage
    timeout_s: float
    progress: dict[str, LaneProgress]  # empty outside the GPU actor
    base: Mapping[str, int]  # where the shared counters stood when the step was submitted

    @classmethod
    def create(
        cls, actor: str, plan: StepPlan, inputs: StepInputs, page: CounterPage, timeout_s: float, gpu: bool = False
    ) -> LaneContext:
        progress = {name: LaneProgress(page) for name in GPU_LANES} if gpu else {}
        return cls(actor, plan, inputs, page, timeout_s, progress, counter_base(inputs))

    def absolute(self, counter: str, value: int) -> int:
        """A plan's value is relative to the step's start."""
        return value + self.base[counter]

    def error(self, lane: str, op: Op, cause: BaseException) -> LaneError:
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, WaitTimeout | TimeoutError):
            text += f" (debug.wait_timeout_s is {self.timeout_s:g})"
        return LaneError(self.actor, lane, op.describe(), self.inputs.step, text)


# (operation, counter, absolute value, event, what the operation returned)
Signaller = Callable[[Op, str, int, Any, Any], None]


def run_in_order(
    context: LaneContext,
    lane: Lane,
    stream: HostStream | CudaStream,
    execute: Callable[[Op], Any],
    signal: Signaller,
    watch: Stopwatch,
) -> None:
    """Run a GPU lane: wait, execute, record an event where someone waits for one, hand shared signals to `signal`.

    Waits on the actor's other lanes are events on the stream; the host blocks only until the other lane has ISSUED the
    operation. Waits on other processes block the host thread of this lane. Raises LaneError, after telling every other
    lane to stop.
    """
    for op in lane.ops:
        with _naming(context, lane, op):
            for name, value in op.waits:
                if name in context.progress:
                    # Twice the time: where that lane waits for another actor, its own error says more than ours would.
                    event = context.progress[name].wait_issued(
                        value, 2 * context.timeout_s, f"{name} to issue operation {value}"
                    )
                    if event is not None:
                        stream.wait(event)
                else:
                    watch.add_wait(
                        name, context.page.wait(name, context.absolute(name, value), context.timeout_s, op.describe())
                    )
            result = watch.time(op, execute, stream)
            for name, value in op.signals:
                if name == lane.name:
                    context.progress[name].issue(value, stream, (name, value) in context.plan.awaited)
                else:
                    signal(op, name, context.absolute(name, value), stream.record(), result)


@contextmanager
def _naming(context: LaneContext, lane: Lane, op: Op) -> Iterator[None]:
    """An error in the block names the operation and ends every lane; another lane's abort passes through."""
    try:
        yield
    except Aborted:
        raise
    except BaseException as cause:
        error = context.error(lane.name, op, cause)
        context.page.abort(str(error))
        raise error from cause


def run_ready_first(context: LaneContext, lane: Lane, execute: Callable[[Op], None], watch: Stopwatch) -> None:
    """Run an update lane: whatever is ready, in the order that `schedule.pick` prefers. Raises LaneError."""
    pending = list(lane.ops)
    all_landed = len(context.plan.gradient_order)
    while pending:
        with _naming(context, lane, pending[0]):
            ready = _wait_for_ready(context, pending, watch)
            op = pick(ready, context.page.read(GRAD_LANDED) >= context.absolute(GRAD_LANDED, all_landed))
        with _naming(context, lane, op):
            watch.time(op, execute, _HOST)
            pending.remove(op)
            for name, value in op.signals:
                context.page.signal(name, context.absolute(name, value))


def _wait_for_ready(context: LaneContext, pending: list[Op], watch: Stopwatch) -> list[Op]:
    """Operations whose waits are met, at least one."""
    while True:
        context.page.raise_if_aborted()
        unmet = [_first_unmet(context, op) for op in pending]
        ready = [op for op, wait in zip(pending, unmet, strict=True) if wait is None]
        if ready:
            return ready
        soonest: dict[str, int] = {}
        for name, value in (wait for wait in unmet if wait is not None):
            soonest[name] = min(value, soonest.get(name, value))
        wanted = sorted(soonest.items())
        started = time.perf_counter()
        context.page.wait_any(wanted, context.timeout_s, f"a gradient for one of {len(pending)} updates")
        watch.add_wait(wanted[0][0], time.perf_counter() - started)


def _first_unmet(context: LaneContext, op: Op) -> tuple[str, int] | None:
    for name, value in op.waits:
        wanted = context.absolute(name, value)
        if context.page.read(name) < wanted:
            return name, wanted
    return None
