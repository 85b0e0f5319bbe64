"""A decoder layer run by hand: its forward, and its backward from nothing but the layer's input.

Activation checkpointing by autograd runs the whole forward again and then walks back. What the gradients need is less:
not the layer's output, so the recomputation stops before the down projection (29 % of a Qwen2.5-3B layer's products);
and the order is known, so gradients are written over the activations that they replace. `RecomputedLayer` writes that
order out for layers of Llama's structure (norm, attention, norm, gated MLP, each half added to its input), from the
kernels of `kernels/`, matrix products and `attend`. Nothing is compiled and no length is special, so nothing is ever
recompiled.

Projections of one input are one product where their weights lie next to each other in the layer's flat buffer, as
`describe_model` lays them out: query, key and value; gate and up. Gradients go where the caller wants them: into bf16,
or added to fp32 sums by the product itself.

Memory of a backward, besides the weights' gradients, with T tokens, H hidden, F inner width, Q and K the widths of
queries and keys, E bytes an element: at the MLP T x (3F + 3H + 2Q + 2K) x E. Worked, Qwen2.5-3B at 32 x 1024 in bf16:
32,768 x (33,024 + 6,144 + 4,096 + 512) x 2 = 2.7 GiB.

Where there is memory to spare, a forward leaves results behind (`Kept`) that its backward then does not compute again:
attention's, T x (H + 2Q + 2K) x E and a softmax statistic per head, 0.41 GiB in that example; gate and up, T x 2F x E,
1.34 GiB. The bits are the same. Attention's save the more time a byte: three products of the four that are repeated,
and everything between them.

Plain PyTorch where the kernels are (kernels/switch.py). Tested by tests/model/test_recompute.py against autograd
through transformers' layer: the output and ALL gradients. Speed: benchmarks/bench_layer.py.

Shape suffixes: B rows, S positions, T = B x S tokens, H hidden, O output features of a projection, I its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slideformer_ray.kernels import rms_norm, rope, swiglu
from slideformer_ray.model.attention import attend
from slideformer_ray.model.families import written_out_obstacle
from slideformer_ray.model.layers import LayerTemplate
from slideformer_ray.model.spec import BlockSpec, ParamSpec

# What is one product where it can be: projections that read the same input.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def obstacle(template: LayerTemplate) -> str:
    """Why `RecomputedLayer` cannot run layers of this kind; empty where it can."""
    module: Any = template.module
    return written_out_obstacle(type(module).__name__, template.activation)


@dataclass
class Kept:
    """What a forward leaves for the backward of the same layer and micro-batch.

    attention, gate_up: what is wanted. A forward fills the rest in, a backward takes it and leaves nothing.
    """

    attention: bool = False
    gate_up: bool = False
    attended: _Attended | None = None
    gate_up_TF: Tensor | None = None

    def take_attended(self) -> _Attended | None:
        taken, self.attended = self.attended, None
        return taken

    def take_gate_up(self) -> Tensor | None:
        taken, self.gate_up_TF = self.gate_up_TF, None
        return taken


@dataclass
class _Attended:
    """Attention with autograd's record of it, from queries, keys and values on, and its branch's output."""

    heads: list[Tensor]
    attended: Tensor
    branch_TH: Tensor


class RecomputedLayer:
    """Layers of one kind, as functions of their parameters. Holds no tensors.

    blocks: all blocks that will be run. Weights are joined where they are adjacent in every one of them, and are
    trained or frozen alike. join=False keeps every projection a product of its own. attention_path: see `attend`.
    Raises ValueError where `obstacle` is not empty.
    """

    def __init__(
        self,
        template: LayerTemplate,
        blocks: Sequence[BlockSpec],
        *,
        join: bool = True,
        attention_path: str | None = None,
    ):
        if reason := obstacle(template):
            raise ValueError(f"layer kind {template.kind}: {reason}")
        module: Any = template.module
        attention = module.self_attn
        self._key = template._layer_key
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self._blocks = blocks if join else ()
        # Names of the parameters behind each tensor of `views`, in order.
        self.pieces: list[tuple[str, ...]] = []
        self._norm1, self._norm2 = self._add("input_layernorm.weight"), self._add("post_attention_layernorm.weight")
        self._qkv, self._o = self._projection(*QKV), self._projection("self_attn.o_proj")
        self._gate_up, self._down = self._projection(*GATE_UP), self._projection("mlp.down_proj")
        self._eps = module.input_layernorm.variance_epsilon, module.post_attention_layernorm.variance_epsilon
        self._activation = module.mlp.config.hidden_act
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._window, self._path = getattr(attention, "sliding_window", None), attention_path
        self._widths = [self._shapes[f"{name}.weight"][0] for name in QKV]

    def _projection(self, *names: str) -> _Projection:
        features = [self._shapes[f"{name}.weight"][0] for name in names]
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self._shapes]
        assert len(biases) in (0, len(names))
        return _Projection(self._add_all([f"{name}.weight" for name in names]), self._add_all(biases), features)

    def _add(self, *names: str) -> int:
        self.pieces.append(names)
        return len(self.pieces) - 1

    def _add_all(self, names: list[str]) -> list[int]:
        if len(names) > 1 and self._blocks and all(self._adjacent(block, names) for block in self._blocks):
            return [self._add(*names)]
        return [self._add(name) for name in names]

    def _adjacent(self, block: BlockSpec, names: Sequence[str]) -> bool:
        members = self._members(block, names)
        ends = [p.offset + p.numel for p in members]
        return ends[:-1] == [p.offset for p in members[1:]] and len({p.frozen for p in members}) == 1

    def _members(self, block: BlockSpec, names: Sequence[str]) -> list[ParamSpec]:
        assert block.layer is not None, f"{block.name} is no decoder block"
        by_name = {p.name: p for p in block.params}
        return [by_name[self._key(block.layer, name)] for name in names]

    def views(self, block: BlockSpec, flat: Tensor) -> tuple[Tensor | None, ...]:
        """Views of `block`'s parameters in `flat`, as calls take them: one for each of `pieces`.

        None stands for frozen ones where `flat` is a gradient buffer of exactly `trainable_numel` elements.
        """
        views: list[Tensor | None] = []
        for names in self.pieces:
            members = self._members(block, names)
            start, stop = members[0].offset, members[-1].offset + members[-1].numel
            rows = sum(p.shape[0] for p in members)
            views.append(flat[start:stop].view(rows, *members[0].shape[1:]) if stop <= flat.numel() else None)
        return tuple(views)

    @torch.no_grad()
    def forward(
        self,
        x_BSH: Tensor,
        cos: Tensor,
        sin: Tensor,
        params: Sequence[Tensor],
        *,
        out: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        kept: Kept | None = None,
    ) -> Tensor:
        """[B, S, H] -> the same. cos, sin: [B or 1, S, head_dim]. Attention is causal; cu_seqlens as in `attend`.

        out: where the result goes, contiguous; it may be x. kept: filled with what it wants.
        """
        packing, kept = _Packing(cu_seqlens, max_seqlen), kept or Kept()
        x_TH = x_BSH.view(-1, x_BSH.shape[-1])
        _, normed_TH = rms_norm.forward(x_TH, params[self._norm1], self._eps[0])
        attention = self._attention(normed_TH, x_BSH.shape, cos, sin, params, packing, record=kept.attention)
        branch_TH = attention.branch_TH
        if kept.attention:
            kept.attended = attention
        del attention
        if out is not None:
            total_TH = out.view(x_TH.shape)
        else:
            total_TH = torch.empty_like(x_TH) if kept.attention else branch_TH
        middle_TH, normed_TH = rms_norm.forward(
            branch_TH, params[self._norm2], self._eps[1], residual=x_TH, sum_out=total_TH
        )
        gate_up_TF = self._gate_up(normed_TH, params)
        if kept.gate_up:
            kept.gate_up_TF = gate_up_TF
        gate, up = gate_up_TF.chunk(2, dim=1)
        inner_TF = swiglu.forward(gate, up, self._activation)
        return self._down.add_to(middle_TH, inner_TF, params).view(x_BSH.shape)

    @torch.no_grad()
    def backward(
        self,
        x_BSH: Tensor,
        cos: Tensor,
        sin: Tensor,
        params: Sequence[Tensor],
        grad_out: Tensor,
        *,
        grads: Sequence[Tensor | None] | None = None,
        accumulate: bool = False,
        out: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        kept: Kept | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """(gradient of x, gradients of the parameters in the order of `pieces`), from the input alone.

        grad_out: [B, S, H], of the layer's output; read only.
        grads: where the parameters' gradients go, in their dtype or in fp32, with None for those that are not wanted;
        by default new tensors like the parameters that require a gradient. accumulate: add to what is there.
        out: where the gradient of x goes, contiguous; it may be x or grad_out.
        kept: what the forward of the same x and params left; it is emptied.
        """
        if grads is None:
            assert not accumulate, "only gradients that the caller holds can be added to"
            grads = [torch.empty_like(p) if p.requires_grad else None for p in params]
        tape = _Tape(params, list(grads), accumulate)
        shape, packing = x_BSH.shape, _Packing(cu_seqlens, max_seqlen)
        x_TH, grad_out_TH = (t.view(-1, shape[-1]) for t in (x_BSH, grad_out))
        num_tokens = x_TH.shape[0]

        # The forward again, up to the product that nothing but the output needs.
        kept = kept or Kept()
        _, normed1_TH = rms_norm.forward(x_TH, params[self._norm1], self._eps[0])
        attention = kept.take_attended() or self._attention(normed1_TH, shape, cos, sin, params, packing, record=True)
        (q, k, v), attended, branch_TH = attention.heads, attention.attended, attention.branch_TH
        del attention
        attended_TQ = attended.detach().reshape(num_tokens, -1)
        middle_TH, normed2_TH = rms_norm.forward(
            branch_TH, params[self._norm2], self._eps[1], residual=x_TH, sum_out=branch_TH
        )
        gate_up = kept.take_gate_up()
        if gate_up is None:
            gate_up = self._gate_up(normed2_TH, params)

        # The MLP. Its three wide tensors are all there ever are: gradients take the places of what they belong to.
        inner_TF = self._down.grad_input(grad_out_TH, params)
        gate, up = gate_up.chunk(2, dim=1)
        swiglu.backward(inner_TF, gate, up, self._activation, out=(gate, up), inner=inner_TF)
        self._down.grad_params(grad_out_TH, inner_TF, tape)
        del inner_TF
        grad_TH = self._gate_up.grad_input(gate_up, params)
        self._gate_up.grad_params(gate_up, normed2_TH, tape)
        del gate_up, gate, up, normed2_TH
        grad_TH = self._norm_backward(self._norm2, grad_TH, middle_TH, self._eps[1], grad_out_TH, grad_TH, tape)
        del middle_TH, branch_TH

        # Attention.
        grad_attended = self._o.grad_input(grad_TH, params).view(attended.shape)
        self._o.grad_params(grad_TH, attended_TQ, tape)
        grad_q, grad_k, grad_v = torch.autograd.grad(attended, (q, k, v), grad_attended)
        del attended, attended_TQ, grad_attended, q, k, v
        grad_qkv = torch.empty(num_tokens, sum(self._widths), dtype=x_TH.dtype, device=x_TH.device)
        to_q, to_k, to_v = self._heads(grad_qkv, shape)
        rope.rotate(grad_q, grad_k, cos, sin, inverse=True, out=(to_q, to_k))
        to_v.copy_(grad_v)
        del grad_q, grad_k, grad_v
        grad_normed_TH = self._qkv.grad_input(grad_qkv, params)
        self._qkv.grad_params(grad_qkv, normed1_TH, tape)
        del grad_qkv, to_q, to_k, to_v
        place_TH = grad_normed_TH if out is None else out.view(x_TH.shape)
        grad_x = self._norm_backward(self._norm1, grad_normed_TH, x_TH, self._eps[0], grad_TH, place_TH, tape)
        return grad_x.view(shape), tape.grads

    def _attention(
        self,
        normed_TH: Tensor,
        shape: torch.Size,
        cos: Tensor,
        sin: Tensor,
        params: Sequence[Tensor],
        packing: _Packing,
        *,
        record: bool,
    ) -> _Attended:
        """From the normed input to the branch's output. record: attention itself is recorded for autograd."""
        q, k, v = self._heads(self._qkv(normed_TH, params), shape)
        rope.rotate(q, k, cos, sin, out=(q, k))
        with torch.set_grad_enabled(record):
            q, k, v = (t.detach().requires_grad_(record) for t in (q, k, v))
            attended = self._attend(q, k, v, packing)
        branch_TH = self._o(attended.detach().reshape(normed_TH.shape[0], -1), params)
        return _Attended([q, k, v], attended, branch_TH)

    def _heads(self, qkv_TO: Tensor, shape: torch.Size) -> list[Tensor]:
        """[B, heads, S, D] views of the queries, keys and values in their joint tensor."""
        parts = qkv_TO.split(self._widths, dim=1)
        return [p.unflatten(0, shape[:2]).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for p in parts]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packing: _Packing) -> Tensor:
        return attend(
            q, k, v, scale=self._scale, window=self._window, path=self._path,
            cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen,
        )  # fmt: skip

    def _norm_backward(
        self, norm: int, grad_TH: Tensor, x_TH: Tensor, eps: float, grad_residual_TH: Tensor, out: Tensor, tape: _Tape
    ) -> Tensor:
        grad_x, grad_weight = rms_norm.backward(
            grad_TH, x_TH, tape.params[norm], eps,
            grad_sum=grad_residual_TH, need_grad_weight=tape.grads[norm] is not None, out=out,
        )  # fmt: skip
        tape.put(norm, grad_weight)
        return grad_x


@dataclass(frozen=True)
class _Packing:
    cu_seqlens: Tensor | None
    max_seqlen: int | None


@dataclass(frozen=True)
class _Tape:
    """Where the gradients of one backward go."""

    params: Sequence[Tensor]
    grads: list[Tensor | None]
    accumulate: bool

    def put(self, index: int, value: Tensor | None) -> None:
        """A vector's gradient, computed in fp32."""
        place = self.grads[index]
        if place is None:
            return
        assert value is not None
        if self.accumulate:
            place.add_(value)
        else:
            place.copy_(value)

    def put_product(self, index: int, a_TM: Tensor, b_TN: Tensor) -> None:
        """a^T b, a matrix's gradient."""
        place = self.grads[index]
        if place is None:
            return
        a_MT = a_TM.T
        if place.dtype == a_TM.dtype:
            if self.accumulate:
                place.addmm_(a_MT, b_TN)
            else:
                torch.mm(a_MT, b_TN, out=place)
        elif a_TM.is_cuda and torch.version.hip is None:
            # The product leaves its fp32 accumulators as they are: no rounding to bf16, and no pass for the addition.
            assert place.dtype == torch.float32
            if self.accumulate:
                torch.addmm(place, a_MT, b_TN, out_dtype=torch.float32, out=place)
            else:
                torch.mm(a_MT, b_TN, out_dtype=torch.float32, out=place)
        elif a_TM.is_cuda:
            # ROCm has no product of 16-bit operands with an fp32 result, and its fp32 one is several times slower: each
            # micro-batch's gradient is rounded once.
            self.put(index, torch.mm(a_MT, b_TN))
        else:
            self.put(index, torch.mm(a_MT.float(), b_TN.float()))


class _Projection:
    """y = x W^T + b, where W may be the weights of several projections, one under the other.

    weights, biases: positions among the parameters: one for all, or one for each of `features`.
    """

    def __init__(self, weights: list[int], biases: list[int], features: list[int]):
        self.weights, self.biases, self.features = weights, biases, features

    def __call__(self, x_TI: Tensor, params: Sequence[Tensor]) -> Tensor:
        bias = self._bias(params)
        if len(self.weights) == 1:
            return F.linear(x_TI, params[self.weights[0]], bias)
        y_TO = torch.empty(x_TI.shape[0], sum(self.features), dtype=x_TI.dtype, device=x_TI.device)
        biases = [None] * len(self.features) if bias is None else bias.split(self.features)
        for index, place, part in zip(self.weights, self._split(y_TO), biases, strict=True):
            if part is None:
                torch.mm(x_TI, params[index].T, out=place)
            else:
                torch.addmm(part, x_TI, params[index].T, out=place)
        return y_TO

    def add_to(self, total_TO: Tensor, x_TI: Tensor, params: Sequence[Tensor]) -> Tensor:
        """total += x W^T + b, the addition within the product."""
        (weight,) = self.weights
        total_TO.addmm_(x_TI, params[weight].T)
        bias = self._bias(params)
        return total_TO if bias is None else total_TO.add_(bias)

    def grad_input(self, grad_TO: Tensor, params: Sequence[Tensor]) -> Tensor:
        first, *others = zip(self.weights, self._split(grad_TO), strict=True)
        grad_TI = torch.mm(first[1], params[first[0]])
        for index, part in others:
            grad_TI.addmm_(part, params[index])
        return grad_TI

    def grad_params(self, grad_TO: Tensor, x_TI: Tensor, tape: _Tape) -> None:
        for index, part in zip(self.weights, self._split(grad_TO), strict=True):
            tape.put_product(index, part, x_TI)
        if any(tape.grads[index] is not None for index in self.biases):
            total_O = grad_TO.sum(0, dtype=torch.float32)
            parts = [total_O] if len(self.biases) == 1 else total_O.split(self.features)
            for index, part in zip(self.biases, parts, strict=True):
                tape.put(index, part)

    def _bias(self, params: Sequence[Tensor]) -> Tensor | None:
        if not self.biases:
            return None
        parts = [params[index] for index in self.biases]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _split(self, y_TO: Tensor) -> Sequence[Tensor]:
        return (y_TO,) if len(self.weights) == 1 else y_TO.split(self.features, dim=1)
