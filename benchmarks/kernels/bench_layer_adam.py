"""Nanoseconds a parameter of one AdamW step on the host: kernels/layer_adam.py against PyTorch's fused AdamW.

    python benchmarks/kernels/bench_layer_adam.py [numel=20000000] [num_threads=all] [grad_magnitude=1e-3]

All rows are of one run, so that their ratios compare; each time is the best of several steps. The yardstick,
`torch._fused_adamw_` on fp32 masters, does not make the bf16 parameters that a GPU reads; the row below it does, with
the two casts that a training loop around it needs. A gradient magnitude of 1e-19 makes exp_avg_sq denormal, which shows
what `flush_denormals` is worth on the CPU at hand.
"""

import os
import platform
import sys
import time
from pathlib import Path

import torch

from slideformer_ray.kernels.layer_adam import ISA_CODES, AdamHyper, LayerAdam, split_master

HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=5)
NUM_REPEATS = 7


def best_seconds(step):
    step()  # first touch, waking of threads
    seconds = []
    for _ in range(NUM_REPEATS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(numel=20_000_000, num_threads=None, grad_magnitude=1e-3):
    num_threads = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    master = torch.randn(numel) * 0.02
    hi, lo = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_master(master, hi, lo)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    fp32_grad = torch.randn(numel) * grad_magnitude
    grad = fp32_grad.bfloat16()
    state_step = torch.tensor(float(HYPER.step))

    def torch_step(with_casts):
        if with_casts:
            fp32_grad.copy_(grad)
        torch._fused_adamw_(
            [master],
            [fp32_grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [state_step],
            lr=HYPER.lr,
            beta1=HYPER.beta1,
            beta2=HYPER.beta2,
            weight_decay=HYPER.weight_decay,
            eps=HYPER.eps,
            amsgrad=False,
            maximize=False,
        )
        if with_casts:
            hi.copy_(master)

    print(f"{cpu_name()}; torch {torch.__version__}; {numel:.3g} parameters, {num_threads} threads", end="")
    print(f", gradients of magnitude {grad_magnitude:g}")
    yardstick = best_seconds(lambda: torch_step(with_casts=False))

    def report(name, seconds):
        print(f"{name:<44}{seconds / numel * 1e9:8.3f} ns a parameter {yardstick / seconds:8.2f} x torch", flush=True)

    report("torch fused AdamW, fp32", yardstick)
    report("torch fused AdamW, bf16 cast to and fro", best_seconds(lambda: torch_step(with_casts=True)))
    options = [{"isa": isa, "flush_denormals": flush} for isa in reversed(ISA_CODES) for flush in (False, True)]
    for option in [*options, {"backend": "torch"}]:
        label = ", ".join(str(value) if key != "flush_denormals" else "flush" * value for key, value in option.items())
        try:
            adam = LayerAdam(num_threads, **option)
        except ValueError as error:
            print(f"split, {label}: {error}")
            continue
        report(
            f"split, {label.removesuffix(', ')}",
            best_seconds(lambda adam=adam: adam.step_split(hi, lo, exp_avg, exp_avg_sq, grad, HYPER)),
        )
        if not option.get("flush_denormals"):
            report(
                f"fp32, {label.removesuffix(', ')}",
                best_seconds(lambda adam=adam: adam.step_fp32(master, exp_avg, exp_avg_sq, fp32_grad, HYPER)),
            )
        adam.close()


if __name__ == "__main__":
    arguments = [float(argument) for argument in sys.argv[1:]]
    main(*(int(argument) for argument in arguments[:2]), *arguments[2:])
