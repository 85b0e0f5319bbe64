"""model/attention.py against transformers' eager attention: values and the gradients of q, k and v, on every path."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.llama.modeling_llama import eager_attention_forward

from slideformer_ray.model.attention import attend, attention_forward, describe, register

WINDOW = 6
# Relative error of a whole tensor against eager attention in float64 (on the GPU in the dtype itself: both round).
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
GPU_PATHS = ["cudnn", "flash", "efficient", "math"]


class Heads(torch.nn.Module):
    """What transformers' attention functions ask of a module."""

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.training = groups, True, False


def heads(rows, num_heads, num_kv, seq, size, dtype=torch.float32, device="cpu"):
    """q, k, v as projections leave them: heads of a token side by side."""
    generator = torch.Generator().manual_seed(seq + size)
    return [
        torch.randn(rows, seq, n, size, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
        for n in (num_heads, num_kv, num_kv)
    ]


def eager(q, k, v, visible):
    """transformers' eager attention where `visible` [.., S, S] says who sees whom; in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    hidden = torch.zeros(visible.shape, dtype=torch.float64, device=q.device).masked_fill(~visible, -torch.inf)
    return eager_attention_forward(Heads(q.shape[1] // k.shape[1]), q, k, v, hidden, q.shape[-1] ** -0.5)[0]


def who_sees_whom(seq, window=None, cu_seqlens=None, device="cpu"):
    i, j = torch.arange(seq, device=device)[:, None], torch.arange(seq, device=device)[None]
    visible = (j <= i) & (j > i - (window or seq))
    if cu_seqlens is not None:
        number = torch.tensor([sum(c <= p for c in cu_seqlens) for p in range(seq)], device=device)
        visible &= number[:, None] == number[None]
    return visible


def assert_equals_eager(function, inputs, visible, tolerance=None):
    """The output and the gradient of each input.

    A gradient that is zero, as a lone token's of q and k, is a difference of equal products, which some CPUs round
    apart.
    """
    found, truth = function(*inputs), eager(*inputs, visible)
    assert found.shape == truth.shape
    gradient = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3)).to(found)
    rounding = torch.finfo(gradient.dtype).eps * gradient.double().norm().item()
    found = [found, *torch.autograd.grad(found, inputs, gradient)]
    truth = [truth, *torch.autograd.grad(truth, inputs, gradient.double())]
    for name, f, t in zip(("out", "grad_q", "grad_k", "grad_v"), found, truth, strict=True):
        error, size = (f.double() - t.double()).norm().item(), t.double().norm().item()
        assert error <= (tolerance or TOLERANCE[f.dtype]) * size + rounding, f"{name}: {error} of {size}"


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["own-heads", "grouped", "one-kv-head"])
@pytest.mark.parametrize("seq", [1, 2, 13])
def test_causal_rows(kv_heads, seq):
    """Every token sees itself and what precedes it, whatever the grouping of heads."""
    assert_equals_eager(attend, heads(2, 4, kv_heads, seq, 8), who_sees_whom(seq))


@pytest.mark.parametrize(
    "seq", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW], ids=["below", "window", "window+1", "twice"]
)
def test_sliding_window(seq):
    """A token sees itself and the WINDOW - 1 before it, as in transformers' masks."""
    inputs = heads(2, 4, 2, seq, 8)
    assert_equals_eager(lambda *qkv: attend(*qkv, window=WINDOW), inputs, who_sees_whom(seq, WINDOW))


@pytest.mark.parametrize("window", [0, None, 13, 100])
def test_a_window_of_zero_or_beyond_the_row_is_none(window):
    """Zero means no window, not a window that hides everything."""
    inputs = heads(1, 4, 2, 13, 8)
    assert torch.equal(attend(*inputs, window=window), attend(*inputs))


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_do_not_see_each_other(window):
    """Sequences packed into one row attend as each would alone."""
    bounds = [0, 4, 5, 13]
    inputs = heads(1, 4, 2, 13, 8)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    visible = who_sees_whom(13, window, bounds)
    assert_equals_eager(lambda *qkv: attend(*qkv, window=window, cu_seqlens=cu_seqlens), inputs, visible)
    packed = attend(*inputs, window=window, cu_seqlens=cu_seqlens)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        alone = attend(*(t[:, :, start:stop] for t in inputs), window=window)
        torch.testing.assert_close(packed[:, start:stop], alone)


def test_packed_rows_of_a_batch_are_counted_through():
    """cu_seqlens runs over all rows: the second row's sequences follow the first's."""
    inputs = heads(2, 4, 2, 6, 8)
    packed = attend(*inputs, cu_seqlens=torch.tensor([0, 2, 6, 9, 12], dtype=torch.int32))
    for row, bounds in enumerate(([0, 2, 6], [0, 3, 6])):
        alone = attend(*(t[row : row + 1] for t in inputs), cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        torch.testing.assert_close(packed[row : row + 1], alone)


def test_a_mask_decides_alone():
    """Where transformers made a mask, causality, window and padding are in it."""
    inputs = heads(2, 4, 2, 7, 8)
    visible = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    visible |= torch.eye(7, dtype=torch.bool)
    assert_equals_eager(lambda *qkv: attend(*qkv, mask=visible, window=2), inputs, visible)


def test_one_query_over_a_cache_sees_all_of_it():
    """Generation: the newest token sees every key, or those within the window."""
    q, k, v = heads(2, 4, 2, 9, 8)
    for window in (None, 4):
        whole = attend(q, k, v, window=window)[:, -1:]
        torch.testing.assert_close(attend(q[:, :, -1:], k, v, window=window), whole)


def test_unequal_lengths_without_a_mask_are_refused():
    """Which query belongs to which key would be a guess."""
    q, k, v = heads(1, 4, 2, 9, 8)
    with pytest.raises(ValueError, match="3 queries over 9 keys need a mask"):
        attend(q[:, :, :3], k, v)


def test_no_graph_break_when_compiled():
    """A compiled layer holds the attention in its one graph."""
    inputs = heads(2, 4, 2, 13, 8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *qkv: attend(*qkv, window=WINDOW), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), attend(*inputs, window=WINDOW))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dropout=0.1), "dropout 0.1; only 0 is supported"),
        (dict(softcap=50.0), "Heads asks for softcap, which only 'eager' has"),
        (dict(s_aux=torch.zeros(4)), "Heads asks for s_aux"),
    ],
)
def test_what_it_does_not_do_is_refused(options, message):
    """A model whose attention has more to it must not train without it."""
    with pytest.raises(ValueError, match=message):
        attention_forward(Heads(2), *heads(1, 4, 2, 5, 8), None, **options)


SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=8),
        Qwen2Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1),
    ],
    ids=["llama", "mistral-window", "qwen2-half-window"],
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_whole_model_equals_eager(config, padding):
    """Registered with transformers: logits are those of eager attention, padded or not, past the window."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    seq = 2 * WINDOW
    ids, mask = torch.randint(1, 97, (2, seq)), torch.ones(2, seq, dtype=torch.long)
    if padding != "none":
        mask[1, slice(0, 5) if padding == "left" else slice(-5, None)] = 0
    logits = []
    for implementation in ("eager", register()):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's line")
def test_it_says_what_is_in_use():
    """One line: the path, the case, and what makes it slow."""
    line = describe("cpu", torch.float32, 4, 2, 8, window=16, packed=True)
    assert line == "attention: cpu for packed rows, window 16, torch.float32 4/2 heads of 8 (as a mask)"


@pytest.mark.gpu
@pytest.mark.parametrize("path", [None, *GPU_PATHS])
def test_gpu_paths_equal_eager(path):
    """Each backend, grouped heads not repeated where it takes them: values and gradients in bf16."""
    inputs = heads(2, 16, 2, 300, 128, torch.bfloat16, "cuda")
    visible = who_sees_whom(300, device="cuda")
    assert_equals_eager(lambda *qkv: attend(*qkv, path=path), inputs, visible)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_gpu_no_graph_break_when_compiled(window):
    """The choice of the path is a constant of the compiled graph."""
    inputs = heads(2, 16, 2, 300, 128, torch.bfloat16, "cuda")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *qkv: attend(*qkv, window=window), fullgraph=True)
    assert_equals_eager(compiled, inputs, who_sees_whom(300, window, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [129, 256, 300])
def test_gpu_window_and_packing_equal_eager(seq):
    """A window of 128 over rows just longer and much longer, and packed sequences with and without it."""
    inputs = heads(2, 16, 2, seq, 128, torch.bfloat16, "cuda")
    assert_equals_eager(lambda *qkv: attend(*qkv, window=128), inputs, who_sees_whom(seq, 128, device="cuda"))
    inputs = heads(1, 16, 2, seq, 128, torch.bfloat16, "cuda")
    bounds = [0, 100, 101, seq]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    for window in (None, 64):
        visible = who_sees_whom(seq, window, bounds, "cuda")
        assert_equals_eager(lambda *qkv, w=window: attend(*qkv, window=w, cu_seqlens=cu_seqlens), inputs, visible)


@pytest.mark.gpu
def test_gpu_fp32_holds_no_scores():
    """fp32 has no flash kernel: memory-efficient attention serves it, windows included, with grouped heads repeated."""
    inputs = heads(2, 16, 2, 300, 64, torch.float32, "cuda")
    assert_equals_eager(attend, inputs, who_sees_whom(300, device="cuda"), tolerance=1e-4)
    assert describe("cuda", torch.float32, 16, 2, 64).startswith("attention: efficient")
    assert "varlen" not in describe("cuda", torch.float32, 16, 2, 64, window=16)


@pytest.mark.gpu
def test_gpu_deterministic_gives_the_same_bits():
    """With PyTorch's deterministic algorithms, the same input twice gives the same gradients' bits."""
    inputs = heads(2, 16, 2, 300, 128, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(attend(*inputs).float().square().sum(), inputs) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
