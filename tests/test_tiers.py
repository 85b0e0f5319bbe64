"""What the driver asks of the tiers, as threads: batches in, steps, errors, whole tensors out.

Against plain PyTorch, all gradients: tests/actors/test_sliding_window.py. Through Ray: tests/test_trainer.py (100 steps
with the same bits), tests/field/test_066_*.py (killed actors) and the last test here.
"""

import dataclasses
import time

import numpy as np
import pytest
import ray
import torch
from pipeline import (
    as_torch,
    make_config,
    open_tiers,
    random_batch,
    relative_error,
    run_steps,
    save_small_model,
    state_of,
)
from safetensors.torch import load_file

from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.actors.slice_files import DamagedCheckpoint
from slideformer_ray.budget import Machine, resolve
from slideformer_ray.memory import pinning
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.reference import ReferenceTrainer
from slideformer_ray.schedule import GRAD_LANDED, updated_counter
from slideformer_ray.tiers import RayTiers, TierError
from slideformer_ray.trainer import submit_batch


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama")


def reference_for(config):
    return ReferenceTrainer(
        config.model.path,
        precision=config.training.precision,
        device="cpu",
        optimizer=config.optimizer,
        total_steps=config.training.steps,
    )


def assert_same_training(tiers, reference, reports, wanted):
    assert [r.gpu.loss for r in reports] == pytest.approx([w.loss for w in wanted], rel=1e-5)
    assert [r.gpu.grad_norm for r in reports] == pytest.approx([w.grad_norm for w in wanted], rel=1e-5)
    for name, master in reference.masters().items():
        assert relative_error(tiers.master(name), master) < 1e-5, name


# --------------------------------------------------------------------------------------------------------------- steps


def test_a_batch_lies_in_its_buffer_row_after_row(model):
    """Ids in the first half, targets in the second, micro-batches one after the other, each of its own length."""
    batch = random_batch(4, 2, seed=0)
    with open_tiers(make_config(model), load=False) as tiers:
        tiers.write_batch(1, batch.micro_batches)
        ids, targets = tiers.buffers["batch.1"].numpy(np.int32).reshape(2, -1)
        assert not tiers.buffers["batch.0"].numpy(np.int32).any()
    flat = [np.concatenate([getattr(m, name).ravel() for m in batch.micro_batches]) for name in ("ids", "targets")]
    assert (ids[: flat[0].size] == flat[0]).all() and (targets[: flat[1].size] == flat[1]).all()


def test_steps_of_different_micro_batch_counts_follow_each_other(model):
    """The last window of an epoch has fewer micro-batches, and is divided by its own count (field case 72)."""
    config = make_config(model, rows=6)
    sizes = [6, 6, 3, 6, 1]
    batches = [random_batch(rows, 2, seed) for seed, rows in enumerate(sizes)]
    assert [len(batch.micro_batches) for batch in batches] == [3, 3, 2, 3, 1]
    reference = reference_for(config)
    with open_tiers(config) as tiers:
        reports = run_steps(tiers, batches)
        assert_same_training(tiers, reference, reports, [reference.step(as_torch(b)) for b in batches])


def test_a_micro_batch_without_a_supervised_token_adds_nothing(model):
    """No NaN in any master, and the others' sum is divided by the others' count (field case 73)."""
    config = make_config(model, rows=6)
    batch = random_batch(6, 2, seed=0)
    silent = dataclasses.replace(batch.micro_batches[1], targets=np.full_like(batch.micro_batches[1].targets, -100))
    lost = int((batch.micro_batches[1].targets != -100).sum())
    micro_batches = (batch.micro_batches[0], silent, batch.micro_batches[2])
    batch = dataclasses.replace(batch, micro_batches=micro_batches, num_supervised=batch.num_supervised - lost)
    reference = reference_for(config)
    with open_tiers(config) as tiers:
        reports = run_steps(tiers, [batch, batch])
        assert_same_training(tiers, reference, reports, [reference.step(as_torch(batch)) for _ in range(2)])


def test_an_evaluation_is_the_references_and_changes_no_bit(model):
    """Between two steps, of another size than they: its loss is right and training goes on as without it."""
    config = make_config(model)
    batches, held_out = [random_batch(4, 2, seed) for seed in range(3)], random_batch(3, 2, seed=9)
    states = []
    for evaluates in (True, False):
        with open_tiers(config) as tiers:
            reports = run_steps(tiers, batches[:2])
            if evaluates:
                found = tiers.gather(submit_batch(tiers, held_out, 2, 2, train=False))
                assert found.updates == () and found.gpu.grad_norm is None and not found.gpu.skipped
                reference = reference_for(config)
                for batch in batches[:2]:
                    reference.step(as_torch(batch))
                assert found.gpu.loss == pytest.approx(reference.evaluate(as_torch(held_out)), rel=1e-5)
            reports += run_steps(tiers, batches[2:], first=2)
            states.append(state_of(tiers, reports))
    assert states[0] == states[1], states[0].differing(states[1])


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_failing_operation_is_a_tier_error(model):
    """Actor, step, lane, operation and cause, as the lane said them; the cause is chained for whoever debugs."""

    def boom(op):
        raise OSError("no space left")

    with open_tiers(make_config(model)) as tiers:
        run_steps(tiers, [random_batch(4, 2, 0)])
        tiers.window._ops["finish_head"] = boom
        wanted = "^gpu actor: step 1: gpu.compute: finish_head block 4: OSError: no space left$"
        with pytest.raises(TierError, match=wanted) as caught:
            run_steps(tiers, [random_batch(4, 2, 1)], first=1)
    assert isinstance(caught.value.__cause__.__cause__, OSError)


def test_an_error_outside_the_lanes_says_where_the_step_was(model):
    """What no lane has named gets the step's progress."""

    def boom(inputs):
        raise MemoryError("out of memory")

    with open_tiers(make_config(model)) as tiers:
        tiers.window._begin = boom
        wanted = r"^MemoryError: out of memory \(in step 0: 0 of 5 gradients had reached host memory; optimizer actor 0"
        with pytest.raises(TierError, match=wanted):
            run_steps(tiers, [random_batch(4, 2, 0)])


def test_a_mistake_of_the_user_stays_one(model, tmp_path):
    """A ValueError of an actor is no failure of a tier: the command line exits with 2 on it."""
    (tmp_path / "empty").mkdir()
    with open_tiers(make_config(model)) as tiers, pytest.raises(DamagedCheckpoint, match="empty/index.json"):
        tiers.load_checkpoint(tmp_path / "empty", 0)


def test_progress_is_told_from_the_counters(model):
    """What has landed and what each actor has not updated, counted from where the step began."""
    config = make_config(model, placement__num_optimizer_actors=2)
    with open_tiers(config, load=False) as tiers:
        inputs = StepInputs(7, tiers.layout.shape(2, True), 3, 0, (), 1)
        for actor in range(2):
            for block in range(5):
                tiers.page.signal(updated_counter(actor, block), 3)
        tiers.page.signal(GRAD_LANDED, 3 * 5 + 2)
        nothing = "had not updated head, layer.2, layer.1 ..."
        assert tiers.progress(inputs) == (
            f"in step 7: 2 of 5 gradients had reached host memory; optimizer actor 0 {nothing}; "
            f"optimizer actor 1 {nothing}"
        )
        for block in range(5):
            tiers.page.signal(updated_counter(0, block), 4)
        for block in range(1, 5):
            tiers.page.signal(updated_counter(1, block), 4)
        assert tiers.progress(inputs).endswith("memory; optimizer actor 1 had not updated embed")
        evaluation = dataclasses.replace(inputs, shape=tiers.layout.shape(2, False))
        assert tiers.progress(evaluation) == "during an evaluation"


def test_closing_ends_a_step_that_was_submitted_in_part(model):
    """Ctrl-C between two calls of one step: the optimizer's lane must not wait out its ten minutes."""
    tiers = open_tiers(make_config(model))
    shape = tiers.layout.shape(2, True)
    tiers._call_optimizer(0, "run_step", StepInputs(0, shape, 0, 0, ((2, 8), (2, 8)), 1))
    started = time.perf_counter()
    tiers.close()
    assert time.perf_counter() - started < 5


# ------------------------------------------------------------------------------------------------------- whole tensors


@pytest.mark.parametrize("num_actors", [1, 3])
def test_masters_are_put_together_from_all_actors(model, num_actors):
    """Before the first step: the loaded weights, exactly, whoever owns which slice."""
    with open_tiers(make_config(model, placement__num_optimizer_actors=num_actors)) as tiers:
        for name, weight in load_file(model / "model.safetensors").items():
            assert torch.equal(tiers.master(name), weight), name


def test_drawn_weights_do_not_depend_on_actors(model):
    """random_init: the same model from a seed, whoever draws which slice; norms 1, matrices of the config's spread."""
    drawn = []
    for num_actors in (1, 2):
        config = make_config(model, precision="bf16", placement__num_optimizer_actors=num_actors)
        with open_tiers(config, load=False) as tiers:
            tiers.load_weights(None)
            drawn.append({p.name: tiers.master(p.name) for b in tiers.spec.blocks for p in b.params})
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert (drawn[0]["model.norm.weight"] == 1).all()
    assert drawn[0]["lm_head.weight"].std().item() == pytest.approx(0.1, rel=0.1)


def test_the_saved_model_is_what_the_gpu_reads(model, tmp_path):
    """bf16 of the masters after a step, checked by the storage actor's own reading; a foreign model is refused."""
    with open_tiers(make_config(model, precision="bf16")) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed) for seed in range(2)])
        tiers.save_model(tmp_path / "saved")
        assert tiers.check_model(tmp_path / "saved") == []
        for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items():
            master = tiers.master(name)
            assert tensor.dtype == torch.bfloat16
            assert ((tensor.float() - master).abs() <= master.abs() * 2.0**-8).all(), name
        other = save_small_model(tmp_path / "other", "llama", layers=2)
        with pytest.raises(ValueError, match="model.layers.2.* is missing"):
            tiers.check_model(other)


@pytest.mark.gpu
def test_gpu_buffers_are_pinned_while_the_tiers_are_open(model):
    """Threads register their buffers as the GPU actor does, and give the registration back."""
    with open_tiers(make_config(model, device="cuda")) as tiers:
        total = sum(buffer.page_range[1] for buffer in tiers.buffers.values())
        assert tiers.registration.pinned_bytes == total
        ranges = [buffer.page_range for buffer in tiers.buffers.values()]
        with pytest.raises(pinning.PinningFailed):
            pinning.register(ranges)
    pinning.register(ranges).unregister()


# ---------------------------------------------------------------------------------------------------------- through Ray


@pytest.mark.gpu
def test_gpu_memory_is_flat_from_the_third_step_on(model):
    """What PyTorch holds of the GPU after step 3 it holds after step 40: two micro-batch lengths, clipping on."""
    batches = [random_batch(4, 2, seed % 2) for seed in range(40)]
    with open_tiers(make_config(model, device="cuda", precision="bf16"), RayTiers) as tiers:
        reserved = [report.gpu.reserved_gpu_bytes for report in run_steps(tiers, batches)]
    assert reserved[3] > 0 and set(reserved[3:]) == {reserved[3]}


@pytest.mark.gpu
def test_gpu_deterministic_runs_have_the_same_bits(model):
    """training.deterministic: two runs of five steps in processes of their own; masters, moments, losses and norms."""
    config = make_config(model, device="cuda", precision="bf16", training__deterministic=True)
    states = []
    for _ in range(2):
        with open_tiers(config, RayTiers) as tiers:
            reports = run_steps(tiers, [random_batch(4, 2, seed) for seed in range(5)])
            states.append(state_of(tiers, reports))
    assert states[0] == states[1]


def test_an_actor_that_cannot_start_is_named_with_its_reason(model):
    """One line with the actor's own error: not "died", no traceback, and nothing is left running."""
    config = make_config(model)
    hf_config = load_hf_config(model)
    spec = describe_model(hf_config)
    plan = resolve(config, spec, hf_config.intermediate_size, Machine.read("cpu"))
    plan = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, device="no-such-device"))
    with pytest.raises(TierError, match=r"^gpu actor could not start: RuntimeError: .*no-such-device") as caught:
        RayTiers(config, hf_config, spec, plan, 1)
    assert "Traceback" not in str(caught.value)
    assert not ray.is_initialized()
