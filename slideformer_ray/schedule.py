"""One training step as data: lanes of operations with the counters they wait for and signal.

Pure: no Ray, no torch. Three readers share a plan: the actors do its work, `simulator.simulate` runs it with durations,
and `simulator.check` proves that it cannot deadlock and that no slot is written while it is read.

How a plan is made. `build_step` walks through the step in program order and states, for each operation, which resources
it reads and writes. Waits are DERIVED from these statements (read after write, write after read, write after write),
never written by hand, and a wait that another wait implies is left out. Which layer sits in which GPU cache unit, and
which activation in which slot, is decided here too: the whole access sequence of a step is known, so the choice is the
optimal one (evict what is needed last).

Counters. A lane of the GPU actor signals its own progress: operation i of lane `gpu.upload` signals
("gpu.upload", i + 1). These are local to the GPU actor and start at 0 every step. Shared counters live in a page that
all actors map and never restart; a plan gives their values relative to the step's start (`StepPlan.increments` is what
a step adds).

    grad.landed          gradients that have reached their pinned slot, in the order of `StepPlan.gradient_order`
    norm.ready           the global gradient norm and the clip coefficient are in the control page
    updated.K.B          optimizer actor K has written its slice of block B's parameters
    rows.K               optimizer actor K has written, of its slice of the embedding, what the next step looks up

Blocks: 0 is the embedding, 1..L the decoder layers, L+1 the head. Activation cell (i, m) is the input of decoder layer
i for micro-batch m; cell (L, m) is the head's input. The backward writes a cell's gradient over the cell.
Tested by tests/test_schedule.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

COMPUTE, UPLOAD, DOWNLOAD = "gpu.compute", "gpu.upload", "gpu.download"
GPU_LANES = (COMPUTE, UPLOAD, DOWNLOAD)
GRAD_LANDED, NORM_READY = "grad.landed", "norm.ready"

IN_ORDER, READY_FIRST = "in_order", "ready_first"

# The embedding's gradient is the last to land and its rows are the first thing that the next step needs: rows that it
# looks up are updated before everything else, the others after everything else. So the embedding's parameters are two
# resources.
ROWS = ("hi", "rows")
UPDATES = ("update", "update_rows")

Wait = tuple[str, int]
Access = tuple[Hashable, Hashable]  # (resource, the content that is read or written)
Item = TypeVar("Item", bound=Hashable)


def updated_counter(actor: int, block: int) -> str:
    return f"updated.{actor}.{block}"


def rows_counter(actor: int) -> str:
    return f"rows.{actor}"


def update_lane(actor: int) -> str:
    return f"update.{actor}"


def shared_counters(num_blocks: int, num_optimizer_actors: int) -> list[str]:
    """Names of every shared counter, in the order in which they lie in the control page."""
    updated = [updated_counter(k, b) for k in range(num_optimizer_actors) for b in range(num_blocks)]
    return [GRAD_LANDED, NORM_READY, *updated, *(rows_counter(k) for k in range(num_optimizer_actors))]


@dataclass(frozen=True)
class StepShape:
    """Everything a plan depends on. Equal shapes give equal plans, so actors build their plans themselves from it."""

    num_layers: int
    num_micro_batches: int
    trainable: tuple[bool, ...]  # one for each block
    tied: bool
    param_units: int = 3
    gradient_units: int = 2
    gradient_slots: int = 1  # pinned host slots for decoder gradients; clipping needs one a trainable layer
    activation_slots: int = 1 << 30  # on the GPU, each for one micro-batch
    num_optimizer_actors: int = 1
    clip: bool = False
    overlap: bool = True
    train: bool = True  # False: forward and loss only

    def __post_init__(self):
        if len(self.trainable) != self.num_layers + 2:
            raise ValueError(
                f"trainable has {len(self.trainable)} entries; {self.num_layers} layers need {self.num_layers + 2}"
            )
        if self.activation_slots < 3:
            raise ValueError(
                f"activation_slots is {self.activation_slots}; a layer needs its input, its output and one in flight: "
                "at least 3"
            )
        if self.param_units < 2:
            raise ValueError(f"param_units is {self.param_units}; one computes while one loads: at least 2")
        needed = sum(self.trainable[1:-1])
        if self.train and self.clip and self.gradient_slots < needed:
            raise ValueError(
                f"gradient_slots is {self.gradient_slots}; clipping holds the gradients of all {needed} trainable "
                "layers until the norm is known: raise gradient_slots or set max_grad_norm to null"
            )
        if self.gradient_slots < 1 or self.gradient_units < 1 or self.num_micro_batches < 1 or self.num_layers < 1:
            raise ValueError(f"every count of {self} must be at least 1")

    @property
    def embed(self) -> int:
        return 0

    @property
    def head(self) -> int:
        return self.num_layers + 1


@dataclass(frozen=True)
class Op:
    """One operation of a lane. Fields that an operation does not use are -1.

    kind                lane      what it does
    gather_embedding    upload    look up the micro-batch's rows of the embedding on the host, send them to activation
                                  `slot`
    upload_params       upload    block's parameters -> GPU cache `unit`
    upload_head         upload    the head's parameters (and the tied weight) -> the vocabulary unit
    upload_activation   upload    host cell `host_slot` -> activation `slot`
    forward             compute   layer in `unit`: activation `slot` -> activation `out_slot`
    head                compute   loss of the activation in `slot`; its gradient takes its place if `out_slot` says so
    finish_head         compute   sum of the head's gradients -> the vocabulary unit, in the gradient dtype
    backward            compute   recompute and backward of layer in `unit`: input `slot`, gradient of the output
                                  `out_slot`; the gradient of the input replaces the input in `slot`
    finish_gradient     compute   the layer's gradient, summed over micro-batches -> gradient unit `grad_unit`
    embed_gradient      compute   gradient of the embedding rows from activation `slot`
    finish_embed        compute   sum of the embedding's gradients -> the vocabulary unit
    norm                download  global gradient norm, clip coefficient
    download_gradient   download  gradient unit `grad_unit` (or the vocabulary unit) -> pinned `grad_slot` (or the
                                  block's own slot)
    download_activation download  activation `slot` -> host cell `host_slot`
    update_rows         update    AdamW on those rows of the actor's slice of the embedding that the next step looks up
    update              update    AdamW on the actor's slice of the block; of the embedding, on all other rows
    """

    kind: str
    lane: str
    block: int = -1
    micro_batch: int = -1
    unit: int = -1
    grad_unit: int = -1
    grad_slot: int = -1
    slot: int = -1
    out_slot: int = -1
    host_slot: int = -1
    first: bool = False  # first micro-batch of this block's gradient sum
    last: bool = False  # the step needs the parameters in `unit` no more
    waits: tuple[Wait, ...] = ()
    signals: tuple[Wait, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()

    def describe(self) -> str:
        return describe(self.kind, self.block, self.micro_batch)


def describe(kind: str, block: int, micro_batch: int) -> str:
    """An operation in words, for errors and traces; -1 stands for what it does not have."""
    where = [f"block {block}"] if block >= 0 else []
    where += [f"micro-batch {micro_batch}"] if micro_batch >= 0 else []
    return " ".join([kind, *where])


@dataclass(frozen=True)
class Lane:
    name: str
    policy: str  # IN_ORDER, or READY_FIRST: any operation whose waits are satisfied
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class StepPlan:
    shape: StepShape
    lanes: dict[str, Lane]
    gradient_order: tuple[int, ...]  # blocks, in the order in which their gradients land
    increments: dict[str, int]  # what the step adds to each shared counter
    num_host_cells: int  # activation cells in pinned host memory

    @property
    def ops(self) -> list[Op]:
        return [op for lane in self.lanes.values() for op in lane.ops]

    @cached_property
    def awaited(self) -> frozenset[Wait]:
        """Every (counter, value) that some operation waits for: a GPU lane records an event for these alone."""
        return frozenset(wait for op in self.ops for wait in op.waits)


def pick(ready: Sequence[Op], all_landed: bool) -> Op:
    """Which of the updates that are ready a READY_FIRST lane runs next. `all_landed`: all gradients of the step have
    reached their slots.

    While gradients still land, the one that landed first: the backward needs its slot again soonest. Afterwards what
    the next forward needs first: the embedding's rows, the layers, the head, and last the rows that nobody looks up.
    Clipped updates hold a slot each, so they go in that order at once.
    """
    by_need = all_landed or any(name == NORM_READY for op in ready for name, _ in op.waits)

    def landed(op: Op) -> int:  # 0: an overlap=False plan leaves this wait out where another implies it
        return max((value for name, value in op.waits if name == GRAD_LANDED), default=0)

    return min(ready, key=need if by_need else landed)


def need(op: Op) -> tuple[bool, int]:
    """Sorts updates by when the next forward needs what they write."""
    return (op.kind == "update" and op.block == 0, op.block)


def micro_batch_order(num_micro_batches: int, turn: int) -> range:
    """Passes over the micro-batches alternate in direction: what one layer touched last, the next layer needs first."""
    return range(num_micro_batches) if turn % 2 == 0 else range(num_micro_batches - 1, -1, -1)


# ----------------------------------------------------------------------------------------------------------------------
# Which content sits in which slot: optimal replacement over a known access sequence.


@dataclass(frozen=True)
class Use(Generic[Item]):
    """What one compute operation does to one item (a layer's parameters, an activation cell)."""

    item: Item
    reads: bool
    writes: bool
    last: bool = False  # the content is dead afterwards


@dataclass
class Placement(Generic[Item]):
    """For access i: `slots[i][item]`, the loads to issue before it, and whether what it writes must be stored to the
    host."""

    slots: list[dict[Item, int]] = field(default_factory=list)
    loads: list[list[tuple[Item, int]]] = field(default_factory=list)
    stored_writes: set[tuple[int, Item]] = field(default_factory=set)  # (access, item)


def place(accesses: Sequence[Sequence[Use[Item]]], num_slots: int) -> Placement[Item]:
    """Belady's rule: evict the content whose next read is furthest away. Among empty slots take the one that is empty
    longest, so that loads can run far ahead. Content is stored (at the access that wrote it) only if it is evicted
    while still needed."""
    reads_of: dict[Item, list[int]] = {}
    for i, uses in enumerate(accesses):
        for use in uses:
            if use.reads:
                reads_of.setdefault(use.item, []).append(i)
    cursor = dict.fromkeys(reads_of, 0)
    result: Placement[Item] = Placement()
    resident: dict[Item, int] = {}
    empty: list[int] = list(range(num_slots)) if num_slots < (1 << 20) else []
    unbounded = num_slots >= (1 << 20)
    next_new = 0
    written_at: dict[Item, int] = {}  # access that wrote the current content, if the host has no copy of it

    def next_read(item: Item, after: int) -> int:
        positions = reads_of.get(item, [])
        at = cursor.get(item, 0)
        while at < len(positions) and positions[at] < after:
            at += 1
        if item in cursor:
            cursor[item] = at
        return positions[at] if at < len(positions) else 1 << 60

    def take(access: int, pinned: set[Item]) -> int:
        nonlocal next_new
        if empty:
            return empty.pop(0)
        if unbounded:
            next_new += 1
            return next_new - 1
        victim = max((item for item in resident if item not in pinned), key=lambda item: next_read(item, access))
        if next_read(victim, access) < 1 << 60 and victim in written_at:
            result.stored_writes.add((written_at.pop(victim), victim))
        written_at.pop(victim, None)
        return resident.pop(victim)

    for i, uses in enumerate(accesses):
        pinned = {use.item for use in uses}
        slots: dict[Item, int] = {}
        loads: list[tuple[Item, int]] = []
        for use in uses:
            if use.item not in resident:
                slot = take(i, pinned)
                resident[use.item] = slot
                if use.reads:
                    loads.append((use.item, slot))
            slots[use.item] = resident[use.item]
            if use.writes:
                written_at[use.item] = i
        for use in uses:
            if use.last:
                empty.append(resident.pop(use.item))
                written_at.pop(use.item, None)
        result.slots.append(slots)
        result.loads.append(loads)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# The builder: program order in, waits out.


@dataclass
class _Resource:
    writers: list[_Node] = field(default_factory=list)  # of the current content (several: the slices of several actors)
    readers: list[_Node] = field(default_factory=list)
    content: Hashable = None


@dataclass(eq=False)
class _Node:
    """An operation while the plan is built, and what every counter has reached at least once it is over."""

    op: Op
    over: dict[str, int]


class _Builder:
    def __init__(self, shape: StepShape):
        self.shape = shape
        self.lanes: dict[str, list[_Node]] = {
            name: [] for name in (*GPU_LANES, *(update_lane(k) for k in range(shape.num_optimizer_actors)))
        }
        self.resources: dict[Hashable, _Resource] = {}
        self.landed: dict[int, int] = {}  # block -> value of grad.landed
        self.slot_of: dict[int, Hashable] = {}  # block -> the pinned slot that its gradient lands in
        self.cell_content: dict[Hashable, Hashable] = {}  # activation cell -> what it holds, wherever it lies
        # An actor begins its updates when those of its step before are over.
        self.over_before: dict[str, dict[str, int]] = {lane: {} for lane in self.lanes}
        # For overlap=False: the latest operation in program order (or the slices of one update, which run side by side;
        # at first, all updates of the step before), and what came before it.
        self.latest: list[_Node] = []
        self.previous: list[_Node] = []

        # Every parameter was last written by the step before: reading it waits for that update.
        for block in range(shape.num_layers + 2):
            writers = []
            if shape.trainable[block]:
                for k in range(shape.num_optimizer_actors):
                    signals = ((updated_counter(k, block), 0),)
                    writers.append(_Node(Op("update", update_lane(k), block, signals=signals), dict(signals)))
            self.latest += writers
            self.resources[("hi", block)] = _Resource(writers=writers, content=0)
        rows = []
        if shape.trainable[shape.embed]:
            for k in range(shape.num_optimizer_actors):
                signals = ((rows_counter(k), 0),)
                rows.append(_Node(Op("update_rows", update_lane(k), shape.embed, signals=signals), dict(signals)))
        self.latest += rows
        for node in self.latest:
            self.over_before[node.op.lane] |= node.over
        self.resources[ROWS] = _Resource(writers=rows, content=0)
        # Nothing of the step need read the other rows, so what the embedding's last updates read is not free by itself.
        readers = [*rows, *self.resources[("hi", shape.embed)].writers]
        self.resources[("grad", "embed")] = _Resource(readers=list(readers))
        self.resources[("norm",)] = _Resource(readers=list(readers))

    def add(
        self,
        kind: str,
        lane: str,
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Access] = (),
        signals: tuple[Wait, ...] = (),
        **fields: Any,
    ) -> _Node:
        """Append an operation; its waits follow from what it reads and writes. A read states the resource alone: the
        content that it must find is what program order put there."""
        after: list[_Node] = []
        read_contents = []
        for resource in reads:
            state = self.resources.setdefault(resource, _Resource())
            after += state.writers
            read_contents.append((resource, state.content))
        for resource, _ in writes:
            state = self.resources.setdefault(resource, _Resource())
            after += state.writers + state.readers
        if not self.shape.overlap:
            side_by_side = kind in UPDATES and all(_same_update(node.op, kind, fields) for node in self.latest)
            if not side_by_side:
                self.previous, self.latest = self.latest, []
            after += self.previous

        node = self._append(kind, lane, after, signals, tuple(read_contents), tuple(writes), fields)
        for resource in reads:
            self.resources[resource].readers.append(node)
        for resource, content in writes:
            state = self.resources[resource]
            # The slices of one update are written side by side by several actors: one content with several writers.
            if kind in UPDATES and state.content == content:
                state.writers.append(node)
            else:
                self.resources[resource] = _Resource(writers=[node], content=content)
        if not self.shape.overlap:
            self.latest.append(node)
        return node

    def _append(
        self,
        kind: str,
        lane: str,
        after: Sequence[_Node],
        signals: tuple[Wait, ...],
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        fields: dict[str, Any],
    ) -> _Node:
        ops = self.lanes[lane]
        on_gpu = lane in GPU_LANES
        known = dict(ops[-1].over) if ops and on_gpu else dict(self.over_before[lane])
        if on_gpu:
            signals = ((lane, len(ops) + 1), *signals)

        awaited: dict[Wait, _Node] = {}
        for node in after:
            if kind in UPDATES and _same_update(node.op, kind, fields):
                continue  # other actors' slices of the same block are disjoint memory; the own one is a step ago
            for name, value in node.op.signals:
                if (name in GPU_LANES) == (on_gpu and node.op.lane in GPU_LANES):
                    awaited[(name, value)] = node
        waits = tuple(
            (name, value)
            for (name, value), node in awaited.items()
            if known.get(name, -1) < value
            and not any(other is not node and other.over.get(name, -1) >= value for other in awaited.values())
        )
        for node in awaited.values():
            for name, value in node.over.items():
                known[name] = max(value, known.get(name, -1))

        op = Op(kind, lane, waits=waits, signals=signals, reads=reads, writes=writes, **fields)
        node = _Node(op, {**known, **dict(signals)})
        ops.append(node)
        return node

    def land(self, block: int) -> Wait:
        self.landed[block] = len(self.landed) + 1
        return (GRAD_LANDED, self.landed[block])


def _same_update(op: Op, kind: str, fields: dict[str, Any]) -> bool:
    return op.kind == kind and op.block == fields["block"]


def layers_with_backward(trainable: Sequence[bool]) -> range:
    """Decoder layers in the order of the backward, down to the lowest trained block. trainable: of every block."""
    num_layers, lowest = len(trainable) - 2, trainable.index(True)
    return range(num_layers - 1, max(lowest - 1, 0) - 1, -1)


@lru_cache(maxsize=64)
def build_step(shape: StepShape) -> StepPlan:
    """The plan of one step. Deterministic in `shape`; cached."""
    s, b = shape, _Builder(shape)
    num_layers, num_micro = s.num_layers, s.num_micro_batches
    if s.train and not any(s.trainable):
        raise ValueError("every parameter is frozen: there is nothing to train")
    lowest = s.trainable.index(True) if s.train else s.head + 1
    backward_layers = layers_with_backward(s.trainable) if s.train else range(0)

    # ---- which activation cell and which layer is needed when: one entry a compute operation, in program order
    compute: list[tuple[str, int, int]] = []  # (kind, layer, micro-batch)
    turn = 0
    for layer in range(num_layers):
        compute += [("forward", layer, m) for m in micro_batch_order(num_micro, turn)]
        turn += 1
    compute += [("head", num_layers, m) for m in micro_batch_order(num_micro, turn)]
    for layer in backward_layers:
        turn += 1
        compute += [("backward", layer, m) for m in micro_batch_order(num_micro, turn)]
    embed_trained = s.train and s.trainable[s.embed]
    if embed_trained:
        turn += 1
        compute += [("embed_gradient", 0, m) for m in micro_batch_order(num_micro, turn)]

    cells = place([_cell_uses(kind, layer, m, backward_layers) for kind, layer, m in compute], s.activation_slots)
    final_use = {layer: i for i, (kind, layer, _) in enumerate(compute) if kind in ("forward", "backward")}
    layers = place(
        [
            [Use(layer, reads=True, writes=False, last=final_use[layer] == i)]
            if kind in ("forward", "backward")
            else []
            for i, (kind, layer, _) in enumerate(compute)
        ],
        s.param_units,
    )
    host_cells = _HostCells()

    def load_cell(cell: tuple[int, int], slot: int) -> None:
        layer, m = cell
        content = b.cell_content.get(cell)
        # The embedding's rows can be looked up again as long as no gradient replaced them.
        if layer == 0 and content is None:
            b.add(
                "gather_embedding",
                UPLOAD,
                block=s.embed,
                micro_batch=m,
                slot=slot,
                # An evaluation looks up any row, a training step those that the step before updated for it.
                reads=[ROWS] if s.train else [ROWS, ("hi", s.embed)],
                writes=[(("act", slot), (cell, "embedding"))],
            )
            return
        host = host_cells.of[cell]
        b.add(
            "upload_activation",
            UPLOAD,
            block=layer,
            micro_batch=m,
            slot=slot,
            host_slot=host,
            reads=[("host_act", host)],
            writes=[(("act", slot), content)],
        )

    def store_cell(access: int, cell: tuple[int, int], slot: int) -> None:
        if (access, cell) not in cells.stored_writes:
            return
        host = host_cells.take(cell)
        content = b.cell_content[cell]
        b.add(
            "download_activation",
            DOWNLOAD,
            block=cell[0],
            micro_batch=cell[1],
            slot=slot,
            host_slot=host,
            reads=[("act", slot)],
            writes=[(("host_act", host), content)],
        )

    def becomes(cell: tuple[int, int], what: str) -> Hashable:
        b.cell_content[cell] = (cell, what)
        return (cell, what)

    head_reads = [("hi", s.head), *([ROWS, ("hi", s.embed)] if s.tied else [])]
    head_uploaded = False
    decoder_grads = 0

    def update(block: int, rows: bool = False) -> None:
        slot = b.slot_of[block]
        for k in range(s.num_optimizer_actors):
            b.add(
                "update_rows" if rows else "update",
                update_lane(k),
                block=block,
                reads=[("grad", slot), *([("norm",)] if s.clip else [])],
                writes=[(ROWS if rows else ("hi", block), 1)],
                signals=((rows_counter(k) if rows else updated_counter(k, block), 1),),
                grad_slot=slot if isinstance(slot, int) else -1,
            )

    def download(block: int, source: Hashable, slot: Hashable, **fields: Any) -> None:
        b.slot_of[block] = slot
        # Before the last gradient travels, since the other updates wait for the norm alone.
        if s.clip and block == lowest:
            unit = fields.get("grad_unit", -1)
            writes = [(("norm",), "norm")]
            b.add("norm", DOWNLOAD, grad_unit=unit, reads=[source], writes=writes, signals=((NORM_READY, 1),))
        signal = b.land(block)
        b.add(
            "download_gradient",
            DOWNLOAD,
            block=block,
            reads=[source],
            writes=[(("grad", slot), ("gradient", block))],
            signals=(signal,),
            **fields,
        )
        if not s.clip:
            if block == s.embed:
                update(block, rows=True)
            update(block)

    for i, (kind, layer, m) in enumerate(compute):
        block = layer + 1
        for needed, unit in layers.loads[i]:
            b.add(
                "upload_params",
                UPLOAD,
                block=needed + 1,
                unit=unit,
                reads=[("hi", needed + 1)],
                writes=[(("unit", unit), ("params", needed + 1))],
            )
        for cell, slot in cells.loads[i]:
            load_cell(cell, slot)
        at = cells.slots[i]
        if kind == "forward":
            unit, slot, out = layers.slots[i][layer], at[(layer, m)], at[(layer + 1, m)]
            content = becomes((layer + 1, m), "value")
            b.add(
                "forward",
                COMPUTE,
                block=block,
                micro_batch=m,
                unit=unit,
                slot=slot,
                out_slot=out,
                last=final_use[layer] == i,
                reads=[("unit", unit), ("act", slot)],
                writes=[(("act", out), content)],
            )
            if layer not in backward_layers:
                host_cells.release((layer, m))
            store_cell(i, (layer + 1, m), out)
        elif kind == "head":
            if not head_uploaded:
                b.add("upload_head", UPLOAD, block=s.head, reads=head_reads, writes=[(("vocab",), "params")])
                head_uploaded = True
            slot = at[(num_layers, m)]
            writes = [(("act", slot), becomes((num_layers, m), "gradient"))] if backward_layers else []
            b.add(
                "head",
                COMPUTE,
                block=s.head,
                micro_batch=m,
                slot=slot,
                out_slot=slot if writes else -1,
                first=m == micro_batch_order(num_micro, num_layers)[0],
                reads=[("vocab",), ("act", slot)],
                writes=writes,
            )
            if writes:
                store_cell(i, (num_layers, m), slot)
            if s.train and m == micro_batch_order(num_micro, num_layers)[-1] and s.trainable[s.head]:
                b.add("finish_head", COMPUTE, block=s.head, writes=[(("vocab",), "head gradient")])
                download(s.head, ("vocab",), "head")
        elif kind == "backward":
            unit, slot, out = layers.slots[i][layer], at[(layer, m)], at[(layer + 1, m)]
            content = becomes((layer, m), "gradient")
            order = micro_batch_order(num_micro, num_layers + 1 + (num_layers - 1 - layer))
            b.add(
                "backward",
                COMPUTE,
                block=block,
                micro_batch=m,
                unit=unit,
                slot=slot,
                out_slot=out,
                first=m == order[0],
                last=final_use[layer] == i,
                reads=[("unit", unit), ("act", slot), ("act", out)],
                writes=[(("act", slot), content)],
            )
            host_cells.release((layer + 1, m))
            store_cell(i, (layer, m), slot)
            if m == order[-1] and s.trainable[block]:
                unit = decoder_grads % s.gradient_units
                b.add(
                    "finish_gradient",
                    COMPUTE,
                    block=block,
                    grad_unit=unit,
                    writes=[(("grad_unit", unit), ("gradient", block))],
                )
                slot = decoder_grads % s.gradient_slots
                download(block, ("grad_unit", unit), slot, grad_unit=unit, grad_slot=slot)
                decoder_grads += 1
        else:
            slot = at[(0, m)]
            embed_order = [mm for k, _, mm in compute if k == "embed_gradient"]
            b.add(
                "embed_gradient",
                COMPUTE,
                block=s.embed,
                micro_batch=m,
                slot=slot,
                first=m == embed_order[0],
                reads=[("act", slot)],
            )
            if m == embed_order[-1]:
                b.add("finish_embed", COMPUTE, block=s.embed, writes=[(("vocab",), "embedding gradient")])
                download(s.embed, ("vocab",), "embed")

    if s.train and s.clip:
        if s.embed in b.landed:
            update(s.embed, rows=True)
        for block in sorted(b.landed, key=lambda block: (block == s.embed, block)):  # see `need`
            update(block)

    increments = dict.fromkeys(shared_counters(num_layers + 2, s.num_optimizer_actors), 0)
    for nodes in b.lanes.values():
        for node in nodes:
            for name, value in node.op.signals:
                if name in increments:
                    increments[name] = max(increments[name], value)
    lanes = {
        name: Lane(name, IN_ORDER if name in GPU_LANES else READY_FIRST, tuple(n.op for n in nodes))
        for name, nodes in b.lanes.items()
    }
    return StepPlan(s, lanes, tuple(b.landed), increments, host_cells.count)


def _cell_uses(kind: str, layer: int, m: int, backward_layers: range) -> list[Use[tuple[int, int]]]:
    if kind == "forward":
        kept = layer in backward_layers
        return [Use((layer, m), reads=True, writes=False, last=not kept), Use((layer + 1, m), reads=False, writes=True)]
    if kind == "head":
        return [Use((layer, m), reads=True, writes=bool(backward_layers), last=not backward_layers)]
    if kind == "backward":
        return [Use((layer + 1, m), reads=True, writes=False, last=True), Use((layer, m), reads=True, writes=True)]
    return [Use((0, m), reads=True, writes=False, last=True)]


class _HostCells:
    """Numbers the pinned host cells; a cell's number is used again once its content is dead."""

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self.free: list[int] = []
        self.count = 0

    def take(self, cell: Hashable) -> int:
        if cell not in self.of:
            if self.free:
                self.of[cell] = self.free.pop(0)
            else:
                self.of[cell] = self.count
                self.count += 1
        return self.of[cell]

    def release(self, cell: Hashable) -> None:
        if cell in self.of:
            self.free.append(self.of.pop(cell))
