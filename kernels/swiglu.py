"""The gate of a gated MLP: act(gate) * up, with SiLU (SwiGLU) or GELU (GeGLU).

As in transformers, act(gate) is rounded to the dtype before the product, and the product again; arithmetic is fp32.
The backward recomputes everything from gate and up, which the two products before have written anyway: nothing else is
kept. With `inner`, the same pass gives act(gate) * up again, which the gradient of the down projection needs.

`swiglu`, `geglu` and `gated` are differentiable and stand inside a compiled layer as custom operators; they change no
input. `forward` and `backward` are the same without autograd, into places that the caller names: a caller that owns
gate, up and the incoming gradient may have the three results written over them, so that a layer's backward never holds
more than three tensors of this width (model/recompute.py). gate and up may be the halves of one product [T, 2F].
`install` puts the kernel into one module instance. Off the GPU it is plain PyTorch (switch.py).
Tests: tests/kernels/test_swiglu.py; speed: benchmarks/kernels/bench_swiglu.py. Shape suffixes: T tokens, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slideformer_ray.kernels.switch import tl, triton, use_triton

# transformers' names of the activations, and what the kernels call them.
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}
# Elements of a program. 8 a thread: one 16-byte access of 16-bit elements for each operand.
BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """(act(x), act'(x)) in fp32. tanh(z) = 2 sigmoid(2z) - 1, so no library function of one vendor is needed."""
    if ACTIVATION == 0:
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif ACTIVATION == 1:
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
        value = x * sigmoid
        slope = sigmoid + x * sigmoid * (1.0 - sigmoid) * (1.5957691216057308 + 0.21406859441451275 * x * x)
    else:
        cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        value = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    return value, slope


@triton.jit
def _tile(num_rows, width, blocks_per_row, ROWS: tl.constexpr, COLS: tl.constexpr):
    program = tl.program_id(0)
    rows = (program // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = program % blocks_per_row * COLS + tl.arange(0, COLS)[None, :]
    return rows, cols, (rows < num_rows) & (cols < width)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    gate_TF, up_TF, out_TF, gate_stride, up_stride, out_stride, num_rows, width, blocks_per_row,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, cols, mask = _tile(num_rows, width, blocks_per_row, ROWS, COLS)
    gate = tl.load(gate_TF + row * gate_stride + cols, mask, other=0.0)
    up = tl.load(up_TF + row * up_stride + cols, mask, other=0.0)
    value, _ = _activate(gate.to(tl.float32), ACTIVATION)
    out = value.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_TF + row * out_stride + cols, out.to(gate.dtype), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad_TF, gate_TF, up_TF, grad_gate_TF, grad_up_TF, inner_TF,
    grad_stride, gate_stride, up_stride, grad_gate_stride, grad_up_stride, inner_stride,
    num_rows, width, blocks_per_row,
    NEED_INNER: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # An element is read and written by one thread, and read first: the results may lie over the inputs.
    row, cols, mask = _tile(num_rows, width, blocks_per_row, ROWS, COLS)
    grad = tl.load(grad_TF + row * grad_stride + cols, mask, other=0.0)
    gate = tl.load(gate_TF + row * gate_stride + cols, mask, other=0.0)
    up = tl.load(up_TF + row * up_stride + cols, mask, other=0.0)
    dtype = gate.dtype
    grad, up = grad.to(tl.float32), up.to(tl.float32)
    value, slope = _activate(gate.to(tl.float32), ACTIVATION)
    value = value.to(dtype).to(tl.float32)
    tl.store(grad_gate_TF + row * grad_gate_stride + cols, (grad * up * slope).to(dtype), mask)
    tl.store(grad_up_TF + row * grad_up_stride + cols, (grad * value).to(dtype), mask)
    if NEED_INNER:
        tl.store(inner_TF + row * inner_stride + cols, (value * up).to(dtype), mask)


def plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The same in plain PyTorch, with transformers' order of roundings."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up


def forward(gate: Tensor, up: Tensor, activation: str = "silu", *, out: Tensor | None = None) -> Tensor:
    """act(gate) * up, [..., F], contiguous unless `out` says where it goes. Records nothing for autograd.

    gate, up: [..., F] of one dtype. Any strides are honoured; rows that no single stride describes are copied first.
    out: rows with one stride between them, as `gate_up[..., :F]` has; it may be gate or up.
    Raises ValueError for shapes, dtypes and activations that do not fit.
    """
    _check(gate, up, activation)
    with torch.no_grad():
        if not use_triton(gate):
            result = plain_gated(gate, up, activation)
            return result if out is None else out.copy_(result)
        result = _like(gate) if out is None else out
        gate_TF, up_TF, out_TF = _rows(gate), _rows(up), _same_rows(result)
        if gate.numel():
            num_programs, sizes, tile = _grid(gate_TF)
            with torch.cuda.device_of(gate):
                _forward_kernel[(num_programs,)](
                    gate_TF, up_TF, out_TF, gate_TF.stride(0), up_TF.stride(0), out_TF.stride(0), *sizes,
                    ACTIVATION=ACTIVATIONS[activation], **tile,
                )  # fmt: skip
        return result


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    *,
    out: tuple[Tensor, Tensor] | None = None,
    inner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of (gate, up), contiguous unless `out` says where they go. Records nothing for autograd.

    grad: [..., F], of act(gate) * up. out: places for the two; they may be (gate, up). inner: a place for
    act(gate) * up; it may be grad. No two results may share a place.
    """
    _check(gate, up, activation)
    with torch.no_grad():
        if not use_triton(gate):
            return _plain_backward(grad, gate, up, activation, out, inner)
        grad_gate, grad_up = (_like(gate), _like(up)) if out is None else out
        grad_TF, gate_TF, up_TF = _rows(grad), _rows(gate), _rows(up)
        grad_gate_TF, grad_up_TF = _same_rows(grad_gate), _same_rows(grad_up)
        inner_TF = grad_TF if inner is None else _same_rows(inner)
        if gate.numel():
            num_programs, sizes, tile = _grid(gate_TF)
            tensors = (grad_TF, gate_TF, up_TF, grad_gate_TF, grad_up_TF, inner_TF)
            with torch.cuda.device_of(gate):
                _backward_kernel[(num_programs,)](
                    *tensors, *(t.stride(0) for t in tensors), *sizes,
                    NEED_INNER=inner is not None, ACTIVATION=ACTIVATIONS[activation], **tile,
                )  # fmt: skip
        return grad_gate, grad_up


def _plain_backward(grad, gate, up, activation, out, inner):
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        product = plain_gated(gate, up, activation)
    grads = torch.autograd.grad(product, (gate, up), grad)
    if inner is not None:
        inner.copy_(product.detach())
    return grads if out is None else tuple(place.copy_(g) for place, g in zip(out, grads, strict=True))


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate is {gate.dtype} {list(gate.shape)}, up is {up.dtype} {list(up.shape)}; they must be alike"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation {activation!r} is not known; known: {', '.join(ACTIVATIONS)}")


def _grid(x_TF: Tensor) -> tuple[int, tuple[int, int, int], dict[str, int]]:
    """(programs, (rows, width, programs to a row), the shape of one program)."""
    num_rows, width = x_TF.shape
    cols = min(triton.next_power_of_2(width), BLOCK)
    rows = BLOCK // cols
    blocks_per_row = triton.cdiv(width, cols)
    return (
        triton.cdiv(num_rows, rows) * blocks_per_row,
        (num_rows, width, blocks_per_row),
        {"ROWS": rows, "COLS": cols, "num_warps": NUM_WARPS},
    )


def _rows(x: Tensor) -> Tensor:
    """x as [T, F] with one stride between rows and none within: a view where its strides allow, else a copy."""
    x_TF = x.reshape(-1, x.shape[-1])
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()


def _same_rows(x: Tensor) -> Tensor:
    """The same for a result, which no copy may stand in for."""
    x_TF = x.view(-1, x.shape[-1])
    assert x_TF.stride(1) == 1
    return x_TF


# ---------------------------------------------------------------------------------------------- operators with autograd


@torch.library.custom_op(
    "slideformer::gated",
    mutates_args=(),
    schema="(Tensor gate, Tensor up, str activation) -> Tensor",
)
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return forward(gate, up, activation)


@torch.library.custom_op(
    "slideformer::gated_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
)
def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return backward(grad, gate, up, activation)


@torch.library.custom_op(
    "slideformer::gated_packed_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor gate_up, str activation) -> Tensor",
)
def _gated_packed_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    grad_gate_up = _like(gate_up)
    gate, up = _halves(gate_up)
    backward(grad, gate, up, activation, out=_halves(grad_gate_up))
    return grad_gate_up


@torch.library.custom_op(
    "slideformer::gated_packed",
    mutates_args=(),
    schema="(Tensor gate_up, str activation) -> Tensor",
)
def _gated_packed(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = _halves(gate_up)
    return forward(gate, up, activation)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_gated.register_fake(lambda gate, up, activation: _like(gate))
_gated_backward.register_fake(lambda grad, gate, up, activation: (_like(gate), _like(gate)))
_gated_packed_backward.register_fake(lambda grad, gate_up, activation: _like(gate_up))


@_gated_packed.register_fake
def _(gate_up, activation):
    return _like(_halves(gate_up)[0])


def _save(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


_gated.register_autograd(
    lambda ctx, grad: (*_gated_backward(grad, *ctx.saved_tensors, ctx.activation), None), setup_context=_save
)
_gated_packed.register_autograd(
    lambda ctx, grad: (_gated_packed_backward(grad, *ctx.saved_tensors, ctx.activation), None), setup_context=_save
)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up for an activation by transformers' name. [..., F] each. Differentiable."""
    _check(gate, up, activation)
    if not use_triton(gate):
        return plain_gated(gate, up, activation)
    return _gated(gate, up, activation)


def gated_packed(gate_up: Tensor, activation: str) -> Tensor:
    """The same for gate and up in one tensor, [..., 2F] -> [..., F]. Differentiable."""
    gate, up = _halves(gate_up)
    _check(gate, up, activation)
    if not use_triton(gate_up):
        return plain_gated(gate, up, activation)
    return _gated_packed(gate_up, activation)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up, by the tanh formula or exactly ("none")."""
    return gated(gate, up, "gelu_pytorch_tanh" if approximate == "tanh" else "gelu")


class GatedMLP(nn.Module):
    """Stands in for a gated MLP of transformers; the parameters keep their names."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, activation: str):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.activation = gate_proj, up_proj, down_proj, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


def install(module: nn.Module) -> int:
    """Replace the gated MLPs within this one module instance whose activation the kernels know; returns how many."""
    replaced = 0
    for parent in list(module.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if [n for n, _ in child.named_children()][:3] == ["gate_proj", "up_proj", "down_proj"]:
                if child.config.hidden_act in ACTIVATIONS:
                    mlp = GatedMLP(child.gate_proj, child.up_proj, child.down_proj, child.config.hidden_act)
                    setattr(parent, name, mlp)
                    replaced += 1
    return replaced
