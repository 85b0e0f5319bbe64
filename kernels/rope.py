"""Rotary position embedding of queries and keys in one kernel, in the layout of transformers.

With x1, x2 the two halves of a head's first R elements, and cos1, cos2, sin1, sin2 those of the tables:
    y1 = x1 * cos1 - x2 * sin1        y2 = x2 * cos2 + x1 * sin2
and elements from R on pass through (partial rotary). cos and sin come from the model's own rotary module, for whatever
rope type it has, in fp32 or in the dtype of q; they are only read. Arithmetic is fp32, rounded once.

The backward is the transposed rotation, by -theta: it keeps nothing but cos and sin.
`rope` is differentiable and stands inside a compiled layer as a custom operator. `rotate` is the same without autograd,
into places that the caller names, which may be q and k themselves. `install` puts the kernel into one module instance.
Off the GPU it is plain PyTorch (switch.py). Tests: tests/kernels/test_rope.py; speed: benchmarks/kernels/bench_rope.py.

Shape suffixes: B rows of the batch, N heads, S positions, D head size, R rotated elements of a head.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn

from slideformer_ray.kernels.switch import tl, triton, use_triton


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos1, cos2, sin1, sin2, head_stride, y_head_stride, num_heads, half, head_size,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one position. Reads both halves before it writes either, so y may be x."""
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    cols = tl.arange(0, HALF)[None, :]
    mask = (heads < num_heads) & (cols < half)
    x1 = tl.load(x_ptr + heads * head_stride + cols, mask, other=0.0)
    x2 = tl.load(x_ptr + heads * head_stride + half + cols, mask, other=0.0)
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if INVERSE:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    if REST > 0:  # loaded before the first store, like the rest
        rest = 2 * half + tl.arange(0, REST)[None, :]
        rest_mask = (heads < num_heads) & (rest < head_size)
        passed = tl.load(x_ptr + heads * head_stride + rest, rest_mask, other=0.0)
        tl.store(y_ptr + heads * y_head_stride + rest, passed, rest_mask)
    tl.store(y_ptr + heads * y_head_stride + cols, y1.to(dtype), mask)
    tl.store(y_ptr + heads * y_head_stride + half + cols, y2.to(dtype), mask)


@triton.jit(do_not_specialize=["seq_len"])
def _rotate_kernel(
    q_BNSD, k_BNSD, cos_BSR, sin_BSR, q_out_BNSD, k_out_BNSD,
    q_stride_b, q_stride_n, q_stride_s, k_stride_b, k_stride_n, k_stride_s,
    q_out_stride_b, q_out_stride_n, q_out_stride_s, k_out_stride_b, k_out_stride_n, k_out_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    seq_len, num_q_heads, num_k_heads, half, head_size,
    INVERSE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b, s = (token // seq_len).to(tl.int64), (token % seq_len).to(tl.int64)
    cols = tl.arange(0, HALF)[None, :]
    mask = cols < half
    cos_ptr = cos_BSR + b * cos_stride_b + s * cos_stride_s + cols
    sin_ptr = sin_BSR + b * sin_stride_b + s * sin_stride_s + cols
    cos1 = tl.load(cos_ptr, mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + half, mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr, mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + half, mask, other=0.0).to(tl.float32)
    _rotate_heads(
        q_BNSD + b * q_stride_b + s * q_stride_s, q_out_BNSD + b * q_out_stride_b + s * q_out_stride_s,
        cos1, cos2, sin1, sin2, q_stride_n, q_out_stride_n, num_q_heads, half, head_size,
        INVERSE, Q_HEADS, HALF, REST,
    )  # fmt: skip
    _rotate_heads(
        k_BNSD + b * k_stride_b + s * k_stride_s, k_out_BNSD + b * k_out_stride_b + s * k_out_stride_s,
        cos1, cos2, sin1, sin2, k_stride_n, k_out_stride_n, num_k_heads, half, head_size,
        INVERSE, K_HEADS, HALF, REST,
    )  # fmt: skip


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, with transformers' order of roundings."""
    cos, sin = cos[:, None], sin[:, None]
    width = cos.shape[-1]

    def rotated(x: Tensor) -> Tensor:
        turned, rest = x[..., :width], x[..., width:]
        x1, x2 = turned.chunk(2, dim=-1)
        turned = (turned * cos + torch.cat((-x2, x1), dim=-1) * sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    return rotated(q), rotated(k)


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    inverse: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated (q, k); with `inverse` by -theta, which is the backward. Records nothing for autograd.

    q: [B, Nq, S, D]; k: [B, Nk, S, D], of one dtype, any strides but 1 along D (else they are copied first).
    cos, sin: [B or 1, S, R] with R even and at most D. out: where the results go, of any such strides; (q, k) is fine.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(q, k, cos, sin)
    with torch.no_grad():
        if not use_triton(q):
            return _plain_rotate(q, k, cos, sin, inverse, out)
        q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
        q_out, k_out = (torch.empty_like(q), torch.empty_like(k)) if out is None else out
        assert q_out.stride(-1) == k_out.stride(-1) == 1 and q_out.shape == q.shape and k_out.shape == k.shape
        (batch, num_q_heads, seq_len, head_size), num_k_heads = q.shape, k.shape[1]
        half = cos.shape[-1] // 2
        rest = head_size - 2 * half
        blocks = [triton.next_power_of_2(n) for n in (num_q_heads, num_k_heads, half)]
        if q.numel():
            with torch.cuda.device_of(q):
                _rotate_kernel[(batch * seq_len,)](
                    q, k, cos, sin, q_out, k_out,
                    *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
                    *_table_strides(cos), *_table_strides(sin), seq_len, num_q_heads, num_k_heads, half, head_size,
                    INVERSE=inverse, Q_HEADS=blocks[0], K_HEADS=blocks[1], HALF=blocks[2],
                    REST=triton.next_power_of_2(rest) if rest else 0,
                    num_warps=_num_warps(blocks[0] * blocks[2]),
                )  # fmt: skip
        return q_out, k_out


def _num_warps(elements: int) -> int:
    """Of a program that rotates so many pairs of the query."""
    return 4 if elements <= 2048 else 8


def _plain_rotate(q, k, cos, sin, inverse, out):
    if inverse:
        with torch.enable_grad():
            leaf_q, leaf_k = (torch.empty_like(t).requires_grad_() for t in (q, k))
            rotated = plain_rope(leaf_q, leaf_k, cos, sin)
        results = torch.autograd.grad(rotated, (leaf_q, leaf_k), (q, k))
    else:
        results = plain_rope(q, k, cos, sin)
    if out is None:
        return results
    return tuple(place.copy_(result) for place, result in zip(out, results, strict=True))


def _table_strides(table: Tensor) -> tuple[int, int]:
    """One table may serve all rows of the batch."""
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.dtype != k.dtype:
        raise ValueError(
            f"rope: q is {q.dtype} {list(q.shape)}, k is {k.dtype} {list(k.shape)}; they must be of one dtype and "
            "[rows, heads, positions, head size], alike but for the heads"
        )
    width = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[:-1] not in ((1, q.shape[2]), (q.shape[0], q.shape[2])):
        raise ValueError(
            f"rope: cos is {list(cos.shape)}, sin is {list(sin.shape)}; both must be "
            f"[{q.shape[0]} or 1, {q.shape[2]}, rotated elements] for q of {list(q.shape)}"
        )
    if width % 2 or not 0 < width <= q.shape[-1]:
        raise ValueError(
            f"rope: {width} elements are rotated; it must be even and at most the head size, {q.shape[-1]}"
        )


# ---------------------------------------------------------------------------------------------- operators with autograd


@torch.library.custom_op(
    "slideformer::rope",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)",
)
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return rotate(q, k, cos, sin, inverse=inverse)


@_rope.register_fake
def _(q, k, cos, sin, inverse):
    return torch.empty_like(q), torch.empty_like(k)


def _save_tables(ctx, inputs, output):
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_back(ctx, grad_q, grad_k):
    return *_rope(grad_q, grad_k, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope.register_autograd(_rotate_back, setup_context=_save_tables)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes as `rotate`. Differentiable in q and k; cos and sin are constants."""
    if not use_triton(q):
        return plain_rope(q, k, cos, sin)
    return _rope(q, k, cos, sin, False)


def install(module: nn.Module, rotary=rope) -> int:
    """Give the attention modules within this one instance a forward that rotates with `rotary`; returns how many.

    transformers calls its rotation as a function of the module's file, which no instance can replace. Only attention of
    Llama's and Qwen2's structure is known here: projections, rotation, attention, projection.
    """
    replaced = 0
    for child in module.modules():
        if type(child).__name__ in ("LlamaAttention", "Qwen2Attention"):
            child.rotary = rotary
            child.forward = types.MethodType(_attention_forward, child)
            replaced += 1
    return replaced


def _attention_forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert kwargs.get("cache") is None and kwargs.get("past_key_values") is None, "templates train; they keep no cache"
    leading = hidden_states.shape[:-1]
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (p(hidden_states).view(*leading, -1, self.head_dim).transpose(1, 2) for p in projections)
    q, k = self.rotary(q, k, *position_embeddings)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, weights = attend(
        self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", None), **kwargs,
    )  # fmt: skip
    return self.o_proj(out.reshape(*leading, -1)), weights
