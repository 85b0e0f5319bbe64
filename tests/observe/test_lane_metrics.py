"""lane_metrics.py: figures of two traced steps, checked on simulated ones whose times are known, and in a real run."""

import json

import pytest
from pipeline import make_config, save_small_model
from recorded_run import small_config

from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.budget import Machine, resolve
from slideformer_ray.config import ConfigError
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.observe.lane_metrics import LaneSampler, lane_metrics, longest_queue
from slideformer_ray.observe.trace import Span
from slideformer_ray.schedule import COMPUTE, DOWNLOAD, UPLOAD, build_step, update_lane
from slideformer_ray.simulator import Durations, simulate
from slideformer_ray.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Three layers, untied, in fp32, one optimizer actor, two micro-batches of two rows."""
    path = save_small_model(tmp_path_factory.mktemp("model") / "model")
    config = make_config(path, optimizer__max_grad_norm=None)
    hf_config = load_hf_config(path)
    spec = describe_model(hf_config, ())
    layout = resolve(config, spec, hf_config.intermediate_size, Machine.read("cpu"), local=True).layout
    return spec, layout


def two_steps(layout):
    shape = layout.shape(2, True)
    return [StepInputs(step, shape, step, 0, ((2, 40), (2, 40)), 10) for step in (1, 2)]


DURATIONS = Durations(
    {
        **dict.fromkeys(("forward", "backward"), 1.0),
        **{f"update.{kind}": 5.0 for kind in ("embed", "decoder", "head")},
    }
)


def durations_of(plan, shape):
    """DURATIONS where they are given, a tenth of a second for every other operation."""
    keys = {Durations.key(op, shape) for op in plan.ops}
    return Durations(dict.fromkeys(keys, 0.1) | {k: v for k, v in DURATIONS.seconds.items() if k in keys})


def spans_of(timeline, step):
    return [Span.of(run.step, run.op, run.start + 100, run.end + 100) for run in timeline.runs if run.step == step]


def test_a_pair_of_steps_gives_its_means(model):
    """Busy seconds are half of both; GB/s are bytes over busy seconds; exposed seconds and hiding factor are those that
    the timeline itself gives."""
    spec, layout = model
    steps = two_steps(layout)
    plan = build_step(steps[0].shape)
    timeline = simulate([plan, plan], durations_of(plan, steps[0].shape))
    found = lane_metrics(timeline, steps, spec, layout, {"temperature_celsius": 40.0})
    assert found.step == 2 and found.gpu_sensors == {"temperature_celsius": 40.0}
    assert found.busy_seconds == {lane: seconds / 2 for lane, seconds in timeline.busy_seconds.items()}
    assert found.exposed_seconds["update"] == timeline.exposed_seconds["update"] / 2 > 1
    assert found.hiding_factor == timeline.hiding_factor
    assert set(found.gb_per_second) == {UPLOAD, DOWNLOAD, update_lane(0)} and COMPUTE in found.busy_seconds
    trained = sum(block.trainable_numel for block in spec.blocks)
    moved = {lane: found.gb_per_second[lane] * found.busy_seconds[lane] * 1e9 for lane in found.gb_per_second}
    # fp32: parameter and two moments read and written, the gradient read.
    assert moved[update_lane(0)] == pytest.approx(trained * (4 * 3 * 2 + 4))
    assert moved[DOWNLOAD] == pytest.approx(trained * 4)
    # Each layer twice but those that stay between forward and backward, the head once, both micro-batches' rows.
    uploads = sum(spec.blocks[op.block].numel for op in plan.ops if op.kind in ("upload_params", "upload_head"))
    rows = 2 * 2 * 40 * spec.hidden_size
    gathers = sum(op.kind == "gather_embedding" for op in plan.ops)
    assert moved[UPLOAD] == pytest.approx((uploads + rows // 2 * gathers) * 4)


def test_the_queue_is_counted_at_its_longest(model):
    """Updates take five times as long as a backward: the gradients of all three layers wait at once."""
    spec, layout = model
    steps = two_steps(layout)
    plan = build_step(steps[0].shape)
    slow = simulate([plan, plan], durations_of(plan, steps[0].shape))
    assert longest_queue(slow) == 3
    assert lane_metrics(slow, steps, spec, layout, {}).free_gradient_slots == layout.gradient_slots - 3
    seconds = durations_of(plan, steps[0].shape).seconds | {"update.decoder": 0.01, "update.head": 0.01}
    assert longest_queue(simulate([plan, plan], Durations(seconds))) == 1


def test_the_sampler_makes_metrics_of_pairs_alone(model):
    """Two steps in a row every so often, none across an evaluation, none of an untraced step; 0 is never."""
    spec, layout = model
    steps = two_steps(layout)
    plan = build_step(steps[0].shape)
    timeline = simulate([plan, plan], durations_of(plan, steps[0].shape))
    first, second = (spans_of(timeline, step) for step in (0, 1))
    sampler = LaneSampler(10, spec, layout)
    assert [step for step in range(25) if sampler.wants(step)] == [1, 2, 11, 12, 21, 22]
    assert not any(LaneSampler(0, spec, layout).wants(step) for step in range(25))
    assert sampler.add(steps[0], first, {}) is None
    found = sampler.add(steps[1], second, {})
    assert found.hiding_factor == pytest.approx(timeline.hiding_factor)
    assert sum(found.exposed_seconds.values()) == pytest.approx(sum(timeline.exposed_seconds.values()) / 2)
    assert sampler.add(steps[0], first, {}) is None
    sampler.interrupt()
    assert sampler.add(steps[1], second, {}) is None
    sampler.interrupt()
    assert sampler.add(steps[0], [], {}) is None and sampler.add(steps[1], second, {}) is None


def test_a_run_writes_a_line_for_each_pair(tmp_path):
    """With the names of the lanes that there are; the run's losses are those of a run that is never traced."""
    losses = {}
    for every in (0, 4):
        directory = tmp_path / str(every)
        directory.mkdir()
        config = small_config(directory, training__steps=8, observe__lanes_every=every)
        losses[every] = [step.loss for step in Trainer(config, local=True).fit()]
    assert losses[0] == losses[4]
    records = [json.loads(line) for line in (tmp_path / "4" / "run" / "metrics.jsonl").read_text().splitlines()]
    lanes = [record for record in records if record["kind"] == "lanes"]
    assert [record["step"] for record in lanes] == [2, 6]
    assert lanes[0]["busy_seconds"].keys() == {COMPUTE, UPLOAD, DOWNLOAD, update_lane(0), update_lane(1)}
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    assert steps[7]["tier_reserved_bytes"].keys() == {"gpu", "pinned", "private"}
    assert steps[7]["tier_bytes"]["private"] > 100 << 20 and 0 < steps[7]["tier_bytes"]["pinned"] < 75 << 20


@pytest.mark.parametrize("every", [1, 2])
def test_a_pair_needs_a_step_beside_it(tmp_path, every):
    """Two in a row of every one or two would be all of them."""
    with pytest.raises(ConfigError, match=rf"observe.lanes_every: two steps in a row are timed: .* \(found {every}\)"):
        small_config(tmp_path, observe__lanes_every=every)
