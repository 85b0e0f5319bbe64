"""Times, memory and limits for the benchmarks of memory-bound kernels, which import this file from beside them.

Such kernels run for tens of microseconds, as long as a launch takes, and their inputs may fit the L2 cache. So calls on
several sets of inputs, larger together than the cache, are captured into one CUDA graph, and its replay is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Each shape is compiled on its own; past the limit PyTorch would silently run it uncompiled.
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000

GIB = 1 << 30
NUM_REPLAYS = 7
# Several times the L2 cache of any GPU in sight.
ROTATED_BYTES = GIB // 2


def num_sets(bytes_of_one: int) -> int:
    return max(1, -(-ROTATED_BYTES // bytes_of_one))


def gpu_seconds(calls: Sequence[Callable]) -> float:
    """Seconds of one call on the GPU alone, median over replays of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: compiles, allocates, chooses algorithms
        for call in (*calls[:2], calls[0]):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(NUM_REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times) / len(calls)


def host_seconds(call: Callable, repeats: int = 20) -> float:
    """Seconds of the host to launch one call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return seconds


def extra_bytes(call: Callable) -> int:
    """Peak beside what was there before the call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_rate() -> float:
    """Bytes a second, read plus written, of a large copy on the device: the limit of these kernels."""
    source = torch.randn(GIB // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_seconds([lambda: target.copy_(source)] * 4)


class Table:
    """Rows of one configuration: the first implementation is the one that ratios refer to."""

    def __init__(self, title: str, rate: float):
        self.rate = rate
        print(f"\n{title}")
        print(f"{'':<38}{'forward':>10}{'of copy':>9}{'fwd+bwd':>10}{'of copy':>9}{'ratio':>7}{'extra':>10}{'host':>8}")

    def row(
        self,
        name: str,
        forward: tuple[float, int] | None,
        both: tuple[float, int],
        extra: int,
        host: float,
        against: float,
    ):
        """(seconds, bytes moved at least) of the forward and of forward and backward; extra: peak bytes."""
        line = f"{name:<38}"
        for entry in (forward, both):
            line += f"{entry[0] * 1e6:8.0f}us{entry[1] / entry[0] / self.rate:9.2f}" if entry else f"{'':>19}"
        print(f"{line}{against / both[0]:7.2f}{extra / 2**20:7.0f}MiB{host * 1e6:6.0f}us", flush=True)


def liger(module: str, name: str):
    """A function of Liger-Kernel, or None where it is not installed."""
    try:
        return getattr(__import__(f"liger_kernel.{module}", fromlist=[name]), name)
    except ImportError:
        return None


def heading(what: str) -> float:
    """Print what was measured on what; returns the copy rate."""
    rate = copy_rate()
    print(
        f"{what} on {torch.cuda.get_device_name()}, torch {torch.__version__}; copy bandwidth {rate / 1e12:.2f} TB/s."
    )
    print("GPU time by graph replay over rotated inputs; of copy: least bytes over time, as a share of that bandwidth;")
    print(
        "ratio: Liger's forward + backward over this one's; extra: peak memory beside the inputs; host: time to launch."
    )
    return rate
