"""kernels/rms_norm.py against float64: values AND all gradients, for both formulas, with and without the residual."""

import pytest
import torch
from kernel_checks import TOLERANCE, assert_close, random, relative_error, with_gradients
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from slideformer_ray.kernels import rms_norm
from slideformer_ray.kernels.rms_norm import add_rms_norm

EPS = 1e-5
# Rows that fill no block, a row of one block, several rows a program, and a single element.
SHAPES = [(4, 7, 123), (3, 2048), (2, 5, 64), (1, 1)]
NAMES = ["sum", "y", "grad_x", "grad_residual", "grad_weight"]


def true_norm(x, weight, one_plus):
    unit = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return unit * (1 + weight if one_plus else weight)


def inputs(shape, dtype, device):
    x, residual = random(*shape, dtype=dtype, device=device), random(*shape, dtype=dtype, device=device, seed=1)
    return x, residual, random(shape[-1], dtype=dtype, device=device, seed=2)


@pytest.mark.parametrize("one_plus", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_all_gradients(device, shape, dtype, one_plus, poisoned):
    """The norm of a sum: both results, and the gradients of both terms and of the weight, are those of float64."""

    def truth(x, residual, weight):
        return x + residual, true_norm(x + residual, weight, one_plus)

    x, residual, weight = inputs(shape, dtype, device)
    residual = (x + residual) - x  # so that the sum is exact, or nearly, in every dtype
    found = with_gradients(lambda *a: add_rms_norm(*a, EPS, one_plus), (x, residual, weight))
    assert all(f.dtype == dtype for f in found)
    assert_close(found, with_gradients(truth, [t.double() for t in (x, residual, weight)]), NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_odd_shape_with_all_options(device, dtype, poisoned):
    """4 x 47 x 31 x 123, Gemma's formula and a residual."""

    def truth(x, residual, weight):
        return x + residual, true_norm(x + residual, weight, True)

    x, residual, weight = inputs((4, 47, 31, 123), dtype, device)
    residual = (x + residual) - x
    found = with_gradients(lambda *a: add_rms_norm(*a, EPS, True), (x, residual, weight))
    assert_close(found, with_gradients(truth, [t.double() for t in (x, residual, weight)]), NAMES)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_residual(device, dtype, poisoned):
    """The norm alone: its value and the gradients of x and the weight."""
    x, _, weight = inputs((4, 47, 123), dtype, device)
    found = with_gradients(lambda x, w: rms_norm.rms_norm(x, w, EPS), (x, weight))
    truth = with_gradients(lambda x, w: true_norm(x, w, False), (x.double(), weight.double()))
    assert_close(found, truth, ["y", "grad_x", "grad_weight"])


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_plain_path_has_the_bits_of_transformers(use_path, kind):
    """The order of the roundings is that of transformers' own module: not a bit differs in bf16."""
    use_path("torch-cpu")
    module = (LlamaRMSNorm if kind == "llama" else GemmaRMSNorm)(123, eps=EPS).bfloat16()
    with torch.no_grad():
        module.weight.copy_(random(123))
    x = random(7, 123, dtype=torch.bfloat16)
    assert torch.equal(rms_norm.rms_norm(x, module.weight, EPS, kind == "gemma"), module(x))


def test_same_input_same_bits(triton_device):
    """The weight's gradient is summed in a fixed order."""
    args = inputs((300, 123), torch.bfloat16, triton_device)
    first, second = (with_gradients(lambda *a: add_rms_norm(*a, EPS), args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_any_strides_are_honoured(triton_device):
    """Transposed rows, rows of a wider tensor, and elements apart: the values are those of a contiguous copy."""
    wide = random(6, 5, 400, device=triton_device)
    weight = random(123, device=triton_device)
    for x in (wide[..., 7:130].transpose(0, 1), wide[..., 7:130], wide[..., 1:247:2]):
        for strided, dense in zip(
            with_gradients(lambda x, w: rms_norm.rms_norm(x, w, EPS), (x, weight)),
            with_gradients(lambda x, w: rms_norm.rms_norm(x, w, EPS), (x.contiguous(), weight)),
            strict=True,
        ):
            assert torch.equal(strided, dense)
        # with_gradients clones its inputs; here they keep their strides.
        assert torch.equal(rms_norm.forward(x, weight, EPS)[1], rms_norm.forward(x.contiguous(), weight, EPS)[1])


def test_results_may_take_the_place_of_inputs(device):
    """forward may write the sum over x, backward the gradient over x: the values do not change."""
    x, residual, weight = inputs((9, 123), torch.float32, device)
    total, y = rms_norm.forward(x, weight, EPS, residual=residual)
    place = x.clone()
    in_place, y_again = rms_norm.forward(place, weight, EPS, residual=residual, sum_out=place)
    assert in_place.data_ptr() == place.data_ptr() and torch.equal(place, total) and torch.equal(y_again, y)

    grad_y, grad_sum = random(9, 123, device=device, seed=3), random(9, 123, device=device, seed=4)
    grad_x, grad_weight = rms_norm.backward(grad_y, total, weight, EPS, grad_sum=grad_sum)
    for name in ("total", "grad_y", "grad_sum"):
        args = {"total": total.clone(), "grad_y": grad_y.clone(), "grad_sum": grad_sum.clone()}
        out, weight_again = rms_norm.backward(
            args["grad_y"], args["total"], weight, EPS, grad_sum=args["grad_sum"], out=args[name]
        )
        assert out.data_ptr() == args[name].data_ptr()
        assert torch.equal(args[name], grad_x) and torch.equal(weight_again, grad_weight)


def test_a_frozen_weight_costs_nothing(device):
    """Where the weight's gradient is not wanted none is made, and that of x is the same."""
    x, _, weight = inputs((9, 123), torch.float32, device)
    grad_y = random(9, 123, device=device, seed=3)
    frozen, none = rms_norm.backward(grad_y, x, weight, EPS, need_grad_weight=False)
    assert none is None and torch.equal(frozen, rms_norm.backward(grad_y, x, weight, EPS)[0])


def test_no_rows(device):
    """A micro-batch without rows has an empty result and a gradient of zero."""
    x, weight = random(0, 123, device=device), random(123, device=device)
    y, grad_x, grad_weight = with_gradients(lambda x, w: rms_norm.rms_norm(x, w, EPS), (x, weight))
    assert y.shape == grad_x.shape == (0, 123) and not grad_weight.any()


def test_inputs_are_not_changed(triton_device):
    """Without `out`, every input keeps its bits."""
    args = inputs((9, 123), torch.float32, triton_device)
    before = [t.clone() for t in args]
    with_gradients(lambda *a: add_rms_norm(*a, EPS), args)
    rms_norm.forward(args[0], args[2], EPS, residual=args[1])
    rms_norm.backward(args[1], args[0], args[2], EPS, grad_sum=args[1])
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_operators_are_what_the_compiler_needs(triton_device):
    """Shapes without data, schema and autograd agree with what the operators do (torch.library.opcheck)."""
    x, residual, weight = (t.requires_grad_() for t in inputs((3, 123), torch.float32, triton_device))
    torch.library.opcheck(rms_norm._rms_norm, (x, weight, EPS, False))
    torch.library.opcheck(rms_norm._add_rms_norm, (x, residual, weight, EPS, True))


def test_stands_in_a_compiled_function_without_a_break(triton_device):
    """One graph, the kernel inside it, the same gradients."""
    args = inputs((3, 5, 123), torch.float32, triton_device)

    def function(x, residual, weight):
        total, y = add_rms_norm(torch.sin(x), residual, weight, EPS)
        return total * 2, torch.cos(y)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, args), with_gradients(function, args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, r, w: (x, r, w[1:]), r"weight is \[122\], x is \[9, 123\]; weight must be \[123\]"),
        (lambda x, r, w: (x, r[1:], w), r"residual is .* \[8, 123\]; it must be as x"),
        (lambda x, r, w: (x, r, w.double()), "weight is torch.float64, x is torch.float32"),
        (lambda x, r, w: (x.repeat(1, 500), None, w.repeat(500)), "rows of 61500; the most is 32768"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    """One line with what was found and what is needed."""
    x, residual, weight = change(*inputs((9, 123), torch.float32, "cpu"))
    with pytest.raises(ValueError, match=message):
        rms_norm.forward(x, weight, EPS, residual=residual)


def test_install_changes_one_instance(use_path):
    """The norms of this module are replaced; parameter names, results and every other instance stay as they were."""
    use_path("torch-cpu")
    config = LlamaConfig(hidden_size=48, intermediate_size=52, num_attention_heads=4, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    layer, other = LlamaDecoderLayer(config, 0), LlamaDecoderLayer(config, 0)
    names = [name for name, _ in layer.named_parameters()]
    x, position = random(2, 5, 48), (random(1, 5, 12), random(1, 5, 12))
    before = layer(x, position_embeddings=position)
    assert rms_norm.install(layer) == 2
    assert type(layer.input_layernorm) is rms_norm.RMSNorm and type(other.input_layernorm) is LlamaRMSNorm
    assert [name for name, _ in layer.named_parameters()] == names
    assert torch.equal(layer(x, position_embeddings=position), before)


def test_install_knows_gemmas_formula():
    """Gemma keeps its weight as the distance from 1."""
    parent = torch.nn.ModuleDict({"norm": GemmaRMSNorm(GemmaConfig().hidden_size, eps=1e-4)})
    assert rms_norm.install(parent) == 1
    assert parent["norm"].one_plus and parent["norm"].eps == 1e-4


@pytest.mark.gpu
def test_more_than_2_31_elements(use_path):
    """Offsets are 64-bit: the last rows of a tensor of 2^31 + 4096 elements are right, in both directions."""
    device = use_path("triton-cuda")
    x = torch.randn(2**31 // 2048 + 2, 2048, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2048, device=device, dtype=torch.bfloat16)
    y = rms_norm.forward(x, weight, EPS)[1][-3:]
    assert relative_error(y, true_norm(x[-3:].double(), weight.double(), False)) < TOLERANCE[torch.bfloat16]
    grad_x = rms_norm.backward(x, x, weight, EPS)[0][-3:]
    torch.cuda.empty_cache()
    last = x[-3:].double().requires_grad_()
    (truth,) = torch.autograd.grad(true_norm(last, weight.double(), False), last, x[-3:].double())
    assert relative_error(grad_x, truth) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 3584, 8192, 16384, 32768])
def test_widths_of_real_models(use_path, width, poisoned):
    """Wide rows, many warps: values and all gradients in bf16."""
    device = use_path("triton-cuda")
    x, residual, weight = inputs((1000, width), torch.bfloat16, device)
    residual = (x + residual) - x
    found = with_gradients(lambda *a: add_rms_norm(*a, EPS), (x, residual, weight))

    def truth(x, residual, weight):
        return x + residual, true_norm(x + residual, weight, False)

    assert_close(found, with_gradients(truth, [t.double() for t in (x, residual, weight)]), NAMES)
