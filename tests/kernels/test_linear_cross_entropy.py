"""kernels/linear_cross_entropy.py against autograd on the full logits in float64: loss and ALL gradients.

A forward can be right while a gradient is wrong (Liger #968), so each test compares the gradients of the hidden rows,
of the weight and of the bias; the last two are added to what their buffers hold already.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import random, relative_error

from slideformer_ray.kernels import linear_cross_entropy as module
from slideformer_ray.kernels import switch
from slideformer_ray.kernels.linear_cross_entropy import (
    IGNORED,
    linear_cross_entropy,
    rows_per_chunk,
    supervised_cross_entropy,
)

# (rows, hidden, vocabulary, rows that the budget pays for): the odd shape 4 x 47 x 31 x 123, one row at a time, chunks
# with a rest, one row, and few of everything.
SHAPES = [(4 * 47, 31, 123, 999), (5, 31, 123, 1), (23, 31, 123, 7), (1, 31, 123, 999), (7, 3, 5, 3)]
SHAPE = SHAPES[2]
# Relative error of a whole tensor. 16 bits: a product and the logits' gradient are each rounded once, to 2^-9 or 2^-11.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCALE = 1 / 77
OWN_BLOCK = module._MAX_BLOCK_V
OPTIONS = {
    "none": {},
    "ignored": {"ignored": 3},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "z-loss": {"z_loss": 1e-2},
    "all": {"ignored": 3, "bias": True, "softcap": 3.0, "z_loss": 1e-2},
}


# The interpreter computes what lies past the vocabulary, too, before it masks it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A row of 123 is then four blocks of the kernel, the last one cut."""
    monkeypatch.setattr(module, "_MAX_BLOCK_V", 32)


def make_inputs(num_rows, hidden, vocab, dtype, device="cpu", ignored=0, bias=False):
    """One target in `ignored` is IGNORED, the first among them."""
    hidden_NH = random(num_rows, hidden, dtype=dtype, device=device)
    weight_VH = (random(vocab, hidden, seed=1) / 2).to(device, dtype)
    targets_N = torch.randint(0, vocab, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    if ignored:
        targets_N[::ignored] = IGNORED
    return hidden_NH, weight_VH, targets_N.to(device), random(vocab, dtype=dtype, device=device) if bias else None


def ground_truth(hidden_NH, weight_VH, targets_N, bias_V=None, softcap=None, z_loss=0.0, scale=SCALE):
    """[summed loss, gradients of `scale` x it for hidden, weight and bias], in float64 on the inputs' exact values."""
    leaves = [t.double().requires_grad_() for t in (hidden_NH, weight_VH, bias_V) if t is not None]
    logits = leaves[0] @ leaves[1].T + (leaves[2] if bias_V is not None else 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    supervised = targets_N != IGNORED
    loss = F.cross_entropy(logits[supervised], targets_N[supervised], reduction="sum")
    loss = loss + z_loss * logits[supervised].logsumexp(-1).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


def budget_for(rows, vocab, hidden, dtype, device):
    """Bytes that pay for `rows` rows and not for one more; a number that is no less serves for "all"."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "rows_per_chunk", lambda num_rows, row_bytes, _: asked.append(row_bytes) or num_rows)
        linear_cross_entropy(*make_inputs(1, hidden, vocab, dtype, device)[:3], gradient_scale=1.0)
    return rows * asked[0]


def run(hidden_NH, weight_VH, targets_N, bias_V=None, *, rows=999, buffers=0.0, **options):
    """[loss, gradients of hidden, weight and, where there is one, bias]; the buffers hold `buffers` before."""
    vocab, hidden = weight_VH.shape
    grad_weight = torch.full((vocab, hidden), buffers, device=hidden_NH.device)
    grad_bias = None if bias_V is None else torch.full((vocab,), buffers, device=hidden_NH.device)
    loss, grad_hidden = linear_cross_entropy(
        hidden_NH,
        weight_VH,
        targets_N,
        bias_V=bias_V,
        gradient_scale=SCALE,
        grad_weight_VH=grad_weight,
        grad_bias_V=grad_bias,
        budget_bytes=budget_for(rows, vocab, hidden, hidden_NH.dtype, hidden_NH.device),
        **options,
    )
    return [t for t in (loss, grad_hidden, grad_weight, grad_bias) if t is not None]


def assert_close(found, wanted, dtype):
    errors = [relative_error(f, w) for f, w in zip(found, wanted, strict=True)]
    assert max(errors) < TOLERANCE[dtype], f"relative errors of loss and gradients: {errors}"


# ----------------------------------------------------------------------------------------------------- right values


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_equal_autograd_on_full_logits(device, shape, dtype, poisoned):
    """Whatever the chunk; every element of a result is written."""
    *size, rows = shape
    inputs = make_inputs(*size, dtype, device)
    found = run(*inputs, rows=rows)
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    assert_close(found, ground_truth(*inputs), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [o for name, o in OPTIONS.items() if name != "none"], ids=list(OPTIONS)[1:])
def test_options(device, options, dtype, poisoned):
    """Ignored rows, a bias, a soft-cap and a z-loss, each alone and all together."""
    options = dict(options)
    *size, rows = SHAPE
    inputs = make_inputs(*size, dtype, device, ignored=options.pop("ignored", 0), bias=options.pop("bias", False))
    assert_close(run(*inputs, rows=rows, **options), ground_truth(*inputs, **options), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_weight_and_bias_are_added(device, dtype):
    """To what the buffers hold: micro-batches, and a tied embedding, share them. Sums stay fp32 in every dtype."""
    *size, rows = SHAPE
    inputs = make_inputs(*size, dtype, device, bias=True)
    into_zeros, into_ones = run(*inputs, rows=rows), run(*inputs, rows=rows, buffers=1.0)
    for zeros, ones in zip(into_zeros[2:], into_ones[2:], strict=True):
        torch.testing.assert_close(ones - 1.0, zeros, rtol=0, atol=4 * 2.0**-23)  # four chunks, each rounded near 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_gives_the_same_in_any_chunk(device, dtype):
    """Chunks are a matter of memory: no gradient depends on where they are cut."""
    inputs = make_inputs(*SHAPE[:3], dtype, device)
    whole = run(*inputs)
    for rows in (1, 5):
        assert_close(run(*inputs, rows=rows), [t.double() for t in whole], dtype)


def test_fp16_keeps_small_probabilities(device, monkeypatch):
    """A probability of 1 / 50,000, times 1 / 10^6 tokens: fp16 has no such number, and yet the sum in fp32 is right."""
    monkeypatch.setattr(module, "_MAX_BLOCK_V", 16384)  # or the interpreter takes a minute
    hidden_NH, weight_VH, targets_N, _ = make_inputs(6, 8, 50_000, torch.float16, device)
    weight_VH = weight_VH * 0.1
    grad_weight = torch.zeros(50_000, 8, device=device)
    linear_cross_entropy(hidden_NH, weight_VH, targets_N, gradient_scale=1e-6, grad_weight_VH=grad_weight)
    others = torch.ones(50_000, dtype=torch.bool).index_fill_(0, targets_N.cpu(), False)  # targets' own are large
    wanted = ground_truth(hidden_NH, weight_VH, targets_N, scale=1e-6)[2]
    assert relative_error(grad_weight[others], wanted[others]) < 2 * TOLERANCE[torch.float16]


def test_large_logits_stay_finite(device):
    """Logits of thousands, as a broken run has them: the loss is large, not infinite, and gradients are exact."""
    hidden_NH, weight_VH, targets_N, _ = make_inputs(*SHAPE[:3], torch.float32, device)
    inputs = hidden_NH * 1000, weight_VH, targets_N
    found, wanted = run(*inputs), ground_truth(*inputs)
    assert max(relative_error(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-5


def test_strides_are_honoured(device):
    """Rows inside wider rows, every second target, a weight and a buffer inside larger ones.

    The neighbours are large, not NaN: some CPUs' products of 31 columns read the 32nd and multiply it by zero.
    """
    hidden_NH, weight_VH, targets_N, _ = make_inputs(*SHAPE[:3], torch.bfloat16, device)
    wide = torch.full((23, 64), 1e6, dtype=torch.bfloat16, device=device)
    wide[:, 5:36] = hidden_NH
    targets = torch.stack([targets_N, torch.zeros_like(targets_N)], dim=1)[:, 0]
    weight = torch.full((123, 40), 1e6, dtype=torch.bfloat16, device=device)
    weight[:, 4:35] = weight_VH
    buffer = torch.zeros(123, 32, device=device)
    loss, grad_hidden = linear_cross_entropy(
        wide[:, 5:36], weight[:, 4:35], targets, gradient_scale=SCALE, grad_weight_VH=buffer[:, :31]
    )
    assert_close([loss, grad_hidden, buffer[:, :31]], ground_truth(hidden_NH, weight_VH, targets_N), torch.bfloat16)
    assert buffer[:, 31].count_nonzero() == 0


# ---------------------------------------------------------------------------------------------------- what is not done


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_rows_are_a_loss_of_zero(device, dtype):
    """A micro-batch without a supervised token adds nothing: no NaN, no division (field case 73)."""
    loss, grad_hidden, grad_weight = run(*make_inputs(0, 31, 123, dtype, device), buffers=3.0)
    assert loss.item() == 0 and grad_hidden.shape == (0, 31) and (grad_weight == 3).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_rows_ignored_are_a_loss_of_zero(device, dtype, poisoned):
    """Loss 0, gradients 0 and a count of 0."""
    inputs = make_inputs(6, 31, 123, dtype, device, ignored=1, bias=True)
    loss, *grads = run(*inputs, z_loss=1e-2)
    assert loss.item() == 0 and all(grad.count_nonzero() == 0 for grad in grads)
    leaf = inputs[0].requires_grad_()
    loss, count = supervised_cross_entropy(leaf, *inputs[1:3])
    loss.backward()
    assert loss.item() == 0 and count == 0 and leaf.grad.count_nonzero() == 0


@pytest.mark.parametrize("need_grad_hidden", [False, True])
@pytest.mark.parametrize("weight_trained", [False, True])
def test_only_the_wanted_gradients_are_made(device, weight_trained, need_grad_hidden):
    """A frozen weight or a frozen body costs nothing and changes neither the loss nor the other gradient."""
    inputs = make_inputs(*SHAPE[:3], torch.float32, device)[:3]
    wanted = ground_truth(*inputs)
    grad_weight = torch.zeros(123, 31, device=device) if weight_trained else None
    loss, grad_hidden = linear_cross_entropy(
        *inputs, gradient_scale=SCALE, grad_weight_VH=grad_weight, need_grad_hidden=need_grad_hidden
    )
    assert (grad_hidden is None) == (not need_grad_hidden)
    found = [(loss, wanted[0]), (grad_hidden, wanted[1]), (grad_weight, wanted[2])]
    assert all(f is None or relative_error(f, w) < 2e-6 for f, w in found)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_inputs_are_unchanged(device, dtype):
    """Hidden rows, weight, targets and bias keep every bit; a weight that requires a gradient gets none."""
    inputs = make_inputs(*SHAPE[:3], dtype, device, ignored=3, bias=True)
    copies = [t.clone() for t in inputs]
    inputs[1].requires_grad_()
    run(*inputs, rows=SHAPE[3], softcap=3.0)
    assert all(map(torch.equal, inputs, copies)) and inputs[1].grad is None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_same_input_same_bits(device, dtype):
    """Nothing is summed in an order that varies."""
    inputs = make_inputs(*SHAPE[:3], dtype, device, ignored=3, bias=True)
    first, second = (run(*inputs, rows=SHAPE[3], softcap=3.0, z_loss=1e-2) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("target", [123, -1])
def test_a_target_outside_the_vocabulary_is_not_silent(use_path, target):
    """PyTorch refuses it; the kernel, which cannot raise, makes the loss NaN and reads nothing outside the row."""
    for path in ("torch-cpu", "triton-cpu"):
        device = use_path(path)
        hidden_NH, weight_VH, targets_N, _ = make_inputs(4, 31, 123, torch.float32, device)
        targets_N[2] = target
        if path == "torch-cpu":
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                run(hidden_NH, weight_VH, targets_N)
        else:
            loss, grad_hidden, _ = run(hidden_NH, weight_VH, targets_N)
            assert loss.isnan() and grad_hidden[2].isnan().all() and grad_hidden[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_VH": torch.zeros(123, 30)}, r"weight_VH is \[123, 30\] .* must be \[123, 31\]"),
        (
            {"weight_VH": torch.zeros(123, 31).half()},
            "must both be fp32, bf16 or fp16; they are .*float32 and .*float16",
        ),
        ({"targets_N": torch.zeros(22, dtype=torch.int64)}, r"targets_N is \[22\] .* must be \[23\] torch.int64"),
        ({"targets_N": torch.zeros(23, dtype=torch.int32)}, "targets_N is .*int32; .* torch.int64"),
        ({"bias_V": torch.zeros(31)}, r"bias_V is \[31\] .* must be \[123\]"),
        ({"grad_weight_VH": torch.zeros(123, 31).bfloat16()}, "grad_weight_VH is .*bfloat16; .* torch.float32"),
        ({"grad_bias_V": torch.zeros(1, 123)}, r"grad_bias_V is \[1, 123\]"),
        ({"softcap": 0.0}, "softcap is 0.0; it must be greater than 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    """One message: the tensor, what it is, what it must be."""
    names = ("hidden_NH", "weight_VH", "targets_N")
    arguments = dict(zip(names, make_inputs(*SHAPE[:3], torch.float32), strict=False)) | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments, gradient_scale=1.0)


# ------------------------------------------------------------------------------------------------- supervised rows only


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_supervised_cross_entropy_is_differentiable(device, dtype):
    """The sum and the count of the supervised rows; autograd's gradients of all inputs, in their dtypes, for a loss
    that is divided afterwards."""
    inputs = make_inputs(*SHAPE[:3], dtype, device, ignored=3, bias=True)
    hidden_NH, weight_VH, targets_N, bias_V = inputs
    leaves = [t.clone().requires_grad_() for t in (hidden_NH, weight_VH, bias_V)]
    loss, count = supervised_cross_entropy(leaves[0], leaves[1], targets_N, bias_V=leaves[2], softcap=3.0, z_loss=1e-2)
    (loss / count).backward()
    assert count == (targets_N != IGNORED).sum()
    assert all(leaf.grad.dtype == dtype for leaf in leaves)
    assert leaves[0].grad[targets_N == IGNORED].count_nonzero() == 0
    wanted = ground_truth(*inputs, softcap=3.0, z_loss=1e-2, scale=1 / count)
    assert_close([loss.detach(), *(leaf.grad for leaf in leaves)], wanted, dtype)


def test_supervised_cross_entropy_projects_supervised_rows_only(use_path, monkeypatch):
    """A chat batch that is two thirds prompt costs one third, and NaN in a prompt's rows reaches nothing."""
    use_path("torch-cpu")
    hidden_NH, weight_VH, targets_N, _ = make_inputs(30, 31, 123, torch.float32)
    targets_N[torch.arange(30) % 3 > 0] = IGNORED
    hidden_NH[targets_N == IGNORED] = float("nan")
    projected = []
    real = module._cross_entropy_torch
    monkeypatch.setattr(module, "_cross_entropy_torch", lambda x, *a: projected.append(len(x)) or real(x, *a))
    weight = weight_VH.requires_grad_()
    loss, count = supervised_cross_entropy(hidden_NH, weight, targets_N)
    loss.backward()
    assert sum(projected) == count == 10 and loss.isfinite() and weight.grad.isfinite().all()


# --------------------------------------------------------------------------------------------------------- the budget


def test_chunk_rows_follow_the_budget():
    """The docstring's worked numbers; at least one row whatever the budget; as equal as whole tiles allow."""
    assert rows_per_chunk(8192, 303_872, 1 << 30) == 2816
    assert rows_per_chunk(8192, 303_872, 1) == 1
    assert rows_per_chunk(8192, 303_872, 100 * 303_872) == 100
    assert rows_per_chunk(100, 303_872, 1 << 40) == 100
    assert rows_per_chunk(0, 303_872, 1 << 30) == 1
    for num_rows in (1, 127, 128, 129, 8191, 8192):
        for limit in (1, 127, 128, 129, 1000, 8192):
            rows = rows_per_chunk(num_rows, 10, 10 * limit)
            largest = limit if limit < 128 or limit >= num_rows else limit // 128 * 128
            assert 1 <= rows <= limit
            assert -(-num_rows // rows) == -(-num_rows // largest)  # equal chunks are no more of them


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["triton-cuda", "torch-cuda"])
def test_gpu_peak_is_the_budget_and_not_rows_times_vocabulary(use_path, path, monkeypatch):
    """16,384 rows x 50,000 would be 1.6 GB of bf16 logits; beside its results and 4 bytes a row, the call takes the
    budget of 64 MiB (field case 43)."""
    monkeypatch.undo()  # the kernel's own block size
    use_path(path)
    num_rows, hidden, vocab, budget = 16_384, 64, 50_000, 64 << 20
    inputs = make_inputs(num_rows, hidden, vocab, torch.bfloat16, "cuda")[:3]
    grad_weight = torch.zeros(vocab, hidden, device="cuda")
    for num_warm in (8, num_rows):  # cuBLAS takes its workspace at the first call
        arguments = inputs[0][:num_warm], inputs[1], inputs[2][:num_warm]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(*arguments, gradient_scale=SCALE, grad_weight_VH=grad_weight, budget_bytes=budget)
    results = num_rows * hidden * 2 + num_rows * 4
    assert torch.cuda.max_memory_allocated() - before < budget + results + (1 << 20)


# ------------------------------------------------------------------------------------------------------- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "z_loss": 1e-2}], ids=["none", "all"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [(257, 512, 151_937), (1000, 768, 32_003), (300, 1024, 128_256)], ids=str)
def test_real_vocabularies(use_path, size, dtype, options, monkeypatch, poisoned):
    """The kernel's own block size, chunks of 130 rows, vocabularies that no block divides."""
    monkeypatch.setattr(module, "_MAX_BLOCK_V", OWN_BLOCK)
    device = use_path("triton-cuda")
    inputs = make_inputs(*size, dtype, device, ignored=5, bias=bool(options))
    inputs = (inputs[0], inputs[1] * 0.1, *inputs[2:])
    first, second = (run(*inputs, rows=130, **options) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert_close(first, ground_truth(*inputs, **options), dtype)


@pytest.mark.gpu
def test_a_chunk_of_more_than_2_31_logits(use_path, monkeypatch):
    """Offsets are 64-bit: the last rows of a chunk of 2.2e9 logits are what they are alone."""
    monkeypatch.setattr(module, "_MAX_BLOCK_V", 16384)
    device = use_path("triton-cuda")
    num_rows, vocab = 17_000, 130_000
    inputs = make_inputs(num_rows, 32, vocab, torch.bfloat16, device)[:3]
    assert num_rows * vocab > 2**31
    _, whole = linear_cross_entropy(*inputs, gradient_scale=1.0, budget_bytes=1 << 34)
    _, alone = linear_cross_entropy(inputs[0][-64:], inputs[1], inputs[2][-64:], gradient_scale=1.0)
    assert relative_error(whole[-64:], alone.double()) < TOLERANCE[torch.bfloat16]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slideformer_ray.kernels.linear_cross_entropy import _cross_entropy_kernel as kernel
constants = dict(VOCAB=123, ROW_STRIDE=128, NUM_BLOCKS=2, IGNORED_TARGET=-100, HAS_BIAS=True, HAS_SOFTCAP=True,
                 NEED_GRAD=True, BLOCK=64)
types = dict(logits_CV="*bf16", targets_C="*i64", loss_C="*fp32", bias_V="*bf16", target_stride="i32")
signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in kernel.arg_names}
for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    print(target.backend, sorted(triton.compile(ASTSource(kernel, signature, constants), target=target).asm))
"""


@pytest.mark.skipif(switch.tl is None, reason="triton is not installed")
def test_kernel_compiles_for_nvidia_and_amd(tmp_path):
    """Without either GPU: machine code for Hopper and for MI300 comes out, so nothing in it is one vendor's own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "cubin" in found.stdout and "hsaco" in found.stdout
