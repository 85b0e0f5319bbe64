"""The interpreter of a StepPlan's lanes: it keeps every wait, picks updates as `schedule.pick` does, ends on errors.

Real plans, with operations that do nothing but take a random moment. What operations do: test_sliding_window.py and
test_adam_shard.py.
"""

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from slideformer_ray.actors.lanes import (
    SCALARS,
    CudaStream,
    HostStream,
    LaneContext,
    LaneError,
    LaneProgress,
    StepInputs,
    Stopwatch,
    counter_base,
    run_in_order,
    run_ready_first,
)
from slideformer_ray.memory.counters import Aborted, CounterPage
from slideformer_ray.schedule import (
    COMPUTE,
    GPU_LANES,
    GRAD_LANDED,
    NORM_READY,
    UPLOAD,
    StepShape,
    build_step,
    shared_counters,
    update_lane,
    updated_counter,
)

NUM_LAYERS = 3
BASE = StepShape(NUM_LAYERS, 2, trainable=(True,) * (NUM_LAYERS + 2), tied=False, num_optimizer_actors=2)
SHAPES = {
    "no clipping": BASE,
    "clipping": replace(BASE, clip=True, gradient_slots=NUM_LAYERS),
    "fewest slots": replace(BASE, param_units=2, gradient_units=1, activation_slots=3),
    "serial": replace(BASE, overlap=False),
}


class Rig:
    """All lanes of a shape as threads over one page, each operation being `execute(op)`."""

    def __init__(self, shape, execute=lambda op: None, timeout_s=20.0):
        self.shape, self.execute, self.timeout_s = shape, execute, timeout_s
        names = shared_counters(shape.num_layers + 2, shape.num_optimizer_actors)
        size = CounterPage.nbytes(len(names), len(SCALARS)) + 64
        memory = np.zeros(size, np.uint8)
        self.page = CounterPage(memory[-memory.ctypes.data % 64 :], names, SCALARS)
        self.update_lanes = [update_lane(k) for k in range(shape.num_optimizer_actors)]
        self.watches = {}

    def inputs(self, train_steps=0):
        return StepInputs(train_steps, self.shape, train_steps, 0, (), 1)

    def run(self, lanes=None, train_steps=0):
        """Run these lanes (default: all) of a step; returns lane -> exception or None."""
        plan, inputs = build_step(self.shape), self.inputs(train_steps)
        gpu = LaneContext.create("gpu actor", plan, inputs, self.page, self.timeout_s, gpu=True)

        def run(name):
            watch = self.watches[name] = Stopwatch()
            if name in GPU_LANES:
                signal = lambda op, counter, value, event, result: self.page.signal(counter, value)  # noqa: E731
                run_in_order(gpu, plan.lanes[name], HostStream(), self.execute, signal, watch)
            else:
                own = LaneContext.create(f"optimizer of {name}", plan, inputs, self.page, self.timeout_s)
                run_ready_first(own, plan.lanes[name], self.execute, watch)

        lanes = lanes if lanes is not None else [*GPU_LANES, *self.update_lanes]
        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = {name: pool.submit(run, name) for name in lanes}
            return {name: future.exception() for name, future in futures.items()}


class Recorder:
    """Takes a random moment an operation and asserts that all it waits for is over when it starts."""

    def __init__(self, shape, seed):
        self.over, self.order = set(), []
        self.lock, self.random = threading.Lock(), random.Random(seed)
        self.signallers = {signal: op for op in build_step(shape).ops for signal in op.signals}

    def __call__(self, op):
        with self.lock:
            self.order.append(op)
            # Value 0 of updated.K.B is the step before: the rig runs steps one after the other.
            early = [w for w in op.waits if w in self.signallers and self.signallers[w] not in self.over]
            assert not early, f"{op.describe()} started before {early}"
            seconds = self.random.choice((0, 0, 1e-3))
        time.sleep(seconds)
        with self.lock:
            self.over.add(op)


@pytest.mark.parametrize("name", SHAPES)
def test_no_operation_starts_before_what_it_waits_for(name):
    """All lanes together, at random speeds: every wait holds, GPU lanes keep their order, nothing runs twice."""
    shape = SHAPES[name]
    plan = build_step(shape)
    for seed in range(3):
        recorder = Recorder(shape, seed)
        assert set(Rig(shape, recorder).run().values()) == {None}
        assert len(recorder.order) == len(plan.ops)
        for lane in GPU_LANES:
            assert [op for op in recorder.order if op.lane == lane] == list(plan.lanes[lane].ops)
        for lane in plan.lanes.values():
            assert {op for op in recorder.order if op.lane == lane.name} == set(lane.ops)


@pytest.mark.parametrize("name", SHAPES)
def test_shared_counters_go_on_from_step_to_step(name):
    """After n steps every shared counter stands at n times what a step adds; the next step's waits start there."""
    rig = Rig(SHAPES[name])
    for step in range(3):
        assert set(rig.run(train_steps=step).values()) == {None}
        after = counter_base(rig.inputs(step + 1))
        assert {counter: rig.page.read(counter) for counter in after} == after


def test_an_evaluation_waits_for_the_updates_before_it():
    """Its plan signals nothing, but reads parameters: their counters must stand where training left them."""
    rig = Rig(SHAPES["no clipping"])
    rig.shape = replace(rig.shape, train=False)
    rig.timeout_s = 0.2
    errors = rig.run(GPU_LANES, train_steps=1)
    assert "WaitTimeout" in str(errors[UPLOAD]) and "updated." in str(errors[UPLOAD])


@pytest.mark.parametrize("name", SHAPES)
def test_a_failing_operation_is_named_and_ends_every_lane(name):
    """The error says actor, step, lane, operation and cause; all others stop with Aborted, and quote it."""
    shape = SHAPES[name]

    def execute(op):
        if (op.kind, op.block) == ("backward", 2):
            raise FloatingPointError("boom")

    rig = Rig(shape, execute)
    started = time.perf_counter()
    errors = rig.run()
    assert time.perf_counter() - started < 2
    failed = errors.pop(COMPUTE)
    micro_batch = next(op.micro_batch for op in build_step(shape).ops if (op.kind, op.block) == ("backward", 2))
    wanted = f"gpu actor: step 0: gpu.compute: backward block 2 micro-batch {micro_batch}: FloatingPointError: boom"
    assert isinstance(failed, LaneError) and str(failed) == wanted
    stopped = [error for error in errors.values() if error is not None]
    assert stopped and all(isinstance(error, Aborted) and error.reason == wanted for error in stopped)


def test_a_failing_update_is_named_and_ends_the_gpu_lanes():
    """As above, from the other side: the GPU lanes need that update for the next step's forward at the latest."""

    def execute(op):
        if op.lane == "update.1" and op.block == 4:
            raise ZeroDivisionError("boom")

    rig = Rig(SHAPES["no clipping"], execute)
    failed = rig.run()["update.1"]
    wanted = "optimizer of update.1: step 0: update.1: update block 4: ZeroDivisionError: boom"
    assert isinstance(failed, LaneError) and str(failed) == wanted
    assert {str(error) for error in rig.run(GPU_LANES, train_steps=1).values()} == {wanted}


def test_a_wait_that_nobody_answers_ends_at_its_deadline():
    """Without optimizer actors the upload lane waits for their update of the step before, and the compute lane for the
    upload lane. The error is the one that knows more: it names the counter."""
    rig = Rig(SHAPES["no clipping"], timeout_s=0.3)
    started = time.perf_counter()
    errors = rig.run(GPU_LANES, train_steps=1)
    assert time.perf_counter() - started < 3
    assert "gpu actor: step 1: gpu.upload" in str(errors[UPLOAD])
    assert "WaitTimeout: waited 0.3 s for counter 'updated.0.1' to reach 1" in str(errors[UPLOAD])


def test_an_update_lane_that_gets_no_gradient_says_so():
    """The counter, what it is for, and how many updates are left."""
    errors = Rig(SHAPES["no clipping"], timeout_s=0.2).run(["update.0"])
    assert "WaitTimeout" in str(errors["update.0"]) and "a gradient for one of 6 updates" in str(errors["update.0"])


def test_a_lane_waits_for_another_of_the_same_actor_at_most_its_deadline():
    """`issue` never comes: TimeoutError with what was waited for, not a hang."""
    with pytest.raises(TimeoutError, match="waited 0.1 s for gpu.upload to issue operation 1"):
        LaneProgress(Rig(BASE).page).wait_issued(1, 0.1, "gpu.upload to issue operation 1")


def test_updates_follow_the_gradients_while_they_land():
    """The slot that landed first is needed again first, though a lower block is ready too."""
    order = []
    rig = Rig(replace(BASE, num_optimizer_actors=1))
    plan = build_step(rig.shape)
    landed = iter(range(3, len(plan.gradient_order) + 1))

    def execute(op):
        order.append(op.block)
        rig.page.signal(GRAD_LANDED, next(landed, len(plan.gradient_order)))

    rig.execute = execute
    rig.page.signal(GRAD_LANDED, 2)  # two have landed before the lane looks
    assert rig.run(["update.0"])["update.0"] is None
    assert tuple(order[:2]) == plan.gradient_order[:2]


def test_updates_left_over_go_from_block_0_up():
    """Once all gradients have landed, the next forward decides: it reads block 0 first."""
    order = []
    rig = Rig(replace(BASE, num_optimizer_actors=1), lambda op: order.append(op.block))
    rig.page.signal(GRAD_LANDED, NUM_LAYERS + 2)
    assert rig.run(["update.0"])["update.0"] is None
    assert order == [0, 1, 2, 3, 4, 0]  # the embedding's rows that the next step looks up, ..., its other rows


def test_clipped_updates_start_with_the_norm():
    """All gradients are there, but nothing is updated before norm.ready."""
    rig = Rig(replace(SHAPES["clipping"], num_optimizer_actors=1), timeout_s=0.2)
    rig.page.signal(GRAD_LANDED, NUM_LAYERS + 2)
    assert "norm.ready" in str(rig.run(["update.0"])["update.0"])
    rig = Rig(replace(SHAPES["clipping"], num_optimizer_actors=1))
    rig.page.signal(GRAD_LANDED, NUM_LAYERS + 2)
    rig.page.signal(NORM_READY, 1)
    assert rig.run(["update.0"])["update.0"] is None
    assert all(rig.page.read(updated_counter(0, block)) == 1 for block in range(NUM_LAYERS + 2))


def test_waiting_and_working_are_told_apart():
    """The stopwatch puts waits under their counter's family and the operations' own time under busy."""
    rig = Rig(replace(BASE, num_optimizer_actors=1), lambda op: time.sleep(0.01))
    threading.Timer(0.2, rig.page.signal, (GRAD_LANDED, NUM_LAYERS + 2)).start()
    assert rig.run(["update.0"])["update.0"] is None
    watch = rig.watches["update.0"]
    assert list(watch.waited) == ["grad"] and 0.1 < watch.waited["grad"] < 2
    assert 0.05 <= watch.busy < 1


def test_lane_errors_survive_pickling():
    """They travel through Ray."""
    error = pickle.loads(pickle.dumps(LaneError("gpu actor", COMPUTE, "norm", 7, "OSError: full")))
    assert isinstance(error, LaneError) and str(error) == "gpu actor: step 7: gpu.compute: norm: OSError: full"


@pytest.mark.gpu
def test_gpu_a_stream_waits_for_another_ones_event():
    """What one stream writes late, another reads after the event; the host does not wait meanwhile."""
    first, second = (CudaStream(torch.cuda.Stream()) for _ in range(2))
    value, copy = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(1)  # CUDA loads a kernel at its first use, which takes time
    copy.copy_(value.fill_(0))
    torch.cuda.synchronize()
    started = time.perf_counter()
    with first.context():
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        value.fill_(1)
        event = first.record()
    with second.context():
        second.wait(event)
        copy.copy_(value)
    issued = time.perf_counter() - started
    second.synchronize()
    assert issued < 0.1 < time.perf_counter() - started and (copy == 1).all()
