"""kernels/swiglu.py against float64: the gated product and both gradients, for every activation."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import TOLERANCE, assert_close, random, relative_error, with_gradients
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from slideformer_ray.kernels import swiglu

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}
NAMES = ["y", "grad_gate", "grad_up"]


def inputs(shape, dtype, device):
    return random(*shape, dtype=dtype, device=device), random(*shape, dtype=dtype, device=device, seed=1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(4, 123), (2, 3, 2048), (1, 1)], ids=str)
def test_values_and_gradients(device, shape, activation, dtype, poisoned):
    """act(gate) * up, and the gradients of both."""
    gate, up = inputs(shape, dtype, device)
    found = with_gradients(lambda g, u: swiglu.gated(g, u, activation), (gate, up))
    truth = with_gradients(lambda g, u: ACTIVATIONS[activation](g) * u, (gate.double(), up.double()))
    assert all(f.dtype == dtype for f in found)
    assert_close(found, truth, NAMES)


def test_the_odd_shape(device, poisoned):
    """4 x 47 x 31 x 123 in bf16."""
    gate, up = inputs((4, 47, 31, 123), torch.bfloat16, device)
    found = with_gradients(swiglu.geglu, (gate, up))
    truth = with_gradients(lambda g, u: F.gelu(g, approximate="tanh") * u, (gate.double(), up.double()))
    assert_close(found, truth, NAMES)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; the sigmoid is 0 then
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_values_are_finite(device, activation):
    """Gates of +-100 and +-1e4 saturate: no NaN in the value or a gradient, and what float64 gives."""
    gate = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]], device=device)
    up = torch.ones_like(gate)
    found = with_gradients(lambda g, u: swiglu.gated(g, u, activation), (gate, up))
    truth = with_gradients(lambda g, u: ACTIVATIONS[activation](g) * u, (gate.double(), up.double()))
    for f, t in zip(found, truth, strict=True):
        torch.testing.assert_close(f.double(), t, rtol=1e-5, atol=1e-6)


def test_both_in_one_tensor(device, poisoned):
    """gate and up as the halves of one product give what they give apart."""
    gate, up = inputs((5, 123), torch.float32, device)
    packed = with_gradients(lambda gu: swiglu.gated_packed(gu, "silu"), (torch.cat((gate, up), dim=-1),))
    apart = with_gradients(swiglu.swiglu, (gate, up))
    torch.testing.assert_close(packed[0], apart[0])
    torch.testing.assert_close(packed[1], torch.cat(apart[1:], dim=-1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_may_take_the_place_of_inputs(device, activation):
    """Three results over the three inputs: both gradients, and the product that the down projection needs."""
    gate_up, grad = random(5, 2 * 123, device=device), random(5, 123, device=device, seed=2)
    gate, up = (half.clone() for half in gate_up.chunk(2, dim=1))
    product = swiglu.forward(gate, up, activation)
    expected = swiglu.backward(grad, gate, up, activation)
    halves = gate_up.chunk(2, dim=1)
    swiglu.backward(grad, *halves, activation, out=halves, inner=grad)
    torch.testing.assert_close(halves, expected)
    torch.testing.assert_close(grad, product)

    gate_up = torch.cat((gate, up), dim=1)
    halves = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(swiglu.forward(*halves, activation, out=halves[0]), product)
    assert torch.equal(halves[1], up)


def test_any_strides_are_honoured(triton_device):
    """Transposed rows and elements apart: the values are those of contiguous copies."""
    wide = random(4, 6, 300, device=triton_device)
    for gate, up in (
        (wide[..., :123].transpose(0, 1), wide[..., 123:246].transpose(0, 1)),
        wide.chunk(2, -1),
        (wide[..., ::2], wide[..., 1::2]),
    ):
        assert torch.equal(swiglu.forward(gate, up), swiglu.forward(gate.contiguous(), up.contiguous()))
        strided, dense = (
            swiglu.backward(up, gate, up),
            swiglu.backward(up.contiguous(), gate.contiguous(), up.contiguous()),
        )
        assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


def test_inputs_are_not_changed(triton_device):
    """Without `out` and `inner`, gate, up and the incoming gradient keep their bits."""
    gate, up, grad = *inputs((3, 123), torch.float32, triton_device), random(3, 123, device=triton_device, seed=2)
    before = [t.clone() for t in (gate, up, grad)]
    swiglu.forward(gate, up)
    swiglu.backward(grad, gate, up)
    assert all(torch.equal(a, b) for a, b in zip((gate, up, grad), before, strict=True))


def test_operators_are_what_the_compiler_needs(triton_device):
    """Shapes without data, schema and autograd agree with what the operators do (torch.library.opcheck)."""
    gate, up = (t.requires_grad_() for t in inputs((3, 10), torch.float32, triton_device))
    torch.library.opcheck(swiglu._gated, (gate, up, "silu"))
    torch.library.opcheck(swiglu._gated_packed, (gate, "silu"))


def test_what_does_not_fit_is_refused():
    """One line with what was found and what is needed."""
    with pytest.raises(
        ValueError, match=r"gate is torch.float32 \[3, 4\], up is torch.float32 \[3, 5\]; they must be alike"
    ):
        swiglu.forward(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="activation 'relu' is not known; known: silu, gelu_pytorch_tanh, gelu"):
        swiglu.gated_packed(torch.zeros(3, 4), "relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_install_changes_one_instance(use_path, activation):
    """This MLP is replaced, with transformers' bits; parameter names and every other instance stay as they were."""
    use_path("torch-cpu")
    config = LlamaConfig(hidden_size=64, intermediate_size=52, hidden_act=activation)
    parent, other = (torch.nn.ModuleDict({"mlp": LlamaMLP(config)}) for _ in range(2))
    names = [name for name, _ in parent.named_parameters()]
    x = random(2, 5, 64)
    before = parent["mlp"](x)
    assert swiglu.install(parent) == 1
    assert type(parent["mlp"]) is swiglu.GatedMLP and type(other["mlp"]) is LlamaMLP
    assert [name for name, _ in parent.named_parameters()] == names
    assert torch.equal(parent["mlp"](x), before)


def test_install_leaves_other_activations_alone():
    """An activation that has no kernel keeps transformers' module."""
    parent = torch.nn.ModuleDict({"mlp": LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=8, hidden_act="relu"))})
    assert swiglu.install(parent) == 0 and type(parent["mlp"]) is LlamaMLP


@pytest.mark.gpu
def test_more_than_2_31_elements(use_path):
    """Offsets are 64-bit: the last rows of a gate-and-up tensor of more than 2^31 elements are right."""
    device = use_path("triton-cuda")
    gate_up = torch.randn(2**31 // 22016 + 2, 22016, device=device, dtype=torch.bfloat16)
    gate, up = (t[-2:].clone() for t in gate_up.chunk(2, dim=1))
    found = swiglu.forward(*gate_up.chunk(2, dim=1))
    assert relative_error(found[-2:], F.silu(gate.double()) * up.double()) < TOLERANCE[torch.bfloat16]
    halves = gate_up.chunk(2, dim=1)
    grad = found[-2:].clone()
    swiglu.backward(found, *halves, out=halves)
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    truth = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, grad.double())
    for half, t in zip(halves, truth, strict=True):
        assert relative_error(half[-2:], t) < TOLERANCE[torch.bfloat16]
