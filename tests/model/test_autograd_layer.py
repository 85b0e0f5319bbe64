"""Which layer runs, and that autograd's keeps the interface of the one written out: destinations, sums, aliases."""

import pytest
import torch

from slideformer_ray.model.autograd_layer import AutogradLayer, make_layer
from slideformer_ray.model.layers import LayerTemplate, RotaryTable, describe_model
from slideformer_ray.model.recompute import RecomputedLayer


@pytest.fixture
def layer_inputs(hf_config):
    """(template, block, flat parameters, x, cos, sin, gradient of the output) of layer 0 in fp32."""
    generator = torch.Generator().manual_seed(0)
    spec = describe_model(hf_config)
    block = spec.decoder[0]
    flat = torch.randn(block.numel, generator=generator) * 0.1
    x, grad = (torch.randn(2, 9, hf_config.hidden_size, generator=generator) for _ in range(2))
    cos, sin = RotaryTable(hf_config, "cpu", torch.float32)(torch.arange(9)[None])
    return LayerTemplate(hf_config, 0, torch.float32, "cpu"), block, flat, x, cos, sin, grad


def test_both_layers_give_the_same_gradients_where_the_caller_wants_them(layer_inputs):
    """Into given places, added to what is there, and the input's gradient over the input: equal for both."""
    template, block, flat, x, cos, sin, grad = layer_inputs
    found = {}
    for layer in (AutogradLayer(template), RecomputedLayer(template, [block])):
        params, total = layer.views(block, flat), torch.zeros(block.trainable_numel)
        cell = x.clone()
        for accumulate in (False, True):
            cell.copy_(x)
            out, _ = layer.backward(
                cell, cos, sin, params, grad, grads=layer.views(block, total), accumulate=accumulate, out=cell
            )
            assert out.data_ptr() == cell.data_ptr()
        place = torch.empty_like(x)
        assert layer.forward(x, cos, sin, params, out=place).data_ptr() == place.data_ptr()
        found[type(layer)] = (total, cell, place)
    for ours, autograd in zip(found[RecomputedLayer], found[AutogradLayer], strict=True):
        torch.testing.assert_close(ours, autograd, rtol=1e-4, atol=1e-5)


def test_auto_takes_the_layer_written_out_and_says_so(layer_inputs):
    """Llama and Qwen2 are written out; what runs is told."""
    template, block, *_ = layer_inputs
    layer, what = make_layer(template, [block], "auto")
    assert isinstance(layer, RecomputedLayer) and what.startswith("written out")
    layer, what = make_layer(template, [block], "plain")
    assert isinstance(layer, AutogradLayer) and what == "plain transformers layer"


def test_a_structure_that_is_not_written_out_runs_by_autograd_and_says_why(layer_inputs, monkeypatch):
    """No silent fallback: the reason is in what the run logs; asked for by name it is an error."""
    template, block, *_ = layer_inputs
    monkeypatch.setattr("slideformer_ray.model.autograd_layer.obstacle", lambda template: "no such structure")
    layer, what = make_layer(template, [block], "auto")
    assert isinstance(layer, AutogradLayer) and what == "plain transformers layer (no such structure)"
    with pytest.raises(ValueError, match="placement.layers is recomputed, but no such structure; set it to auto"):
        make_layer(template, [block], "recomputed")
