"""kernels/rope.py on one GPU against Liger-Kernel and torch.compile of the plain version.

    python benchmarks/kernels/bench_rope.py [--sweep]

bf16 heads of 128, as a projection leaves them, with the grouped heads of Qwen2.5-3B, Qwen2.5-7B and Llama-3.1-8B; 8k
and 32k tokens in rows of 1,024. Least bytes: q and k read and written once in each direction. --sweep tries warp counts
instead.
"""

from __future__ import annotations

import functools
import itertools
import sys

import torch
from measure import Table, extra_bytes, gpu_seconds, heading, host_seconds, liger, num_sets

from slideformer_ray.kernels import rope

SEQ, SIZE = 1024, 128
HEADS, TOKENS = ((16, 2), (28, 4), (32, 8)), (8192, 32768)


def make_inputs(rows, num_q, num_k):
    def new(num_heads):
        return torch.randn(rows, SEQ, num_heads, SIZE, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    return [new(n).requires_grad_() for n in (num_q, num_k)], [new(num_q), new(num_k)]


def implementations() -> dict:
    found = {
        "liger": liger("transformers.functional", "liger_rope"),
        "ours": rope.rope,
        "torch.compile": torch.compile(rope.plain_rope, dynamic=False),
    }
    return {name: function for name, function in found.items() if function}


def raw_pass(inputs, grads, tables):
    """What model/recompute.py does: in place, in both directions."""
    q, k = (t.data for t in inputs)
    rope.rotate(q, k, *tables, out=(q, k))
    rope.rotate(*grads, *tables, inverse=True, out=grads)


def apart_pass(inputs, grads, tables, places):
    rope.rotate(*(t.data for t in inputs), *tables, out=places)
    rope.rotate(*grads, *tables, inverse=True, out=places)


def sweep(rate: float, tables) -> None:
    default = rope._num_warps
    print("\nboth directions, 32768 tokens: microseconds in place, and to other places; share of the copy bandwidth")
    for num_q, num_k in HEADS:
        one_way = 2 * 32768 * (num_q + num_k) * SIZE * 2
        inputs, grads = make_inputs(32768 // SEQ, num_q, num_k)
        in_place = functools.partial(raw_pass, inputs, grads, tables)
        apart = functools.partial(apart_pass, inputs, grads, tables, [torch.empty_like(t.data) for t in inputs])
        for warps in (1, 2, 4, 8):
            rope._num_warps = lambda elements, warps=warps: warps
            times = [gpu_seconds([call] * 2) for call in (in_place, apart)]
            shares = "  ".join(f"{t * 1e6:7.0f}us {2 * one_way / t / rate:5.2f}" for t in times)
            print(f"  {num_q:2} and {num_k} heads, warps {warps}: {shares}", flush=True)
    rope._num_warps = default


def main() -> None:
    rate = heading("RoPE")
    angle = torch.rand(1, SEQ, SIZE // 2, device="cuda").repeat(1, 1, 2) * 6.28
    tables = angle.cos().bfloat16(), angle.sin().bfloat16()
    if "--sweep" in sys.argv[1:]:
        return sweep(rate, tables)
    for tokens, (num_q, num_k) in itertools.product(TOKENS, HEADS):
        one_way = 2 * tokens * (num_q + num_k) * SIZE * 2
        sets = [make_inputs(tokens // SEQ, num_q, num_k) for _ in range(num_sets(2 * one_way))]
        rows = Table(f"{tokens} tokens, {num_q} and {num_k} heads", rate)
        against = None
        for name, function in implementations().items():
            with torch.no_grad():
                forward = gpu_seconds([lambda i=i, f=function: f(*i, *tables) for i, _ in sets])
            calls = [lambda i=i, g=g, f=function: torch.autograd.grad(f(*i, *tables), i, g) for i, g in sets]
            both = gpu_seconds(calls)
            against = against or both
            rows.row(
                name, (forward, one_way), (both, 2 * one_way), extra_bytes(calls[0]), host_seconds(calls[0]), against
            )
        raw = [lambda i=i, g=g: raw_pass(i, g, tables) for i, g in sets]
        both = gpu_seconds(raw)
        rows.row(
            "ours, without autograd, in place",
            None,
            (both, 2 * one_way),
            extra_bytes(raw[0]),
            host_seconds(raw[0]),
            against,
        )


if __name__ == "__main__":
    main()
