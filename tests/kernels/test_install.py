"""The kernels within a template layer, plain and compiled: what `install` of each kernel file is for."""

import pytest
import torch
from kernel_checks import random
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, Qwen2Config

from slideformer_ray.kernels import rms_norm, rope, swiglu
from slideformer_ray.model.attention import register
from slideformer_ray.model.layers import LayerTemplate, RotaryTable, describe_model

SIZES = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
KERNELS = {
    "none": (),
    "rms_norm": (rms_norm,),
    "rope": (rope,),
    "swiglu": (swiglu,),
    "all": (rms_norm, rope, swiglu),
}


def results(run, template, block, config, device, units=(0,)):
    """Output and gradients, at the parameters of each unit of an arena."""
    arena = random(2, block.numel, device=device) * 0.1
    tables = RotaryTable(config, device, torch.float32)(torch.arange(6, device=device)[None])
    found = []
    for unit in units:
        x = random(2, 6, config.hidden_size, device=device, seed=unit).requires_grad_()
        params = tuple(v.detach().requires_grad_() for v in template.views(block, arena[unit % 2]))
        out = run(x, *tables, params)
        found += [out, *torch.autograd.grad(out, [x, *params], random(*x.shape, device=device, seed=7))]
    return found


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_layer_with_kernels_equals_a_plain_one(triton_device, config_class, kernels):
    """Each kernel alone and all together: the output and all gradients of transformers' layer."""
    config = config_class(**SIZES)
    block = describe_model(config).decoder[0]
    plain, ours = (LayerTemplate(config, 0, torch.float32, triton_device, name) for name in ("sdpa", register()))
    for kernel in KERNELS[kernels]:
        assert kernel.install(ours.module) > 0
    assert ours.param_names == tuple(name for name, _ in ours.module.named_parameters())
    found, expected = (results(t, t, block, config, triton_device) for t in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_layer_holds_all_kernels_in_one_graph(triton_device):
    """No graph break, and pointing the layer at other weights compiles nothing anew."""
    config = Qwen2Config(**SIZES)
    block = describe_model(config).decoder[0]
    plain, ours = (LayerTemplate(config, 0, torch.float32, triton_device, name) for name in ("sdpa", register()))
    for kernel in KERNELS["all"]:
        kernel.install(ours.module)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if triton_device == "cuda" else "aot_eager")
    compiled = torch.compile(ours.__call__, fullgraph=True, dynamic=False, backend=counter)
    found = results(compiled, ours, block, config, triton_device, units=range(4))
    expected = results(plain, plain, block, config, triton_device, units=range(4))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
