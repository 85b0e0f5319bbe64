"""One decoder layer as the GPU actor runs it, forward and then backward from its input: ours, compiled, Liger, plain.

    python benchmarks/bench_layer.py [--cases 3b:4,3b:8,3b:32,7b:4,7b:8,7b:32] [--systems ...] [--kernel-cases 3b:8]
                                     [--seconds 140] [--seq 1024] [--profile FILE]

A case is a Qwen2.5 shape and the rows of a micro-batch. Systems, each with the same weights, input and gradient, bf16:
    plain        transformers' layer; forward without autograd, then forward with it and torch.autograd.grad
    liger        the same with Liger-Kernel's norm, rotation and SwiGLU in this instance
    compiled     torch.compile of the plain layer, each shape compiled on its own: the mark to beat
    one-graph    torch.compile of recomputation and gradients as one function, so that the compiler may drop what no
                 gradient needs; forward as in `compiled`
    ours         model/recompute.py
and, of ours, one change each:
    ours-cudnn, ours-flash   that attention backend
    ours-apart               query, key, value and gate, up as products of their own
    ours-torch               plain PyTorch instead of the Triton kernels
    ours-sums                gradients added to fp32 sums by the products, as for several micro-batches
    compiled-sums            `compiled`, its gradients added to fp32 sums: what ours-sums compares with
At --kernel-cases, the kernels of kernels/ within the compiled layer, one by one and together (kernels-norm, -rope,
-swiglu, -all), and together in the layer that is not compiled (kernels-eager).

TFLOP/s counts 8 x P x tokens + attention, P the weights of the products: what a full recomputation does, for all
systems alike. ratio: the compiled layer's time over this one's. extra: peak memory beside weights, input and incoming
gradient. err: the largest relative error of an output or gradient against transformers' layer in fp32. Optional rows
are left out, and said so, once --seconds have passed. --profile writes the kernels' times of one backward of `ours` and
of `compiled`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slideformer_ray.kernels import rms_norm, rope, swiglu, switch
from slideformer_ray.model import attention
from slideformer_ray.model.layers import LayerTemplate, RotaryTable, describe_model
from slideformer_ray.model.recompute import RecomputedLayer
from slideformer_ray.model.shapes import shape

# Each shape is compiled on its own; past the limit PyTorch would silently run it uncompiled.
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000

GIB = 1 << 30
START = time.perf_counter()
ROUNDS, SECONDS_A_ROUND = 3, 0.15
REQUIRED = ("plain", "liger", "compiled", "ours")
OPTIONAL = ("one-graph", "ours-cudnn", "ours-flash", "ours-apart", "ours-torch", "compiled-sums", "ours-sums")
KERNELS = {
    "kernels-all": (rms_norm, rope, swiglu),
    "kernels-norm": (rms_norm,),
    "kernels-rope": (rope,),
    "kernels-swiglu": (swiglu,),
    "kernels-eager": (rms_norm, rope, swiglu),
}


@dataclasses.dataclass
class Result:
    case: str
    system: str
    forward_ms: float
    backward_ms: float
    host_ms: float
    extra_gib: float
    compile_seconds: float
    error: float
    tflops: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


class Case:
    """A layer of a shape with random weights in a flat buffer, an input and the gradient of its output."""

    def __init__(self, name: str, config: PretrainedConfig, rows: int, seq: int, device: str, dtype: torch.dtype):
        self.name, self.config, self.rows, self.seq, self.device, self.dtype = name, config, rows, seq, device, dtype
        self.spec = describe_model(config)
        self.block = self.spec.decoder[0]
        torch.manual_seed(0)
        self.flat = torch.zeros(self.block.numel, device=device, dtype=dtype)
        for p in self.block.params:
            view = self.flat[p.offset : p.offset + p.numel].view(p.shape)
            view.normal_(1.0 if p.name.endswith("norm.weight") else 0.0, 0.02)
        self.x = torch.randn(rows, seq, config.hidden_size, device=device, dtype=dtype)
        self.grad = torch.randn_like(self.x)
        self.tables = RotaryTable(config, device, dtype)(torch.arange(seq, device=device)[None])
        self.sums = torch.zeros(self.block.numel, device=device)

    @property
    def flops(self) -> float:
        """8 x P x tokens, and attention: two products over half the positions forward, 2.5 times that backward."""
        weights = sum(p.numel for p in self.block.params if len(p.shape) == 2)
        return self.rows * self.seq * (8 * weights + 4.5 * 2 * self.seq * self.config.hidden_size)

    def leaves(self, views: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(v.detach().requires_grad_() for v in views)


class System:
    """forward() -> output; backward() -> (gradient of x, gradients of the parameters). Both as the GPU actor calls."""

    def __init__(self, case: Case, template: LayerTemplate, *, compiled: bool = False, sums: bool = False):
        self.case, self.params = case, case.leaves(template.views(case.block, case.flat))
        self.run = torch.compile(template.__call__, dynamic=False) if compiled else template
        self.sums = template.views(case.block, case.sums) if sums else None
        self.names = [(name,) for name in template.param_names]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run(self.case.x, *self.case.tables, self.params)

    def backward(self) -> tuple[Tensor, Sequence[Tensor]]:
        x = self.case.x.detach().requires_grad_()
        out = self.run(x, *self.case.tables, self.params)
        grad_x, *grads = torch.autograd.grad(out, [x, *self.params], self.case.grad)
        if self.sums is not None:
            torch._foreach_add_(self.sums, grads)
        return grad_x, grads


class OneGraph(System):
    def __init__(self, case: Case, template: LayerTemplate):
        super().__init__(case, template, compiled=True)

        def gradients(x, cos, sin, params, grad):
            _, pull = torch.func.vjp(lambda x, *params: template(x, cos, sin, params), x, *params)
            return pull(grad)

        self.gradients = torch.compile(gradients, dynamic=False, fullgraph=True)
        self.plain = tuple(p.detach() for p in self.params)

    def backward(self):
        with torch.no_grad():
            grad_x, *grads = self.gradients(self.case.x, *self.case.tables, self.plain, self.case.grad)
        return grad_x, grads


class Ours(System):
    def __init__(
        self, case: Case, template: LayerTemplate, *, sums: bool = False, kernels: str | None = None, **options
    ):
        self.case, self.kernels = case, kernels
        self.layer = RecomputedLayer(template, case.spec.decoder, **options)
        self.params = case.leaves(self.layer.views(case.block, case.flat))
        self.sums = self.layer.views(case.block, case.sums) if sums else None
        self.names = self.layer.pieces

    def forward(self):
        return self._with_kernels(lambda: self.layer.forward(self.case.x, *self.case.tables, self.params))

    def backward(self):
        case = self.case
        return self._with_kernels(
            lambda: self.layer.backward(
                case.x, *case.tables, self.params, case.grad, grads=self.sums, accumulate=self.sums is not None
            )
        )

    def _with_kernels(self, call: Callable):
        if self.kernels is None:
            return call()
        before = os.environ.get(switch.VARIABLE)
        os.environ[switch.VARIABLE] = self.kernels
        switch._read_setting.cache_clear()
        try:
            return call()
        finally:
            os.environ.pop(switch.VARIABLE)
            if before is not None:
                os.environ[switch.VARIABLE] = before
            switch._read_setting.cache_clear()


def make(name: str, case: Case) -> System | None:
    """None where what it needs is not installed."""
    template = LayerTemplate(case.config, 0, case.dtype, case.device)
    if name == "liger":
        return System(case, template) if install_liger(template.module, case.config) else None
    if name in KERNELS:
        ours = LayerTemplate(case.config, 0, case.dtype, case.device, attention.register())
        for kernel in KERNELS[name]:
            kernel.install(ours.module)
        return System(case, ours, compiled=name != "kernels-eager")
    return {
        "plain": lambda: System(case, template),
        "compiled": lambda: System(case, template, compiled=True),
        "compiled-sums": lambda: System(case, template, compiled=True, sums=True),
        "one-graph": lambda: OneGraph(case, template),
        "ours": lambda: Ours(case, template),
        "ours-cudnn": lambda: Ours(case, template, attention_path="cudnn"),
        "ours-flash": lambda: Ours(case, template, attention_path="flash"),
        "ours-apart": lambda: Ours(case, template, join=False),
        "ours-torch": lambda: Ours(case, template, kernels="torch"),
        "ours-sums": lambda: Ours(case, template, sums=True),
    }[name]()


def install_liger(module: nn.Module, config: PretrainedConfig) -> bool:
    """Liger's kernels in this instance alone; their modules' parameters have transformers' names."""
    try:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm
        from liger_kernel.transformers.rope import liger_rotary_pos_emb
        from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
    except ImportError:
        return False
    with torch.device("meta"):
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(module, name, LigerRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        module.mlp = LigerSwiGLUMLP(config)
    module.to(torch.bfloat16)
    rope.install(module, liger_rotary_pos_emb)
    return True


# ------------------------------------------------------------------------------------------------------------ measuring


def synchronize(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(case: Case, call: Callable[[], Any], repeats: int = 1) -> float:
    """One call, on the GPU's clock where there is one; several at once keep its queue filled, as a step does."""
    if case.device != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def host_seconds(case: Case, call: Callable[[], Any]) -> float:
    """How long the host takes to launch it, from an idle GPU."""
    times = []
    for _ in range(3):
        synchronize(case)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize(case)
    return min(times)


def extra_bytes(case: Case, call: Callable[[], Any]) -> int:
    if case.device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    del result
    return extra


def reference(case: Case) -> dict[str, Tensor]:
    """Output and gradients of transformers' layer in fp32, on the same values."""
    template = LayerTemplate(case.config, 0, torch.float32, case.device)
    params = tuple(v.detach().float().requires_grad_() for v in template.views(case.block, case.flat))
    x = case.x.float().requires_grad_()
    out = template(x, *(t.float() for t in case.tables), params)
    grads = torch.autograd.grad(out, [x, *params], case.grad.float())
    return dict(zip(["out", "x", *template.param_names], [out.detach(), *grads], strict=True))


def error_of(system: System, case: Case, truth: dict[str, Tensor]) -> float:
    """The largest of the output and all gradients, by ||found - true|| / ||true||."""
    case.sums.zero_()
    found = {"out": system.forward()}
    found["x"], grads = system.backward()
    sizes = {p.name.split(".", 3)[-1]: p.shape[0] for p in case.block.params}
    for names, grad in zip(system.names, grads, strict=True):
        found.update(zip(names, grad.split([sizes[n] for n in names]), strict=True))
    return max(((f.float() - truth[n]).norm() / truth[n].norm()).item() for n, f in found.items())


def measure(case: Case, names: Sequence[str], deadline: float, skipped: list[str]) -> list[Result]:
    truth = reference(case)
    systems: dict[str, System] = {}
    results: dict[str, Result] = {}
    for name in names:
        if name not in REQUIRED and time.perf_counter() - START > deadline:
            skipped.append(f"{case.name} {name}")
            continue
        try:
            system = make(name, case)
            if system is None:
                skipped.append(f"{case.name} {name} (not installed)")
                continue
            start = time.perf_counter()
            error = error_of(system, case, truth)
            synchronize(case)
            first = time.perf_counter() - start
            system.forward(), system.backward()
            synchronize(case)
            extra = max(extra_bytes(case, system.forward), extra_bytes(case, system.backward))
            host = host_seconds(case, system.forward) + host_seconds(case, system.backward)
        except Exception as failure:
            if name == "ours":
                raise
            skipped.append(f"{case.name} {name} ({type(failure).__name__}: {str(failure).splitlines()[0][:150]})")
            continue
        systems[name] = system
        results[name] = Result(case.name, name, 0.0, 0.0, host * 1e3, extra / GIB, first, error)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in systems}
    for _ in range(ROUNDS):  # systems take turns, so that a GPU which warms up favours none
        for name, system in systems.items():
            once = seconds_of(case, system.forward) + seconds_of(case, system.backward)
            repeats = 1 if once > 0.04 else 4
            for _ in range(max(2, min(15, int(SECONDS_A_ROUND / once / repeats)))):
                times[name][0].append(seconds_of(case, system.forward, repeats))
                times[name][1].append(seconds_of(case, system.backward, repeats))
    for name, (forward, backward) in times.items():
        result = results[name]
        result.forward_ms, result.backward_ms = (statistics.median(t) * 1e3 for t in (forward, backward))
        result.tflops = case.flops / result.total_ms / 1e9
    return list(results.values())


def gemm_rate(device: str) -> float:
    """FLOP/s of a large bf16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * 8192**3 / statistics.median(times[2:])


def profile(case: Case, file: str) -> None:
    from torch.profiler import ProfilerActivity

    with open(file, "w") as out:
        for name in ("ours", "compiled"):
            system = make(name, case)
            assert system is not None
            system.backward()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
                system.backward()
                torch.cuda.synchronize()
            out.write(f"{case.name} {name}, one backward\n")
            out.write(trace.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))
            out.write("\n\n")


def print_table(results: Sequence[Result]) -> None:
    titles = ("fwd ms", "bwd ms", "total", "TFLOP/s", "ratio", "extra GiB", "host ms", "first s", "err")
    print(f"{'case':<7}{'system':<16}" + "".join(f"{title:>10}" for title in titles))
    for case in dict.fromkeys(r.case for r in results):
        rows = [r for r in results if r.case == case]
        mark = next((r.total_ms for r in rows if r.system == "compiled"), float("nan"))
        for r in rows:
            print(
                f"{r.case:<7}{r.system:<16}{r.forward_ms:10.3f}{r.backward_ms:10.3f}{r.total_ms:10.3f}{r.tflops:10.0f}"
                f"{mark / r.total_ms:10.3f}{r.extra_gib:10.2f}{r.host_ms:10.2f}{r.compile_seconds:10.1f}{r.error:10.1e}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="3b:4,3b:8,3b:32,7b:4,7b:8,7b:32")
    parser.add_argument("--systems", default=",".join((*REQUIRED, *OPTIONAL)))
    parser.add_argument("--kernel-cases", default="3b:8")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile")
    args = parser.parse_args()
    if args.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GEMM {gemm_rate('cuda') / 1e12:.0f} TFLOP/s")
        print(switch.describe())
        print(attention.describe("cuda", torch.bfloat16, 16, 2, 128))
    skipped: list[str] = []
    results: list[Result] = []
    for name in args.cases.split(","):
        size, rows = name.split(":")
        config = shape(f"qwen2.5-{size}")
        case = Case(name, config, int(rows), args.seq, args.device, torch.bfloat16)
        chosen = args.systems.split(",")
        # What is compiled again takes seconds: for the kernel cases alone, and after all that must be there.
        names = [n for n in chosen if n not in ("one-graph", "compiled-sums") or name in args.kernel_cases.split(",")]
        results += measure(case, names, args.seconds, skipped)
        if args.profile and name == args.kernel_cases.split(",")[0]:
            profile(case, args.profile)
        print(f"{name} done at {time.perf_counter() - START:.0f} s", flush=True)
        del case
    for name in (n for n in args.kernel_cases.split(",") if n in args.cases.split(",")):
        size, rows = name.split(":")
        case = Case(name, shape(f"qwen2.5-{size}"), int(rows), args.seq, args.device, torch.bfloat16)
        results += measure(case, list(KERNELS), args.seconds, skipped)
    if skipped:
        print("left out:", "; ".join(skipped))
    print_table(results)


if __name__ == "__main__":
    main()
