"""One optimizer actor's slice of every layer, without a GPU actor: gradients are put into their slots by hand.

The ground truth is `torch.optim.AdamW(fused=True)` on whole fp32 masters, bit for bit. What the actors add to the
kernel (tests/kernels/test_layer_adam.py): which elements, which decay, which step, which rate, which coefficient.
"""

import functools

import numpy as np
import pytest
import torch
from pipeline import make_config, save, save_small_model, saved_tensors

from slideformer_ray.actors.adam_shard import AdamShard, complement, row_segments
from slideformer_ray.actors.lanes import CLIP_COEFFICIENT, SCALARS, SKIP_STEP, StepInputs
from slideformer_ray.budget import Machine, resolve
from slideformer_ray.lr_schedule import learning_rate
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.weights import WeightFiles, load_block_slice
from slideformer_ray.schedule import GRAD_LANDED, NORM_READY, build_step

STATES = ("exp_avg", "exp_avg_sq", "lo")


class Shards:
    """All actors of a run over private buffers, called one after the other."""

    def __init__(self, model_dir, num_actors, precision="bf16", max_grad_norm=1.0, frozen=(), weight_decay=0.1):
        self.config = make_config(
            model_dir,
            precision=precision,
            placement__num_optimizer_actors=num_actors,
            model__frozen=list(frozen),
            optimizer__max_grad_norm=max_grad_norm,
            optimizer__weight_decay=weight_decay,
            optimizer__warmup_steps=2,
        )
        hf_config = load_hf_config(model_dir)
        self.spec = describe_model(hf_config, frozen)
        machine = Machine.read("cpu")
        self.layout = resolve(self.config, self.spec, hf_config.intermediate_size, machine).layout
        self.buffers = {n: SharedBuffer.private(n, size) for n, size in self.layout.buffers(self.spec).items()}
        names = self.layout.counter_names()
        self.page = CounterPage(self.buffers["control"].numpy(np.uint8), names, SCALARS)
        self.total_steps = self.config.training.steps
        self.actors = [
            AdamShard(
                self.spec,
                self.layout,
                k,
                self.buffers,
                self.page,
                self.config.optimizer,
                self.total_steps,
                timeout_s=5,
            )
            for k in range(num_actors)
        ]
        with WeightFiles(model_dir) as files:

            def fill(block, start, stop, hi, lo):
                load_block_slice(files, block, start, stop, hi, lo, precision)

            for actor in self.actors:
                actor.fill(fill)
        self.steps = 0

    @property
    def params(self):
        return {p.name: p for block in self.spec.blocks for p in block.params}

    def step(self, gradients, coefficient=1.0, skip=False):
        """One step on gradients by parameter name, rounded to the gradient dtype as the GPU actor does."""
        shape = self.layout.shape(1, True)
        plan = build_step(shape)
        for op in (op for op in plan.ops if op.kind == "download_gradient"):
            block = self.spec.blocks[op.block]
            name = op.grad_slot if block.kind == "decoder" else block.kind
            slot = self.buffers[f"grad.{name}"].tensor(self.layout.dtype)
            slot.zero_()
            for p in block.params:
                if not p.frozen:
                    slot[p.offset : p.offset + p.numel] = gradients[p.name].flatten().to(slot.dtype)
        self.page.write_scalar(CLIP_COEFFICIENT, coefficient)
        self.page.write_scalar(SKIP_STEP, float(skip))
        self.page.signal(GRAD_LANDED, (self.steps + 1) * len(plan.gradient_order))
        if shape.clip:
            self.page.signal(NORM_READY, self.steps + 1)
        inputs = StepInputs(self.steps, shape, self.steps, 0, (), 1)
        self.steps += 1
        return [actor.run_step(inputs) for actor in self.actors]

    def master(self, name):
        whole = np.full(self.params[name].numel, np.nan, np.float32)
        for first, values in (actor.master(name) for actor in self.actors):
            whole[first : first + values.size] = values
        return torch.from_numpy(whole).view(self.params[name].shape)

    def bits(self):
        """Masters, what the GPU reads, and every state, put together from all actors."""
        found = {}
        for block in self.spec.blocks:
            hi = self.buffers[f"hi.{block.index}"].tensor(self.layout.dtype)
            for p in block.params:
                found[f"hi {p.name}"] = hi[p.offset : p.offset + p.numel].clone()
                if p.frozen:
                    continue
                found[f"master {p.name}"] = self.master(p.name)
                for state in STATES if self.layout.split_masters else STATES[:2]:
                    found[f"{state} {p.name}"] = out = torch.full((p.numel,), -1, dtype=torch.float32)
                    for first, values in (actor.state(state, p.name) for actor in self.actors):
                        out[first : first + values.numel()] = values
        return found

    # What `CheckpointWriter` asks of tiers.

    def begin_save(self, directory, places):
        return [actor.begin_save(directory, places) for actor in self.actors]

    def wait_saves(self, begun, actors):
        return [self.actors[k].wait_save() for k in actors]


class GroundTruth:
    """torch.optim.AdamW on whole masters, with the rate of each step set from outside."""

    def __init__(self, masters, optimizer, total_steps):
        self.params = {name: torch.nn.Parameter(m.clone()) for name, m in masters.items()}
        matrices = [p for p in self.params.values() if p.ndim > 1]
        others = [p for p in self.params.values() if p.ndim == 1]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.optimizer, self.total_steps, self.applied = optimizer, total_steps, 0

    def step(self, gradients, coefficient):
        o = self.optimizer
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.applied, self.total_steps, o.learning_rate, o.schedule, o.warmup_steps)
        for name, p in self.params.items():
            p.grad = gradients[name].float() * torch.tensor(coefficient, dtype=torch.float32)
        self.adamw.step()
        self.applied += 1


@pytest.fixture
def model_dir(tmp_path):
    return save_small_model(tmp_path / "model", "qwen2")  # biases: 1-D parameters inside the layers


def random_gradients(shards, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    return {name: draw(p.shape).to(shards.layout.dtype) for name, p in shards.params.items() if not p.frozen}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("num_actors", [1, 3])
def test_masters_equal_torch_adamw_bit_for_bit(model_dir, num_actors, precision):
    """Warm-up, decay on matrices alone, a clip coefficient that changes every step: six steps, every bit."""
    shards = Shards(model_dir, num_actors, precision)
    truth = GroundTruth({n: shards.master(n) for n in shards.params}, shards.config.optimizer, shards.total_steps)
    for step in range(6):
        gradients, coefficient = random_gradients(shards, step), 1 / (step + 1)
        for result in shards.step(gradients, coefficient):
            assert (result.skipped, result.applied_steps) == (False, step + 1)
        truth.step(gradients, coefficient)
        wrong = [n for n, p in truth.params.items() if not torch.equal(shards.master(n), p.detach())]
        assert wrong == [], step


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_are_the_loaded_weights(model_dir, precision):
    """Exact from the start, in both precisions: nothing is rounded on the way in."""
    shards = Shards(model_dir, 2, precision)
    with WeightFiles(model_dir) as files:
        for name, p in shards.params.items():
            assert torch.equal(shards.master(name).flatten(), files.read_range(name, 0, p.numel)), name


@pytest.mark.parametrize("num_actors", [2, 3, 40])
def test_number_of_actors_changes_no_bit(model_dir, num_actors):
    """Also when most actors own nothing of the small blocks."""
    found = []
    for count in (1, num_actors):
        shards = Shards(model_dir, count)
        for step in range(3):
            shards.step(random_gradients(shards, step), coefficient=0.3)
        found.append(shards.bits())
    assert_same(found[1], found[0])


def test_the_gpu_reads_the_rounded_masters(model_dir):
    """After an update the shared parameters are the upper halves of the masters, and both have moved."""
    shards = Shards(model_dir, 2)
    before = {name: shards.master(name) for name in shards.params}
    for step in range(2):  # the first one has rate 0
        shards.step(random_gradients(shards, step))
    for block in shards.spec.blocks:
        hi = shards.buffers[f"hi.{block.index}"].tensor(torch.bfloat16)
        for p in block.params:
            master = shards.master(p.name)
            assert not torch.equal(master, before[p.name])
            error = (hi[p.offset : p.offset + p.numel].float() - master.flatten()).abs()
            assert (error <= master.flatten().abs() * 2.0**-8).all()


def test_a_skipped_step_changes_nothing_and_is_not_counted(model_dir):
    """The gradient was not finite: no state, no master moves, and neither Adam's step nor the rate goes on."""
    shards, straight = Shards(model_dir, 2), Shards(model_dir, 2)
    good = random_gradients(shards, 0)
    bad = {name: torch.full_like(g, torch.nan) for name, g in good.items()}
    for gradients in (good, good):
        straight.step(gradients)
    shards.step(good)
    for result in shards.step(bad, coefficient=0.0, skip=True):
        assert (result.skipped, result.applied_steps) == (True, 1)
    shards.step(good)
    assert_same(shards.bits(), straight.bits())


def test_without_clipping_scalars_are_not_read(model_dir):
    """No norm, no coefficient: what an earlier run left in the page must not scale a gradient."""
    shards, plain = (Shards(model_dir, 1, max_grad_norm=None) for _ in range(2))
    for step in range(2):
        shards.step(random_gradients(shards, step), coefficient=0.01, skip=True)
        plain.step(random_gradients(plain, step))
    assert all(torch.equal(shards.master(name), plain.master(name)) for name in shards.params)


def test_each_trained_element_has_one_owner(model_dir):
    """Slices of all actors cover each parameter once, and the update's padding is nobody's."""
    shards = Shards(model_dir, 3)
    owners = {name: torch.zeros(p.numel, dtype=torch.int32) for name, p in shards.params.items()}
    for actor in shards.actors:
        for name in owners:
            first, values = actor.master(name)
            owners[name][first : first + values.size] += 1
    assert all((count == 1).all() for count in owners.values())


@pytest.mark.parametrize("precision, bytes_each", [("bf16", 10), ("fp32", 8)])
def test_private_memory_is_what_the_plan_says(model_dir, precision, bytes_each):
    """lo 2 (bf16 alone), exp_avg 4, exp_avg_sq 4 bytes a trained element, padding included, over all actors."""
    shards = Shards(model_dir, 3, precision)
    trained = sum(block.trainable_numel for block in shards.spec.blocks)
    assert sum(actor.state_bytes for actor in shards.actors) == bytes_each * trained


def test_frozen_parameters_have_no_state_and_keep_their_bits(model_dir):
    """Not updated, not decayed, not saved; the trained ones beside them are, as if alone."""
    frozen = ("model.embed_tokens.*", "model.layers.1.*", "model.layers.2.mlp.*")
    shards = Shards(model_dir, 2, frozen=frozen)
    kept = [name for name, p in shards.params.items() if p.frozen]
    before = shards.bits()
    for step in range(2):
        shards.step(random_gradients(shards, step))
    after = shards.bits()
    assert kept and all(torch.equal(after[f"hi {name}"], before[f"hi {name}"]) for name in kept)
    changed = [name for name, p in shards.params.items() if not p.frozen]
    assert all(not torch.equal(after[f"master {name}"], before[f"master {name}"]) for name in changed)
    saved = saved_tensors(save(shards, shards.config, 2))
    assert all(name in saved and f"exp_avg.{name}" not in saved for name in kept)
    assert all(f"exp_avg.{name}" in saved for name in changed)
    trained = sum(block.trainable_numel for block in shards.spec.blocks)
    assert sum(actor.state_bytes for actor in shards.actors) == 10 * trained


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("saved, resumed", [(1, 1), (2, 3), (3, 1)])
def test_states_go_on_with_any_number_of_actors(model_dir, saved, resumed, precision):
    """Saved after 3 steps and filled into fresh shards: steps 4 and 5 give the bits of the run that never stopped."""
    straight, fresh = Shards(model_dir, saved, precision), Shards(model_dir, resumed, precision)
    for step in range(3):
        straight.step(random_gradients(straight, step), coefficient=0.5)
    checkpoint = save(straight, straight.config, 3)
    for actor in fresh.actors:
        actor.load(checkpoint, 3)
    for step in (3, 4):
        straight.step(random_gradients(straight, step), coefficient=0.5)
        results = fresh.step(random_gradients(fresh, step), coefficient=0.5)
        assert {result.applied_steps for result in results} == {step + 1}
    assert_same(fresh.bits(), straight.bits())


def test_saved_states_are_whole_tensors_by_name(model_dir):
    """Nothing in the files says how many actors wrote them; each state in its own dtype."""
    saved = [saved_tensors(save(shards, shards.config, n)) for n in (1, 3) if (shards := Shards(model_dir, n))]
    assert_same(saved[1], saved[0])
    for name, p in shards.params.items():
        assert saved[0][name].dtype == torch.bfloat16 and saved[0][name].shape == p.shape
        assert [saved[0][f"{state}.{name}"].dtype for state in STATES] == [torch.float32, torch.float32, torch.int16]


@pytest.mark.parametrize("first", [0, 7, -37])
def test_row_segments_are_the_rows_elements_within_the_slice(first):
    """Distinct rows in order, neighbours joined, cut at the slice's ends; each element is here or in the complement."""
    ids, width, length = np.array([5, 3, 4, 3, 9, 0], np.int32), 10, 80
    wanted = np.zeros(length, bool)
    for row in set(ids.tolist()):
        begin = first + row * width
        wanted[max(begin, 0) : max(begin + width, 0)] = True
    segments = row_segments(ids, width, first, length)
    found = np.zeros(length, int)
    for begin, end in segments.tolist():
        found[begin:end] += 1
    assert (found == wanted).all()
    for begin, end in complement(segments, length).tolist():
        found[begin:end] += 1
    assert (found == 1).all()


def test_no_row_in_the_slice_gives_no_segment():
    """Another actor's slice holds them all."""
    segments = row_segments(np.array([0, 1], np.int32), 10, -50, 30)
    assert segments.shape == (0, 2) and complement(segments, 30).tolist() == [[0, 30]]
