"""Step time of a model shape through the tiers, and of the same training resident on the GPU, in one run.

    python benchmarks/train_step.py --shape qwen2.5-3b --rows 32 --seq 1024 --gpu-gib 24 --compare

Random weights and ids, every token supervised, constant learning rate. TFLOP/s is 6 x parameters x tokens / step. The
resident run is plain PyTorch: bf16 weights and bf16 AdamW states (fused), every layer checkpointed, Liger kernels where
they are installed: the fastest that a GPU which holds everything would do with an optimizer of half the precision. Each
runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

TRACED_STEPS = 3  # after the timed ones


class HostMemory:
    """Peak of what the whole machine uses, from MemAvailable: what no process-by-process sum misses."""

    def __init__(self) -> None:
        self.base = self.lowest = self._available()
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def _available() -> int:
        line = next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024

    def _watch(self) -> None:
        while True:
            self.lowest = min(self.lowest, self._available())
            time.sleep(0.05)

    @property
    def peak_gib(self) -> float:
        return (self.base - self.lowest) / 2**30


def result(
    system: str,
    args: argparse.Namespace,
    parameters: int,
    seconds: list[float],
    gpu_bytes: int,
    host_gib: float,
    **more,
) -> dict:
    step = statistics.median(seconds)
    tokens = args.rows * args.seq
    return {
        "system": system, "shape": args.shape, "rows": args.rows, "seq": args.seq, "tokens": tokens,
        "parameters": parameters, "step_seconds": round(step, 4), "min": round(min(seconds), 4),
        "max": round(max(seconds), 4), "tokens_per_second": round(tokens / step),
        "tflops": round(6 * parameters * tokens / step / 1e12, 1), "gpu_gib": round(gpu_bytes / 2**30, 2),
        "host_gib": round(host_gib, 1), **more,
    }  # fmt: skip


def run_tiers(args: argparse.Namespace) -> dict:
    memory = HostMemory()
    import numpy as np

    from slideformer_ray.budget import Machine, resolve
    from slideformer_ray.config import RunConfig
    from slideformer_ray.data.batches import MicroBatch, StepBatch
    from slideformer_ray.model.layers import describe_model, load_hf_config
    from slideformer_ray.model.shapes import write_shape
    from slideformer_ray.observe.trace import measured_timeline, write_chrome_trace
    from slideformer_ray.schedule import build_step
    from slideformer_ray.tiers import RayTiers
    from slideformer_ray.trainer import submit_batch

    folder = Path(tempfile.mkdtemp())
    config = RunConfig.from_dict({
        "run_dir": folder / "run",
        "model": {"path": write_shape(args.shape, folder), "random_init": True},
        "data": {"train": [folder / "none.jsonl"], "seq_len": args.seq},
        "training": {"steps": args.steps, "rows_per_step": args.rows, "precision": args.precision,
                     "micro_batch_rows": args.micro_batch_rows or args.rows, "overlap": not args.no_overlap},
        "optimizer": {"learning_rate": args.lr, "schedule": "constant", "max_grad_norm": args.max_grad_norm},
        "budget": {"gpu_gib": args.gpu_gib},
        "placement": {"num_optimizer_actors": args.actors, "threads_per_optimizer_actor": args.threads,
                      "layers": args.layers, "gradient_slots": args.gradient_slots,
                      "activation_slots": args.activation_slots},
    })  # fmt: skip
    hf_config = load_hf_config(config.model.path)
    spec = describe_model(hf_config)
    plan = resolve(config, spec, hf_config.intermediate_size, Machine.read())
    layout = plan.layout
    rng = np.random.default_rng(0)

    def batch() -> StepBatch:
        micro = []
        for start in range(0, args.rows, layout_rows):
            ids = rng.integers(0, hf_config.vocab_size, (min(layout_rows, args.rows - start), args.seq), dtype=np.int32)
            targets = np.full_like(ids, -100)
            targets[:, :-1] = ids[:, 1:]
            micro.append(MicroBatch(ids, targets))
        supervised = sum(int((m.targets != -100).sum()) for m in micro)
        return StepBatch(tuple(micro), supervised, args.rows * args.seq, ())

    layout_rows = config.micro_batch_rows
    started = time.perf_counter()
    with RayTiers(config, hf_config, spec, plan, args.steps + TRACED_STEPS) as tiers:
        up = time.perf_counter() - started
        tiers.load_weights(None)
        loaded = time.perf_counter() - started - up
        batches = [batch() for _ in range(2)]
        ahead: deque = deque()
        ends, losses, waits, busy, spans = [], [], [], [], []
        timed_steps = args.steps + TRACED_STEPS
        for step in range(timed_steps):
            if len(ahead) == 2:
                report = tiers.gather(ahead.popleft())
                _note(report, ends, losses, waits, busy, spans)
            batch_now, batch_next = batches[step % 2], batches[(step + 1) % 2]
            trace = step >= args.steps
            ahead.append(submit_batch(tiers, batch_now, step, step, train=True, following=batch_next, trace=trace))
        while ahead:
            report = tiers.gather(ahead.popleft())
            _note(report, ends, losses, waits, busy, spans)
        peak, reserved = report.gpu.peak_gpu_bytes, report.gpu.reserved_gpu_bytes
        actors = [f"{r.name}: {r.detail}" for r in tiers.reports()]
    seconds = [b - a for a, b in pairwise(ends)][args.warmup : -TRACED_STEPS]
    timeline = measured_timeline([build_step(layout.shape(config.num_micro_batches, True))] * TRACED_STEPS, spans)
    exposed = {cause: round(value / TRACED_STEPS, 4) for cause, value in timeline.exposed_seconds.items() if value}
    if args.trace:
        write_chrome_trace(Path(args.trace), spans)
    return result(
        "slideformer_ray", args, spec.num_parameters, seconds, peak, memory.peak_gib,
        reserved_gib=round(reserved / 2**30, 2), planned_gpu_gib=round(plan.gpu_bytes / 2**30, 2),
        planned_host_gib=round(plan.host_bytes / 2**30, 1), start_seconds=round(up, 1), load_seconds=round(loaded, 1),
        losses=[round(x, 3) for x in losses[:2] + losses[-1:]], gpu_waits=waits[-1], update_busy=round(busy[-1], 3),
        first_step=round(ends[0] - started - up - loaded, 1),
        slots=[layout.gradient_slots, layout.activation_slots, layout.num_host_cells],
        threads=[layout.num_optimizer_actors, layout.threads_per_optimizer_actor], actors=actors,
        exposed=exposed, hiding_factor=round(timeline.hiding_factor, 2),
        traced_step=round(timeline.step_seconds[-1], 4),
    )  # fmt: skip


def _note(report, ends, losses, waits, busy, spans) -> None:
    spans += [*report.gpu.spans, *(span for update in report.updates for span in update.spans)]
    ends.append(time.perf_counter())
    losses.append(report.gpu.loss)
    waits.append({k: round(v, 4) for k, v in report.gpu.waited_seconds.items()})
    busy.append(max(u.busy_seconds for u in report.updates))


def run_resident(args: argparse.Namespace) -> dict:
    memory = HostMemory()
    import torch
    from transformers import AutoModelForCausalLM

    from slideformer_ray.model.shapes import shape

    config = shape(args.shape)
    liger = _apply_liger(config.model_type)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    ids = torch.randint(0, config.vocab_size, (args.rows, args.seq), device="cuda")
    seconds = []
    for step in range(args.warmup + 6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - started)
    parameters = sum(p.numel() for p in model.parameters())
    return result(
        "resident", args, parameters, seconds, torch.cuda.max_memory_allocated(), memory.peak_gib, liger=liger
    )


def _apply_liger(model_type: str) -> bool:
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        return False
    getattr(liger, f"apply_liger_kernel_to_{model_type}")(fused_linear_cross_entropy=True, cross_entropy=False)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="qwen2.5-3b")
    add("--rows", type=int, default=32)
    add("--seq", type=int, default=1024)
    add("--micro-batch-rows", type=int)
    add("--gpu-gib", type=float, default=24)
    add("--actors", type=int)
    add("--threads", type=int)
    add("--gradient-slots", type=int)
    add("--activation-slots", type=int)
    add("--steps", type=int, default=9)
    add("--warmup", type=int, default=2)
    add("--lr", type=float, default=1e-5)
    add("--max-grad-norm", type=float)
    add("--precision", default="bf16")
    add("--layers", default="auto")
    add("--no-overlap", action="store_true")
    add("--trace", help="write the lanes of the last steps there, for Perfetto")
    add("--compare", action="store_true", help="also run the resident training, first, and print the ratio")
    add("--only", choices=("tiers", "resident"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print("RESULT " + json.dumps((run_tiers if args.only == "tiers" else run_resident)(args)), flush=True)
        return
    results = {}
    for system in (["resident"] if args.compare else []) + ["tiers"]:
        process = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", system], stdout=subprocess.PIPE, text=True
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(process.stdout)
            sys.exit(f"{system}: ended with code {process.returncode} and no result")
        results[system] = json.loads(lines[-1].removeprefix("RESULT "))
        print(json.dumps(results[system]), flush=True)
    if args.compare:
        ratio = results["resident"]["step_seconds"] / results["tiers"]["step_seconds"]
        ours, resident = results["tiers"]["gpu_gib"], results["resident"]["gpu_gib"]
        print(f"speed against resident: {ratio:.3f} x, with {ours} of {resident} GiB of GPU memory")


if __name__ == "__main__":
    main()
