"""How a step is planned: which slot holds what, what travels, in which order. Soundness: tests/test_simulator.py."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from slideformer_ray.schedule import (
    COMPUTE,
    DOWNLOAD,
    GPU_LANES,
    ROWS,
    UPDATES,
    UPLOAD,
    Op,
    StepShape,
    Use,
    build_step,
    pick,
    place,
    update_lane,
)
from slideformer_ray.simulator import PlanOrder


def shape_of(num_layers=3, num_micro_batches=2, **fields):
    fields.setdefault("trainable", (True,) * (num_layers + 2))
    return StepShape(num_layers, num_micro_batches, **{"tied": False, **fields})


def count(plan, kind, block=None):
    return sum(op.kind == kind and block in (None, op.block) for op in plan.ops)


# ----------------------------------------------------------------------------------------------------------------------
# place


def random_accesses(rng, num_items, length):
    """Every item is created or loaded at its first access, then read, perhaps rewritten, and declared dead at its last
    one, perhaps. One or two items an access."""
    items = [rng.sample(range(num_items), rng.choice((1, 1, 2))) for _ in range(length)]
    created = set(rng.sample(range(num_items), num_items // 2))
    declared_dead = set(rng.sample(range(num_items), num_items // 2))
    accesses, seen = [], set()
    for i, names in enumerate(items):
        uses = []
        for name in names:
            create = name in created and name not in seen
            last = name in declared_dead and all(name not in later for later in items[i + 1 :])
            uses.append(Use(name, reads=not create, writes=create or rng.random() < 0.3, last=last))
        seen.update(names)
        accesses.append(uses)
    return accesses


RANDOM_ACCESSES = [
    (random_accesses(rng, num_items=5, length=9), num_slots)
    for seed in range(25)
    for rng in [random.Random(seed)]
    for num_slots in (2, 3, 4)
]


def fewest_loads(accesses, num_slots):
    """Over every choice of what to evict, by exhaustion."""
    costs = {frozenset(): 0}
    for uses in accesses:
        needed = {use.item for use in uses}
        following = {}
        for resident, cost in costs.items():
            loads = sum(use.reads and use.item not in resident for use in uses)
            others = resident - needed
            for size in range(min(len(others), num_slots - len(needed)) + 1):
                for kept in itertools.combinations(others, size):
                    after = frozenset(kept) | {use.item for use in uses if not use.last}
                    following[after] = min(cost + loads, following.get(after, cost + loads))
        costs = following
    return min(costs.values())


@pytest.mark.parametrize(("accesses", "num_slots"), RANDOM_ACCESSES)
def test_no_other_eviction_loads_less(accesses, num_slots):
    """`place` loads as little as any choice of evictions can."""
    assert sum(map(len, place(accesses, num_slots).loads)) == fewest_loads(accesses, num_slots)


@pytest.mark.parametrize(("accesses", "num_slots"), RANDOM_ACCESSES)
def test_slots_hold_what_an_access_needs(accesses, num_slots):
    """At each access, its items lie in slots of their own among the `num_slots`, put there by a load or a write."""
    placement = place(accesses, num_slots)
    held = {}
    for i, uses in enumerate(accesses):
        held |= {slot: item for item, slot in placement.loads[i]}
        held |= {placement.slots[i][use.item]: use.item for use in uses if not use.reads}
        assert {slot: held[slot] for slot in placement.slots[i].values()} == {
            placement.slots[i][use.item]: use.item for use in uses
        }
        assert set(held) <= set(range(num_slots))


@pytest.mark.parametrize(("accesses", "num_slots"), RANDOM_ACCESSES)
def test_exactly_what_is_loaded_again_is_stored(accesses, num_slots):
    """A written content is stored if and only if it is loaded before it is written anew: dead content never is."""
    placement = place(accesses, num_slots)
    wanted = set()
    last_write = {}
    for i, uses in enumerate(accesses):
        wanted |= {(last_write[item], item) for item, _ in placement.loads[i] if item in last_write}
        last_write |= {use.item: i for use in uses if use.writes}
    assert placement.stored_writes == wanted


def test_the_slot_that_is_empty_longest_is_taken_first():
    """Reuse is as late as can be, so that a load need not wait for the operation that has only just freed the slot."""
    accesses = [[Use(item, reads=True, writes=False, last=True)] for item in range(6)]
    assert [slots[item] for item, slots in enumerate(place(accesses, 3).slots)] == [0, 1, 2, 0, 1, 2]


# ----------------------------------------------------------------------------------------------------------------------
# What travels


@pytest.mark.parametrize("param_units", [2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_a_layer_is_uploaded_once_a_pass_whatever_the_micro_batches(num_layers, num_micro_batches, param_units):
    """Once for the forward, once for the backward, except for the layers that are still in a cache unit at the turn."""
    plan = build_step(shape_of(num_layers, num_micro_batches, param_units=param_units, activation_slots=4))
    resident = min(param_units, num_layers)
    assert count(plan, "upload_params") == 2 * num_layers - resident
    for block in range(1, num_layers + 1):
        assert count(plan, "upload_params", block) == (1 if block > num_layers - resident else 2)
    assert count(plan, "upload_head") == 1


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_one_gradient_a_trainable_block_travels_and_every_actor_updates_it_once(num_micro_batches, clip):
    """Gradients are summed on the GPU: one download and one update an actor a step. Frozen blocks have neither."""
    trainable = (False, True, False, True, True)
    plan = build_step(
        shape_of(3, num_micro_batches, trainable=trainable, clip=clip, gradient_slots=2, num_optimizer_actors=2)
    )
    expected = Counter({block: 1 for block, trained in enumerate(trainable) if trained})
    assert Counter(op.block for op in plan.ops if op.kind == "download_gradient") == expected
    for lane in (update_lane(0), update_lane(1)):
        assert Counter(op.block for op in plan.lanes[lane].ops) == expected
    assert plan.gradient_order == tuple(op.block for op in plan.ops if op.kind == "download_gradient")
    assert plan.increments["grad.landed"] == 3
    assert plan.increments["norm.ready"] == clip


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_activations_that_fit_on_the_gpu_stay_there(num_micro_batches):
    """With a slot for every activation nothing goes to the host, and no embedding row is looked up twice."""
    for slots in (4 * num_micro_batches, 1 << 30):
        plan = build_step(shape_of(3, num_micro_batches, activation_slots=max(slots, 3)))
        assert plan.num_host_cells == 0
        assert count(plan, "download_activation") == count(plan, "upload_activation") == 0
        assert count(plan, "gather_embedding") == num_micro_batches


def test_host_cells_are_used_again():
    """A host cell is free once its content is dead: no more cells than activations alive at once."""
    plan = build_step(shape_of(5, 4, activation_slots=3))
    assert plan.num_host_cells <= 5 * 4  # layers' inputs, the first layer's excepted, and the head's
    assert {op.host_slot for op in plan.ops if op.host_slot >= 0} == set(range(plan.num_host_cells))


@pytest.mark.parametrize("activation_slots", [3, 4, 7])
def test_slots_stay_within_their_numbers(activation_slots):
    """Units and slots are numbered from 0 to the counts of the shape."""
    shape = shape_of(5, 4, activation_slots=activation_slots, param_units=2, gradient_units=2, gradient_slots=2)
    plan = build_step(shape)
    assert {op.unit for op in plan.ops} - {-1} == {0, 1}
    assert {op.grad_unit for op in plan.ops} - {-1} == {0, 1}
    assert {op.grad_slot for op in plan.ops} - {-1} == {0, 1}
    assert {slot for op in plan.ops for slot in (op.slot, op.out_slot)} - {-1} == set(range(activation_slots))


def test_a_tied_head_is_sent_with_the_embedding():
    """The tied weight belongs to the embedding's block: the head waits for both blocks' updates."""
    [upload] = [op for op in build_step(shape_of(tied=True)).ops if op.kind == "upload_head"]
    assert {resource for resource, _ in upload.reads} == {("hi", 0), ROWS, ("hi", 4)}


def test_a_step_looks_up_rows_before_the_rest_of_the_embedding_is_updated():
    """Training waits for the rows that were updated for it alone; an evaluation looks up any row and waits for all."""
    for train, waits in ((True, {("rows.0", 0)}), (False, {("rows.0", 0), ("updated.0.0", 0)})):
        plan = build_step(shape_of(tied=False, train=train))
        gathers = [op for op in plan.ops if op.kind == "gather_embedding"]
        assert {wait for op in gathers for wait in op.waits if wait[0] not in GPU_LANES} == waits


# ----------------------------------------------------------------------------------------------------------------------
# The order of work


def test_the_step_is_layer_major():
    """All micro-batches of a layer before the next layer, forward and backward, each direction once."""
    plan = build_step(shape_of(3, 4))
    runs = [
        (kind, block) for (kind, block), _ in itertools.groupby((op.kind, op.block) for op in plan.lanes[COMPUTE].ops)
    ]
    assert runs == [
        *[("forward", block) for block in (1, 2, 3)],
        *[("head", 4), ("finish_head", 4)],
        *[(kind, block) for block in (3, 2, 1) for kind in ("backward", "finish_gradient")],
        *[("embed_gradient", 0), ("finish_embed", 0)],
    ]
    for (_, _), group in itertools.groupby(plan.lanes[COMPUTE].ops, key=lambda op: (op.kind, op.block)):
        micro_batches = [op.micro_batch for op in group]
        assert micro_batches == [-1] or sorted(micro_batches) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_a_gradient_sum_begins_once(num_micro_batches):
    """`first` marks the first micro-batch of each block's gradient, and no other: the sum starts from nothing."""
    plan = build_step(shape_of(3, num_micro_batches))
    summing = [op for op in plan.lanes[COMPUTE].ops if op.kind in ("head", "backward", "embed_gradient")]
    for _, group in itertools.groupby(summing, key=lambda op: (op.kind, op.block)):
        assert [op.first for op in group] == [True] + [False] * (num_micro_batches - 1)


@pytest.mark.parametrize(
    ("trainable", "backward"),
    [
        ((True,) * 5, [3, 2, 1]),
        ((True, False, False, False, False), [3, 2, 1]),
        ((False, True, True, True, True), [3, 2, 1]),
        ((False, False, False, True, True), [3]),
        ((False, False, True, False, False), [3, 2]),
        ((False, False, False, False, True), []),
    ],
)
def test_the_backward_ends_at_the_lowest_trainable_block(trainable, backward):
    """Below it nobody needs a gradient. Frozen layers above it still pass gradients on."""
    plan = build_step(shape_of(3, 1, trainable=trainable))
    assert [op.block for op in plan.ops if op.kind == "backward"] == backward
    assert (count(plan, "embed_gradient") > 0) == trainable[0]


def test_evaluation_is_forward_and_loss():
    """A plan with train=False writes no gradient, updates nothing and moves no shared counter."""
    plan = build_step(shape_of(3, 2, train=False, clip=True, gradient_slots=1))
    assert {op.kind for op in plan.ops} == {"upload_params", "upload_head", "gather_embedding", "forward", "head"}
    assert set(plan.increments.values()) == {0}
    assert plan.gradient_order == ()


def test_evaluation_reads_what_training_wrote():
    """An evaluation waits for every update of the step before it, just as training does."""
    waits = {
        wait for op in build_step(shape_of(3, 2, train=False)).ops for wait in op.waits if wait[0].startswith("upd")
    }
    assert waits == {(f"updated.0.{block}", 0) for block in range(5)}


def test_clipped_updates_wait_for_the_norm():
    """No parameter changes before the global norm is known; then they go as the next forward needs them."""
    plan = build_step(shape_of(3, 2, clip=True, gradient_slots=3))
    updates = plan.lanes[update_lane(0)].ops
    # The last gradient lands after the norm: who waits for it has waited for both.
    assert all({("norm.ready", 1), ("grad.landed", 5)} & set(op.waits) for op in updates)
    assert [op.block for op in updates] == [0, 1, 2, 3, 4, 0]
    assert [op.kind for op in updates] == ["update_rows", *["update"] * 5]


def test_equal_shapes_give_equal_plans():
    """Each actor builds its plans itself, in its own process: nothing but the shape may enter."""
    shape = shape_of(4, 3, activation_slots=4, num_optimizer_actors=2)
    assert repr(build_step.__wrapped__(shape)) == repr(build_step.__wrapped__(dataclasses.replace(shape)))


NO_OVERLAP = [
    shape_of(2, 2, overlap=False, activation_slots=slots, clip=clip, gradient_slots=2, num_optimizer_actors=actors)
    for slots, clip, actors in itertools.product((3, 1 << 30), (False, True), (1, 2))
]


def unordered(plans, from_step=0):
    """Pairs of operations that may run at once, slices of one update excepted; one is of `from_step` or later."""
    ops = PlanOrder(plans).ops
    return [
        (str(first), str(second))
        for first, second in itertools.combinations(ops, 2)
        if max(first.step, second.step) >= from_step
        and not PlanOrder.before(first, second)
        and not PlanOrder.before(second, first)
        and not (first.op.kind == second.op.kind in UPDATES and first.op.block == second.op.block)
    ]


@pytest.mark.parametrize("shape", NO_OVERLAP)
def test_without_overlap_one_operation_runs_at_a_time(shape):
    """overlap=False orders all operations totally, across steps and evaluations too."""
    plan, evaluation = build_step(shape), build_step(dataclasses.replace(shape, train=False))
    assert unordered([plan, plan, evaluation, plan]) == []


@pytest.mark.parametrize("shape", NO_OVERLAP[::3])
def test_without_overlap_no_wait_is_superfluous(shape):
    """Every single wait of an overlap=False plan is needed for its total order, whatever step comes before."""
    plan, overlapped = build_step(shape), build_step(dataclasses.replace(shape, overlap=True))
    for lane in plan.lanes.values():
        for i, op in enumerate(lane.ops):
            for wait in op.waits:
                fewer = dataclasses.replace(op, waits=tuple(other for other in op.waits if other != wait))
                ops = (*lane.ops[:i], fewer, *lane.ops[i + 1 :])
                lanes = {**plan.lanes, lane.name: dataclasses.replace(lane, ops=ops)}
                mutant = dataclasses.replace(plan, lanes=lanes)
                assert unordered([overlapped, mutant, mutant], 1), f"{op.describe()} need not wait for {wait}"


# ----------------------------------------------------------------------------------------------------------------------
# pick


def update(block, landed, *others):
    return Op("update", update_lane(0), block, waits=(("grad.landed", landed), *others))


def test_pick_takes_the_oldest_gradient_while_gradients_land():
    """The backward waits for a free gradient slot: the one that was filled first is freed first."""
    ready = [update(2, landed=3), update(4, landed=1), update(3, landed=2)]
    assert pick(ready, all_landed=False).block == 4


def test_pick_takes_the_lowest_block_once_all_have_landed():
    """The next forward needs block 0 first."""
    ready = [update(4, landed=1), update(2, landed=3), update(3, landed=2)]
    assert pick(ready, all_landed=True).block == 2


def test_pick_takes_the_rows_first_and_the_other_rows_last():
    """The next step looks the rows up before anything else; nobody looks up the others."""
    rows = Op("update_rows", update_lane(0), 0, waits=(("grad.landed", 5),))
    ready = [update(0, landed=5), update(1, landed=4), rows, update(4, landed=1)]
    order = []
    while ready:
        order.append(pick(ready, all_landed=True))
        ready.remove(order[-1])
    assert [(op.kind, op.block) for op in order] == [("update_rows", 0), ("update", 1), ("update", 4), ("update", 0)]


def test_pick_takes_the_lowest_block_when_gradients_are_clipped():
    """All gradients are held until the norm is known, so no slot is wanted back: the next forward decides at once."""
    ready = [update(4, 1, ("norm.ready", 1)), update(2, 3, ("norm.ready", 1))]
    assert pick(ready, all_landed=False).block == 2


# ----------------------------------------------------------------------------------------------------------------------
# Shapes that cannot work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainable": (True,) * 3}, "trainable has 3 entries; 3 layers need 5"),
        ({"activation_slots": 2}, "activation_slots is 2"),
        ({"param_units": 1}, "param_units is 1"),
        (
            {"clip": True, "gradient_slots": 2},
            "gradient_slots is 2; clipping holds the gradients of all 3 trainable layers",
        ),
        ({"gradient_slots": 0}, "must be at least 1"),
        ({"num_micro_batches": 0}, "must be at least 1"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(fields, message):
    """The message has the field, the number found and the number needed."""
    with pytest.raises(ValueError, match=message):
        shape_of(**fields)


def test_a_model_with_nothing_to_train_is_refused():
    """Training needs a trainable block; evaluation does not."""
    frozen = (False,) * 5
    with pytest.raises(ValueError, match="every parameter is frozen"):
        build_step(shape_of(3, 1, trainable=frozen))
    build_step(shape_of(3, 1, trainable=frozen, train=False))


def test_downloads_keep_a_gradient_unit_busy_no_longer_than_its_copy():
    """The backward may run ahead by as many layers as there are gradient units: a unit waits for its own copy only."""
    plan = build_step(shape_of(4, 1, gradient_units=2, gradient_slots=4))
    position = {op.block: i + 1 for i, op in enumerate(plan.lanes[DOWNLOAD].ops)}
    finishes = {op.block: op for op in plan.ops if op.kind == "finish_gradient"}
    assert (DOWNLOAD, position[4]) in finishes[2].waits
    assert not [wait for block in (4, 3) for wait in finishes[block].waits if wait[0] == DOWNLOAD]


def test_uploads_run_ahead_by_the_cache_units():
    """A layer's upload waits for the layer whose unit it takes, not for the one before it."""
    plan = build_step(shape_of(5, 1, param_units=3))
    uploads = [op for op in plan.lanes[UPLOAD].ops if op.kind == "upload_params"]
    last_forward = {op.block: i + 1 for i, op in enumerate(plan.lanes[COMPUTE].ops) if op.kind == "forward"}
    assert (COMPUTE, last_forward[1]) in uploads[3].waits
    assert not [wait for op in uploads[:3] for wait in op.waits if wait[0] == COMPUTE]
