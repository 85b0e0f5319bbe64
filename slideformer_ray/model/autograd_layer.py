"""A decoder layer run by autograd over transformers' own module, with the interface of `RecomputedLayer`; and the
choice between them.

For families that nobody has written out by hand, and to compare with. Tested by tests/model/test_autograd_layer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from slideformer_ray.kernels import switch
from slideformer_ray.model.layers import LayerTemplate
from slideformer_ray.model.recompute import RecomputedLayer, obstacle
from slideformer_ray.model.spec import BlockSpec

LayerChoice = Literal["auto", "recomputed", "compiled", "plain"]


class AutogradLayer:
    """`compiled`: through torch.compile, one graph for each micro-batch shape, whichever unit holds the parameters."""

    def __init__(self, template: LayerTemplate, *, compiled: bool = False):
        self.template = template
        self._run: Callable[..., Tensor] = template
        if compiled:
            # Past the limit, which is 8 by default, PyTorch would silently run uncompiled.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self._run = torch.compile(template.__call__, dynamic=False)

    def views(self, block: BlockSpec, flat: Tensor) -> tuple[Tensor | None, ...]:
        return self.template.views(block, flat)

    @torch.no_grad()
    def forward(
        self, x_BSH: Tensor, cos: Tensor, sin: Tensor, params: Sequence[Tensor], *, out: Tensor | None = None
    ) -> Tensor:
        y = self._run(x_BSH, cos, sin, tuple(params))
        return y if out is None else out.copy_(y)

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
    ) -> tuple[Tensor, list[Tensor | None]]:
        places = (
            list(grads) if grads is not None else [torch.empty_like(p) if p.requires_grad else None for p in params]
        )
        x = x_BSH.detach().requires_grad_()
        leaves = [p.detach().requires_grad_(place is not None) for p, place in zip(params, places, strict=True)]
        with torch.enable_grad():
            y = self._run(x, cos, sin, tuple(leaves))
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        grad_x, *found = torch.autograd.grad(y, [x, *trained], grad_out)
        into = [place for place in places if place is not None]
        if into:
            (torch._foreach_add_ if accumulate else torch._foreach_copy_)(into, found)
        return grad_x if out is None else out.copy_(grad_x), places


# Layers of one kind as functions of their parameters; neither holds tensors. `RecomputedLayer` says what may alias.
Layer = RecomputedLayer | AutogradLayer


def make_layer(template: LayerTemplate, blocks: Sequence[BlockSpec], choice: LayerChoice) -> tuple[Layer, str]:
    """The layer to run `blocks` with, and what it is, for the log.

    auto: written out by hand where the structure is known, else compiled on a GPU in 16 bits, else plain. Raises
    ValueError for `recomputed` where it cannot be.
    """
    reason = obstacle(template)
    if choice == "recomputed" or (choice == "auto" and not reason):
        if reason:
            raise ValueError(f"placement.layers is recomputed, but {reason}; set it to auto")
        return RecomputedLayer(template, blocks), f"written out, {switch.describe()}"
    compiled = choice == "compiled" or (
        choice == "auto" and template.device.type == "cuda" and template.dtype != torch.float32
    )
    note = f" ({reason})" if choice == "auto" else ""
    return AutogradLayer(template, compiled=compiled), (
        "compiled" if compiled else "plain"
    ) + f" transformers layer{note}"
