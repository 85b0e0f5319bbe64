"""The model families that can be trained: where transformers keeps their parts, and what of them is not run.

A family is added here and nowhere else (see CONTRIBUTING). Nothing is loaded or allocated; `family_of` is called before
any weight is touched, so that what cannot be trained exactly is refused by name. Tested by
tests/model/test_families.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from slideformer_ray.kernels import swiglu

# Decoder layers of Llama's structure, which model/recompute.py writes out.
WRITTEN_OUT = ("LlamaDecoderLayer", "Qwen2DecoderLayer")


@dataclass(frozen=True)
class Family:
    """Where transformers keeps one model_type's parts. Keys are those of the causal language model's state dict."""

    model_type: str
    config: type[PretrainedConfig]
    causal_lm: type[nn.Module]
    decoder_layer: type[nn.Module]  # built as decoder_layer(config, layer)
    rotary: type[nn.Module]  # built as rotary(config); called with (x, position_ids) -> (cos, sin)
    norm: type[nn.Module]  # built as norm(hidden_size, eps=rms_norm_eps)
    embed_key: str = "model.embed_tokens.weight"
    norm_key: str = "model.norm.weight"
    head_key: str = "lm_head.weight"
    # Buffers that old releases of transformers saved beside the parameters and that are computed from the config today.
    ignored_keys: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def layer_key(self, layer: int, name: str) -> str:
        """State-dict key of parameter `name` of decoder layer `layer`."""
        return f"model.layers.{layer}.{name}"

    def layer_kind(self, config: PretrainedConfig, layer: int) -> str:
        """Layers of one kind run the same code on parameters of the same shapes, and so share a template."""
        layer_types = getattr(config, "layer_types", None)
        return layer_types[layer] if layer_types else "full_attention"


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", LlamaConfig, LlamaForCausalLM, LlamaDecoderLayer, LlamaRotaryEmbedding, LlamaRMSNorm),
        Family("qwen2", Qwen2Config, Qwen2ForCausalLM, Qwen2DecoderLayer, Qwen2RotaryEmbedding, Qwen2RMSNorm),
    )
}


def family_named(model_type: str | None, where: str = "config.json") -> Family:
    """Raises ValueError, naming the family found and those supported."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def written_out_obstacle(layer_class: str, activation: str) -> str:
    """Why model/recompute.py cannot run layers of this class with this hidden_act; empty where it can."""
    if layer_class not in WRITTEN_OUT:
        return f"{layer_class} is not written out by hand; those that are: {', '.join(WRITTEN_OUT)}"
    if activation not in swiglu.ACTIVATIONS:
        return f"hidden_act {activation!r} has no kernel; those that have: {', '.join(swiglu.ACTIVATIONS)}"
    return ""


def family_of(hf_config: PretrainedConfig) -> Family:
    """The family of a configuration that can be trained exactly.

    Raises ValueError with one line for each feature that cannot, so that a user sees all of them at once.
    """
    family = family_named(hf_config.model_type)
    if refused := _unsupported_features(hf_config):
        raise ValueError("\n".join(f"config.json: {line}" for line in refused))
    return family


def _unsupported_features(config: PretrainedConfig) -> list[str]:
    refused = []
    architectures = config.architectures or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        refused.append(f"architectures is {architectures}; only causal language models (...ForCausalLM) are trained")
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        refused.append(
            "auto_map names modelling code of the checkpoint's own, which is not run; "
            f"remove the entry if the model is a plain {config.model_type}"
        )
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        refused.append(f"the checkpoint is quantized (quant_method {method!r}); give its bf16, fp16 or fp32 original")
    if config.attention_dropout:
        # A recomputed layer would draw another mask than its forward did.
        refused.append(
            f"attention_dropout is {config.attention_dropout}; only 0 is supported, set it so in config.json"
        )
    if not getattr(config, "is_causal", True):
        refused.append("is_causal is false; only causal attention is supported")
    if sliding := [i for i, kind in enumerate(getattr(config, "layer_types", None) or []) if kind != "full_attention"]:
        found = config.layer_types[sliding[0]]
        refused.append(
            f"{len(sliding)} of {config.num_hidden_layers} layers use {found} (the first is layer {sliding[0]}); "
            "only full attention is supported (use_sliding_window: false, where the rows fit the window)"
        )
    pad = config.pad_token_id
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        refused.append(
            f"pad_token_id is {pad}, outside the vocabulary of {config.vocab_size}; set it to null or a token of it"
        )
    return refused
