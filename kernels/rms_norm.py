"""RMSNorm, alone or fused with the residual addition before it, as Llama, Qwen and Gemma of transformers round it.

    Llama, Qwen   y = weight * round(x / rms)          two roundings to x's dtype
    Gemma         y = round(x / rms * (1 + weight))    one, and the stored weight is the distance from 1
where rms = sqrt(mean(x^2) + eps) in fp32. With a residual, x is round(x + residual), which is returned too.

`rms_norm` and `add_rms_norm` are differentiable and stand inside a compiled layer as custom operators, without a graph
break. `forward` and `backward` are the same without autograd, for a layer that keeps its own tape (model/recompute.py).
`install` puts the kernel into one module instance. A pass reads each input once and writes each output once; the
backward reads x again and recomputes rms rather than keep it. The weight's gradient is summed in two stages, in a fixed
order, so the same input gives the same bits on the same GPU.
Off the GPU it is plain PyTorch (switch.py), whose backward is autograd's own. Changes only outputs it is handed. Tests:
tests/kernels/test_rms_norm.py; speed: benchmarks/kernels/bench_rms_norm.py.

Shape suffixes: T rows (tokens), H the normalised width, P programs of the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slideformer_ray.kernels.switch import tl, triton, use_triton

# One program holds a whole row in registers. 32768 fp32 values over 32 warps are 32 registers a thread and operand.
MAX_WIDTH = 32768
# Programs of the backward, for each multiprocessor: enough loads in flight to saturate memory, few enough that the
# partial sums of the weight's gradient (P x H fp32) stay small beside x. Fixed: the order of summation hangs on it.
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x_TH, residual_TH, weight_H, y_TH, sum_TH, x_stride, residual_stride, num_rows, width, eps,
    HAS_RESIDUAL: tl.constexpr, ONE_PLUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (cols < width)
    x = tl.load(x_TH + rows * x_stride + cols, mask, other=0.0)
    dtype = x.dtype
    if HAS_RESIDUAL:
        residual = tl.load(residual_TH + rows * residual_stride + cols, mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_TH + rows * width + cols, x, mask)
    x = x.to(tl.float32)
    weight = tl.load(weight_H + cols, cols < width, other=0.0).to(tl.float32)
    unit = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    if ONE_PLUS:
        y = unit * (1.0 + weight)
    else:
        y = unit.to(dtype).to(tl.float32) * weight
    tl.store(y_TH + rows * width + cols, y.to(dtype), mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def _backward_kernel(
    grad_y_TH, x_TH, weight_H, grad_sum_TH, grad_x_TH, partial_PH,
    grad_y_stride, x_stride, grad_sum_stride, grad_x_stride, num_rows, rows_per_program, width, eps,
    HAS_GRAD_SUM: tl.constexpr, NEED_GRAD_WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Each output row is written after all inputs of that row have been read, so grad_x may be one of them.
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    cols = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_H + cols, cols < width, other=0.0).to(tl.float32)
    if ONE_PLUS:
        weight += 1.0
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    start = first
    while start < last:
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < last) & (cols < width)
        x = tl.load(x_TH + rows * x_stride + cols, mask, other=0.0)
        dtype = x.dtype
        x = x.to(tl.float32)
        grad_y = tl.load(grad_y_TH + rows * grad_y_stride + cols, mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
        unit = x * scale
        grad_unit = grad_y * weight
        grad_x = scale * (grad_unit - unit * (tl.sum(grad_unit * unit, axis=1, keep_dims=True) / width))
        if HAS_GRAD_SUM:
            grad_x += tl.load(grad_sum_TH + rows * grad_sum_stride + cols, mask, other=0.0).to(tl.float32)
        tl.store(grad_x_TH + rows * grad_x_stride + cols, grad_x.to(dtype), mask)
        if NEED_GRAD_WEIGHT:
            if not ONE_PLUS:
                unit = unit.to(dtype).to(tl.float32)  # what the weight was multiplied with
            grad_weight += grad_y * unit
        start += ROWS
    if NEED_GRAD_WEIGHT:
        total = tl.sum(grad_weight, axis=0, keep_dims=True)
        tl.store(partial_PH + program * width + cols, total, cols < width)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """The same in plain PyTorch, with transformers' order of roundings."""
    unit = x.float()
    unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + eps)
    if one_plus:
        return (unit * (1.0 + weight.float())).to(x.dtype)
    return weight * unit.to(x.dtype)


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    one_plus: bool = False,
    residual: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, y): `sum` is x + residual, or x itself without a residual. Records nothing for autograd.

    x, residual: [..., H]; weight: [H], of one dtype (bf16, fp16 or fp32). Any strides are honoured; rows that no single
    stride describes are copied first. sum_out: contiguous, where `sum` goes; it may be x or residual.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(x, weight, residual)
    with torch.no_grad():
        if not use_triton(x):
            if residual is not None:
                x = torch.add(x, residual, out=sum_out)
            return x, plain_rms_norm(x, weight, eps, one_plus)
        x_TH = _rows(x)
        residual_TH = x_TH if residual is None else _rows(residual)
        if residual is None:
            total = x
        elif sum_out is None:
            total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        else:
            total = sum_out
        assert residual is None or total.is_contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows, width = x_TH.shape
        if x.numel():
            block, rows, num_warps = _tile(width)
            with torch.cuda.device_of(x):
                _forward_kernel[(triton.cdiv(num_rows, rows),)](
                    x_TH, residual_TH, weight, y, total, x_TH.stride(0), residual_TH.stride(0), num_rows, width, eps,
                    HAS_RESIDUAL=residual is not None, ONE_PLUS=one_plus, ROWS=rows, BLOCK=block, num_warps=num_warps,
                )  # fmt: skip
        return total, y


def backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    one_plus: bool = False,
    grad_sum: Tensor | None = None,
    need_grad_weight: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of x, of the weight in fp32 [H]). x is what was normalised: with a residual, the sum.

    grad_sum: the gradient that reaches the sum on its other ways; it is added. out: where the gradient of x goes,
    contiguous; it may be x, grad_y or grad_sum.
    """
    with torch.no_grad():
        if not use_triton(x):
            return _plain_backward(grad_y, x, weight, eps, one_plus, grad_sum, need_grad_weight, out)
        x_TH, grad_y_TH = _rows(x), _rows(grad_y)
        grad_sum_TH = x_TH if grad_sum is None else _rows(grad_sum)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        assert grad_x.is_contiguous() and grad_x.shape == x.shape
        num_rows, width = x_TH.shape
        block, rows, num_warps = _tile(width)
        num_programs = min(triton.cdiv(max(num_rows, 1), rows), _max_programs(x))
        rows_per_program = triton.cdiv(triton.cdiv(max(num_rows, 1), num_programs), rows) * rows
        num_programs = triton.cdiv(max(num_rows, 1), rows_per_program)
        num_partials = num_programs if need_grad_weight else 0
        partial_PH = torch.empty((num_partials, width), dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _backward_kernel[(num_programs,)](
                grad_y_TH, x_TH, weight, grad_sum_TH, grad_x, partial_PH,
                grad_y_TH.stride(0), x_TH.stride(0), grad_sum_TH.stride(0), width,
                num_rows, rows_per_program, width, eps,
                HAS_GRAD_SUM=grad_sum is not None, NEED_GRAD_WEIGHT=need_grad_weight, ONE_PLUS=one_plus,
                ROWS=rows, BLOCK=block, num_warps=num_warps,
            )  # fmt: skip
        return grad_x, partial_PH.sum(0) if need_grad_weight else None


def _plain_backward(grad_y, x, weight, eps, one_plus, grad_sum, need_grad_weight, out):
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(need_grad_weight)
        y = plain_rms_norm(x, weight, eps, one_plus)
    grad_x, *grad_weight = torch.autograd.grad(y, [x, weight] if need_grad_weight else [x], grad_y)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    if out is not None:
        grad_x = out.copy_(grad_x)
    return grad_x, grad_weight[0].float() if need_grad_weight else None


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if weight.shape != x.shape[-1:] or weight.stride(-1) != 1:
        raise ValueError(
            f"rms_norm: weight is {list(weight.shape)}, x is {list(x.shape)}; weight must be [{x.shape[-1]}]"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual is {residual.dtype} {list(residual.shape)}; it must be as x, {x.dtype} {list(x.shape)}"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"rms_norm: weight is {weight.dtype}, x is {x.dtype}; they must be of one dtype")
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"rms_norm: rows of {x.shape[-1]}; the most is {MAX_WIDTH}")


def _rows(x: Tensor) -> Tensor:
    """x as [T, H] with one stride between rows and none within: a view where its strides allow, else a copy."""
    x_TH = x.reshape(-1, x.shape[-1])
    return x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()


def _tile(width: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program: 16 values a thread of long rows, several short rows at once."""
    block = max(triton.next_power_of_2(width), 16)
    most_warps = 16 if torch.version.hip else 32  # 1,024 threads; a wavefront of AMD's has 64
    return block, max(1, 1024 // block), min(max(block // 512, 4), most_warps)


def _max_programs(x: Tensor) -> int:
    if not x.is_cuda:
        return PROGRAMS_PER_MULTIPROCESSOR  # the interpreter
    return PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(x.device).multi_processor_count


# ---------------------------------------------------------------------------------------------- operators with autograd


@torch.library.custom_op(
    "slideformer::rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps, bool one_plus) -> Tensor",
)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    return forward(x, weight, eps, one_plus=one_plus)[1]


@torch.library.custom_op(
    "slideformer::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps, bool one_plus) -> (Tensor, Tensor)",
)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    return forward(x, weight, eps, one_plus=one_plus, residual=residual)


@torch.library.custom_op(
    "slideformer::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor grad_y, Tensor x, Tensor weight, Tensor? grad_sum, float eps, bool one_plus) -> (Tensor, Tensor)",
)
def _rms_norm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, grad_sum: Tensor | None, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = backward(grad_y, x, weight, eps, one_plus=one_plus, grad_sum=grad_sum)
    assert grad_weight is not None
    return grad_x, grad_weight.to(weight.dtype)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm.register_fake(lambda x, weight, eps, one_plus: _like(x))
_add_rms_norm.register_fake(lambda x, residual, weight, eps, one_plus: (_like(x), _like(x)))
_rms_norm_backward.register_fake(lambda grad_y, x, weight, grad_sum, eps, one_plus: (_like(x), _like(weight)))


def _save_rms_norm(ctx, inputs, output):
    x, weight, ctx.eps, ctx.one_plus = inputs
    ctx.save_for_backward(x, weight)


def _save_add_rms_norm(ctx, inputs, output):
    _, _, weight, ctx.eps, ctx.one_plus = inputs
    ctx.save_for_backward(output[0], weight)


def _rms_norm_grads(ctx, grad_y):
    grad_x, grad_weight = _rms_norm_backward(grad_y, *ctx.saved_tensors, None, ctx.eps, ctx.one_plus)
    return grad_x, grad_weight, None, None


def _add_rms_norm_grads(ctx, grad_sum, grad_y):
    grad_x, grad_weight = _rms_norm_backward(grad_y, *ctx.saved_tensors, grad_sum, ctx.eps, ctx.one_plus)
    return grad_x, grad_x, grad_weight, None, None


_rms_norm.register_autograd(_rms_norm_grads, setup_context=_save_rms_norm)
_add_rms_norm.register_autograd(_add_rms_norm_grads, setup_context=_save_add_rms_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """x: [..., H], weight: [H] -> [..., H], contiguous. Differentiable; `forward` says what is refused."""
    if not use_triton(x):
        return plain_rms_norm(x, weight, eps, one_plus)
    return _rms_norm(x, weight, eps, one_plus)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm), both [..., H] and contiguous. Differentiable."""
    if not use_triton(x):
        total = x + residual
        return total, plain_rms_norm(total, weight, eps, one_plus)
    return _add_rms_norm(x, residual, weight, eps, one_plus)


class RMSNorm(nn.Module):
    """Stands in for a norm of transformers; the parameter keeps its name, `weight`."""

    def __init__(self, weight: nn.Parameter, eps: float, one_plus: bool):
        super().__init__()
        self.weight, self.eps, self.one_plus = weight, eps, one_plus

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.one_plus)


def install(module: nn.Module) -> int:
    """Replace the RMS norms within this one module instance, Llama's, Qwen's and Gemma's; returns how many."""
    replaced = 0
    for parent in list(module.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if kind.endswith("RMSNorm"):
                one_plus = kind.startswith("Gemma")
                eps = child.eps if one_plus else child.variance_epsilon
                setattr(parent, name, RMSNorm(child.weight, eps, one_plus))
                replaced += 1
    return replaced
