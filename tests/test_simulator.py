"""`check` passes what build_step makes and objects to every kind of broken plan; `simulate` tells its time.

A mutation breaks one thing of a sound plan. `check` is trusted because it notices every one of them.
"""

import itertools
import random
from dataclasses import replace

import pytest

from slideformer_ray.schedule import COMPUTE, DOWNLOAD, GPU_LANES, UPLOAD, StepShape, build_step, update_lane
from slideformer_ray.simulator import (
    CAUSES,
    AccessMismatch,
    CounterError,
    Deadlock,
    Durations,
    PlanError,
    SlotHazard,
    WrongContent,
    check,
    simulate,
)

UNBOUNDED = 1 << 30


def shape_of(num_layers=3, num_micro_batches=2, **fields):
    fields.setdefault("trainable", (True,) * (num_layers + 2))
    return StepShape(num_layers, num_micro_batches, **{"tied": False, **fields})


def frozen_patterns(num_layers):
    """What is trained: all, all but the embedding, the top half, every other, the head alone, the embedding alone."""
    blocks = range(num_layers + 2)
    return [
        (True,) * len(blocks),
        tuple(b != 0 for b in blocks),
        tuple(b > num_layers // 2 for b in blocks),
        tuple(b % 2 == 1 for b in blocks),
        tuple(b == num_layers + 1 for b in blocks),
        tuple(b == 0 for b in blocks),
    ]


def sample_of_shapes(num, seed, **fixed):
    """Shapes drawn from the product of everything that a shape can be."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(num):
        num_layers, clip = rng.choice((1, 3, 5)), rng.random() < 0.4
        trainable = rng.choice(frozen_patterns(num_layers))
        fields = {
            "num_micro_batches": rng.choice((1, 3, 4)),
            "trainable": trainable,
            "tied": rng.random() < 0.5,
            "param_units": rng.choice((2, 3)),
            "gradient_units": rng.choice((1, 2)),
            "gradient_slots": max(1, sum(trainable[1:-1])) if clip else rng.choice((1, 2, num_layers)),
            "activation_slots": rng.choice((3, 4, 7, UNBOUNDED)),
            "num_optimizer_actors": rng.choice((1, 2, 3)),
            "clip": clip,
            "overlap": rng.random() < 0.7,
        }
        shapes.append(StepShape(num_layers, **{**fields, **fixed}))
    return shapes


def evaluation_of(shape):
    return replace(shape, train=False)


# ----------------------------------------------------------------------------------------------------------------------
# What build_step makes is sound


@pytest.mark.parametrize("shape", sample_of_shapes(300, seed=0))
def test_every_plan_is_sound(shape):
    """No deadlock, no hazard, right contents: over steps with other micro-batch counts and evaluations in between."""
    short = replace(shape, num_micro_batches=2)
    check([build_step(s) for s in (shape, shape, evaluation_of(short), evaluation_of(shape), short, shape)])


def test_a_large_plan_is_checked_quickly():
    """36 layers, 8 micro-batches, 2 actors, 3 steps: fast enough to be run before training."""
    shape = shape_of(36, 8, activation_slots=40, num_optimizer_actors=2)
    check([build_step(shape)] * 3)


# ----------------------------------------------------------------------------------------------------------------------
# Mutations

MUTATED_SHAPES = [
    shape_of(1, 1),
    shape_of(3, 2, activation_slots=3, param_units=2, gradient_units=1),
    shape_of(3, 3, activation_slots=4, num_optimizer_actors=2, gradient_slots=2),
    shape_of(3, 1, tied=True, clip=True, gradient_slots=3),
    shape_of(
        3, 2, tied=True, clip=True, gradient_slots=3, gradient_units=1, activation_slots=3, num_optimizer_actors=2
    ),
    shape_of(5, 2, trainable=(False, False, True, False, True, True, True), activation_slots=4),
    shape_of(5, 1, param_units=2, gradient_units=2, gradient_slots=2, num_optimizer_actors=3),
    evaluation_of(shape_of(3, 3, activation_slots=3, num_optimizer_actors=2)),
]
mutated_shapes = pytest.mark.parametrize("shape", MUTATED_SHAPES, ids=range(len(MUTATED_SHAPES)))


def with_op(plan, lane, i, /, **changes):
    """The plan with operation i of the lane changed."""
    ops = list(plan.lanes[lane].ops)
    ops[i] = replace(ops[i], **changes)
    return replace(plan, lanes={**plan.lanes, lane: replace(plan.lanes[lane], ops=tuple(ops))})


def every_op(plan):
    return [(lane.name, i, op) for lane in plan.lanes.values() for i, op in enumerate(lane.ops)]


def every_wait(plan):
    return [(lane, i, op, wait) for lane, i, op in every_op(plan) for wait in op.waits]


def without_wait(op, wait):
    return tuple(other for other in op.waits if other != wait)


def check_between_steps(shape, mutant):
    """Check the mutant where its waits matter: twice in a row, after a step that leaves as much as can be unfinished.

    The step before has a gradient slot for every layer. With fewer, its own downloads wait for some of its updates, so
    that the wait for these at the begin of the next step would find them done.
    """
    check([build_step(replace(shape, train=True, gradient_slots=shape.num_layers)), mutant, mutant])


@mutated_shapes
def test_every_dropped_wait_is_noticed(shape):
    """No wait of a plan is superfluous, and none can be lost unnoticed."""
    plan = build_step(shape)
    for lane, i, op, wait in every_wait(plan):
        with pytest.raises((SlotHazard, WrongContent)):
            check_between_steps(shape, with_op(plan, lane, i, waits=without_wait(op, wait)))
            pytest.fail(f"{op.describe()} need not wait for {wait}")


@mutated_shapes
def test_every_wait_that_is_one_too_low_is_noticed(shape):
    """Waiting for the operation (or step) before the right one is a hazard."""
    plan = build_step(shape)
    for lane, i, op, (name, value) in every_wait(plan):
        waits = (*without_wait(op, (name, value)), (name, value - 1))
        with pytest.raises((SlotHazard, WrongContent)):
            check_between_steps(shape, with_op(plan, lane, i, waits=waits))
            pytest.fail(f"{op.describe()} may wait for {name} {value - 1}")


@mutated_shapes
def test_a_wait_for_a_value_that_never_comes_is_noticed(shape):
    """Counters are raised by a step as far as its plan says: to wait for more is to wait for ever."""
    plan = build_step(shape)
    for lane, i, op, (name, value) in every_wait(plan):
        beyond = (len(plan.lanes[name].ops) if name in GPU_LANES else plan.increments[name]) + 1
        waits = (*without_wait(op, (name, value)), (name, beyond))
        with pytest.raises(CounterError, match=f"waits for {name} {beyond}"):
            check([with_op(plan, lane, i, waits=waits)])


def test_a_wait_for_an_unknown_counter_is_noticed():
    """A counter that nobody has is one that nobody signals."""
    plan = build_step(shape_of())
    with pytest.raises(CounterError, match="no.where 0"):
        check([with_op(plan, COMPUTE, 0, waits=(("no.where", 0),))])


@mutated_shapes
def test_every_wait_for_the_own_consumer_is_noticed(shape):
    """An upload that waits for the operation it is for, and a gradient for its own update, wait for ever."""
    plan = build_step(shape)
    for lane, i, op, (name, value) in every_wait(plan):
        if name not in plan.lanes or name not in GPU_LANES:
            continue
        awaited = plan.lanes[name].ops[value - 1]
        mutant = with_op(plan, name, value - 1, waits=(*awaited.waits, (lane, i + 1)))
        if lane in GPU_LANES:
            with pytest.raises(Deadlock) as error:
                check([mutant])
            assert op.describe() in str(error.value) and awaited.describe() in str(error.value)


def test_a_gradient_that_waits_for_a_later_one_is_noticed():
    """With one slot, no update can wait until all gradients have landed: the second needs the first one's slot."""
    plan = build_step(shape_of(3, 1, gradient_slots=1))
    lane = update_lane(0)
    i, first = next((i, op) for i, op in enumerate(plan.lanes[lane].ops) if op.block == 3)
    assert first.grad_slot == 0
    for broken in (check, lambda plans: simulate(plans, ONE_SECOND)):
        with pytest.raises(Deadlock, match=r"update block 3 \(update.0, step 0\) waits for download_gradient"):
            broken([with_op(plan, lane, i, waits=(("grad.landed", len(plan.gradient_order)),))])


@mutated_shapes
def test_every_dropped_signal_is_noticed(shape):
    """A counter steps by one: a missing signal is missed even where a later one lets every wait pass."""
    plan = build_step(shape)
    for lane, i, op in every_op(plan):
        for signal in op.signals:
            with pytest.raises(CounterError):
                check([with_op(plan, lane, i, signals=tuple(other for other in op.signals if other != signal))])
                pytest.fail(f"{op.describe()} need not signal {signal}")


def test_a_counter_has_one_writer():
    """A second lane that signals a counter is named, with the first."""
    plan = build_step(shape_of())
    first = plan.lanes[UPLOAD].ops[0]
    with pytest.raises(CounterError, match="download_gradient block 4 .*belongs to upload_params block 1"):
        check([with_op(plan, UPLOAD, 0, signals=(*first.signals, ("grad.landed", 1)))])


def test_lanes_that_run_in_any_order_do_not_share_a_counter():
    """Two updates that step one counter could do so the wrong way round."""
    plan = build_step(shape_of())
    mutant = with_op(plan, update_lane(0), 1, signals=(("updated.0.4", 2),))
    with pytest.raises(CounterError, match="any order"):
        check([replace(mutant, increments={**plan.increments, "updated.0.4": 2, "updated.0.3": 0})])


def test_only_the_gpu_actor_sees_its_lanes_progress():
    """An optimizer actor that waits for gpu.compute would wait for a counter of another process."""
    plan = build_step(shape_of())
    with pytest.raises(CounterError, match="only the GPU actor sees"):
        check([with_op(plan, update_lane(0), 0, waits=((COMPUTE, 1),))])


def swapped(plan, lane, i):
    """Operations i and i + 1 change places. The lane's own progress counts positions, so these signals stay."""
    first, second = plan.lanes[lane].ops[i : i + 2]
    others = [tuple(s for s in op.signals if s[0] != lane) for op in (first, second)]
    plan = with_op(plan, lane, i, **{**vars(second), "signals": ((lane, i + 1), *others[1])})
    return with_op(plan, lane, i + 1, **{**vars(first), "signals": ((lane, i + 2), *others[0])})


@mutated_shapes
def test_every_swap_of_an_awaited_operation_is_noticed(shape):
    """Where another lane waits for exactly operation i, having i + 1 in its place is wrong: another layer's parameters
    are in the unit, or another activation in the slot."""
    plan = build_step(shape)
    awaited = {(name, value) for *_, (name, value) in every_wait(plan)}
    for lane in GPU_LANES:
        for i in range(len(plan.lanes[lane].ops) - 1):
            if (lane, i + 1) in awaited:
                with pytest.raises(PlanError):
                    check_between_steps(shape, swapped(plan, lane, i))
                    pytest.fail(f"{plan.lanes[lane].ops[i].describe()} may come one later")


def test_gradients_that_land_in_another_order_are_noticed():
    """Two downloads change places, each signalling what its place signals: the updates take the wrong gradients."""
    plan = build_step(shape_of(4, 1, gradient_slots=4))
    downloads = plan.lanes[DOWNLOAD].ops
    for i in range(len(downloads) - 1):
        mutant = with_op(plan, DOWNLOAD, i, **{**vars(downloads[i + 1]), "signals": downloads[i].signals})
        mutant = with_op(mutant, DOWNLOAD, i + 1, **{**vars(downloads[i]), "signals": downloads[i + 1].signals})
        with pytest.raises((SlotHazard, WrongContent, Deadlock)):
            check([mutant])


def test_updates_may_be_listed_in_any_order():
    """An update lane runs what is ready: its order in the plan means nothing, and `check` does not lean on it."""
    for shape in sample_of_shapes(20, seed=1):
        plan = build_step(shape)
        lanes = {
            name: lane if name in GPU_LANES else replace(lane, ops=lane.ops[::-1]) for name, lane in plan.lanes.items()
        }
        check([replace(plan, lanes=lanes)] * 2)


RESOURCE_OF = {
    "unit": "unit",
    "slot": "act",
    "out_slot": "act",
    "host_slot": "host_act",
    "grad_unit": "grad_unit",
    "grad_slot": "grad",
}


def every_slot(plan):
    return [(lane, i, op, name) for lane, i, op in every_op(plan) for name in RESOURCE_OF if getattr(op, name) >= 0]


@mutated_shapes
def test_every_changed_slot_is_noticed(shape):
    """An operation that uses another slot than planned, and says so, breaks somebody: itself, or who comes after."""
    plan = build_step(shape)
    for lane, i, op, name in every_slot(plan):
        old = (RESOURCE_OF[name], getattr(op, name))
        new = (old[0], old[1] + 1)
        mutant = with_op(
            plan,
            lane,
            i,
            **{
                field: value + 1
                for field in RESOURCE_OF
                if RESOURCE_OF[field] == old[0] and (value := getattr(op, field)) == old[1]
            },
            reads=tuple((new if resource == old else resource, content) for resource, content in op.reads),
            writes=tuple((new if resource == old else resource, content) for resource, content in op.writes),
        )
        with pytest.raises((SlotHazard, WrongContent)):
            check_between_steps(shape, mutant)
            pytest.fail(f"{op.describe()} may use {new} for {old}")


@mutated_shapes
def test_a_field_that_differs_from_the_stated_access_is_noticed(shape):
    """The actors go by fields, the proof by reads and writes: these must be the same."""
    plan = build_step(shape)
    for lane, i, op, name in every_slot(plan):
        if op.kind == "head" and name == "out_slot":
            continue  # the same slot as `slot`
        with pytest.raises(AccessMismatch):
            check([with_op(plan, lane, i, **{name: getattr(op, name) + 1})])


def test_reading_parameters_of_the_wrong_step_is_noticed():
    """An upload that is promised this step's update finds the one before: the message says what it reads."""
    plan = build_step(shape_of())
    upload = plan.lanes[UPLOAD].ops[0]
    with pytest.raises(WrongContent, match=r"upload_params block 1 \(gpu.upload, step 1\)"):
        check([plan, with_op(plan, UPLOAD, 0, reads=((upload.reads[0][0], 1),))])


def test_an_evaluation_that_does_not_wait_is_noticed():
    """Evaluating right after training must wait for the updates, though an evaluation itself raises no counter."""
    shape = shape_of()
    evaluation = build_step(evaluation_of(shape))
    with pytest.raises(SlotHazard, match=r"update block 1 \(update.0, step 0\).*upload_params block 1"):
        check([build_step(shape), with_op(evaluation, UPLOAD, 0, waits=())])


# ----------------------------------------------------------------------------------------------------------------------
# simulate

KINDS = (
    "gather_embedding upload_params upload_head upload_activation forward head finish_head backward finish_gradient "
    "embed_gradient finish_embed norm download_activation download_gradient.embed download_gradient.decoder "
    "download_gradient.head update.embed update.decoder update.head update_rows"
).split()
ONE_SECOND = Durations(dict.fromkeys(KINDS, 1.0))


def random_durations(seed):
    rng = random.Random(seed)
    return Durations({kind: rng.choice((0.0, 0.3, 1.0, 4.0)) + rng.random() for kind in KINDS})


def seconds_of(shape, durations, **longer):
    """Steady seconds a step, with some durations replaced."""
    return simulate([build_step(shape)] * 4, Durations({**durations.seconds, **longer})).steady_step_seconds


def test_a_small_step_by_hand():
    """One layer, one micro-batch, a second for everything: each operation begins when a hand-drawn chart says so."""
    plan = build_step(shape_of(1, 1))
    timeline = simulate([plan, plan], ONE_SECOND)
    starts = {(run.op.kind, run.op.block): run.start for run in timeline.runs if run.step == 0}
    assert starts == {
        ("upload_params", 1): 0,
        ("gather_embedding", 0): 1,
        ("upload_head", 2): 2,
        ("forward", 1): 2,
        ("head", 2): 3,
        ("finish_head", 2): 4,
        ("backward", 1): 5,
        ("finish_gradient", 1): 6,
        ("embed_gradient", 0): 7,
        ("finish_embed", 0): 8,
        ("download_gradient", 2): 5,
        ("download_gradient", 1): 7,
        ("download_gradient", 0): 9,
        ("update", 2): 6,
        ("update", 1): 8,
        ("update_rows", 0): 10,
        ("update", 0): 11,
    }
    # The GPU's second step begins at 10 with layer 1; the embedding is looked up at 11, when its rows are updated.
    assert timeline.step_seconds == [10, 10]
    assert timeline.seconds == 22
    assert timeline.busy_seconds == {COMPUTE: 14, UPLOAD: 6, DOWNLOAD: 6, "update.0": 8}
    assert timeline.exposed_seconds == {**dict.fromkeys(CAUSES, 0.0), "step_edge": 4, "tail": 2}
    assert timeline.hiding_factor == 1 / 2


@pytest.mark.parametrize("shape", sample_of_shapes(20, seed=2))
def test_a_run_keeps_the_plans_order(shape):
    """A lane does one thing at a time, GPU lanes in order; nothing starts before what it waits for is signalled."""
    plans = [build_step(shape), build_step(evaluation_of(shape)), build_step(shape)]
    runs = simulate(plans, random_durations(0)).runs
    assert sorted(map(id, (run.op for run in runs))) == sorted(id(op) for plan in plans for op in plan.ops)
    for lane in plans[0].lanes:
        mine = [run for run in runs if run.lane == lane]
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
        if lane in GPU_LANES:
            assert [run.op for run in mine] == [op for plan in plans for op in plan.lanes[lane].ops]
    signalled = {
        (
            run.step if name in GPU_LANES else "",
            name,
            value + (run.step == 2) * plans[0].increments.get(name, 0),
        ): run.end
        for run in runs
        for name, value in run.op.signals
    }
    for run in runs:
        for name, value in run.op.waits:
            value += (run.step > 0) * plans[0].increments.get(name, 0)
            assert value == 0 or signalled[run.step if name in GPU_LANES else "", name, value] <= run.start


@pytest.mark.parametrize("shape", sample_of_shapes(20, seed=6))
def test_no_timing_breaks_a_plan_that_check_passes(shape):
    """Runs with random durations, looked at by the clock alone: while an operation reads, nobody writes, and the last
    write before it was the declared one."""
    plans = [build_step(shape), build_step(shape)]
    for seed in range(3):
        writes = {}  # (resource, who writes this part of it) -> [(run, content)], in the order of the clock
        runs = simulate(plans, random_durations(seed)).runs
        for run in runs:
            for resource, content in run.op.writes:
                part = (resource, run.lane if resource[0] == "hi" else "")
                writes.setdefault(part, []).append((run, content))
        for reader in runs:
            for resource, declared in reader.op.reads:
                for part in [part for part in writes if part[0] == resource]:
                    before = [(run, content) for run, content in writes[part] if run.start < reader.start]
                    during = [run for run, _ in writes[part] if reader.start <= run.start < reader.end]
                    assert all(run.end <= reader.start for run, _ in before) and during in ([], [reader])
                    if resource[0] == "hi":
                        assert len(before) == reader.step + declared
                    else:
                        assert (before[-1][0].step, before[-1][1]) == (reader.step, declared)


@pytest.mark.parametrize("shape", sample_of_shapes(20, seed=3))
def test_idle_and_busy_time_of_the_compute_lane_add_up(shape):
    """Every idle second has one cause: busy and exposed seconds are the time until the GPU's last step ends."""
    timeline = simulate([build_step(shape)] * 3, random_durations(1))
    total = timeline.busy_seconds[COMPUTE] + sum(timeline.exposed_seconds.values())
    assert total == pytest.approx(sum(timeline.step_seconds))


@pytest.mark.parametrize("shape", sample_of_shapes(20, seed=4))
def test_the_critical_path_has_no_gap(shape):
    """Its operations follow one another from 0 to the end."""
    timeline = simulate([build_step(shape)] * 2, random_durations(2))
    path = timeline.critical_path
    assert [path[0].start, *(run.end for run in path)] == [*(run.start for run in path), timeline.seconds]
    assert sum(run.seconds for run in path) == pytest.approx(timeline.seconds)


@pytest.mark.parametrize("shape", sample_of_shapes(10, seed=5, overlap=False))
def test_without_overlap_the_step_takes_the_sum_of_its_operations(shape):
    """overlap=False is one chain: all seconds add up, counting the slices of an update once."""
    plan, durations = build_step(shape), random_durations(3)
    chain = [op for op in plan.ops if op.lane in (*GPU_LANES, update_lane(0))]
    timeline = simulate([plan], durations)
    assert timeline.seconds == pytest.approx(sum(durations.of(op, shape) for op in chain))
    assert len(timeline.critical_path) == len(chain)


def test_equal_input_gives_an_equal_timeline():
    """Ties are broken in one way: a prediction does not change from run to run."""
    plans = [build_step(shape_of(3, 3, num_optimizer_actors=2, activation_slots=4))] * 2
    first, second = (repr(simulate(plans, ONE_SECOND).runs) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("cause", "slow", "fields"),
    [
        ("upload_params", {"upload_params": 50.0}, {}),
        ("upload_activations", {"upload_activation": 50.0}, {"activation_slots": 3}),
        ("upload_head", {"upload_head": 50.0}, {}),
        ("update", {"update.decoder": 50.0}, {}),
        ("update", {"update_rows": 50.0}, {}),
        ("update", {"update.embed": 50.0}, {"tied": True}),
        ("download", {"download_gradient.decoder": 50.0}, {"gradient_units": 1, "gradient_slots": 4}),
        ("tail", {"download_gradient.embed": 50.0}, {}),
        ("step_edge", {"gather_embedding": 50.0}, {"num_micro_batches": 1}),
    ],
)
def test_idle_time_is_put_down_to_what_is_slow(cause, slow, fields):
    """If one kind of operation is slow, most of the compute lane's idle time is put down to it."""
    timeline = simulate([build_step(shape_of(4, **fields))] * 3, Durations({**ONE_SECOND.seconds, **slow}))
    exposed = timeline.exposed_seconds
    assert exposed[cause] > 0.7 * sum(exposed.values())


def test_updates_left_at_the_end_of_backward_run_from_block_0_up():
    """While gradients land, the oldest is taken; then the next forward's order decides (docs/architecture.md)."""
    plan = build_step(shape_of(8, 1, gradient_slots=8))
    timeline = simulate([plan], Durations({**ONE_SECOND.seconds, "update.decoder": 4.0}))
    last_landed = max(run.end for run in timeline.runs if run.lane == DOWNLOAD)
    updates = [run for run in timeline.runs if run.lane == update_lane(0)]
    early = [run.op.block for run in updates if run.start < last_landed]
    late = [run.op.block for run in updates if run.start >= last_landed]
    assert early == sorted(early, reverse=True) and len(early) > 2
    assert late[:-1] == sorted(late[:-1]) and len(late) > 3
    assert (late[0], updates[-len(late)].op.kind) == (0, "update_rows") and late[-1] == 0


def test_updates_hide_behind_the_next_forward():
    """A backlog of updates costs less than its length: the next forward begins as soon as block 0 is done."""
    shape = shape_of(8, 1, gradient_slots=8)
    slow = {"forward": 3.0, "update.decoder": 4.0}
    backlog = 8 * 4.0 + 2 - 8 * 2.0  # decoder updates, embedding, head; the backward hides a layer's two seconds each
    assert seconds_of(shape, ONE_SECOND, **slow) < seconds_of(shape, ONE_SECOND, forward=3.0) + 0.6 * backlog


def test_the_hiding_factor_is_the_papers():
    """Backward over gradient transfer plus the slowest actor's update, of decoder layers (SlideFormer, section 3.1)."""
    durations = Durations({**ONE_SECOND.seconds, "backward": 6.0, "update.decoder": 2.0, "update.embed": 99.0})
    timeline = simulate([build_step(shape_of(3, 2, num_optimizer_actors=2))] * 2, durations)
    assert timeline.hiding_factor == 2 * 6.0 / (1.0 + 2.0)
    evaluation = simulate([build_step(evaluation_of(shape_of()))], durations)
    assert evaluation.hiding_factor == float("inf")


def test_the_forward_hides_the_uploads_of_its_own_layers():
    """Of a layer's uploads in a step the first is the forward's; those for the backward do not count."""
    durations = Durations({**ONE_SECOND.seconds, "forward": 3.0, "upload_params": 2.0})
    timeline = simulate([build_step(shape_of(5, 2))] * 2, durations)
    uploads = sum(run.op.kind == "upload_params" for run in timeline.runs)
    assert uploads > 2 * 5  # some layers come twice
    assert timeline.forward_hiding_factor == 2 * 3.0 / 2.0


def test_durations_from_rates():
    """Bytes over bandwidth, a slice of the parameters times the update's rate; a tied head sends no second gradient."""
    rates = dict(
        tokens=10,
        hidden_size=4,
        layer_parameters=1000,
        vocab_parameters=5000,
        h2d_bytes_per_second=100.0,
        d2h_bytes_per_second=50.0,
        layer_forward_seconds=3.0,
        layer_backward_seconds=7.0,
        head_seconds=2.0,
        update_ns_per_parameter=1e9,
        num_optimizer_actors=2,
    )
    shape = shape_of(2, 1, num_optimizer_actors=2)
    durations = Durations.from_rates(**rates, tied=False)
    expected = {
        ("upload_params", 1): 20.0,
        ("gather_embedding", 0): 0.8,
        ("forward", 1): 3.0,
        ("backward", 1): 7.0,
        ("head", 3): 2.0,
        ("upload_head", 3): 100.08,
        ("download_gradient", 3): 200.16,
        ("download_gradient", 2): 40.0,
        ("download_gradient", 0): 200.0,
        ("update", 3): 2502.0,
        ("update", 2): 500.0,
        ("update_rows", 0): 500.0,  # a fifth of the rows
        ("update", 0): 2000.0,
    }
    found = {(op.kind, op.block): durations.of(op, shape) for op in build_step(shape).ops}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    tied = Durations.from_rates(**rates, tied=True).seconds
    assert tied["download_gradient.head"] == pytest.approx(0.16)
    assert tied["upload_head"] == durations.seconds["upload_head"]


def qwen_3b(num_micro_batches):
    """Qwen2.5-3B, 32 rows of 1024 tokens a step, with rates measured on an H200: a layer takes 7.7 + 26.6 ms for all
    rows, the two optimizer actors 0.2 ns a parameter together."""
    parts = num_micro_batches
    durations = Durations.from_rates(
        tokens=32 * 1024 // parts,
        hidden_size=2048,
        layer_parameters=77_072_896,
        vocab_parameters=151_936 * 2048,
        tied=True,
        h2d_bytes_per_second=50e9,
        d2h_bytes_per_second=50e9,
        layer_forward_seconds=7.7e-3 / parts,
        layer_backward_seconds=26.6e-3 / parts,
        head_seconds=0.08 / parts,
        update_ns_per_parameter=0.4,
        num_optimizer_actors=2,
        gpu_bytes_per_second=3e12,
    )
    shape = shape_of(36, parts, tied=True, num_optimizer_actors=2, gradient_slots=8)
    return shape, durations


@pytest.mark.parametrize("num_micro_batches", [1, 4, 8])
def test_a_real_models_step_is_hidden_almost_whole(num_micro_batches):
    """The compute lane works more than 90 % of the time, and splitting the step into micro-batches costs nothing."""
    shape, durations = qwen_3b(num_micro_batches)
    timeline = simulate([build_step(shape)] * 3, durations)
    assert timeline.busy_seconds[COMPUTE] > 0.9 * sum(timeline.step_seconds)
    assert 1.3 < timeline.steady_step_seconds < 1.5
    assert timeline.hiding_factor == pytest.approx(26.6 / (3.08 + 15.41), rel=0.01)


def test_overlap_is_faster_than_one_thing_at_a_time():
    """The same step without overlap takes all transfers and updates on top."""
    shape, durations = qwen_3b(4)
    assert seconds_of(replace(shape, overlap=False), durations) > 1.4 * seconds_of(shape, durations)
