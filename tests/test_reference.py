import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from slideformer_ray.config import OptimizerSection
from slideformer_ray.reference import ReferenceTrainer

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
# Rows of unequal length; the supervised part is the second half of each.
LENGTHS = (23, 7, 16, 5, 11, 4, 19, 8)


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose time on a second thread, most of all beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["llama-untied", "qwen2-tied"])
def model_dir(request, tmp_path):
    if request.param == "llama-untied":
        config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    else:
        config = Qwen2Config(**SIZES, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.ndim == 1) + 0.2 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_trainer(model_dir, precision="fp32", total_steps=10, frozen=(), state_dict=None, **optimizer):
    settings = {"learning_rate": 1e-2, "schedule": "constant", "weight_decay": 0.1, "max_grad_norm": None} | optimizer
    return ReferenceTrainer(
        model_dir,
        precision=precision,
        device="cpu",
        optimizer=OptimizerSection(**settings),
        total_steps=total_steps,
        frozen=frozen,
        state_dict=state_dict,
    )


def micro_batches(*rows_of_each, lengths=LENGTHS):
    """Cut the rows into micro-batches of the given numbers of rows, each padded to its own longest row."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, SIZES["vocab_size"], (n + 1,), generator=generator) for n in lengths]
    batches, first = [], 0
    for count in rows_of_each:
        group = rows[first : first + count]
        first += count
        longest = max(len(row) for row in group) - 1
        ids = torch.zeros(count, longest, dtype=torch.int32)
        targets = torch.full((count, longest), -100, dtype=torch.int32)
        for i, row in enumerate(group):
            n = len(row) - 1
            ids[i, :n] = row[:-1]
            targets[i, n // 2 : n] = row[1 + n // 2 :]
        batches.append((ids, targets))
    return batches


def snapshot(trainer):
    return {name: master.clone() for name, master in trainer.masters().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_loss_and_gradients_are_those_of_transformers(model_dir):
    """One micro-batch: transformers' own mean loss over its labels, and the gradients of its backward."""
    ((ids, targets),) = micro_batches(8)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    labels = torch.full_like(targets, -100)
    labels[:, 1:] = targets[:, :-1]  # transformers shifts labels itself, and so never sees the last column's target
    targets[:, -1] = -100
    loss = model(input_ids=ids.long(), attention_mask=torch.ones_like(ids), labels=labels.long()).loss
    loss.backward()
    step = make_trainer(model_dir).step([(ids, targets)])
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    assert step.num_supervised == int((targets != -100).sum())
    assert step.gradients.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], p.grad, rtol=1e-4, atol=1e-6 * p.grad.abs().max().item())


@pytest.mark.parametrize("cut", [(2, 2, 2, 2), (3, 5), (1,) * 8])
def test_micro_batches_of_unequal_lengths_give_the_whole_batch(model_dir, cut):
    """Field case 71: 1 x 8 and 4 x 2 rows have one loss and one gradient: one divisor for the whole step."""
    whole = make_trainer(model_dir).step(micro_batches(8))
    parts = make_trainer(model_dir).step(micro_batches(*cut))
    assert parts.num_supervised == whole.num_supervised
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    for name, gradient in whole.gradients.items():
        # Other shapes, another order of fp32 sums: up to 6e-6, on k_proj's bias, whose gradient the softmax nearly
        # cancels.
        assert (parts.gradients[name] - gradient).norm() <= 2e-5 * gradient.norm()


def test_clipped_norm_is_the_maximum_and_the_reported_norm_is_before_clipping(model_dir):
    """Field case 20: gradients of a norm well above 1 and a maximum of 1: AdamW sees 1 within 1e-5."""
    trainer = make_trainer(model_dir, max_grad_norm=1.0)
    seen = []

    def record(optimizer, args, kwargs):
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        seen.append(torch.cat(gradients).norm().item())

    trainer._adamw.register_step_pre_hook(record)
    step = trainer.step(micro_batches(4, 4))
    assert step.grad_norm > 2
    assert seen == [pytest.approx(1.0, rel=1e-5)]
    norm = torch.cat([g.flatten() for g in step.gradients.values()]).norm().item()
    assert step.grad_norm == pytest.approx(norm, rel=1e-6)


def test_a_norm_below_the_maximum_changes_nothing(model_dir):
    """The clip coefficient is then exactly 1."""
    clipped, free = make_trainer(model_dir, max_grad_norm=1e6), make_trainer(model_dir)
    for trainer in (clipped, free):
        trainer.step(micro_batches(8))
    assert_equal(snapshot(clipped), snapshot(free))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_update_is_adamw_with_decay_on_matrices_alone(model_dir, precision):
    """First step: p - lr * (g / (|g| + eps) + weight_decay * p), the last term for matrices alone."""
    trainer = make_trainer(model_dir, precision, learning_rate=1e-2, weight_decay=0.1)
    before = snapshot(trainer)
    gradients = trainer.step(micro_batches(8)).gradients
    for name, master in trainer.masters().items():
        g, p = gradients[name].double(), before[name].double()
        decay = 0.0 if p.ndim == 1 or name.endswith(".bias") else 0.1
        expected = p - 1e-2 * (g / (g.abs() + 1e-8) + decay * p)
        torch.testing.assert_close(master.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_rate_follows_the_schedule(model_dir):
    """A linear schedule of 4 steps with 2 of warm-up runs at 0, 1/2, 1, 1/2 of the peak."""
    trainer = make_trainer(model_dir, total_steps=4, schedule="linear", warmup_steps=2, learning_rate=0.01)
    rates = []
    trainer._adamw.register_step_pre_hook(lambda optimizer, *_: rates.append([g["lr"] for g in optimizer.param_groups]))
    for _ in range(4):
        trainer.step(micro_batches(8))
    assert rates == [[0.0, 0.0], [0.005, 0.005], [0.01, 0.01], [0.005, 0.005]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rate_of_zero_changes_no_bit(model_dir, precision):
    """Neither the update nor the weight decay may round a weight."""
    trainer = make_trainer(model_dir, precision, learning_rate=0.0)
    before = snapshot(trainer)
    for _ in range(3):
        trainer.step(micro_batches(8))
    assert_equal(snapshot(trainer), before)


def test_training_lowers_the_loss(model_dir):
    """Twenty steps on one batch fit it; evaluate sees the same weights."""
    trainer = make_trainer(model_dir, total_steps=20, max_grad_norm=1.0)
    batches = micro_batches(8)
    before = trainer.evaluate(batches)
    steps = [trainer.step(batches) for _ in range(20)]
    assert steps[0].loss == pytest.approx(before, rel=1e-6)
    assert trainer.evaluate(batches) < 0.7 * before


def test_evaluation_is_the_mean_over_supervised_tokens(model_dir):
    """Held-out loss does not depend on how the rows are cut, and equals the training loss of the same rows."""
    trainer = make_trainer(model_dir)
    whole = trainer.evaluate(micro_batches(8))
    assert trainer.evaluate(micro_batches(3, 5)) == pytest.approx(whole, rel=1e-6)
    assert trainer.step(micro_batches(8)).loss == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_neither_move_nor_decay(model_dir, precision):
    """They have no gradient and no part in the norm; masters() still lists them."""
    frozen = ("model.embed_tokens.*", "model.layers.0.*")
    trainer = make_trainer(model_dir, precision, frozen=frozen)
    before = snapshot(trainer)
    step = trainer.step(micro_batches(8))
    kept = {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert step.gradients.keys() == before.keys() - kept
    moved = {name for name, master in trainer.masters().items() if not torch.equal(master, before[name])}
    assert moved == before.keys() - kept


def test_a_step_with_a_non_finite_norm_is_skipped(model_dir, monkeypatch):
    """With clipping nothing changes: not the masters, nor Adam's step, nor the schedule."""
    trainer, undisturbed = (make_trainer(model_dir, max_grad_norm=1.0, schedule="linear") for _ in range(2))
    batches = micro_batches(8)
    for t in (trainer, undisturbed):
        t.step(batches)
    before = snapshot(trainer)
    summed_loss = trainer._summed_loss
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_summed_loss", lambda *batch: summed_loss(*batch) * math.inf)
        step = trainer.step(batches)
    assert not step.applied and not math.isfinite(step.grad_norm)
    assert_equal(snapshot(trainer), before)
    for t in (trainer, undisturbed):
        assert t.step(batches).applied
    assert_equal(snapshot(trainer), snapshot(undisturbed))


def test_a_non_finite_norm_without_clipping_stops(model_dir, monkeypatch):
    """Without a norm to wait for, the real run has no chance to skip: it stops, and so does the reference."""
    trainer = make_trainer(model_dir)
    summed_loss = trainer._summed_loss
    monkeypatch.setattr(trainer, "_summed_loss", lambda *batch: summed_loss(*batch) * math.nan)
    with pytest.raises(FloatingPointError, match="gradient norm is nan at step 0"):
        trainer.step(micro_batches(8))


def test_a_step_without_supervised_tokens_is_refused(model_dir):
    """No silent zero loss, and no division by zero."""
    ids = torch.ones(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="no token is supervised"):
        make_trainer(model_dir).step([(ids, torch.full_like(ids, -100))])


def test_a_micro_batch_without_supervised_tokens_adds_nothing(model_dir):
    """Field case 73, in part: one such micro-batch beside others changes neither loss nor gradients, and is no NaN."""
    ids = torch.ones(2, 5, dtype=torch.int32)
    with_it = make_trainer(model_dir).step([*micro_batches(8), (ids, torch.full_like(ids, -100))])
    without = make_trainer(model_dir).step(micro_batches(8))
    assert with_it.loss == without.loss
    assert_equal(with_it.gradients, without.gradients)


def test_bf16_sums_micro_batches_in_fp32_and_rounds_once(model_dir):
    """The optimizer consumes bf16(sum of the micro-batches' bf16 gradients)."""
    batches = micro_batches(2, 2, 2, 2)
    count = sum(int((targets != -100).sum()) for _, targets in batches)
    trainer = make_trainer(model_dir, "bf16")
    parameters = dict(trainer.model.named_parameters())
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    for batch in batches:
        gradients = torch.autograd.grad(trainer._summed_loss(*batch) / count, list(parameters.values()))
        for name, gradient in zip(sums, gradients, strict=True):
            assert gradient.dtype == torch.bfloat16
            sums[name] += gradient.float()
    step = trainer.step(batches)
    assert_equal(step.gradients, {name: total.bfloat16() for name, total in sums.items()})
    norm = torch.cat([g.float().flatten() for g in step.gradients.values()]).norm().item()
    assert step.grad_norm == pytest.approx(norm, rel=1e-6)


def test_bf16_masters_keep_what_bf16_cannot(model_dir):
    """Field case 21: steps far below bf16's resolution still move the masters; the model is their rounding."""
    trainer = make_trainer(model_dir, "bf16", learning_rate=1e-6, weight_decay=0.0)
    before = snapshot(trainer)
    for _ in range(3):
        trainer.step(micro_batches(8))
    for name, p in trainer.model.named_parameters():
        master = trainer.masters()[name]
        assert master.dtype == torch.float32 and not torch.equal(master, before[name])
        assert p.dtype == torch.bfloat16 and torch.equal(p, master.bfloat16())
    assert all(torch.equal(p, before[n].bfloat16()) for n, p in trainer.model.named_parameters() if p.ndim == 1)


def test_bf16_does_not_cast_the_rotary_frequencies(model_dir):
    """Buffers stay fp32: bf16 frequencies would drift with the position (field case 84)."""
    trainer = make_trainer(model_dir, "bf16")
    buffers = dict(trainer.model.named_buffers())
    assert buffers and {b.dtype for b in buffers.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_may_be_given_instead_of_loaded(model_dir, precision):
    """A directory that holds config.json alone, and a state dict without the tied head: the same run."""
    loaded = make_trainer(model_dir, precision)
    state_dict = snapshot(loaded)
    (model_dir / "model.safetensors").unlink()
    given = make_trainer(model_dir, precision, state_dict=state_dict)
    for trainer in (loaded, given):
        trainer.step(micro_batches(8))
    assert_equal(snapshot(loaded), snapshot(given))


def test_a_warmup_longer_than_the_run_is_refused(model_dir):
    """Before anything is loaded."""
    with pytest.raises(ValueError, match="warmup_steps is 11"):
        make_trainer(model_dir / "nowhere", total_steps=10, warmup_steps=11)
