"""kernels/swiglu.py on one GPU against Liger-Kernel and torch.compile of the plain version.

    python benchmarks/kernels/bench_swiglu.py [--sweep]

bf16, the inner widths of Qwen2.5-3B, Llama-3.1-8B and Qwen2.5-7B, 8k and 32k tokens. Liger's backward writes over gate
and up, which are its inputs; ours changes no input, but for `backward(out=..., inner=...)`, the last row. --sweep tries
block and warp counts instead.
"""

from __future__ import annotations

import itertools
import sys

import torch
from measure import Table, extra_bytes, gpu_seconds, heading, host_seconds, liger, num_sets

from slideformer_ray.kernels import swiglu

WIDTHS, TOKENS = (11008, 14336, 18944), (8192, 32768)


def implementations(activation: str) -> dict:
    theirs = liger("transformers.functional", "liger_swiglu" if activation == "silu" else "liger_geglu")
    found = {
        "liger": theirs,
        "ours": lambda gate, up: swiglu.gated(gate, up, activation),
        "torch.compile": torch.compile(lambda gate, up: swiglu.plain_gated(gate, up, activation), dynamic=False),
    }
    return {name: function for name, function in found.items() if function}


def make_inputs(tokens, width):
    gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    halves = [half.clone().requires_grad_() for half in gate_up.chunk(2, dim=1)]
    return halves, torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16), gate_up


def raw_pass(gate_up, grad, activation, gate_up_out, inner_out):
    """What model/recompute.py does: gate and up in one tensor, and the product once more for the next gradient."""
    halves = gate_up.chunk(2, dim=1)
    swiglu.forward(*halves, activation)
    swiglu.backward(grad, *halves, activation, out=gate_up_out.chunk(2, dim=1), inner=inner_out)


def table(rate: float, tokens: int, width: int, activation: str) -> None:
    tensor = tokens * width * 2
    rows = Table(f"{tokens} x {width}, {activation}", rate)
    against = None
    for name, function in implementations(activation).items():
        # New ones for each: Liger's backward leaves gradients where they were, which the next would take for inputs.
        sets = [make_inputs(tokens, width) for _ in range(num_sets(8 * tensor))]
        with torch.no_grad():
            forward = gpu_seconds([lambda i=i, f=function: f(*i) for i, _, _ in sets])
        calls = [lambda i=i, g=g, f=function: torch.autograd.grad(f(*i), i, g) for i, g, _ in sets]
        both = gpu_seconds(calls)
        against = against or both
        rows.row(
            name, (forward, 3 * tensor), (both, 8 * tensor), extra_bytes(calls[0]), host_seconds(calls[0]), against
        )
    sets = [make_inputs(tokens, width) for _ in range(num_sets(8 * tensor))]
    # Timed beside the inputs: repeated in place, values would shrink to zeros, on which a GPU is faster.
    _, grad, gate_up = sets[0]
    places = torch.empty_like(gate_up), torch.empty_like(grad)
    both = gpu_seconds([lambda g=g, gu=gu: raw_pass(gu, g, activation, *places) for _, g, gu in sets])

    def in_place():
        raw_pass(gate_up, grad, activation, gate_up, grad)

    name = "ours in place, and the product again"
    rows.row(name, None, (both, 9 * tensor), extra_bytes(in_place), host_seconds(in_place), against)


def sweep(rate: float) -> None:
    default = swiglu.BLOCK, swiglu.NUM_WARPS
    tensor = 32768 * 11008 * 2
    _, grad, gate_up = make_inputs(32768, 11008)
    halves = gate_up.chunk(2, dim=1)
    gate_up_out, inner_out = torch.empty_like(gate_up), torch.empty_like(grad)
    places = {"out": gate_up_out.chunk(2, dim=1), "inner": inner_out}
    print("\nbackward and product, 32768 x 11008: microseconds, and share of the copy bandwidth; then the forward")
    for block, warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
        swiglu.BLOCK, swiglu.NUM_WARPS = block, warps
        back = gpu_seconds([lambda: swiglu.backward(grad, *halves, **places)] * 2)
        there = gpu_seconds([lambda: swiglu.forward(*halves)] * 2)
        mark = "  <- default" if (block, warps) == default else ""
        shares = f"{6 * tensor / back / rate:6.2f} {there * 1e6:7.0f}us {3 * tensor / there / rate:6.2f}"
        print(f"  block {block:5} warps {warps:2} {back * 1e6:7.0f}us {shares}{mark}", flush=True)
    swiglu.BLOCK, swiglu.NUM_WARPS = default


def main() -> None:
    rate = heading("SwiGLU")
    if "--sweep" in sys.argv[1:]:
        return sweep(rate)
    for tokens, width in itertools.product(TOKENS, WIDTHS):
        table(rate, tokens, width, "silu")
    table(rate, 8192, 14336, "gelu_pytorch_tanh")


if __name__ == "__main__":
    main()
