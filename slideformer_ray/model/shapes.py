"""Well-known model shapes by name, for planning and benchmarks. Only the numbers: nothing is downloaded.

Tested by tests/model/test_shapes.py: each has the parameter count that its name claims.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

_QWEN: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
_LLAMA: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
}


def shape(name: str) -> PretrainedConfig:
    """Raises KeyError for an unknown name; the names are those of `SHAPES`."""
    return SHAPES[name]()


def write_shape(name: str, directory: Path) -> Path:
    """A model directory with config.json alone, for `model.random_init`."""
    config = shape(name)
    config.architectures = ["Qwen2ForCausalLM" if isinstance(config, Qwen2Config) else "LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    return directory


def _qwen(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool, vocab: int = 151936
) -> Callable[[], PretrainedConfig]:
    return lambda: Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, use_cache=False, **_QWEN,
    )  # fmt: skip


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> Callable[[], PretrainedConfig]:
    return lambda: LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, use_cache=False, **_LLAMA,
    )  # fmt: skip


SHAPES = {
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, True),
    "qwen2.5-3b": _qwen(2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, False, 152064),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, False, 152064),
    "qwen2.5-32b": _qwen(5120, 27648, 64, 40, 8, False, 152064),
    "llama3.2-1b": _llama(2048, 8192, 16, 32, 8, True),
    "llama3.2-3b": _llama(3072, 8192, 28, 24, 8, True),
    "llama3.1-8b": _llama(4096, 14336, 32, 32, 8, False),
}
