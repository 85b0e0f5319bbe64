"""How a Hugging Face model falls into blocks, and the modules that run them on parameters that live in flat buffers.

transformers' own decoder layer, norm and rotary modules do the work; their parameters stay on the meta device and the
real ones are passed in at each call, so one template serves every layer and no weight is ever copied into a module.
Reads config.json, never the hub and never a weight. Tested by tests/model/test_layers.py.
"""

from __future__ import annotations

import copy
import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PretrainedConfig

from slideformer_ray.model.families import Family, family_named, family_of, written_out_obstacle
from slideformer_ray.model.spec import BlockSpec, ModelSpec, ParamSpec, align


def load_hf_config(path: Path | str) -> PretrainedConfig:
    """Read a model directory's config.json (or the file itself). Never asks the hub.

    Raises ValueError, one line, for a missing or malformed file and for a family that is not supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"model.path: {file}: cannot be read ({error.strerror}); give a directory that holds config.json. Nothing "
            "is downloaded: `hf download NAME --local-dir DIR` does that"
        ) from None
    except ValueError as error:
        raise ValueError(f"model.path: {file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"model.path: {file}: expected a JSON object, found {type(values).__name__}")
    family = family_named(values.get("model_type"), where=str(file))
    try:
        return family.config.from_dict(values)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{file}: refused by transformers: {' '.join(str(error).split())}") from None


def describe_model(
    hf_config: PretrainedConfig, frozen: Sequence[str] = (), checkpoint_dtype: str | None = None
) -> ModelSpec:
    """Lay out every parameter of the model in blocks. Builds modules on the meta device only.

    frozen: shell patterns of state-dict keys. checkpoint_dtype: default is config.json's dtype, or float32 where it has
    none. Raises ValueError for an unsupported configuration, a pattern that matches nothing, and a model with nothing
    left to train.
    """
    family = family_of(hf_config)
    tied = bool(hf_config.tie_word_embeddings)
    hidden, vocab = hf_config.hidden_size, hf_config.vocab_size

    # (kind, layer, template, [(state-dict key, shape)]) of each block.
    parts: list[tuple[str, int | None, str, list[tuple[str, tuple[int, ...]]]]] = []
    parts.append(("embed", None, "", [(family.embed_key, (vocab, hidden))]))
    shapes_of_kind: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for layer in range(hf_config.num_hidden_layers):
        kind = family.layer_kind(hf_config, layer)
        if kind not in shapes_of_kind:
            module = _meta_decoder_layer(family, hf_config, layer)
            shapes_of_kind[kind] = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
        parts.append(
            ("decoder", layer, kind, [(family.layer_key(layer, name), shape) for name, shape in shapes_of_kind[kind]])
        )
    head: list[tuple[str, tuple[int, ...]]] = [(family.norm_key, (hidden,))]
    if not tied:
        head.append((family.head_key, (vocab, hidden)))
    parts.append(("head", None, "", head))

    keys = [key for *_, params in parts for key, _ in params]
    frozen_keys = _match_frozen(frozen, keys, family, tied)
    if len(frozen_keys) == len(keys):
        raise ValueError(f"model.frozen: {', '.join(frozen)} match every parameter; nothing is left to train")
    blocks = tuple(
        _lay_out(index, kind, layer, template, params, frozen_keys)
        for index, (kind, layer, template, params) in enumerate(parts)
    )
    return ModelSpec(
        family=family.model_type,
        blocks=blocks,
        tied=tied,
        hidden_size=hidden,
        vocab_size=vocab,
        num_layers=hf_config.num_hidden_layers,
        written_out=not written_out_obstacle(family.decoder_layer.__name__, hf_config.hidden_act),
        checkpoint_dtype=checkpoint_dtype or str(hf_config.dtype or torch.float32).removeprefix("torch."),
    )


def _match_frozen(patterns: Sequence[str], keys: list[str], family: Family, tied: bool) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(keys, pattern)
        if not hits:
            hint = f"parameters are named like {keys[0]} and {keys[1]}"
            if tied and fnmatch.fnmatchcase(family.head_key, pattern):
                hint = f"{family.head_key} is tied to {family.embed_key}; freeze that one"
            raise ValueError(f"model.frozen: pattern {pattern!r} matches no parameter; {hint}")
        matched.update(hits)
    return matched


def _lay_out(
    index: int,
    kind: str,
    layer: int | None,
    template: str,
    params: list[tuple[str, tuple[int, ...]]],
    frozen_keys: set[str],
) -> BlockSpec:
    # Trainable with decay, trainable without, frozen: gradients and Adam states then cover one leading range, and decay
    # changes once within it. sorted() is stable, so the model's own order is kept within each group.
    ordered = sorted(params, key=lambda item: (item[0] in frozen_keys, not _decays(*item)))
    offset = trainable_numel = 0
    specs = []
    for name, shape in ordered:
        spec = ParamSpec(name, shape, offset, decay=_decays(name, shape), frozen=name in frozen_keys)
        specs.append(spec)
        offset = align(offset + spec.numel)
        if not spec.frozen:
            trainable_numel = offset
    return BlockSpec(index, kind, layer, template, tuple(specs), trainable_numel, numel=offset)


def _decays(name: str, shape: tuple[int, ...]) -> bool:
    """Weight decay is for matrices: never for norms' weights (1-D) and biases."""
    return len(shape) > 1 and not name.endswith(".bias")


def _meta_decoder_layer(family: Family, hf_config: PretrainedConfig, layer: int) -> nn.Module:
    with torch.device("meta"):
        return family.decoder_layer(hf_config, layer)


def flat_views(block: BlockSpec, flat: Tensor) -> dict[str, Tensor]:
    """Views of a block's parameters in a flat buffer, by state-dict key and in the block's order.

    flat: 1-D, of any dtype and device. One shorter than the block (a gradient buffer has `trainable_numel` elements)
    yields the parameters that lie within it; a longer one (a cache unit sized for the largest layer) is fine.
    """
    return {p.name: p.view(flat) for p in block.params if p.offset + p.numel <= flat.numel()}


def padding_row(hf_config: PretrainedConfig) -> int | None:
    """The embedding row whose look-ups give no gradient, because transformers builds the embedding with padding_idx.

    It is often the end-of-text token too. The head's gradient of the same row, where the two are tied, is not affected.
    """
    pad = hf_config.pad_token_id
    return None if pad is None else pad % hf_config.vocab_size


class LayerTemplate:
    """One kind of decoder layer as a function of its parameters.

    `torch.compile(template, fullgraph=True)` gives one graph for all layers of the kind: the parameters are graph
    inputs, so pointing them elsewhere recompiles nothing. dtype and device are those of the parameters that calls will
    bring.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str,
        attn_implementation: str = "sdpa",
    ):
        family = family_of(hf_config)
        config = copy.deepcopy(hf_config)
        config._attn_implementation = attn_implementation
        self.kind = family.layer_kind(config, layer)
        self.activation: str = config.hidden_act
        self.dtype = dtype
        self.device = torch.device(device)
        self.module = _meta_decoder_layer(family, config, layer).to(dtype)
        # A buffer would stay on the meta device and fail at the first call; none of the families has one in its layers.
        assert not list(self.module.buffers()), (
            f"{family.model_type}: decoder layers with buffers need a place for them"
        )
        self.param_names = tuple(name for name, _ in self.module.named_parameters())
        self._layer_key = family.layer_key

    def views(self, block: BlockSpec, flat: Tensor) -> tuple[Tensor | None, ...]:
        """Views of `block`'s parameters in `flat`, in `param_names` order; of a whole block, as a call takes them.

        None stands for a frozen parameter where `flat` is a gradient buffer of exactly `trainable_numel` elements.
        """
        assert block.layer is not None, f"{block.name} is no decoder block"
        found = flat_views(block, flat)
        return tuple(found.get(self._layer_key(block.layer, name)) for name in self.param_names)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """x: [rows, seq, hidden] -> the same; cos, sin: [rows or 1, seq, head_dim] of `RotaryTable`.

        Attention is causal over the whole row. Rows are padded on the right, so no supervised token sees padding and no
        mask is needed: without one, the fast attention kernels apply. params: `views` of a whole block.
        """
        return functional_call(
            self.module,
            dict(zip(self.param_names, params, strict=True)),
            (x,),
            {"attention_mask": None, "position_embeddings": (cos, sin)},
        )


class HeadTemplate:
    """The final norm as a function of its parameters, and the key of the weight that projects to the vocabulary."""

    def __init__(self, hf_config: PretrainedConfig):
        family = family_of(hf_config)
        with torch.device("meta"):
            self.module = family.norm(hf_config.hidden_size, eps=hf_config.rms_norm_eps)
        self.norm_keys = (family.norm_key,)
        self.projection_key = family.embed_key if hf_config.tie_word_embeddings else family.head_key

    def norm(self, x: Tensor, norm_params: tuple[Tensor, ...]) -> Tensor:
        """x: [..., hidden] -> the same. norm_params: the parameters named by `norm_keys`."""
        (weight,) = norm_params
        return functional_call(self.module, {"weight": weight}, (x,))


class RotaryTable:
    """cos and sin of the rotary embedding, from transformers' own module, so every rope type is transformers' own.

    The module is never cast: its frequencies stay fp32 whatever `dtype` is, else positions past some thousands drift.
    """

    def __init__(self, hf_config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype):
        self.module = family_of(hf_config).rotary(copy.deepcopy(hf_config)).to(device)
        # The module takes the result's dtype and device from its first argument and reads nothing else of it.
        self._like = torch.empty(0, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [rows, seq] int64 -> cos, sin: [rows, seq, head_dim]."""
        return self.module(self._like, positions)
