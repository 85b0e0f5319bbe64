"""Runs step plans without their work: `check` proves them sound, `simulate` predicts their time.

Pure: no Ray, no torch. Both read a plan as the actors do: a lane runs in order, or any operation whose waits are
satisfied; the GPU actor begins a step when its three lanes of the step before have ended, an optimizer actor when its
own lane has; the values of shared counters continue from step to step.
Tested by tests/test_simulator.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from slideformer_ray.schedule import (
    COMPUTE,
    DOWNLOAD,
    GPU_LANES,
    GRAD_LANDED,
    IN_ORDER,
    UPLOAD,
    Op,
    StepPlan,
    StepShape,
    pick,
)


class PlanError(Exception):
    """A plan that must not run. The message names the operations concerned, with lane and step."""


class Deadlock(PlanError):
    """Operations wait for one another in a circle."""


class SlotHazard(PlanError):
    """Two operations use one resource, one of them writes it, and nothing orders them."""


class WrongContent(PlanError):
    """An operation reads a resource that certainly holds something else than it declares."""


class CounterError(PlanError):
    """A counter does not step 1, 2, 3, ... in one lane, or somebody waits for a value that never comes."""


class AccessMismatch(PlanError):
    """The slots in an operation's fields, which the actors use, are not those it says it reads and writes."""


# ----------------------------------------------------------------------------------------------------------------------
# Plans as one graph: which operation starts after which.

STEP_BEGIN = "step_begin"


@dataclass(eq=False)
class PlannedOp:
    """An operation of one step of several, with everything that must have ended before it may start."""

    step: int
    lane: str
    op: Op  # of kind STEP_BEGIN: no operation, but the edge at which an actor begins the step
    number: int  # position in an in-order lane, over all steps; else a number of its own among all such operations
    in_order: bool
    after: list[PlannedOp] = field(default_factory=list)
    # Vector clock, set by PlanOrder: what is certainly over when this starts.
    lanes_done: dict[str, int] = field(default_factory=dict)  # in-order lane -> how many of its operations
    others_done: int = 0  # a bit for each operation of the lanes that run in any order

    def __str__(self) -> str:
        return f"{self.op.describe()} ({self.lane}, step {self.step})"

    @property
    def is_edge(self) -> bool:
        return self.op.kind == STEP_BEGIN


class PlanOrder:
    """The operations of consecutive steps, in one possible order of execution, and which orders are certain.

    Raises CounterError, or Deadlock if there is no possible order.
    """

    def __init__(self, plans: Sequence[StepPlan]):
        self.nodes = _in_possible_order(_linked(plans))
        for node in self.nodes:
            for earlier in node.after:
                for lane, done in earlier.lanes_done.items():
                    node.lanes_done[lane] = max(done, node.lanes_done.get(lane, 0))
                node.others_done |= earlier.others_done
                if earlier.is_edge:
                    continue
                if earlier.in_order:
                    node.lanes_done[earlier.lane] = max(earlier.number + 1, node.lanes_done.get(earlier.lane, 0))
                else:
                    node.others_done |= 1 << earlier.number

    @property
    def ops(self) -> list[PlannedOp]:
        return [node for node in self.nodes if not node.is_edge]

    @staticmethod
    def before(first: PlannedOp, second: PlannedOp) -> bool:
        """Whether `first` has certainly ended when `second` starts, however long anything takes."""
        if first.in_order:
            return second.lanes_done.get(first.lane, 0) > first.number
        return bool(second.others_done >> first.number & 1)


def _actor(lane: str) -> str:
    return "gpu" if lane in GPU_LANES else lane


def _linked(plans: Sequence[StepPlan]) -> list[PlannedOp]:
    nodes: list[PlannedOp] = []
    signallers: dict[str, list[PlannedOp]] = {}  # counter -> who signals 1, 2, 3, ...
    edges: dict[str, PlannedOp] = {}  # actor -> begin of its current step
    ends: dict[str, list[PlannedOp]] = {}  # actor -> what must end before its next step
    numbers: dict[str, int] = defaultdict(int)
    for step, plan in enumerate(plans):
        for name in GPU_LANES:
            signallers[name] = []
        for name in plan.increments:
            signallers.setdefault(name, [])
        base = {name: len(nodes_of) for name, nodes_of in signallers.items()}
        for actor in dict.fromkeys(map(_actor, plan.lanes)):
            edges[actor] = PlannedOp(step, actor, Op(STEP_BEGIN, actor), -1, True, ends.get(actor, []))
            ends[actor] = [edges[actor]]
            nodes.append(edges[actor])

        step_nodes: list[PlannedOp] = []
        for lane in plan.lanes.values():
            actor, in_order = _actor(lane.name), lane.policy == IN_ORDER
            previous = edges[actor]
            for op in lane.ops:
                numbering = lane.name if in_order else ""
                node = PlannedOp(step, lane.name, op, numbers[numbering], in_order, [previous])
                numbers[numbering] += 1
                if in_order:
                    previous = node
                else:
                    ends[actor].append(node)
                step_nodes.append(node)
            if in_order:
                ends[actor].append(previous)

        for node in step_nodes:
            _register_signals(node, signallers, base)
        _check_totals(step, plan, signallers, base)
        for node in step_nodes:
            node.after += _awaited(node, signallers, base)
        nodes += step_nodes
    return nodes


def _register_signals(node: PlannedOp, signallers: dict[str, list[PlannedOp]], base: Mapping[str, int]) -> None:
    for name, value in node.op.signals:
        earlier = signallers.setdefault(name, [])
        if earlier and earlier[-1].lane != node.lane or name in GPU_LANES and name != node.lane:
            owner = earlier[-1] if earlier else f"lane {name}"
            raise CounterError(f"{node} signals {name}, which belongs to {owner}: one lane writes a counter")
        expected = len(earlier) - base.get(name, 0) + 1
        if value != expected:
            raise CounterError(f"{node} signals {name} {value}; the next value is {expected}")
        if value > 1 and not node.in_order:
            raise CounterError(f"{node} and {earlier[-1]} signal {name}, but their lane runs them in any order")
        earlier.append(node)


def _check_totals(
    step: int, plan: StepPlan, signallers: Mapping[str, list[PlannedOp]], base: Mapping[str, int]
) -> None:
    totals = {name: len(plan.lanes[name].ops) for name in GPU_LANES if name in plan.lanes} | plan.increments
    for name in {**signallers, **totals}:
        signalled, total = len(signallers.get(name, ())) - base.get(name, 0), totals.get(name, 0)
        if signalled != total:
            raise CounterError(f"step {step} signals {name} up to {signalled}; the plan says {total}")


def _awaited(
    node: PlannedOp, signallers: Mapping[str, list[PlannedOp]], base: Mapping[str, int]
) -> Iterator[PlannedOp]:
    for name, value in node.op.waits:
        if name in GPU_LANES and node.lane not in GPU_LANES:
            raise CounterError(f"{node} waits for {name}, which only the GPU actor sees")
        if name not in signallers or value > len(signallers[name]) - base[name]:
            raise CounterError(f"{node} waits for {name} {value}, but nothing in its step signals that")
        if base[name] + value > 0:
            yield signallers[name][base[name] + value - 1]


def _in_possible_order(nodes: Sequence[PlannedOp]) -> list[PlannedOp]:
    missing = {node: len(node.after) for node in nodes}
    followers = _followers(nodes)
    ready = deque(node for node in nodes if not missing[node])
    done: list[PlannedOp] = []
    while ready:
        node = ready.popleft()
        done.append(node)
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(done) < len(nodes):
        circle = _circle(set(nodes) - set(done), next(node for node in nodes if missing[node]))
        raise Deadlock(" waits for ".join(map(str, [*circle, circle[0]])))
    return done


def _followers(nodes: Sequence[PlannedOp]) -> dict[PlannedOp, list[PlannedOp]]:
    followers: dict[PlannedOp, list[PlannedOp]] = {node: [] for node in nodes}
    for node in nodes:
        for earlier in node.after:
            followers[earlier].append(node)
    return followers


def _circle(stuck: set[PlannedOp], start: PlannedOp) -> list[PlannedOp]:
    path = [start]
    while True:
        following = next(node for node in path[-1].after if node in stuck)
        if following in path:
            return path[path.index(following) :]
        path.append(following)


# ----------------------------------------------------------------------------------------------------------------------
# The checker.

# Kind -> what it reads and what it writes, as resource.field: the field holds the resource's number, or -1. Stated a
# second time on purpose: the actors go by an operation's fields, `check` by its reads and writes.
_NUMBERED_ACCESSES = {
    "gather_embedding": ("", "act.slot"),
    "upload_params": ("hi.block", "unit.unit"),
    "upload_head": ("hi.block", ""),
    "upload_activation": ("host_act.host_slot", "act.slot"),
    "forward": ("unit.unit act.slot", "act.out_slot"),
    "head": ("act.slot", "act.out_slot"),
    "finish_head": ("", ""),
    "backward": ("unit.unit act.slot act.out_slot", "act.slot"),
    "finish_gradient": ("", "grad_unit.grad_unit"),
    "embed_gradient": ("act.slot", ""),
    "finish_embed": ("", ""),
    "norm": ("grad_unit.grad_unit", ""),
    "download_gradient": ("grad_unit.grad_unit", "grad.grad_slot"),
    "download_activation": ("act.slot", "host_act.host_slot"),
    "update": ("grad.grad_slot", "hi.block"),
    "update_rows": ("grad.grad_slot", ""),
}


def check(plans: Sequence[StepPlan]) -> None:
    """Raise a PlanError unless these consecutive steps are sound in EVERY run that their waits allow.

    Sound: no deadlock; two accesses to one resource, one of them a write, are always ordered; every read finds the
    content that it declares; counters step by one. Give at least two steps: most hazards lie between steps.
    """
    order = PlanOrder(plans)
    versions = _versions_before(plans)
    slices: dict[Hashable, list[str]] = {}  # a block's parameters -> the lanes that write a slice of them
    for node in order.ops:
        _check_fields(node, plans[node.step].shape)
        for resource, _ in node.op.writes:
            if _is_parameters(resource) and node.lane not in slices.setdefault(resource, []):
                slices[resource].append(node.lane)

    held: dict[Hashable, _Held] = {}
    for node in order.ops:
        for resource, declared in node.op.reads:
            content = _absolute(resource, declared, node.step, versions)
            for part in _parts(resource, slices.get(resource, ["no lane"])):
                _read(node, part, content, held.setdefault(part, _Held(0 if _is_parameters(resource) else None)))
        for resource, declared in node.op.writes:
            content = _absolute(resource, declared, node.step, versions)
            for part in _parts(resource, [node.lane]):
                _write(node, part, content, held.setdefault(part, _Held(None)))


@dataclass
class _Held:
    """What a resource holds, as the operations come in a possible order."""

    content: Hashable  # (step, content as declared); of parameters: how often they were updated
    writer: PlannedOp | None = None
    readers: list[PlannedOp] = field(default_factory=list)


def _read(node: PlannedOp, part: Hashable, content: Hashable, held: _Held) -> None:
    if held.writer is not None and not PlanOrder.before(held.writer, node):
        raise SlotHazard(f"nothing orders {held.writer}, which writes {part}, and {node}, which reads it")
    if content != held.content:
        raise WrongContent(f"{node} reads {part} for {content}, but finds {held.content} of {held.writer}")
    held.readers.append(node)


def _write(node: PlannedOp, part: Hashable, content: Hashable, held: _Held) -> None:
    for other in (held.writer, *held.readers):
        if other is not None and other is not node and not PlanOrder.before(other, node):
            raise SlotHazard(f"nothing orders {node}, which writes {part}, and {other}, which uses it")
    held.content, held.writer, held.readers = content, node, []


def _is_parameters(resource: Hashable) -> bool:
    return isinstance(resource, tuple) and resource[0] == "hi"


def _parts(resource: Hashable, lanes: Sequence[str]) -> list[Hashable]:
    """Each update lane writes its own slice of a block's parameters: as many separate resources."""
    return [(resource, lane) for lane in lanes] if _is_parameters(resource) else [resource]


def _versions_before(plans: Sequence[StepPlan]) -> list[dict[Hashable, int]]:
    """For each step: how often each block's parameters have been updated before it."""
    versions: list[dict[Hashable, int]] = []
    current: dict[Hashable, int] = defaultdict(int)
    for plan in plans:
        versions.append(dict(current))
        for resource in {resource for op in plan.ops for resource, _ in op.writes if _is_parameters(resource)}:
            current[resource] += 1
    return versions


def _absolute(resource: Hashable, declared: Hashable, step: int, versions: list[dict[Hashable, int]]) -> Hashable:
    if _is_parameters(resource):
        assert isinstance(declared, int)
        return versions[step].get(resource, 0) + declared
    return (step, declared)


def _check_fields(node: PlannedOp, shape: StepShape) -> None:
    op = node.op
    for accesses, table in zip((op.reads, op.writes), _NUMBERED_ACCESSES[op.kind], strict=True):
        stated = {resource for resource, _ in accesses if isinstance(resource, tuple) and isinstance(resource[-1], int)}
        fields = {(name, getattr(op, of)) for name, _, of in (entry.partition(".") for entry in table.split())}
        whole_embedding = (op.kind == "upload_head" and shape.tied) or (
            op.kind == "gather_embedding" and not shape.train
        )
        if whole_embedding and accesses is op.reads:
            fields.add(("hi", shape.embed))
        fields = {(name, number) for name, number in fields if number >= 0}
        if stated != fields:
            raise AccessMismatch(f"{node} has fields for {sorted(fields)}, but states accesses to {sorted(stated)}")


# ----------------------------------------------------------------------------------------------------------------------
# The clock.


@dataclass(frozen=True)
class Durations:
    """Seconds that each operation takes, by `Durations.key`: from rates, or from a measured trace."""

    seconds: Mapping[str, float]

    @staticmethod
    def key(op: Op, shape: StepShape) -> str:
        """The operation's kind, with the kind of block where that decides its size: "update.embed", "forward"."""
        if op.kind not in ("update", "download_gradient"):
            return op.kind
        block = "embed" if op.block == shape.embed else "head" if op.block == shape.head else "decoder"
        return f"{op.kind}.{block}"

    def of(self, op: Op, shape: StepShape) -> float:
        return self.seconds[self.key(op, shape)]

    @classmethod
    def from_rates(
        cls,
        *,
        tokens: int,
        hidden_size: int,
        layer_parameters: int,
        vocab_parameters: int,
        tied: bool,
        h2d_bytes_per_second: float,
        d2h_bytes_per_second: float,
        layer_forward_seconds: float,
        layer_backward_seconds: float,
        head_seconds: float,
        update_ns_per_parameter: float,
        num_optimizer_actors: int = 1,
        gather_bytes_per_second: float = math.inf,
        gpu_bytes_per_second: float = math.inf,
        looked_up_fraction: float = 0.2,
        value_bytes: int = 2,
    ) -> Durations:
        """Durations from sizes and rates.

        tokens, layer_forward_seconds, layer_backward_seconds (recompute included) and head_seconds (loss and its
        gradient) are of ONE micro-batch. vocab_parameters: elements of the embedding. update_ns_per_parameter: what an
        optimizer actor needs for a parameter of its own slice while all actors work. gather_bytes_per_second: host
        look-up of embedding rows. gpu_bytes_per_second: GPU memory, for sums and casts of gradients; infinite means
        that they cost nothing. looked_up_fraction: of the embedding's rows, what a step looks up; with ids drawn at
        random it is the share of distinct ones, in text it is less. value_bytes: of a parameter, gradient or activation
        that travels.
        """
        head_parameters = hidden_size + (0 if tied else vocab_parameters)
        activation = tokens * hidden_size * value_bytes

        def h2d(num_bytes: float) -> float:
            return num_bytes / h2d_bytes_per_second

        def finish(parameters: int) -> float:  # read the fp32 sum, write the gradient
            return parameters * (4 + value_bytes) / gpu_bytes_per_second

        seconds = {
            "gather_embedding": activation / gather_bytes_per_second + h2d(activation),
            "upload_params": h2d(layer_parameters * value_bytes),
            "upload_head": h2d((hidden_size + vocab_parameters) * value_bytes),
            "upload_activation": h2d(activation),
            "forward": layer_forward_seconds,
            "head": head_seconds,
            "backward": layer_backward_seconds,
            "finish_head": finish(head_parameters),
            "finish_gradient": finish(layer_parameters),
            "finish_embed": finish(vocab_parameters),
            # Read the row's gradient; read and write the fp32 sum.
            "embed_gradient": tokens * hidden_size * (value_bytes + 8) / gpu_bytes_per_second,
            "norm": 0.0,
            "download_activation": activation / d2h_bytes_per_second,
        }
        for block, parameters in (
            ("embed", vocab_parameters),
            ("decoder", layer_parameters),
            ("head", head_parameters),
        ):
            seconds[f"download_gradient.{block}"] = parameters * value_bytes / d2h_bytes_per_second
            seconds[f"update.{block}"] = parameters / num_optimizer_actors * update_ns_per_parameter * 1e-9
        seconds["update_rows"] = seconds["update.embed"] * looked_up_fraction
        seconds["update.embed"] *= 1 - looked_up_fraction
        return cls(seconds)


@dataclass(frozen=True, eq=False)
class Run:
    """An operation on the time axis, in seconds from the begin of the first step."""

    lane: str
    op: Op
    step: int
    start: float
    end: float
    after: Run | None = field(repr=False)  # whose end let it start

    @property
    def seconds(self) -> float:
        return self.end - self.start


# What the compute lane idles for. `tail` and `step_edge` are the gap between two steps: gradients of the old one still
# leave the GPU, the first parameters and rows of the new one arrive. Waiting for an optimizer is "update" everywhere.
# The last two are times in which nothing that is waited for works, which a measured timeline alone has: an operation
# that was not issued in time, and, between two steps, the call that carries the step (through Ray) and its preparation.
CAUSES = (
    *("upload_params", "upload_activations", "upload_head", "update", "download", "disk", "tail", "step_edge"),
    *("launch", "step_call"),
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated run of consecutive steps."""

    runs: Sequence[Run]  # by start

    @property
    def seconds(self) -> float:
        """Until the last operation has ended, updates included."""
        return max(run.end for run in self.runs)

    @cached_property
    def step_seconds(self) -> list[float]:
        """Time between the ends of consecutive GPU steps. The first step has no updates before it to wait for."""
        ends: dict[int, float] = {}
        for run in self._gpu_runs:
            ends[run.step] = max(run.end, ends.get(run.step, 0.0))
        return [end - begin for begin, end in pairwise([0.0, *(ends[step] for step in sorted(ends))])]

    @property
    def steady_step_seconds(self) -> float:
        """Mean over all steps but the first, which has no updates before it to wait for."""
        steady = self.step_seconds[1:] or self.step_seconds
        return sum(steady) / len(steady)

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Work of each lane, over all steps."""
        busy: dict[str, float] = defaultdict(float)
        for run in self.runs:
            busy[run.lane] += run.seconds
        return dict(busy)

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """Idle time of the compute lane until the GPU's last step ends, by cause (CAUSES), over all steps."""
        exposed = dict.fromkeys(CAUSES, 0.0)
        computing = [run for run in self.runs if run.lane == COMPUTE]
        first, last = computing[0], max(self._gpu_runs, key=lambda run: run.end)
        _expose(exposed, first.after, 0.0, first.start, edge=True)
        for previous, run in pairwise(computing):
            _expose(exposed, run.after, previous.end, run.start, edge=previous.step != run.step)
        _expose(exposed, last, computing[-1].end, last.end, edge=True)
        return exposed

    @property
    def hiding_factor(self) -> float:
        """T_bwd / (T_d2h + T_update) over the decoder layers (SlideFormer, section 3.1): 1 or more can hide all
        updates. Actors update a layer side by side, so the slowest counts. Infinite where nothing has to be hidden."""
        backward = sum(run.seconds for run in self.runs if run.op.kind == "backward")
        to_hide: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)  # (step, block) -> lane -> seconds
        for run in self.runs:
            if run.op.kind in ("download_gradient", "update") and run.op.grad_slot >= 0:
                to_hide[(run.step, run.op.block)][run.lane] = run.seconds
        hidden = 0.0
        for by_lane in to_hide.values():
            hidden += by_lane.pop(DOWNLOAD) + max(by_lane.values())
        return backward / hidden if hidden else math.inf

    @property
    def forward_hiding_factor(self) -> float:
        """T_fwd / T_h2d over the decoder layers (SlideFormer, section 3.1): 1 or more can hide all uploads of
        parameters that the forward reads. Infinite where no layer has to be uploaded for it."""
        forward = sum(run.seconds for run in self.runs if run.op.kind == "forward")
        # A layer's first upload of a step is the forward's; the second, if it did not stay, the backward's.
        first: dict[tuple[int, int], float] = {}
        for run in self.runs:
            if run.op.kind == "upload_params":
                first.setdefault((run.step, run.op.block), run.seconds)
        return forward / sum(first.values()) if first else math.inf

    @property
    def critical_path(self) -> list[Run]:
        """The chain of runs, each started by the end of the one before, that ends last: they sum to `seconds`."""
        path = [max(self.runs, key=lambda run: run.end)]
        while path[-1].after is not None:
            path.append(path[-1].after)
        return path[::-1]

    @property
    def _gpu_runs(self) -> list[Run]:
        return [run for run in self.runs if run.lane in GPU_LANES]


def _expose(exposed: dict[str, float], run: Run | None, idle_from: float, idle_to: float, edge: bool) -> None:
    """Share out an idle time to whatever ran then on the chain of runs that led to its end, `run` the last of it."""
    nothing_runs = "step_call" if edge else "launch"
    while run is not None and run.end > idle_from and idle_to > idle_from:
        end, start = min(run.end, idle_to), max(run.start, idle_from)
        exposed[nothing_runs] += idle_to - end
        exposed[_cause(run, edge)] += max(end - start, 0.0)
        idle_to, run = min(start, end), run.after
    exposed[nothing_runs] += max(idle_to - idle_from, 0.0)


def _cause(run: Run, edge: bool) -> str:
    if run.lane == UPLOAD:
        if edge:
            return "step_edge"
        return {"upload_params": "upload_params", "upload_head": "upload_head"}.get(run.op.kind, "upload_activations")
    if run.lane == DOWNLOAD:
        return "tail" if edge else "download"
    return "disk" if run.lane.startswith("storage.") else "update"


def simulate(plans: Sequence[StepPlan], durations: Durations) -> Timeline:
    """Run consecutive steps with durations instead of work. Raises CounterError and Deadlock as `check` does.

    All lanes run at once and do not slow one another. Lanes that run in any order choose as `schedule.pick` does.
    """
    nodes = PlanOrder(plans).nodes
    followers = _followers(nodes)
    missing = {node: len(node.after) for node in nodes}
    ready: dict[str, list[PlannedOp]] = defaultdict(list)  # of the lanes that run in any order
    landed = [0] * len(plans)
    runs: list[Run] = []
    latest: dict[str, Run] = {}  # of each lane
    run_of: dict[PlannedOp, Run | None] = {}  # for an edge, which takes no time: the run that ended last before it
    ending: list[tuple[float, int, PlannedOp]] = []  # a heap; the count in it makes ties deterministic
    count = itertools.count()

    def start(node: PlannedOp, now: float) -> None:
        earlier = [run for run in (*map(run_of.get, node.after), latest.get(node.lane)) if run is not None]
        # Of two that end at once, the lane's own run: only what alone holds an operation up is to blame for it.
        after = max(earlier, key=lambda run: (run.end, run.lane == node.lane), default=None)
        if node.is_edge:
            run_of[node] = after
            heapq.heappush(ending, (now, next(count), node))
            return
        end = now + durations.of(node.op, plans[node.step].shape)
        run_of[node] = latest[node.lane] = run = Run(node.lane, node.op, node.step, now, end, after)
        runs.append(run)
        heapq.heappush(ending, (end, next(count), node))

    def finish(node: PlannedOp, now: float) -> None:
        landed[node.step] += any(name == GRAD_LANDED for name, _ in node.op.signals)
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                if follower.in_order:
                    start(follower, now)
                else:
                    ready[follower.lane].append(follower)

    for node in nodes:
        if not missing[node]:
            start(node, 0.0)
    while ending:
        now = ending[0][0]
        while ending and ending[0][0] == now:
            finish(heapq.heappop(ending)[-1], now)
        for lane, waiting in ready.items():
            if waiting and (lane not in latest or latest[lane].end <= now):
                step = waiting[0].step
                op = pick([node.op for node in waiting], landed[step] == len(plans[step].gradient_order))
                chosen = next(node for node in waiting if node.op is op)
                waiting.remove(chosen)
                start(chosen, now)
    return Timeline(sorted(runs, key=lambda run: run.start))
