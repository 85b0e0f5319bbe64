"""kernels/linear_cross_entropy.py on one GPU against Liger-Kernel's fused linear cross-entropy and compiled PyTorch.

    python benchmarks/kernels/bench_linear_cross_entropy.py [PART ...]

Parts, in this order; without any, all but `compiled`:
    check      loss and every gradient against float64, outputs poisoned, the same bits twice; ends the run if it fails
    kernel     block and warp counts of the one Triton kernel
    products   the three matrix products by rows of a chunk: which chunk sizes fill the GPU
    table      time, peak extra memory and share of the GEMM limit, all rows supervised and one third of them
    compiled   the same for torch.compile of the plain version, which holds all logits; compiling takes most of a minute

Times are medians, of one run, so that ratios compare. Extra memory is the peak beside inputs and results. The GEMM
limit is 6 x rows x H x V floating-point operations over the rate of an 8192-cubed bf16 product, measured first.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import slideformer_ray.kernels.linear_cross_entropy as ours
from slideformer_ray.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy

TOKENS = (8192, 32768)
VOCABS = (128_256, 152_064)
HIDDENS = (2048, 3584, 4096)
GIB = 1 << 30
DEVICE = "cuda"


def seconds(call: Callable, *arguments, repeats: int = 3, **options) -> float:
    call(*arguments, **options)
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(*arguments, **options)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def extra_bytes(call: Callable) -> int:
    """Peak beside what was there before the call and what the call leaves behind."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = call()  # held, so that they count as results
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    return extra


def make_inputs(num_rows, hidden, vocab, dtype=torch.bfloat16):
    """Hidden rows as after a norm, logits of a standard deviation of about 1.3, one target a row."""
    hidden_NH = torch.randn(num_rows, hidden, device=DEVICE).to(dtype)
    weight_VH = (torch.randn(vocab, hidden, device=DEVICE) * 1.3 * hidden**-0.5).to(dtype)
    return hidden_NH, weight_VH, torch.randint(0, vocab, (num_rows,), device=DEVICE)


# ------------------------------------------------------------------------------------------------------------- check


def ground_truth(hidden_NH, weight_VH, targets_N, bias_V, softcap, z_loss, scale):
    hidden, weight, bias = (t.double().requires_grad_() for t in (hidden_NH, weight_VH, bias_V))
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    z = z_loss * (logits.logsumexp(-1).square() * (targets_N != IGNORED)).sum()
    loss = F.cross_entropy(logits, targets_N, ignore_index=IGNORED, reduction="sum") + z
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad, bias.grad


def check() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then holds NaN, so what is not written shows
    limits = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    odd, real = (4 * 47, 31, 123), (257, 1024, 151_937)
    cases = [(torch.bfloat16, shape, options) for shape in (odd, real) for options in (False, True)]
    cases += [(torch.float32, real, True), (torch.float16, real, True)]  # each costs a compilation of the kernel
    worst, failed = dict.fromkeys(limits, 0.0), []
    for dtype, shape, all_options in cases:
        num_rows, hidden, vocab = shape
        inputs = make_inputs(*shape, dtype)
        inputs[2][::5] = IGNORED
        bias_V = torch.randn(vocab, device=DEVICE) * all_options
        softcap, z_loss = (5.0, 1e-2) if all_options else (None, 0.0)
        wanted = ground_truth(*inputs, bias_V, softcap, z_loss, 1 / num_rows)
        runs = []
        for _ in range(2):
            grad_weight, grad_bias = torch.zeros(vocab, hidden, device=DEVICE), torch.zeros(vocab, device=DEVICE)
            loss, grad_hidden = linear_cross_entropy(
                *inputs, gradient_scale=1 / num_rows, grad_weight_VH=grad_weight, bias_V=bias_V, grad_bias_V=grad_bias,
                softcap=softcap, z_loss=z_loss, budget_bytes=130 * vocab * 2,
            )  # fmt: skip
            runs.append((loss, grad_hidden, grad_weight, grad_bias))
        errors = [((f.double() - w).norm() / w.norm()).item() for f, w in zip(runs[0], wanted, strict=True)]
        worst[dtype] = max(worst[dtype], *errors)
        if not max(errors) < limits[dtype]:
            failed.append(f"{dtype} {shape} all options {all_options}: loss, hidden, weight, bias {errors}")
        if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
            failed.append(f"{dtype} {shape} all options {all_options}: two runs differ in their bits")
    torch.use_deterministic_algorithms(False)
    print("check: worst relative error", ", ".join(f"{d}: {e:.1e} (limit {limits[d]:g})" for d, e in worst.items()))
    print(f"check: bf16 products add to fp32 in place: {ours._product_adds_to_fp32(inputs[0].device, torch.bfloat16)}")
    if failed:
        sys.exit("\n".join(["check FAILED", *failed]))


# ------------------------------------------------------------------------------------------------- kernel and products


def kernel(copy_rate: float) -> None:
    num_rows, vocab = 2048, 152_064
    logits = torch.randn(num_rows, vocab, device=DEVICE, dtype=torch.bfloat16)
    targets, loss = torch.randint(0, vocab, (num_rows,), device=DEVICE), torch.empty(num_rows, device=DEVICE)
    print(f"\nkernel, {num_rows} x {vocab}: us, and share of the copy bandwidth, counting 4 bytes a logit")
    default = ours._MAX_BLOCK_V, ours._MAX_NUM_WARPS
    for block, warps in ((4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)):
        ours._MAX_BLOCK_V, ours._MAX_NUM_WARPS = block, warps
        time = seconds(ours._cross_entropy_triton, logits, targets, loss, None, None, 0.0, 1.0, repeats=10)
        share, mark = logits.numel() * 4 / time / copy_rate, "  <- default" if (block, warps) == default else ""
        print(f"  block {block:6} warps {warps:2} {time * 1e6:8.0f} us {share:6.2f}{mark}")
    ours._MAX_BLOCK_V, ours._MAX_NUM_WARPS = default


def product_seconds(hidden_CH, weight_VH, grad_weight_VH, chunk_CV) -> list[float]:
    """Of hidden @ W^T; gradient @ W to the compute dtype, to fp32, and as a sum of 2 and of 4 parts of V; and
    gradient^T @ hidden, added to fp32. On the values of a real step: zeros, for one, are faster to multiply."""
    num_rows = len(hidden_CH)

    def in_parts(parts):
        grads = chunk_CV.view(num_rows, parts, -1).transpose(0, 1)
        return torch.bmm(grads, weight_VH.view(parts, -1, weight_VH.shape[1]), out_dtype=torch.float32).sum(0)

    project = seconds(torch.mm, hidden_CH, weight_VH.T, out=chunk_CV)
    targets, loss = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE), torch.empty(num_rows, device=DEVICE)
    ours._cross_entropy_triton(chunk_CV, targets, loss, None, None, 0.0, 1.0)
    out, wide = torch.empty_like(hidden_CH), torch.empty_like(hidden_CH, dtype=torch.float32)
    return [
        project,
        seconds(torch.addmm, out, chunk_CV, weight_VH, beta=0, alpha=0.5, out=out),
        seconds(torch.mm, chunk_CV, weight_VH, out_dtype=torch.float32, out=wide),
        seconds(in_parts, 2),
        seconds(in_parts, 4),
        seconds(ours._add_product, grad_weight_VH, chunk_CV, hidden_CH, 0.5, True),
    ]


def products(gemm_rate: float) -> None:
    vocab = VOCABS[-1]
    rows = (768, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 6144)
    print(f"\nproducts, V {vocab}: share of the GEMM rate. x: hidden @ W^T. dx: gradient @ W to bf16, to fp32, as a")
    print("sum of 2 and of 4 parts of V. dW: gradient^T @ hidden added to fp32. all: x, dx and dW together")
    print(f"{'H':>5} {'rows':>5}" + "".join(f"{name:>7}" for name in ("x", "dx", "fp32", "2", "4", "dW", "all")))
    for hidden in HIDDENS:
        hidden_NH, weight_VH, _ = make_inputs(max(rows), hidden, vocab)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        chunk = torch.empty(max(rows), vocab, device=DEVICE, dtype=torch.bfloat16)
        for n in rows:
            times = product_seconds(hidden_NH[:n], weight_VH, grad_weight_VH, chunk[:n])
            limit = 2 * n * vocab * hidden / gemm_rate
            shares = [limit / time for time in times] + [3 * limit / (times[0] + times[1] + times[5])]
            print(f"{hidden:5} {n:5}" + "".join(f"{share:7.2f}" for share in shares), flush=True)


# -------------------------------------------------------------------------------------------------------------- table


class Ours:
    def __init__(self, inputs, supervised, budget_bytes):
        self.hidden_NH, self.weight_VH, targets_N = inputs
        self.supervised = supervised  # positions, known on the host in training
        self.targets = targets_N if supervised is None else targets_N[supervised]
        self.budget_bytes = budget_bytes
        self.grad_weight = torch.zeros_like(self.weight_VH, dtype=torch.float32)

    def forward_backward(self):
        hidden = self.hidden_NH if self.supervised is None else self.hidden_NH.index_select(0, self.supervised)
        loss, grad = linear_cross_entropy(
            hidden, self.weight_VH, self.targets, gradient_scale=1 / len(self.targets), grad_weight_VH=self.grad_weight,
            budget_bytes=self.budget_bytes,
        )  # fmt: skip
        if self.supervised is not None:
            grad = torch.zeros_like(self.hidden_NH).index_copy_(0, self.supervised, grad)
        return loss, grad

    def forward(self):
        return linear_cross_entropy(
            self.hidden_NH, self.weight_VH, self.targets, gradient_scale=1.0, need_grad_hidden=False,
            budget_bytes=self.budget_bytes,
        )  # fmt: skip


class Differentiable:
    """A function of (hidden, weight, targets) whose gradients autograd hands out."""

    def __init__(self, function, inputs):
        hidden, weight, self.targets = inputs
        self.hidden, self.weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        self.function = function

    def forward_backward(self):
        self.hidden.grad = self.weight.grad = None
        loss = self.function(self.hidden, self.weight, self.targets)
        loss.backward()
        grads = self.hidden.grad, self.weight.grad
        self.hidden.grad = self.weight.grad = None
        return loss, grads

    def forward(self):
        with torch.no_grad():
            return self.function(self.hidden.detach(), self.weight.detach(), self.targets)


def liger(accum_dtype):
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        print(f"no Liger-Kernel here: {error}")
        return None
    return lambda h, w, t: liger_fused_linear_cross_entropy(h, w, t, reduction="sum", accum_dtype=accum_dtype)


def plain_loss(hidden_NH, weight_VH, targets_N):
    return F.cross_entropy((hidden_NH @ weight_VH.T).float(), targets_N, reduction="sum")


def table(gemm_rate: float, with_compiled: bool) -> None:
    others = {"Liger": liger(None), "Liger, fp32 sum": liger(torch.float32)}
    if with_compiled:
        others["compiled plain"] = torch.compile(plain_loss, dynamic=True)
    others = {name: function for name, function in others.items() if function is not None}
    print("\ntable: ms of forward + backward and of forward alone; share of the GEMM limit, by supervised rows;")
    print("Liger's time over this one's; extra memory, and that over the whole logits in bf16")
    print("third: one row in three supervised; its Liger is Liger on the same")
    for vocab, hidden, tokens in itertools.product(VOCABS, HIDDENS, TOKENS):
        inputs = make_inputs(tokens, hidden, vocab)
        full_logits = tokens * vocab * 2
        third = torch.arange(0, tokens, 3, device=DEVICE)
        masked = torch.full_like(inputs[2], IGNORED).index_copy_(0, third, inputs[2][third])
        rows = {name: functools.partial(Differentiable, f, inputs) for name, f in others.items()}
        for share in (0.1, 0.195, 0.4):
            rows[f"ours, {share:.1%}"] = functools.partial(Ours, inputs, None, int(share * full_logits))
        rows["ours, 1 GiB"] = functools.partial(Ours, inputs, None, GIB)
        if "Liger" in others:
            rows["Liger, third"] = functools.partial(Differentiable, others["Liger"], (*inputs[:2], masked))
        rows["ours 19.5%, third"] = functools.partial(Ours, inputs, third, int(0.195 * full_logits))
        print(f"\nV {vocab}, H {hidden}, {tokens} tokens, whole logits {full_logits / GIB:.2f} GiB")
        print(f"{'':18} {'rows':>5} {'f+b ms':>8} {'limit':>6} {'Liger':>6} {'f ms':>7} {'GiB':>6} {'logits':>6}")
        yardstick: dict[bool, float] = {}
        for name, make in rows.items():
            row, is_third = make(), name.endswith("third")
            time = seconds(row.forward_backward)
            forward = float("nan") if is_third else seconds(row.forward)
            extra = extra_bytes(row.forward_backward)
            yardstick.setdefault(is_third, time if name.startswith("Liger") else float("nan"))
            supervised = len(third) if is_third else tokens
            chunk = ours.rows_per_chunk(supervised, vocab * 2, row.budget_bytes) if isinstance(row, Ours) else ""
            limit = 6 * supervised * vocab * hidden / gemm_rate
            print(
                f"{name:18} {chunk:>5} {time * 1e3:8.2f} {limit / time:6.2f} {yardstick[is_third] / time:6.2f}"
                f" {forward * 1e3:7.2f} {extra / GIB:6.2f} {extra / full_logits:6.3f}",
                flush=True,
            )
            del row


def main(parts: list[str]) -> None:
    known = ("check", "kernel", "products", "table", "compiled")
    if unknown := set(parts) - set(known):
        sys.exit(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    parts = parts or [part for part in known if part != "compiled"]
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU: torch.cuda.is_available() is false")
    torch.manual_seed(int.from_bytes(os.urandom(4)))  # fresh inputs every run
    if "check" in parts:
        check()
    square = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    gemm_rate = 2 * 8192**3 / seconds(torch.mm, *square, repeats=10)
    source = torch.empty(GIB, device=DEVICE, dtype=torch.uint8).random_()
    copy_rate = 2 * GIB / seconds(torch.empty_like(source).copy_, source, repeats=10)
    del square, source
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {ours.triton.__version__}", end="; ")
    print(f"GEMM 8192 cubed {gemm_rate / 1e12:.0f} TFLOP/s; copy {copy_rate / 1e12:.2f} TB/s")
    if "kernel" in parts:
        kernel(copy_rate)
    if "products" in parts:
        products(gemm_rate)
    if "table" in parts or "compiled" in parts:
        table(gemm_rate, "compiled" in parts)


if __name__ == "__main__":
    main(sys.argv[1:])
