"""kernels/rms_norm.py on one GPU against Liger-Kernel and torch.compile of the plain version.

    python benchmarks/kernels/bench_rms_norm.py [--sweep]

bf16, hidden sizes of 3B to 8B models, 8k and 32k tokens, alone and with the residual. --sweep tries warps and programs
a multiprocessor of the backward instead; its order of summation hangs on the latter, so that is a constant.
"""

from __future__ import annotations

import itertools
import sys

import torch
from measure import Table, extra_bytes, gpu_seconds, heading, host_seconds, liger, num_sets

from slideformer_ray.kernels import rms_norm

EPS = 1e-6
HIDDENS, TOKENS = (2048, 3584, 4096), (8192, 32768)


def implementations(with_residual: bool) -> dict:
    """name -> function of (x, residual, weight) that returns (sum, y), or y alone."""
    if with_residual:
        theirs = liger("transformers.functional", "liger_fused_add_rms_norm")

        def plain(x, residual, weight):
            total = x + residual
            return total, rms_norm.plain_rms_norm(total, weight, EPS)

        found = {
            "liger": theirs and (lambda x, residual, weight: theirs(x, residual, weight, EPS)[::-1]),
            "ours": lambda x, residual, weight: rms_norm.add_rms_norm(x, residual, weight, EPS),
        }
    else:
        theirs = liger("transformers.functional", "liger_rms_norm")

        def plain(x, residual, weight):
            return (rms_norm.plain_rms_norm(x, weight, EPS),)

        found = {
            "liger": theirs and (lambda x, residual, weight: (theirs(x, weight, EPS),)),
            "ours": lambda x, residual, weight: (rms_norm.rms_norm(x, weight, EPS),),
        }
    found["torch.compile"] = torch.compile(plain, dynamic=False)
    return {name: function for name, function in found.items() if function}


def forward_backward(function, inputs, grads):
    outputs = function(*inputs)
    wanted = [t for t in inputs if t is not None]
    return torch.autograd.grad(outputs, wanted, grads[: len(outputs)])


def make_inputs(tokens, hidden, with_residual):
    def new(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    inputs = [new(tokens, hidden), new(tokens, hidden) if with_residual else None, new(hidden)]
    return [t if t is None else t.requires_grad_() for t in inputs], [new(tokens, hidden) for _ in range(2)]


def table(rate: float, tokens: int, hidden: int, with_residual: bool) -> None:
    tensor = tokens * hidden * 2
    forward_bytes, both_bytes = (4 * tensor, 8 * tensor) if with_residual else (2 * tensor, 5 * tensor)
    sets = [make_inputs(tokens, hidden, with_residual) for _ in range(num_sets(both_bytes))]
    rows = Table(f"{tokens} x {hidden}, {'with residual' if with_residual else 'alone'}", rate)
    against = None
    for name, function in implementations(with_residual).items():
        with torch.no_grad():
            forward = gpu_seconds([lambda i=i, f=function: f(*i) for i, _ in sets])
        calls = [lambda i=i, g=g, f=function: forward_backward(f, i, g) for i, g in sets]
        both = gpu_seconds(calls)
        against = against or both
        rows.row(
            name, (forward, forward_bytes), (both, both_bytes), extra_bytes(calls[0]), host_seconds(calls[0]), against
        )
    raw = [lambda i=i, g=g: raw_pass(i, g) for i, g in sets]
    both = gpu_seconds(raw)
    rows.row(
        "ours, without autograd, in place", None, (both, both_bytes), extra_bytes(raw[0]), host_seconds(raw[0]), against
    )


def raw_pass(inputs, grads):
    """What model/recompute.py does: results over inputs that are not needed any more."""
    x, residual, weight = inputs
    total, _ = rms_norm.forward(x, weight, EPS, residual=residual, sum_out=None if residual is None else residual.data)
    rms_norm.backward(grads[1], total, weight, EPS, grad_sum=None if residual is None else grads[0], out=grads[1])


def sweep(rate: float) -> None:
    default = rms_norm.PROGRAMS_PER_MULTIPROCESSOR, rms_norm._tile
    print("\nbackward with residual, 32768 tokens: microseconds, and share of the copy bandwidth")
    for hidden in HIDDENS:
        tensor = 32768 * hidden * 2
        sets = [make_inputs(32768, hidden, True) for _ in range(num_sets(4 * tensor))]
        block, rows, warps = default[1](hidden)
        for programs, num_warps in itertools.product((2, 4, 6, 8, 16), (warps // 2, warps, 2 * warps)):
            rms_norm.PROGRAMS_PER_MULTIPROCESSOR = programs
            rms_norm._tile = lambda width, w=num_warps, b=block, r=rows: (b, r, w)
            seconds = gpu_seconds(
                [lambda i=i, g=g: rms_norm.backward(g[0], i[0], i[2], EPS, grad_sum=g[1], out=g[0]) for i, g in sets]
            )
            mark = "  <- default" if (programs, num_warps) == (default[0], warps) else ""
            share = 4 * tensor / seconds / rate
            print(
                f"  {hidden:5} programs {programs:2} warps {num_warps:2} {seconds * 1e6:7.0f}us {share:6.2f}{mark}",
                flush=True,
            )
    rms_norm.PROGRAMS_PER_MULTIPROCESSOR, rms_norm._tile = default


def main() -> None:
    rate = heading("RMSNorm")
    if "--sweep" in sys.argv[1:]:
        return sweep(rate)
    for with_residual, tokens, hidden in itertools.product((False, True), TOKENS, HIDDENS):
        table(rate, tokens, hidden, with_residual)


if __name__ == "__main__":
    main()
