"""kernels/rope.py against float64: rotated queries and keys and their gradients, in transformers' layout."""

import pytest
import torch
from kernel_checks import TOLERANCE, assert_close, random, relative_error, with_gradients
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from slideformer_ray.kernels import rope

NAMES = ["q", "k", "grad_q", "grad_k"]


def tables(rows, seq, width, dtype, device):
    """cos and sin of random angles, both halves alike as transformers makes them."""
    angle = random(rows, seq, width // 2, seed=5).repeat(1, 1, 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def heads(rows, num_heads, seq, size, dtype, device, seed=0):
    """[rows, heads, seq, size] as a projection leaves it: heads lie beside each other, positions above."""
    return random(rows, seq, num_heads, size, dtype=dtype, device=device, seed=seed).transpose(1, 2)


def true_rope(q, k, cos, sin):
    def rotated(x):
        width = cos.shape[-1]
        x1, x2 = x[..., : width // 2], x[..., width // 2 : width]
        c1, c2 = cos[:, None, :, : width // 2].double(), cos[:, None, :, width // 2 :].double()
        s1, s2 = sin[:, None, :, : width // 2].double(), sin[:, None, :, width // 2 :].double()
        return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, x[..., width:]), dim=-1)

    return rotated(q), rotated(k)


@pytest.mark.parametrize("table_dtype", [None, torch.float32], ids=["tables-as-q", "tables-fp32"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 7, 2, 16, 16), (3, 4, 5, 4, 24, 8), (1, 1, 1, 1, 2, 2)], ids=str)
def test_values_and_gradients(device, shape, dtype, table_dtype, poisoned):
    """Grouped heads, whole and partial rotation, tables in fp32 and in the dtype of q."""
    rows, num_q, seq, num_k, size, width = shape
    cos, sin = tables(1, seq, width, table_dtype or dtype, device)
    q, k = heads(rows, num_q, seq, size, dtype, device), heads(rows, num_k, seq, size, dtype, device, 1)
    found = with_gradients(lambda q, k: rope.rope(q, k, cos, sin), (q, k))
    truth = with_gradients(lambda q, k: true_rope(q, k, cos, sin), (q.double(), k.double()))
    assert all(f.dtype == dtype for f in found)
    limits = dict(TOLERANCE)
    if device == "cpu":  # the plain path rounds each product, as transformers does
        limits = {d: 2 * limit for d, limit in limits.items()}
    for name, f, t in zip(NAMES, found, truth, strict=True):
        assert relative_error(f, t) < limits[dtype], name


def test_the_odd_shape_with_all_options(device, poisoned):
    """4 x 47 x 31 x 123, partial rotation, a table for each row of the batch."""
    cos, sin = tables(4, 31, 62, torch.float32, device)
    q, k = heads(4, 47, 31, 123, torch.float32, device), heads(4, 47, 31, 123, torch.float32, device, 1)
    found = with_gradients(lambda q, k: rope.rope(q, k, cos, sin), (q, k))
    assert_close(found, with_gradients(lambda q, k: true_rope(q, k, cos, sin), (q.double(), k.double())), NAMES)


def test_plain_path_has_the_bits_of_transformers(use_path):
    """The order of the roundings is that of transformers' own function: not a bit differs in bf16."""
    use_path("torch-cpu")
    cos, sin = tables(2, 7, 16, torch.bfloat16, "cpu")
    q, k = heads(2, 4, 7, 16, torch.bfloat16, "cpu"), heads(2, 2, 7, 16, torch.bfloat16, "cpu", 1)
    for ours, theirs in zip(rope.rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)


def test_the_inverse_undoes_it(device):
    """Rotating by theta and then by -theta gives q and k back: the backward is the inverse rotation."""
    cos, sin = tables(1, 7, 16, torch.float32, device)
    q, k = heads(2, 4, 7, 16, torch.float32, device), heads(2, 2, 7, 16, torch.float32, device, 1)
    for back, there in zip(rope.rotate(*rope.rotate(q, k, cos, sin), cos, sin, inverse=True), (q, k), strict=True):
        torch.testing.assert_close(back, there)


def test_results_may_take_the_place_of_inputs(device):
    """In place in a tensor that holds q, k and v of a token side by side; v is not touched."""
    joint = random(2, 7, (4 + 2 + 2) * 16, device=device)
    cos, sin = tables(1, 7, 16, torch.float32, device)

    def split(tensor):
        return [t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in tensor.split([64, 32, 32], dim=-1)]

    q, k, v = (t.clone() for t in split(joint))
    expected = rope.rotate(q, k, cos, sin)
    places = split(joint)
    rope.rotate(places[0], places[1], cos, sin, out=(places[0], places[1]))
    for place, wanted in zip(places, (*expected, v), strict=True):
        assert torch.equal(place, wanted)


def test_any_strides_are_honoured(triton_device):
    """Contiguous heads, heads of a wider tensor, and elements apart: values are those of a contiguous copy."""
    cos, sin = tables(1, 7, 16, torch.float32, triton_device)
    wide = random(2, 4, 7, 40, device=triton_device)
    for q in (wide[..., 3:19], wide[..., :32:2], heads(2, 4, 7, 16, torch.float32, triton_device)):
        dense = rope.rotate(q.contiguous(), q.contiguous(), cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(rope.rotate(q, q, cos, sin), dense, strict=True))


def test_inputs_are_not_changed(triton_device):
    """Without `out`, q, k, cos and sin keep their bits."""
    args = (
        *(heads(1, 2, 3, 8, torch.float32, triton_device, s) for s in (0, 1)),
        *tables(1, 3, 8, torch.float32, triton_device),
    )
    before = [t.clone() for t in args]
    with_gradients(lambda q, k: rope.rope(q, k, *args[2:]), args[:2])
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_operator_is_what_the_compiler_needs(triton_device):
    """Shapes without data, schema and autograd agree with what the operator does (torch.library.opcheck)."""
    q, k = (heads(2, n, 3, 8, torch.float32, triton_device).requires_grad_() for n in (4, 2))
    torch.library.opcheck(rope._rope, (q, k, *tables(1, 3, 8, torch.float32, triton_device), False))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 7, 16), (2, 2, 8, 16), (1, 7, 16)), r"q is .* \[2, 4, 7, 16\], k is .* \[2, 2, 8, 16\]"),
        (((2, 4, 7, 16), (2, 2, 7, 16), (3, 7, 16)), r"cos is \[3, 7, 16\].*must be \[2 or 1, 7, rotated elements\]"),
        (((2, 4, 7, 16), (2, 2, 7, 16), (1, 7, 18)), "18 elements are rotated; .* at most the head size, 16"),
        (((2, 4, 7, 16), (2, 2, 7, 16), (1, 7, 7)), "7 elements are rotated; it must be even"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, message):
    """One line with what was found and what is needed."""
    q, k, table = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        rope.rotate(q, k, table, table)


@pytest.mark.parametrize(
    ("config_class", "layer_class"), [(LlamaConfig, LlamaDecoderLayer), (Qwen2Config, Qwen2DecoderLayer)]
)
def test_install_changes_one_instance(use_path, config_class, layer_class):
    """The rotation of this layer is replaced; results, parameter names and every other instance stay as they were."""
    use_path("torch-cpu")
    config = config_class(
        hidden_size=48, intermediate_size=52, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
    )
    config._attn_implementation = "sdpa"
    layer, other = layer_class(config, 0), layer_class(config, 0)
    x, position = random(2, 5, 48), tables(1, 5, 12, torch.float32, "cpu")
    names = [name for name, _ in layer.named_parameters()]
    before = layer(x, position_embeddings=position)
    calls = []
    assert rope.install(layer, lambda *args: calls.append(args) or rope.rope(*args)) == 1
    assert torch.equal(layer(x, position_embeddings=position), before) and len(calls) == 1
    other(x, position_embeddings=position)
    assert len(calls) == 1
    assert [name for name, _ in layer.named_parameters()] == names


@pytest.mark.gpu
def test_more_than_2_31_elements(use_path):
    """Offsets are 64-bit: the last rows of a tensor of more than 2^31 elements are right."""
    device = use_path("triton-cuda")
    rows, seq = 2**31 // (1024 * 2048) + 1, 1024
    q = torch.randn(rows, seq, 16, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn(rows, seq, 2, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = tables(1, seq, 128, torch.float32, device)
    found = rope.rotate(q, k, cos, sin)
    truth = true_rope(q[-1:].double(), k[-1:].double(), cos, sin)
    assert all(relative_error(f[-1:], t) < TOLERANCE[torch.bfloat16] for f, t in zip(found, truth, strict=True))
