"""How a model falls into blocks: pure data that every actor shares. Built by `layers.describe_model`.

Block 0 is the embedding, blocks 1..L the decoder layers, block L+1 the head (final norm, and lm_head unless it is tied
to the embedding). Each block is ONE flat buffer; its parameters lie one after the other, trainable ones first, each
aligned to `ALIGN_ELEMENTS`. Imports neither torch nor ray. Tested by tests/model/test_spec.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# 128 elements are 256 bytes of bf16: a parameter's view is then aligned for every vector width and for the GPU's copy
# engines, and so is every optimizer actor's slice.
ALIGN_ELEMENTS = 128


def align(count: int, to: int = ALIGN_ELEMENTS) -> int:
    return -(-count // to) * to


@dataclass(frozen=True)
class ParamSpec:
    """One parameter inside its block's flat buffer."""

    name: str  # the key of the Hugging Face state dict
    shape: tuple[int, ...]
    offset: int  # elements from the block's start
    decay: bool
    frozen: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Any) -> Any:
        """The parameter, in its shape, inside a 1-D tensor that begins where its block does."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class BlockSpec:
    index: int
    kind: str  # "embed", "decoder" or "head"
    layer: int | None  # decoder layer number, None for embed and head
    template: str  # which template module runs it ("" for embed and head)
    params: tuple[ParamSpec, ...]
    trainable_numel: int  # elements [0, trainable_numel) have gradients and Adam states, padding included
    numel: int  # whole buffer, padding included

    @property
    def name(self) -> str:
        return f"layer.{self.layer}" if self.kind == "decoder" else self.kind

    def decay_runs(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """Cut the trainable elements [start, stop) into maximal runs (start, stop, decay).

        Padding joins the run before it.
        """
        trainable = [p for p in self.params if not p.frozen]
        runs: list[tuple[int, int, bool]] = []
        for i, p in enumerate(trainable):
            end = trainable[i + 1].offset if i + 1 < len(trainable) else self.trainable_numel
            a, b = max(p.offset, start), min(end, stop)
            if a >= b:
                continue
            if runs and runs[-1][1] == a and runs[-1][2] == p.decay:
                runs[-1] = (runs[-1][0], b, p.decay)
            else:
                runs.append((a, b, p.decay))
        return runs


@dataclass(frozen=True)
class ModelSpec:
    family: str  # transformers' model_type
    blocks: tuple[BlockSpec, ...]
    tied: bool  # lm_head's weight is the embedding's: one tensor, one gradient, one state
    hidden_size: int
    vocab_size: int
    num_layers: int
    checkpoint_dtype: str  # dtype of the stored weights, such as "bfloat16"
    written_out: bool  # whether model/recompute.py runs the layers

    @property
    def embed(self) -> BlockSpec:
        return self.blocks[0]

    @property
    def head(self) -> BlockSpec:
        return self.blocks[-1]

    @property
    def decoder(self) -> tuple[BlockSpec, ...]:
        return self.blocks[1:-1]

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for b in self.blocks for p in b.params)

    @property
    def largest_decoder_numel(self) -> int:
        return max(b.numel for b in self.decoder)

    def width(self, projection: str) -> int:
        """Output features of a projection of the decoder layers, such as "q_proj"."""
        return next(p.shape[0] for p in self.decoder[0].params if p.name.endswith(f".{projection}.weight"))


def slice_of(numel: int, actor: int, num_actors: int) -> tuple[int, int]:
    """Elements [start, stop) of a buffer of `numel` that optimizer actor `actor` of `num_actors` owns, aligned."""
    cut = lambda k: min(numel, align(numel * k // num_actors)) if k < num_actors else numel  # noqa: E731
    return cut(actor), cut(actor + 1)
