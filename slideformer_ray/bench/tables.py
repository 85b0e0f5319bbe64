"""The benchmark's tables: speed, memory, what the GPU waits for. Tested by tests/bench/test_tables.py."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from slideformer_ray.bench.result import BenchResult, Failure, Outcome, of_system
from slideformer_ray.config import GIB


def tables(outcomes: Sequence[Outcome]) -> Group:
    found = [outcome for outcome in outcomes if isinstance(outcome, BenchResult)]
    parts: list[Table | str] = []
    if found:
        first = found[0]
        versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
        parts += [f"{first.shape}, {first.parameters:,} parameters, on {first.device}", versions, ""]
        parts += [_speed(found), "", _memory(found), ""]
        if windows := of_system(outcomes, "window"):
            parts += [_waits(windows), ""]
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            parts.append(f"not measured: {outcome.case.system}, {outcome.case.label}: {outcome.reason}")
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _speed(results: Sequence[BenchResult]) -> Table:
    table = _table(
        "Speed", "tokens", "step s", "min - max", "tokens/s", "TFLOP/s 6N", "8N", "of resident", "of its best"
    )
    for r in results:
        table.add_row(
            _name(r),
            f"{r.tokens:,}",
            f"{r.step_seconds:.4f}",
            f"{min(r.seconds):.4f} - {max(r.seconds):.4f}",
            f"{r.tokens_per_second:,.0f}",
            f"{r.tflops(6):.1f}",
            f"{r.tflops(8):.1f}",
            _ratio(r, same_batch(r, results)),
            _ratio(r, best_resident(results)),
        )
    return table


def same_batch(result: BenchResult, results: Sequence[BenchResult]) -> BenchResult | None:
    """The resident model's result on the same rows."""
    return next((r for r in of_system(results, "resident") if r.rows == result.rows), None)


def best_resident(results: Sequence[BenchResult]) -> BenchResult | None:
    """The resident model at the batch at which it is fastest."""
    return max(of_system(results, "resident"), key=lambda r: r.tokens_per_second, default=None)


def _ratio(result: BenchResult, reference: BenchResult | None) -> str:
    return f"{result.tokens_per_second / reference.tokens_per_second:.3f}" if reference is not None else "-"


def _memory(results: Sequence[BenchResult]) -> Table:
    table = _table(
        "Memory, GiB", "GPU", "reserved", "planned", "host: machine", "processes", "planned", "activations in it"
    )
    for r in results:
        sizes = (r.gpu_peak_bytes, r.gpu_reserved_bytes, r.planned_gpu_bytes)
        host = (r.machine_bytes, r.process_bytes, r.planned_host_bytes, r.offloaded_bytes)
        table.add_row(_name(r), *map(_gib, (*sizes, *host)))
    return table


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.2f}"


def _waits(results: Sequence[BenchResult]) -> Table:
    """Exposed: seconds in which the compute lane idles, by what it waits for; causes that cost nothing are left out."""
    causes = [cause for cause in results[0].exposed_seconds if any(r.exposed_seconds[cause] >= 5e-5 for r in results)]
    table = _table("What the GPU waits for, ms a step", "hiding fwd", "bwd", "exposed", *causes)
    for r in results:
        exposed = [r.exposed_seconds[cause] for cause in causes]
        factors = (r.forward_hiding_factor, r.backward_hiding_factor)
        table.add_row(
            _name(r),
            *("-" if factor is None else f"{factor:.2f}" for factor in factors),
            *(f"{seconds * 1e3:.1f}" for seconds in (sum(r.exposed_seconds.values()), *exposed)),
        )
    return table


def _name(result: BenchResult) -> str:
    return f"resident, {result.label}" if result.system == "resident" else result.label
