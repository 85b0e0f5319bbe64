"""Measures a case through the tiers. Tested by tests/bench/test_window.py."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.bench.batches import random_batch
from slideformer_ray.bench.case import Case
from slideformer_ray.bench.host_memory import MachineMemory
from slideformer_ray.bench.result import BenchResult
from slideformer_ray.budget import resolve
from slideformer_ray.data.batches import StepBatch
from slideformer_ray.machine import Machine, device_name
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.observe.lane_metrics import LaneMetrics, lane_metrics
from slideformer_ray.observe.memory import anonymous_bytes, process_tree
from slideformer_ray.observe.report import version_numbers
from slideformer_ray.observe.trace import Span, measured_timeline, write_chrome_trace
from slideformer_ray.schedule import build_step
from slideformer_ray.tiers import LocalTiers, PendingStep, RayTiers, StepReport, Tiers
from slideformer_ray.trainer import STEPS_AHEAD, submit_batch

# Two batches in turn, so that the embedding rows of the next step are not those of this one.
_NUM_BATCHES = 2


def measure_window(case: Case, memory: MachineMemory) -> BenchResult:
    """Raises what a run does (ConfigError, TierError). `memory`: begun before this process imported torch."""
    with TemporaryDirectory(prefix="slideformer-ray-bench-") as scratch:
        config = case.config(Path(scratch) / "run")
        hf_config = load_hf_config(config.model.path)
        spec = describe_model(hf_config, config.model.frozen)
        machine = Machine.read(config.placement.device)
        plan = resolve(config, spec, hf_config.intermediate_size, machine, local=case.local)
        batches = [
            random_batch(case.rows, case.seq_len, config.micro_batch_rows, hf_config.vocab_size, seed)
            for seed in range(_NUM_BATCHES)
        ]
        begin = time.perf_counter()
        with (LocalTiers if case.local else RayTiers)(config, hf_config, spec, plan, case.total_steps) as tiers:
            started = time.perf_counter()
            tiers.load_weights(None)
            loaded = time.perf_counter()
            steps = _run(tiers, batches, case)
            process_bytes = _process_bytes(tiers)
            actors = [f"{r.name}: {r.threads} threads, nice {r.niceness}; {r.detail}" for r in tiers.reports()]
        last = steps.reports[-1].gpu
        lanes = steps.lanes(case, tiers)
        if case.trace_path is not None:
            write_chrome_trace(Path(case.trace_path), steps.spans(case))
        return BenchResult(
            label=case.label,
            system=case.system,
            shape=case.shape,
            settings=case.settings,
            rows=case.rows,
            seq_len=case.seq_len,
            micro_batch_rows=config.micro_batch_rows,
            tokens=batches[0].num_tokens,
            parameters=spec.num_parameters,
            seconds=tuple(steps.seconds[case.warmup : case.warmup + case.steps]),
            gpu_peak_bytes=last.peak_gpu_bytes,
            gpu_reserved_bytes=last.reserved_gpu_bytes,
            machine_bytes=memory.peak_bytes,
            device=device_name(machine, plan.layout.device),
            versions=version_numbers(),
            losses=tuple(report.gpu.loss for report in steps.reports),
            process_bytes=process_bytes,
            planned_gpu_bytes=plan.gpu_bytes,
            planned_host_bytes=plan.host_bytes,
            offloaded_bytes=plan.layout.num_host_cells * plan.layout.cell_numel * plan.layout.element_bytes,
            forward_hiding_factor=lanes.forward_hiding_factor,
            backward_hiding_factor=lanes.hiding_factor,
            exposed_seconds=lanes.exposed_seconds,
            busy_seconds=lanes.busy_seconds,
            gb_per_second=lanes.gb_per_second,
            traced_step_seconds=statistics.median(steps.seconds[-case.traced :]),
            notes={
                "start_seconds": started - begin,
                "draw_seconds": loaded - started,
                "first_step_seconds": steps.ends[0] - loaded,
                "num_optimizer_actors": plan.layout.num_optimizer_actors,
                "threads_per_optimizer_actor": plan.layout.threads_per_optimizer_actor,
                "gradient_slots": plan.layout.gradient_slots,
                "activation_slots": plan.layout.activation_slots,
                "host_cells": plan.layout.num_host_cells,
                "update_queue_layers": lanes.update_queue_layers,
                "gpu_sensors": dict(lanes.gpu_sensors),
                "local": case.local,
                "actors": actors,
            },
        )


class _Steps:
    """The reports of a case's steps, and when each had ended in the driver."""

    def __init__(self) -> None:
        self.inputs: list[StepInputs] = []
        self.reports: list[StepReport] = []
        self.ends: list[float] = []

    def add(self, pending: PendingStep, report: StepReport) -> None:
        self.ends.append(time.perf_counter())
        self.inputs.append(pending.inputs)
        self.reports.append(report)

    @property
    def seconds(self) -> list[float]:
        """Between the ends of consecutive steps; of the first there is no such time, and it is no timed one."""
        return [float("nan"), *(after - before for before, after in pairwise(self.ends))]

    def spans(self, case: Case) -> list[Span]:
        return [span for report in self.reports[-case.traced :] for span in report.spans]

    def lanes(self, case: Case, tiers: Tiers) -> LaneMetrics:
        traced = self.inputs[-case.traced :]
        timeline = measured_timeline([build_step(inputs.shape) for inputs in traced], self.spans(case))
        return lane_metrics(timeline, traced, tiers.spec, tiers.layout, self.reports[-1].gpu.sensors)


def _run(tiers: Tiers, batches: Sequence[StepBatch], case: Case) -> _Steps:
    """All steps, submitted ahead as the trainer does."""
    steps, ahead = _Steps(), deque[PendingStep]()
    for step in range(case.total_steps):
        if len(ahead) == STEPS_AHEAD:
            pending = ahead.popleft()
            steps.add(pending, tiers.gather(pending))
        batch, following = batches[step % len(batches)], batches[(step + 1) % len(batches)]
        trace = step >= case.warmup + case.steps
        ahead.append(submit_batch(tiers, batch, step, step, train=True, following=following, trace=trace))
    while ahead:
        pending = ahead.popleft()
        steps.add(pending, tiers.gather(pending))
    return steps


def _process_bytes(tiers: Tiers) -> int:
    shared = sum(buffer.nbytes for buffer in tiers.buffers.values())
    own = anonymous_bytes(process_tree(os.getpid()) | {report.pid for report in tiers.reports()})
    # Without Ray the buffers are this process's own pages.
    return own if isinstance(tiers, LocalTiers) else own + shared
