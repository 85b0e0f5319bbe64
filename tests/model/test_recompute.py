"""model/recompute.py against autograd through transformers' own layer: the output and ALL gradients."""

import math

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from slideformer_ray.kernels import switch
from slideformer_ray.model.layers import LayerTemplate, RotaryTable, describe_model, flat_views
from slideformer_ray.model.recompute import GATE_UP, QKV, Kept, RecomputedLayer, obstacle
from slideformer_ray.model.shapes import SHAPES

# Sizes whose weights lie next to each other without padding, so that they are joined; conftest's SIZES are not all so.
JOINED = dict(
    vocab_size=101, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, pad_token_id=0,
)  # fmt: skip
# Relative error of a whole tensor against float64. In bf16 autograd's own error comes on top: see `assert_equal_truth`.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


class Case:
    """A layer of a configuration, with random parameters in a flat buffer, its input and its output's gradient."""

    def __init__(self, config, dtype=torch.float32, frozen=(), device="cpu", rows=4, seq=47, **options):
        self.config, self.dtype, self.device = config, dtype, device
        self.spec = describe_model(config, frozen=frozen)
        self.block = self.spec.decoder[-1]
        self.template = LayerTemplate(config, self.block.layer, dtype, device)
        self.layer = RecomputedLayer(self.template, self.spec.decoder, **options)
        generator = torch.Generator().manual_seed(0)
        # NaN between the parameters, where nothing may read.
        self.flat = torch.full((self.block.numel,), math.nan, dtype=dtype, device=device)
        for view in flat_views(self.block, self.flat).values():
            mean, std = (1.0, 0.1) if view.ndim == 1 else (0.0, config.hidden_size**-0.5)
            view.copy_(mean + std * torch.randn(view.shape, generator=generator))
        self.x, self.grad = (
            torch.randn(rows, seq, config.hidden_size, generator=generator).to(device, dtype) for _ in range(2)
        )
        self.tables = RotaryTable(config, device, dtype)(torch.arange(seq, device=device)[None])

    def views(self, of, dtype=None):
        """Leaves of a layer's parameters; those that are frozen ask for no gradient."""
        trained = of.views(self.block, self.flat[: self.block.trainable_numel])
        views = of.views(self.block, self.flat)
        return tuple(
            v.detach().to(dtype or v.dtype).requires_grad_(t is not None) for v, t in zip(views, trained, strict=True)
        )

    def autograd(self, dtype):
        """{"out", "x", parameter names}: transformers' layer and autograd, in a dtype, on the same values."""
        template = LayerTemplate(self.config, self.block.layer, dtype, self.device)
        params, x = self.views(self.template, dtype), self.x.to(dtype).requires_grad_()
        out = template(x, *(t.to(dtype) for t in self.tables), params)
        trained = {n: p for n, p in zip(self.template.param_names, params, strict=True) if p.requires_grad}
        grads = torch.autograd.grad(out, [x, *trained.values()], self.grad.to(dtype))
        return dict(zip(["out", "x", *trained], [out.detach(), *grads], strict=True))

    def found(self, **options):
        """The same by the layer under test."""
        params = self.views(self.layer)
        result = {"out": self.layer.forward(self.x, *self.tables, params)}
        result["x"], grads = self.layer.backward(self.x, *self.tables, params, self.grad, **options)
        return result | self.by_name(grads)

    def by_name(self, grads):
        shapes = {name: p.shape for name, p in self.template.module.named_parameters()}
        found = {}
        for names, grad in zip(self.layer.pieces, grads, strict=True):
            if grad is not None:
                found.update(zip(names, grad.split([shapes[n][0] for n in names]), strict=True))
        return found


def assert_equal_truth(case, found, times=1):
    """`found` against float64. In bf16 a gradient that almost cancels (of key biases) is far off for autograd too.

    times: what the parameters' gradients are a sum of.
    """
    truth, same_dtype = case.autograd(torch.float64), case.autograd(case.dtype)
    assert found.keys() == truth.keys()
    for name, t in truth.items():
        factor = 1 if name in ("out", "x") else times
        error, usual = (
            ((f[name].double() / n - t).norm() / t.norm()).item() for f, n in ((found, factor), (same_dtype, 1))
        )
        limit = TOLERANCE[case.dtype] + (1.5 * usual if case.dtype == torch.bfloat16 else 0.0)
        assert error < limit, f"{name}: {error}, autograd in the same dtype {usual}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_and_all_gradients(hf_config, dtype):
    """Biases or none, grouped heads, weights that are joined and weights that padding keeps apart."""
    case = Case(hf_config, dtype)
    assert_equal_truth(case, case.found())


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_joined_products(dtype, join):
    """One product for query, key and value and one for gate and up, or five: the same results."""
    case = Case(Qwen2Config(**JOINED), dtype, join=join)
    assert (len(case.layer.pieces) == 7) == join  # two norms, qkv, their biases, o, gate and up, down
    assert_equal_truth(case, case.found())


def test_joined_weights_are_views():
    """The joint weight is the flat buffer's own memory, query's rows first: nothing is copied."""
    case = Case(Qwen2Config(**JOINED))
    by_names = dict(zip(case.layer.pieces, case.layer.views(case.block, case.flat), strict=True))
    single = flat_views(case.block, case.flat)
    for group in (QKV, GATE_UP):
        joint = by_names[tuple(f"{name}.weight" for name in group)]
        parts = [single[f"model.layers.1.{name}.weight"] for name in group]
        assert joint.data_ptr() == parts[0].data_ptr() and torch.equal(joint, torch.cat(parts))


def test_frozen_parameters_have_no_gradient():
    """What is frozen is not computed; the rest is unchanged, though query, key and value are no more of one kind."""
    case = Case(Qwen2Config(**JOINED), frozen=["*.k_proj.*", "*.down_proj.*", "*.input_layernorm.*"])
    assert ("self_attn.k_proj.weight",) in case.layer.pieces
    assert_equal_truth(case, case.found())


def test_a_layer_that_is_all_frozen_passes_its_gradient_on():
    """Layers below it may train."""
    case = Case(Qwen2Config(**JOINED), frozen=["model.layers.1.*"])
    found = case.found()
    assert found.keys() == {"out", "x"}
    assert_equal_truth(case, found)


def test_joined_only_where_every_layer_allows():
    """One layer in which the key weight alone is frozen keeps it apart in all: they share the code."""
    spec = describe_model(Qwen2Config(**JOINED), frozen=["model.layers.0.self_attn.k_proj.*"])
    template = LayerTemplate(Qwen2Config(**JOINED), 0, torch.float32, "cpu")
    pieces = RecomputedLayer(template, spec.decoder).pieces
    assert ("self_attn.q_proj.weight",) in pieces and ("mlp.gate_proj.weight", "mlp.up_proj.weight") in pieces


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-3b", "qwen2.5-7b", "llama3.1-8b"])
def test_real_models_are_joined(name):
    """Their sizes are multiples of the alignment: three matrices of attention and MLP are one and one."""
    config = SHAPES[name]()
    pieces = RecomputedLayer(LayerTemplate(config, 0, torch.bfloat16, "meta"), describe_model(config).decoder).pieces
    assert [len(names) for names in pieces if "_proj" in names[0]] == (
        [3, 3, 1, 2, 1] if "qwen" in name else [3, 1, 2, 1]
    )


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_where_the_caller_wants(gradient_dtype):
    """Into the caller's buffer, every element of every parameter written, in its dtype; padding is left alone."""
    case = Case(Qwen2Config(**JOINED), torch.bfloat16)
    flat = torch.full((case.block.trainable_numel,), math.nan, dtype=gradient_dtype)
    places = case.layer.views(case.block, flat)
    found = case.found(grads=places)
    assert all(
        found[names[0]].data_ptr() == place.data_ptr() for names, place in zip(case.layer.pieces, places, strict=True)
    )
    assert_equal_truth(case, found)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_are_added_up_in_fp32(dtype):
    """The micro-batches of a step: the first one sets the sum, the others add to it."""
    case = Case(Qwen2Config(**JOINED), dtype)
    sums = [torch.full_like(v, math.nan, dtype=torch.float32) for v in case.views(case.layer)]
    for micro_batch in range(3):
        found = case.found(grads=sums, accumulate=micro_batch > 0)
    assert_equal_truth(case, found, times=3)


def test_results_may_take_the_place_of_the_input():
    """forward over its input, backward over its input or over the incoming gradient: the same bits."""
    case = Case(Qwen2Config(**JOINED))
    expected = case.found()
    params = case.views(case.layer)
    x = case.x.clone()
    assert case.layer.forward(x, *case.tables, params, out=x).data_ptr() == x.data_ptr()
    assert torch.equal(x, expected["out"])
    x, grad = case.x.clone(), case.grad.clone()
    case.layer.backward(x, *case.tables, params, grad, out=x)
    assert torch.equal(x, expected["x"]) and torch.equal(grad, case.grad)
    case.layer.backward(case.x, *case.tables, params, grad, out=grad)
    assert torch.equal(grad, expected["x"])


def test_inputs_are_not_changed():
    """Without `out`, the input, the incoming gradient, the tables and the weights keep their bits."""
    case = Case(Qwen2Config(**JOINED))
    held = [case.x, case.grad, case.flat.nan_to_num(), *case.tables]
    before = [t.clone() for t in held]
    case.found()
    held[2] = case.flat.nan_to_num()
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize("attention, gate_up, products", [(True, False, 1), (False, True, 2), (True, True, 0)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_the_forward_keeps_is_not_computed_again(monkeypatch, dtype, attention, gate_up, products):
    """The same bits with fewer products, and nothing stays behind."""
    case = Case(Qwen2Config(**JOINED), dtype)
    expected = case.found()
    params, kept, out = case.views(case.layer), Kept(attention, gate_up), torch.empty_like(case.x)
    case.layer.forward(case.x, *case.tables, params, out=out, kept=kept)
    assert (kept.attended is not None, kept.gate_up_TF is not None) == (attention, gate_up)
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: calls.append(1) or linear(*a))
    grad_x, grads = case.layer.backward(case.x, *case.tables, params, case.grad, kept=kept)
    assert len(calls) == products
    assert (kept.attended, kept.gate_up_TF) == (None, None)
    found = {"out": out, "x": grad_x} | case.by_name(grads)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_keeping_needs_no_place_for_the_output():
    """The branch that is kept is not the output's place either."""
    case = Case(Qwen2Config(**JOINED))
    params, kept = case.views(case.layer), Kept(attention=True)
    assert torch.equal(
        case.layer.forward(case.x, *case.tables, params, kept=kept), case.layer.forward(case.x, *case.tables, params)
    )
    expected = case.layer.backward(case.x, *case.tables, params, case.grad)[0]
    assert torch.equal(case.layer.backward(case.x, *case.tables, params, case.grad, kept=kept)[0], expected)


def test_packed_rows(hf_config):
    """Sequences packed into a row give what they give alone, gradients of the weights being their sum."""
    case = Case(hf_config, rows=1, seq=12)
    params = case.views(case.layer)
    bounds = [0, 5, 12]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)])[None]
    tables = RotaryTable(hf_config, "cpu", torch.float32)(positions)
    packing = dict(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=7)
    out = case.layer.forward(case.x, *tables, params, **packing)
    grad_x, grads = case.layer.backward(case.x, *tables, params, case.grad, **packing)
    sums = [torch.zeros_like(g) for g in grads]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        x, grad = case.x[:, start:stop].contiguous(), case.grad[:, start:stop].contiguous()
        alone = tuple(t[:, : stop - start] for t in case.tables)
        torch.testing.assert_close(out[:, start:stop], case.layer.forward(x, *alone, params))
        torch.testing.assert_close(
            grad_x[:, start:stop], case.layer.backward(x, *alone, params, grad, grads=sums, accumulate=True)[0]
        )
    torch.testing.assert_close(grads, sums, rtol=1e-4, atol=1e-5)


def test_the_last_product_is_not_recomputed(monkeypatch):
    """The backward's products: the forward's but the last, and two for each weight; nothing is computed for nobody."""
    case = Case(Qwen2Config(**JOINED))
    shapes = []
    for name in ("mm", "addmm"):
        plain = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, plain=plain, **k: shapes.append(plain(*a, **k).shape) or plain(*a, **k)
        )
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: shapes.append("forward") or linear(*a))
    case.layer.backward(case.x, *case.tables, case.views(case.layer), case.grad)
    assert shapes.count("forward") == 3  # qkv, o, gate and up
    assert len(shapes) - 3 == 2 * 4


def test_kernels_in_the_interpreter(monkeypatch):
    """The same through the Triton kernels: rotation in place, gradients over activations, norms with residuals."""
    if switch.tl is None or torch.cuda.is_available():
        pytest.skip("needs triton's interpreter")
    monkeypatch.setenv(switch.VARIABLE, "triton")
    switch._read_setting.cache_clear()
    try:
        case = Case(Qwen2Config(**JOINED), rows=2, seq=5)
        found = case.found()
    finally:
        monkeypatch.undo()
        switch._read_setting.cache_clear()
    assert_equal_truth(case, found)


def test_what_it_cannot_run_is_said():
    """Another structure or activation is no silent difference: the reason names it and what is known."""
    relu = LlamaConfig(**{**JOINED, "hidden_act": "relu"})
    template = LayerTemplate(relu, 0, torch.float32, "meta")
    assert obstacle(template).startswith(
        "hidden_act 'relu' has no kernel; those that have: silu, gelu_pytorch_tanh, gelu"
    )
    with pytest.raises(ValueError, match="layer kind full_attention: hidden_act 'relu' has no kernel"):
        RecomputedLayer(template, describe_model(relu).decoder)
    template.module = type("MistralDecoderLayer", (), {})()
    assert "MistralDecoderLayer is not written out by hand" in obstacle(template)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_other_gates(activation):
    """GELU gates run by the same code."""
    case = Case(LlamaConfig(**{**JOINED, "hidden_act": activation}))
    assert_equal_truth(case, case.found())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-3b", "llama3.2-1b"])
def test_real_shapes_on_the_gpu(name):
    """bf16, kernels and products of a real run: output, all gradients, and the fp32 sums of two micro-batches."""
    case = Case(SHAPES[name](), torch.bfloat16, device="cuda", rows=2, seq=300)
    assert_equal_truth(case, case.found())
    sums = [torch.full_like(v, math.nan, dtype=torch.float32) for v in case.views(case.layer)]
    for micro_batch in range(2):
        found = case.found(grads=sums, accumulate=micro_batch > 0)
    assert_equal_truth(case, found, times=2)


@pytest.mark.gpu
def test_gpu_memory_is_what_the_module_says():
    """Peak of a backward into given gradients: the formula of the module's docstring, and 5 %."""
    case = Case(SHAPES["qwen2.5-3b"](), torch.bfloat16, device="cuda", rows=8, seq=1024)
    grads = [torch.empty_like(v) for v in case.views(case.layer)]
    case.found(grads=grads)  # kernels compiled, workspaces of the products allocated
    params = case.views(case.layer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.layer.backward(case.x, *case.tables, params, case.grad, grads=grads)
    torch.cuda.synchronize()
    hidden, inner, queries, keys = 2048, 11008, 2048, 256
    formula = 8 * 1024 * (3 * inner + 3 * hidden + 2 * queries + 2 * keys) * 2
    assert torch.cuda.max_memory_allocated() - before < 1.05 * formula


@pytest.mark.gpu
def test_gpu_kept_bytes_and_bits():
    """On the kernels of a real run: the bits of a recomputation, in the bytes that budget.py counts."""
    rows, seq, hidden, inner, queries, keys = 8, 1024, 2048, 11008, 2048, 256
    case = Case(SHAPES["qwen2.5-3b"](), torch.bfloat16, device="cuda", rows=rows, seq=seq)
    expected = case.found()
    params, out = case.views(case.layer), torch.empty_like(case.x)
    for attention, gate_up in ((True, False), (False, True), (True, True)):
        kept = Kept(attention, gate_up)
        before = torch.cuda.memory_allocated()
        case.layer.forward(case.x, *case.tables, params, out=out, kept=kept)
        each_token = (hidden + 2 * queries + 2 * keys) * 2 + 16 * 4 if attention else 0
        each_token += 2 * inner * 2 if gate_up else 0
        assert torch.cuda.memory_allocated() - before <= 1.01 * rows * seq * each_token
        grad_x, grads = case.layer.backward(case.x, *case.tables, params, case.grad, kept=kept)
        found = {"out": out, "x": grad_x} | case.by_name(grads)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.gpu
def test_gpu_lengths_compile_nothing_anew(monkeypatch):
    """Rows and lengths of any size run the kernels that the first ones compiled: a handful for a whole run."""
    import triton

    compiled = []
    case = Case(SHAPES["qwen2.5-0.5b"](), torch.bfloat16, device="cuda", rows=2, seq=64)
    case.found()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    for rows, seq in [(1, 1), (1, 17), (2, 100), (3, 33), (4, 128), (5, 7), (8, 512), (7, 333), (1, 1000)]:
        Case(SHAPES["qwen2.5-0.5b"](), torch.bfloat16, device="cuda", rows=rows, seq=seq).found()
    assert len(compiled) <= 4, compiled
