"""`verify` passes on a right pipeline, and notices each of several deliberate faults: the proof of the proof."""

import dataclasses
import gc
import json
import shutil
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from slideformer_ray import verify as verify_module
from slideformer_ray.actors import adam_shard, sliding_window
from slideformer_ray.actors.sliding_window import SlidingWindow
from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.data.quickstart import quickstart_config, quickstart_data, quickstart_model_dir
from slideformer_ray.model.spec import BlockSpec
from slideformer_ray.schedule import COMPUTE, UPLOAD
from slideformer_ray.tiers import TierError
from slideformer_ray.verify import Errors, VerifyReport, proof_config, relative_error, verify

SIZES = dict(
    vocab_size=2048,
    hidden_size=48,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
CONFIGS = {
    "llama-untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose time on a second thread, most of all beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # `verify` collects garbage between runs: not through all of torch and transformers each time
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def make_config(tmp_path_factory):
    """config(name, **fields of sections): a random model with the shipped tokenizer, and 40 of the shipped rows."""
    folder = tmp_path_factory.mktemp("verify")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(quickstart_data().read_text().splitlines(keepends=True)[:40]))

    def model_dir(name):
        path = folder / name
        if not path.exists():
            model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_((p.ndim == 1) + 0.1 * torch.randn(p.shape, generator=generator))
            model.save_pretrained(path)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(quickstart_model_dir() / file, path)
        return path

    def config(name="llama-untied", precision="fp32", device="cpu", model=None, **optimizer):
        return RunConfig.from_dict(
            {
                "run_dir": folder / "run",
                "model": {"path": model_dir(name), **(model or {})},
                "data": {"train": [rows], "seq_len": 64, "pad_to_multiple": 8},
                "optimizer": {"learning_rate": 1e-3, **optimizer},
                "training": {"steps": 10, "precision": precision},
                "placement": {"device": device, "threads_per_optimizer_actor": 1},
                "debug": {"wait_timeout_s": 30},
            }
        )

    return config


def failed(report: VerifyReport) -> set[str]:
    """Names of the checks that did not pass."""
    return {row.check.removeprefix("fp32: ") for row in report.rows if not row.passed}


GRADIENTS = {"loss and gradients", "1 x 8 rows: loss and gradients"}
MASTERS = {"masters", "1 x 8 rows: masters"}
SAME_BITS = {"overlap off", "2 optimizer actors", "3 optimizer actors", "activations in host memory"}


# ---------------------------------------------------------------------------------------------------- it passes


def test_shipped_model_passes_in_fp32(tmp_path):
    """Masters and losses of 5 steps within 1e-6 of plain PyTorch, clipping, decay, schedule and unequal rows on."""
    config = quickstart_config(tmp_path)
    config = verify_module.changed(config, training={"precision": "fp32"}, placement={"device": "cpu"})
    lines: list[str] = []
    report = verify(config, local=True, on_line=lines.append)
    assert failed(report) == set()
    assert {row.check.removeprefix("fp32: ") for row in report.rows} == (
        {"loaded weights", "gradient norm", "learning rate 0"} | GRADIENTS | MASTERS | SAME_BITS
    )
    exact = [row for row in report.rows if "masters" in row.check or row.tensor.startswith("loss")]
    assert max(row.error for row in exact) <= 1e-6
    # What attention amplifies (q_proj, k_proj, and the norm before them) is bounded by plain PyTorch's own spread.
    others = [
        row for row in report.rows if not any(part in row.tensor for part in ("q_proj", "k_proj", "input_layernorm"))
    ]
    assert max(row.error for row in others) <= 1e-6
    settings = report.settings
    assert (settings["weight_decay"], settings["schedule"], settings["warmup_steps"]) == (0.1, "linear", 2)
    assert len({seq for rows, seq in settings["micro_batch_shapes"][0]}) > 1, "rows of unequal length"
    assert lines


@pytest.mark.parametrize(
    "name, model",
    [
        ("qwen2-tied", {}),
        ("llama-untied", {"frozen": ["model.embed_tokens.*", "model.layers.1.*"]}),
        ("qwen2-tied", {"random_init": True}),
    ],
    ids=["tied, biases", "frozen", "random weights"],
)
def test_other_models_pass(make_config, name, model):
    """Tied embeddings, biases, frozen parameters and drawn weights are all the reference's."""
    assert failed(verify(make_config(name, model=model), steps=STEPS, local=True)) == set()


def test_bf16_passes_within_the_spread_of_two_references(make_config):
    """A config that trains in bf16 is proven in both precisions; each kind has its own tolerance, and states it."""
    report = verify(make_config(precision="bf16"), steps=STEPS, local=True)
    assert failed(report) == set()
    rows = [row for row in report.rows if row.check == "bf16: masters"]
    assert len({verify_module.kind_of(row.tensor.split(",")[0]) for row in rows}) == len(rows) == 12
    assert all(row.tolerance == 1e-6 or "between two reference runs" in row.origin for row in rows)
    q_proj = next(row for row in report.rows if row.check == "bf16: loss and gradients" and "q_proj" in row.tensor)
    assert 1e-6 < q_proj.tolerance < 0.1


def test_actors_give_the_bits_of_threads(make_config):
    """Ray changes where the tiers run, and nothing else: `local` decides only that."""
    config = proof_config(make_config(), STEPS, "fp32", 0.5)
    here, there = (
        verify_module.Proof(make_config(), STEPS, local, lambda line: None).pipeline(config, "")
        for local in (True, False)
    )
    differences = verify_module.Differences()
    differences.add("states", there.states, here.states)
    for a, b in zip(there.steps, here.steps, strict=True):
        differences.add("step", a.masters, b.masters)
        assert a.loss == b.loss
    assert differences.count == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_on_the_gpu(make_config, precision):
    """Every check holds with the layers on CUDA, in fp32 without TF32 and in bf16."""
    config = make_config(precision=precision, device="cuda")
    assert [row for row in verify(config, local=True).rows if not row.passed] == []


# ------------------------------------------------------------------------------------------------- it notices faults


def test_notices_a_skipped_wait_for_an_activation(make_config, monkeypatch):
    """The first layer does not wait for the embedding of micro-batch 1, which comes after it has run."""
    skip_wait(monkeypatch, "gather_embedding", block=1, micro_batch=1)
    assert {"loss and gradients", "masters"} <= failed(verify(make_config(), steps=STEPS, local=True))


def test_notices_a_skipped_wait_for_parameters(make_config, monkeypatch):
    """The last layer does not wait for its parameters: the slot itself objects, and the error says where."""
    skip_wait(monkeypatch, "upload_params", block=3, micro_batch=0)
    with pytest.raises(TierError, match="forward block 3.*parameter unit"):
        verify(make_config(), steps=STEPS, local=True)


def skip_wait(monkeypatch, awaited, block, micro_batch):
    """One forward does not wait for the upload lane, and what it should have waited for is late, every time."""
    build_step, forward, upload = (
        sliding_window.build_step,
        SlidingWindow._forward,
        getattr(SlidingWindow, f"_{awaited}"),
    )
    forward_ran = threading.Event()

    def is_hasty(op):
        return op.kind == "forward" and (op.block, op.micro_batch) == (block, micro_batch)

    def build(shape):
        plan = build_step(shape)
        lane = plan.lanes[COMPUTE]
        without = {
            op: dataclasses.replace(op, waits=tuple(w for w in op.waits if w[0] != UPLOAD))
            for op in lane.ops
            if is_hasty(op)
        }
        hasty = dataclasses.replace(lane, ops=tuple(without.get(op, op) for op in lane.ops))
        return dataclasses.replace(plan, lanes=plan.lanes | {COMPUTE: hasty})

    def hasty_forward(self, op):
        try:
            return forward(self, op)
        finally:
            if is_hasty(op):
                forward_ran.set()

    def late_upload(self, op):
        if op.micro_batch == micro_batch or op.block == block:
            forward_ran.wait(timeout=0.2)
            forward_ran.clear()
        return upload(self, op)

    monkeypatch.setattr(sliding_window, "build_step", build)
    monkeypatch.setattr(SlidingWindow, "_forward", hasty_forward)
    monkeypatch.setattr(SlidingWindow, f"_{awaited}", late_upload)


def test_notices_a_dropped_micro_batch(make_config, monkeypatch):
    """Layer 1's gradient of micro-batch 2 is not added to the sum."""
    backward = SlidingWindow._backward

    def drop(self, op):
        before = self._layer_sum.clone()
        backward(self, op)
        if op.block == 2 and op.micro_batch == 2:
            self._layer_sum.copy_(before)

    monkeypatch.setattr(SlidingWindow, "_backward", drop)
    report = verify(make_config(), steps=STEPS, local=True)
    assert failed(report) == GRADIENTS | MASTERS
    assert all(
        "model.layers.1." in row.tensor
        for row in report.rows
        if row.check == "fp32: loss and gradients" and not row.passed
    )


def test_notices_swapped_gradient_slots(make_config, monkeypatch):
    """The gradients of layers 0 and 1 land in each other's slot."""
    download = SlidingWindow._download_gradient

    def swap(self, op):
        if op.block in (1, 2):
            other = next(
                o
                for o in sliding_window.build_step(self._inputs.shape).ops
                if o.kind == op.kind and o.block == 3 - op.block
            )
            op = dataclasses.replace(op, grad_slot=other.grad_slot)
        return download(self, op)

    monkeypatch.setattr(SlidingWindow, "_download_gradient", swap)
    found = failed(verify(make_config(), steps=STEPS, local=True))
    assert {"loss and gradients", "masters"} <= found


def test_notices_weight_decay_on_a_norm(make_config, monkeypatch):
    """Gradients are right, and so are matrices; the masters of norms are not."""
    monkeypatch.setattr(
        BlockSpec, "decay_runs", lambda self, start, stop: [(start, stop, True)] if stop > start else []
    )
    report = verify(make_config(), steps=STEPS, local=True)
    assert failed(report) == {"masters"}
    assert all("norm.weight" in row.tensor for row in report.rows if not row.passed)


def test_notices_the_clip_coefficient_of_the_step_before(make_config, monkeypatch):
    """Gradients are compared before clipping, so this shows in the masters alone."""
    coefficient, last = sliding_window.clip_coefficient, [1.0]

    def late(norm, limit):
        last.append(coefficient(norm, limit))
        return last[-2]

    monkeypatch.setattr(sliding_window, "clip_coefficient", late)
    assert "masters" in failed(verify(make_config(), steps=STEPS, local=True))


def test_notices_a_loss_that_is_a_mean_of_means(make_config, monkeypatch):
    """Field case 71: each micro-batch divided by its own supervised tokens, not by the step's."""
    head_loss = SlidingWindow._head_loss

    def mean(self, op):
        whole = self._inputs
        own = self._micro_batches[op.micro_batch].targets.numel() * len(self._micro_batches)
        self._inputs = dataclasses.replace(whole, num_supervised=own)
        head_loss(self, op)
        self._inputs = whole

    monkeypatch.setattr(SlidingWindow, "_head_loss", mean)
    assert GRADIENTS <= failed(verify(make_config(), steps=STEPS, local=True))


def test_notices_one_wrong_optimizer_actor(make_config, monkeypatch):
    """The second actor's slice is updated with another step's bias correction: identical bits are lost."""
    update = adam_shard.AdamShard._update

    def off_by_one(self, op):
        self.applied_steps += self.actor == 1
        update(self, op)
        self.applied_steps -= self.actor == 1

    monkeypatch.setattr(adam_shard.AdamShard, "_update", off_by_one)
    assert failed(verify(make_config(), steps=STEPS, local=True)) == {"2 optimizer actors", "3 optimizer actors"}


def test_notices_a_rate_that_is_not_quite_zero(make_config, monkeypatch):
    """A rate of 1e-7 in place of 0 is within every tolerance, and changes bits."""
    rate = adam_shard.learning_rate
    monkeypatch.setattr(adam_shard, "learning_rate", lambda *args: max(rate(*args), 1e-7))
    assert "learning rate 0" in failed(verify(make_config(), steps=STEPS, local=True))


# ------------------------------------------------------------------------------------------------------- its parts


def test_nan_never_passes():
    """NaN compares as false with everything, so an error that is not a number becomes infinite."""
    nan, one = torch.tensor([torch.nan]), torch.tensor([1.0])
    assert relative_error(nan, one) == relative_error(one, nan) == relative_error(nan, nan) == float("inf")
    errors = Errors()
    errors.add("step 0", {"w": nan}, {"w": one})
    assert not errors.rows("check")[0].passed


def test_a_tensor_of_zeros_is_matched_by_zeros_alone():
    """No division by zero; a gradient that should be 0 and is not is an error."""
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-30, 0.0]), zeros) == float("inf")


def test_bits_tell_minus_zero_from_zero():
    """Identical bits means bits."""
    differences = verify_module.Differences()
    differences.add("step 0", {"w": torch.tensor([0.0, torch.nan])}, {"w": torch.tensor([-0.0, torch.nan])})
    row = differences.row("check")
    assert row.error == 1 and not row.passed


def test_everything_that_can_go_wrong_is_in_effect(make_config):
    """Clipping, decay, warm-up and a falling rate are on even where the config has none of them."""
    config = make_config(learning_rate=0.0, weight_decay=0.0, schedule="constant", max_grad_norm=None)
    proof = proof_config(config, 5, "fp32", 0.25)
    o = proof.optimizer
    assert (o.learning_rate, o.weight_decay, o.schedule, o.warmup_steps, o.max_grad_norm) == (
        1e-5,
        0.1,
        "cosine",
        2,
        0.25,
    )
    assert (proof.training.rows_per_step, proof.micro_batch_rows, proof.debug.poison_freed_slots) == (8, 2, True)


def test_clipping_is_active(make_config):
    """The limit is half of the first step's norm, or less if the config says so."""
    limits = [
        verify_module.Proof(make_config(max_grad_norm=n), STEPS, True, lambda line: None).clipping_norm()
        for n in (None, 1e-3)
    ]
    assert limits[0] > limits[1] == 1e-3


def test_report_is_json(make_config):
    """What the command prints with --json: passed, settings, and each row with its verdict."""
    errors = Errors()
    errors.add("step 0", {"w": torch.ones(2)}, {"w": torch.ones(2)})
    errors.add("step 1", {"b": torch.ones(2)}, {"b": torch.zeros(2)})
    values = json.loads(VerifyReport({"steps": 2}, tuple(errors.rows("check"))).to_json())
    assert values["passed"] is False and values["settings"] == {"steps": 2}
    assert [(row["tensor"], row["passed"]) for row in values["rows"]] == [("w, step 0", True), ("b, step 1", False)]


def test_a_model_too_large_for_the_reference_is_refused(make_config):
    """One line with what is needed, what is free, and what to do; nothing is loaded."""
    config = verify_module.changed(make_config(), budget={"ram_gib": 0.001})
    with pytest.raises(
        ConfigError, match=r"verify: .* GiB of host memory are needed and 0\.00 GiB are free; verify .* fewer layers"
    ):
        verify(config, local=True)


def test_too_few_steps_are_refused(make_config):
    """Two steps are warm-up, and the first of them has rate 0."""
    with pytest.raises(ConfigError, match="steps is 2; at least 3"):
        verify(make_config(), steps=2, local=True)
