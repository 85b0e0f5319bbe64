"""Projection to the vocabulary and cross-entropy in one, by chunks of rows, so that logits are never whole in memory.

A chunk of rows is projected by one matrix product; one kernel then turns its logits, in place, into their gradient,
and two more products make the gradients of the hidden rows and of the weight. Only the kernel between the products has
two forms, which switch.py chooses from: Triton's, two reads and one write of the logits, and plain PyTorch's, which is
the ground truth and runs anywhere. Products take operands of the compute dtype and accumulate in fp32, statistics are
fp32; logits and their gradient are rounded to the compute dtype once each.

The same input on the same device, under the same budget, gives the same bits: block shapes are constants, not tuned at
run time, and nothing is summed in an order that varies.

Shape suffixes: N rows, C rows of one chunk, H hidden, V vocabulary. Writes the gradient buffers that it is handed and
nothing else. Tests: tests/kernels/test_linear_cross_entropy.py; speed:
benchmarks/kernels/bench_linear_cross_entropy.py.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slideformer_ray.kernels.switch import tl, triton, use_triton

IGNORED = -100  # target of a row that is not supervised
DEFAULT_BUDGET_BYTES = 1 << 30

# Rows of logits begin on 128 bytes whatever the vocabulary: else an odd one costs the products their fast kernels and
# the loads between them their width.
_LOGIT_ALIGNMENT = 64
# Chunks are whole tiles of the matrix products.
_ROW_ALIGNMENT = 128
# fp32 temporaries a logit of the PyTorch form: the logits and their gradient.
_TORCH_BYTES_PER_LOGIT = 8
# Parts of the vocabulary in which the weight's gradient is made where no product adds 16-bit operands to fp32.
_WIDENED_PARTS = 16
# Gradients of logits are kept this much larger in fp16, whose smallest normal number, 6e-5, exceeds 1 / V.
_FP16_GRADIENT_FACTOR = 256.0
# One row a program. Measured on one H200, 2048 x 152,064 (benchmarks/kernels/bench_linear_cross_entropy.py): 543 us
# with 8192 / 16, 561 with 8192 / 8, 603 with 4096 / 8, 708 with 16384 / 32. 16 warps are 1,024 threads on AMD too,
# whose wavefronts have 64.
_MAX_BLOCK_V = 8192
_MAX_NUM_WARPS = 16

_log = logging.getLogger(__name__)


def rows_per_chunk(num_rows: int, row_bytes: int, budget_bytes: int) -> int:
    """Rows of a chunk, as equal as may be: at least one, whole tiles of products where the budget reaches that far.

    Worked: V = 151,936 in bf16 is a row_bytes of 303,872 in Triton. 1 GiB pays for 3,533 rows, whose whole tiles of 128
    are 3,456; so 8,192 rows take 3 chunks, of 2,816, 2,816 and 2,560.
    """
    limit = max(1, budget_bytes // row_bytes)
    if limit >= num_rows:
        return max(1, num_rows)
    if limit < _ROW_ALIGNMENT:
        return limit
    limit -= limit % _ROW_ALIGNMENT
    num_chunks = -(-num_rows // limit)
    return _round_up(-(-num_rows // num_chunks), _ROW_ALIGNMENT)


@torch.no_grad()
def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    gradient_scale: float,
    grad_weight_VH: Tensor | None = None,
    need_grad_hidden: bool = True,
    bias_V: Tensor | None = None,
    grad_bias_V: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of N rows (fp32 scalar, unscaled) and the gradient of `gradient_scale` times it.

    hidden_NH: [N, H] and weight_VH: [V, H] in one dtype, fp32, bf16 or fp16; bias_V: [V], any of these dtypes.
    targets_N: [N] int64 in [0, V), or IGNORED: loss 0 and gradient 0. Callers gather the supervised rows first, since
    an ignored row costs as much as another and a NaN in it reaches the weight. Another target is an IndexError in
    PyTorch on the CPU, and a loss of NaN in Triton.
    grad_weight_VH, grad_bias_V: fp32 [V, H] and [V], ADDED to; None where it is not wanted.
    A row's loss, from its logits x (softcap x tanh(x / softcap) if given), is logsumexp(x) - x[target]
    + z_loss x logsumexp(x)^2 (the last as in PaLM, arXiv 2204.02311, section 5).
    budget_bytes: bounds the memory beside inputs, results and 4 bytes a row, down to a chunk of one row.
    Returns (loss_sum, grad_hidden [N, H] in hidden's dtype, or None). No rows: loss 0, gradient of shape [0, H].
    Raises ValueError for shapes or dtypes that do not fit together. Inputs are never changed.
    """
    _check(hidden_NH, weight_VH, targets_N, bias_V, grad_weight_VH, grad_bias_V, softcap)
    (num_rows, hidden_size), vocab_size = hidden_NH.shape, weight_VH.shape[0]
    device, dtype = hidden_NH.device, hidden_NH.dtype
    triton_form, fp32_sums = use_triton(hidden_NH), _product_adds_to_fp32(device, dtype)
    cross_entropy = _cross_entropy_triton if triton_form else _cross_entropy_torch
    need_grad = need_grad_hidden or grad_weight_VH is not None or grad_bias_V is not None
    factor = _FP16_GRADIENT_FACTOR if dtype == torch.float16 else 1.0
    scale = gradient_scale / factor

    padded_vocab = _round_up(vocab_size, _LOGIT_ALIGNMENT)
    temporaries = 0 if triton_form else vocab_size * _TORCH_BYTES_PER_LOGIT
    widened = 0 if fp32_sums else (-(-vocab_size // _WIDENED_PARTS) + hidden_size) * 4
    row_bytes = padded_vocab * dtype.itemsize + max(temporaries, widened)
    step = rows_per_chunk(num_rows, row_bytes, budget_bytes)

    loss_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    grad_hidden_NH = torch.empty_like(hidden_NH) if need_grad_hidden else None
    chunk = torch.empty(min(step, num_rows), padded_vocab, dtype=dtype, device=device)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        hidden_CH = hidden_NH[rows]
        logits_CV = chunk[: rows.stop - start, :vocab_size]
        torch.mm(hidden_CH, weight_VH.T, out=logits_CV)
        cross_entropy(logits_CV, targets_N[rows], loss_N[rows], bias_V, softcap, z_loss, factor if need_grad else None)
        grad_CV = logits_CV  # overwritten
        if grad_hidden_NH is not None:
            grad_CH = grad_hidden_NH[rows]
            torch.addmm(grad_CH, grad_CV, weight_VH, beta=0, alpha=scale, out=grad_CH)
        if grad_weight_VH is not None:
            _add_product(grad_weight_VH, grad_CV, hidden_CH, scale, fp32_sums)
        if grad_bias_V is not None:
            grad_bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=scale)
    return loss_N.sum(), grad_hidden_NH


def supervised_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[Tensor, int]:
    """Summed loss of the supervised rows, for autograd, and their number; arguments as of `linear_cross_entropy`.

    Rows whose target is IGNORED are gathered out before the projection, and their gradient is 0. Where a gradient is
    wanted the forward pass makes it at once; the weight's is summed in fp32 and rounded to its dtype at the end.
    """
    supervised = torch.nonzero(targets_N != IGNORED)[:, 0]
    loss = _LinearCrossEntropy.apply(
        hidden_NH.index_select(0, supervised),
        weight_VH,
        bias_V,
        targets_N.index_select(0, supervised),
        softcap,
        z_loss,
        budget_bytes,
    )
    return loss, supervised.numel()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        budget_bytes: int,
    ) -> Tensor:
        hidden_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if weight_wanted else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and bias_wanted else None
        loss, grad_hidden = linear_cross_entropy(
            hidden_NH,
            weight_VH,
            targets_N,
            gradient_scale=1.0,
            grad_weight_VH=grad_weight,
            need_grad_hidden=hidden_wanted,
            bias_V=bias_V,
            grad_bias_V=grad_bias,
            softcap=softcap,
            z_loss=z_loss,
            budget_bytes=budget_bytes,
        )
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        ctx.dtype = hidden_NH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = (ctx.dtype, ctx.dtype, ctx.bias_dtype)
        grads = (
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, dtypes, strict=True)
        )
        return (*grads, None, None, None, None)


def _check(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    grad_weight_VH: Tensor | None,
    grad_bias_V: Tensor | None,
    softcap: float | None,
) -> None:
    vocab_size = weight_VH.shape[0]
    if hidden_NH.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight_VH.dtype != hidden_NH.dtype:
        found = f"{hidden_NH.dtype} and {weight_VH.dtype}"
        raise ValueError(f"hidden rows and weight must both be fp32, bf16 or fp16; they are {found}")
    wanted = {
        "weight_VH": (weight_VH, (vocab_size, hidden_NH.shape[1]), weight_VH.dtype),
        "targets_N": (targets_N, (hidden_NH.shape[0],), torch.int64),
        "bias_V": (bias_V, (vocab_size,), None),
        "grad_weight_VH": (grad_weight_VH, tuple(weight_VH.shape), torch.float32),
        "grad_bias_V": (grad_bias_V, (vocab_size,), torch.float32),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is not None and (tensor.shape != shape or dtype not in (None, tensor.dtype)):
            found, needed = f"{list(tensor.shape)} {tensor.dtype}", f"{list(shape)} {dtype or ''}".strip()
            raise ValueError(f"{name} is {found}; beside the other tensors it must be {needed}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be greater than 0, or None for none")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ------------------------------------------------------------------------------ the weight's gradient, summed in fp32


@functools.cache
def _product_adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one product adds operands of `dtype` to an fp32 matrix in place. Tried, not looked up: torch on CUDA can;
    ROCm builds can since torch 2.10 or so; on the CPU there is no such product of 16-bit operands."""
    if dtype == torch.float32:
        return True
    if device.type == "cpu":
        return False
    operand = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        _log.warning("the vocabulary weight's gradient is made by fp32 products, slowly: torch.addmm says: %s", error)
        return False
    return True


def _add_product(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor, scale: float, fp32_sums: bool) -> None:
    """total += scale x grad^T @ hidden, in fp32: partial sums over chunks would lose bits in the compute dtype."""
    if grad_CV.dtype == torch.float32:
        total_VH.addmm_(grad_CV.T, hidden_CH, alpha=scale)
    elif fp32_sums:
        torch.addmm(total_VH, grad_CV.T, hidden_CH, alpha=scale, out_dtype=torch.float32, out=total_VH)
    else:
        hidden_CH = hidden_CH.float()
        part = -(-total_VH.shape[0] // _WIDENED_PARTS)
        for total, grad in zip(total_VH.split(part), grad_CV.split(part, dim=1), strict=True):
            total.addmm_(grad.T.float(), hidden_CH, alpha=scale)


# -------------------------------------------------------------- logits -> their gradient, in place: the ground truth


def _cross_entropy_torch(
    logits_CV: Tensor,
    targets_C: Tensor,
    loss_C: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    z_loss: float,
    factor: float | None,
) -> None:
    """Writes each row's loss, and over the logits their gradient times `factor`, unless that is None."""
    x_CV = logits_CV.float()
    if bias_V is not None:
        x_CV = x_CV + bias_V.float()
    if softcap is not None:
        x_CV = (x_CV / softcap).tanh_().mul_(softcap)
    ignored_C = targets_C == IGNORED
    at_C1 = targets_C.masked_fill(ignored_C, 0)[:, None]
    lse_C = x_CV.logsumexp(-1)
    loss_C.copy_(lse_C - x_CV.gather(1, at_C1)[:, 0] + z_loss * lse_C.square())
    loss_C.masked_fill_(ignored_C, 0.0)
    if factor is None:
        return
    grad_CV = (x_CV - lse_C[:, None]).exp_()
    grad_CV *= (1 + 2 * z_loss * lse_C)[:, None]
    grad_CV.scatter_add_(1, at_C1, torch.full_like(at_C1, -1, dtype=torch.float32))
    if softcap is not None:
        grad_CV *= x_CV.div_(softcap).square_().neg_().add_(1.0)  # the derivative of the cap
    grad_CV *= factor
    logits_CV.copy_(grad_CV.masked_fill_(ignored_C[:, None], 0.0))


# ------------------------------------------------------------------------------------------------- the same in Triton


def _cross_entropy_triton(
    logits_CV: Tensor,
    targets_C: Tensor,
    loss_C: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    z_loss: float,
    factor: float | None,
) -> None:
    """As `_cross_entropy_torch`. What lies between the vocabulary and the rows' stride is overwritten too."""
    num_rows, vocab_size = logits_CV.shape
    block = min(_MAX_BLOCK_V, triton.next_power_of_2(vocab_size))
    with torch.cuda.device_of(logits_CV):
        _cross_entropy_kernel[(num_rows,)](
            logits_CV,
            targets_C,
            loss_C,
            logits_CV if bias_V is None else bias_V.contiguous(),  # a pointer that is never read, where there is none
            targets_C.stride(0),
            1.0 if softcap is None else softcap,
            z_loss,
            1.0 if factor is None else factor,
            VOCAB=vocab_size,
            ROW_STRIDE=logits_CV.stride(0),
            NUM_BLOCKS=triton.cdiv(vocab_size, block),
            IGNORED_TARGET=IGNORED,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            NEED_GRAD=factor is not None,
            BLOCK=block,
            num_warps=min(_MAX_NUM_WARPS, max(1, block // 512)),
        )


@triton.jit
def _load_logits(
    logits_V, bias_V, at, softcap,
    VOCAB: tl.constexpr, ROW_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    # Masked by the stride, which the alignment divides: the mask of an odd vocabulary would make the loads narrow.
    x = tl.load(logits_V + at, mask=at < ROW_STRIDE, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_V + at, mask=at < VOCAB, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # tanh, without a vendor's library
    return tl.where(at < VOCAB, x, float("-inf"))


@triton.jit
def _cross_entropy_kernel(
    logits_CV, targets_C, loss_C, bias_V, target_stride, softcap, z_loss, factor,
    VOCAB: tl.constexpr, ROW_STRIDE: tl.constexpr, NUM_BLOCKS: tl.constexpr, IGNORED_TARGET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NEED_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # a chunk of 4 GiB has more than 2^31 logits
    logits_V = logits_CV + row * ROW_STRIDE
    cols = tl.arange(0, BLOCK)
    target = tl.load(targets_C + row * target_stride)
    if target == IGNORED_TARGET:
        tl.store(loss_C + row, 0.0)
        if NEED_GRAD:
            for block in range(NUM_BLOCKS):
                at = block * BLOCK + cols
                tl.store(logits_V + at, tl.zeros([BLOCK], logits_CV.dtype.element_ty), mask=at < ROW_STRIDE)
        return

    # A finite start, so that a first block of nothing but -inf leaves exp(-inf - start) = 0 and no NaN.
    largest = -3.0e38
    total = 0.0
    for block in range(NUM_BLOCKS):
        at = block * BLOCK + cols
        x = _load_logits(logits_V, bias_V, at, softcap, VOCAB, ROW_STRIDE, HAS_BIAS, HAS_SOFTCAP, "evict_last")
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
        largest = new_largest
    known = (target >= 0) & (target < VOCAB)
    lse = tl.where(known, largest + tl.log(total), float("nan"))
    at_target = tl.where(known, target, 0)
    x_target = _load_logits(logits_V, bias_V, at_target, softcap, VOCAB, ROW_STRIDE, HAS_BIAS, HAS_SOFTCAP, "")
    tl.store(loss_C + row, lse - x_target + z_loss * lse * lse)

    if NEED_GRAD:
        tl.debug_barrier()  # every thread has read the target's logit before one overwrites it
        dlse = 1.0 + 2.0 * z_loss * lse
        for back in range(NUM_BLOCKS):
            at = (NUM_BLOCKS - 1 - back) * BLOCK + cols  # last block first: it is the likeliest to be cached still
            x = _load_logits(logits_V, bias_V, at, softcap, VOCAB, ROW_STRIDE, HAS_BIAS, HAS_SOFTCAP, "evict_first")
            grad = tl.exp(x - lse) * dlse - tl.where(at == target, 1.0, 0.0)
            if HAS_SOFTCAP:
                grad *= 1.0 - (x / softcap) * (x / softcap)
            grad = tl.where(at < VOCAB, grad * factor, 0.0).to(logits_CV.dtype.element_ty)
            tl.store(logits_V + at, grad, mask=at < ROW_STRIDE, eviction_policy="evict_first")
