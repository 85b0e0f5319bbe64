"""Field case 85 (unsloth PR #8253, transformers PR #32522, LlamaFactory #7063): sequences longer than the window.

In: a layer with a sliding window, rows longer than it, no mask: as the GPU actor calls layers.
Bad: SDPA attends to the whole row, silently; or the window is off by one.
Good: the output equals transformers' eager model on window + 1 and 2 x window tokens; a window of zero means none.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRotaryEmbedding

from slideformer_ray.model.attention import register

WINDOW = 8


def config_of(window):
    return MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=window,
    )  # fmt: skip


def layer_without_mask(model, implementation, x):
    """The model's only layer, called as the GPU actor calls layers: no mask, whatever the length."""
    model.config._attn_implementation = implementation
    layer: MistralDecoderLayer = model.model.layers[0]
    position = MistralRotaryEmbedding(model.config)(x, torch.arange(x.shape[1])[None])
    return layer(x, attention_mask=None, position_embeddings=position)


@pytest.mark.parametrize("seq", [WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("window", [WINDOW, None])
def test_equals_eager_past_the_window(seq, window):
    """Without a mask, our attention gives what transformers' eager model gives with its mask."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(window), attn_implementation="eager").eval()
    ids = torch.randint(0, 97, (2, seq))
    captured = {}
    model.model.layers[0].register_forward_hook(lambda module, args, out: captured.update(x=args[0], out=out))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        eager_out = captured["out"]
        ours = layer_without_mask(model, register(), captured["x"])
        torch.testing.assert_close(ours, eager_out, rtol=1e-5, atol=1e-5)
        if window:  # what "sdpa" does without a mask is the fault of this case
            assert not torch.allclose(layer_without_mask(model, "sdpa", captured["x"]), eager_out, atol=1e-4)


def test_a_window_of_zero_means_none():
    """Zero hides nothing: the layer equals one without a window."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(None), attn_implementation="eager").eval()
    x = torch.randn(1, 2 * WINDOW, 32)
    with torch.no_grad():
        without = layer_without_mask(model, register(), x)
        model.model.layers[0].self_attn.sliding_window = 0
        model.config.sliding_window = 0
        assert torch.equal(layer_without_mask(model, register(), x), without)
