"""The CPU tier: one optimizer actor's slice of every layer's Adam states, and their update.

`AdamShard` k of K owns the same contiguous slice of EVERY block (`spec.slice_of`), so each layer's update runs on all
cores at once and the last update, which nothing can hide, is as short as it can be. It alone writes its slice of the
parameters that the GPU reads. It runs without Ray; `optimizer_actor.py` is its thin wrapper.

Private memory a trainable parameter: lo 2 (bf16 precision only) + exp_avg 4 + exp_avg_sq 4 bytes.
Tested by tests/actors/test_adam_shard.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slideformer_ray.actors.block_saver import BlockSaver, SaveReport
from slideformer_ray.actors.lanes import (
    CLIP_COEFFICIENT,
    SKIP_STEP,
    HostStream,
    LaneContext,
    StepInputs,
    Stopwatch,
    run_ready_first,
)
from slideformer_ray.actors.slice_files import SavedTensors, StateSlice
from slideformer_ray.budget import BATCH_ROWS, RunLayout
from slideformer_ray.checkpoint_layout import PARAM, TensorPlaces
from slideformer_ray.config import OptimizerSection
from slideformer_ray.kernels.layer_adam import AdamHyper, LayerAdam, join_master
from slideformer_ray.lr_schedule import learning_rate
from slideformer_ray.memory import pinning
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.model.spec import BlockSpec, ModelSpec, slice_of
from slideformer_ray.observe.trace import Span
from slideformer_ray.schedule import Op, build_step, update_lane

FillSlice = Callable[[BlockSpec, int, int, Tensor, Tensor | None], None]  # (block, start, stop, hi, lo): see weights.py


@dataclass(frozen=True)
class UpdateStepResult:
    skipped: bool
    applied_steps: int
    learning_rate: float
    busy_seconds: float
    waited_seconds: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()


@dataclass
class _BlockState:
    """States of the trainable elements [start, stop) of a block."""

    start: int
    stop: int
    lo: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamShard:
    def __init__(
        self,
        spec: ModelSpec,
        layout: RunLayout,
        actor: int,
        buffers: Mapping[str, SharedBuffer],
        page: CounterPage,
        optimizer: OptimizerSection,
        total_steps: int,
        *,
        timeout_s: float = 600.0,
        backend: Literal["auto", "native", "torch"] = "auto",
    ):
        self.spec, self.layout, self.actor, self.page, self.timeout_s = spec, layout, actor, page, timeout_s
        self.optimizer, self.total_steps = optimizer, total_steps
        self.name = f"optimizer actor {actor}"
        self.adam = LayerAdam(layout.threads_per_optimizer_actor, backend=backend)
        self.applied_steps = 0
        dtype = layout.dtype
        self._hi = [buffers[f"hi.{b.index}"].tensor(dtype) for b in spec.blocks]
        self._grad_slots = [buffers[f"grad.{i}"].tensor(dtype) for i in range(layout.gradient_slots)]
        self._vocab_grads = {
            b.index: buffers[f"grad.{b.kind}"].tensor(dtype) for b in (spec.embed, spec.head) if b.trainable_numel
        }
        self._batch_ids = [
            buffers[f"batch.{i}"].numpy(np.int32).reshape(BATCH_ROWS, -1)[0] for i in range(layout.num_batch_buffers)
        ]
        self._looked_up: np.ndarray | None = None  # segments of the step at hand, once they are known
        self._saver: BlockSaver | None = None
        self._allocate()

    def _allocate(self) -> None:
        """All states in one arena of anonymous memory, in huge pages where the kernel gives them.

        All threads touch it first.
        """
        slices = [slice_of(b.trainable_numel, self.actor, self.layout.num_optimizer_actors) for b in self.spec.blocks]
        self.state_bytes = sum(stop - start for start, stop in slices) * self.layout.private_bytes_per_parameter
        self._arena = mmap.mmap(-1, max(self.state_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._arena.madvise(mmap.MADV_HUGEPAGE)
        # One thread makes pages at 4 GB/s; the parameters are written by one.
        pinning.touch_parallel(np.frombuffer(self._arena, np.uint8), self.layout.threads_per_optimizer_actor)
        at = 0

        def take(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            if count == 0:
                return torch.empty(0, dtype=dtype)
            tensor = torch.frombuffer(self._arena, dtype=dtype, count=count, offset=at)
            at += tensor.nbytes
            return tensor

        split = self.layout.split_masters
        # Slices are cut at multiples of 128 elements, but a block's last slice may end anywhere: 4-byte states come
        # first, to keep them aligned.
        moments = [(take(b - a, torch.float32), take(b - a, torch.float32)) for a, b in slices]
        lows = [take(b - a, torch.int16) if split else None for a, b in slices]
        self._states = [_BlockState(a, b, lo, m, v) for (a, b), (m, v), lo in zip(slices, moments, lows, strict=True)]

    # ------------------------------------------------------------------------------------------------------- one step

    def run_step(self, inputs: StepInputs) -> UpdateStepResult:
        """Run the update lane of the step to its end. Raises LaneError (ours) or Aborted (another actor's fault)."""
        plan = build_step(inputs.shape)
        watch = Stopwatch(inputs.trace)
        self._inputs, self._skipped, self._looked_up = inputs, False, None
        o = self.optimizer
        peak = o.learning_rate if inputs.peak_learning_rate is None else inputs.peak_learning_rate
        self._rate = learning_rate(self.applied_steps, self.total_steps, peak, o.schedule, o.warmup_steps)
        context = LaneContext.create(self.name, plan, inputs, self.page, self.timeout_s)
        lane = plan.lanes[update_lane(self.actor)]
        run_ready_first(context, lane, self._update, watch)
        if lane.ops and not self._skipped:
            self.applied_steps += 1
        spans = tuple(watch.spans(inputs.step, HostStream()))
        return UpdateStepResult(self._skipped, self.applied_steps, self._rate, watch.busy, watch.waited, spans)

    def _update(self, op: Op) -> None:
        """AdamW on our slice of the block. The scalars were published before norm.ready, which `op` waited for."""
        scale = 1.0
        if self._inputs.shape.clip:
            if self.page.read_scalar(SKIP_STEP):
                self._skipped = True
                return
            scale = self.page.read_scalar(CLIP_COEFFICIENT)
        if (saver := self._saver) is not None:  # `poll_save` clears it from another thread
            saver.before_update(op.block)
        block, state = self.spec.blocks[op.block], self._states[op.block]
        grad = self._grad_slots[op.grad_slot] if block.kind == "decoder" else self._vocab_grads[op.block]
        hi = self._hi[op.block]
        o = self.optimizer
        segments = self._segments(op) if block.kind == "embed" else None
        for start, stop, decay in block.decay_runs(state.start, state.stop):
            hyper = AdamHyper(
                lr=self._rate,
                beta1=o.betas[0],
                beta2=o.betas[1],
                eps=o.eps,
                weight_decay=o.weight_decay if decay else 0.0,
                step=self.applied_steps + 1,
                grad_scale=scale,
            )
            own = slice(start - state.start, stop - state.start)
            m, v, g = state.exp_avg[own], state.exp_avg_sq[own], grad[start:stop]
            if state.lo is None:
                self.adam.step_fp32(hi[start:stop], m, v, g, hyper, segments)
            else:
                self.adam.step_split(hi[start:stop], state.lo[own], m, v, g, hyper, segments)

    def _segments(self, op: Op) -> np.ndarray | None:
        """Elements of our slice of the embedding (one parameter, so one run) that the operation updates; None: all.

        First the rows that the next step looks up, then the others. Which comes first changes no bit.
        """
        rows_first, following = op.kind == "update_rows", self._inputs.next_batch
        if following is None:
            return None if rows_first else np.empty((0, 2), np.int64)
        state = self._states[op.block]
        length = state.stop - state.start
        if self._looked_up is None:
            slot, tokens = following
            table = self.spec.embed.params[0]
            self._looked_up = row_segments(
                self._batch_ids[slot][:tokens], table.shape[1], table.offset - state.start, length
            )
        return self._looked_up if rows_first else complement(self._looked_up, length)

    # ------------------------------------------------------------------------------------ weights, states, checkpoints

    def fill(self, fill_slice: FillSlice) -> None:
        """Write our slice of every block's parameters (hi and lo) from the loaded or drawn weights; frozen ones too."""
        for block, state in zip(self.spec.blocks, self._states, strict=True):
            hi = self._hi[block.index]
            if state.stop > state.start:
                fill_slice(block, state.start, state.stop, hi[state.start : state.stop], state.lo)
            a, b = self._frozen_slice(block)
            if b > a:
                fill_slice(block, a, b, hi[a:b], None)

    def _frozen_slice(self, block: BlockSpec) -> tuple[int, int]:
        a, b = slice_of(block.numel - block.trainable_numel, self.actor, self.layout.num_optimizer_actors)
        return block.trainable_numel + a, block.trainable_numel + b

    def master(self, name: str) -> tuple[int, np.ndarray]:
        """(first element, fp32 values) of our piece of a parameter's master. For checking; not in a step."""
        first, hi = self.state(PARAM, name)
        if not self.layout.split_masters or not hi.numel():
            return first, hi.float().numpy()
        return first, join_master(hi, self.state("lo", name)[1]).numpy()

    def state(self, state: str, name: str) -> tuple[int, Tensor]:
        """(first element, values) of our piece of a trained parameter's state. For checking; not in a step."""
        found = ((b, p) for b in self.spec.blocks for p in b.params if p.name == name and not p.frozen)
        for block, param in found:
            for piece in self.slices(block.index):
                a, b = max(param.offset, piece.start), min(param.offset + param.numel, piece.stop)
                if piece.state == state and a < b:
                    return a - param.offset, piece.data[a - piece.start : b - piece.start].clone()
        return 0, torch.empty(0)

    def slices(self, block: int) -> Iterator[StateSlice]:
        """Everything of a block that is ours and that a checkpoint holds, frozen parameters too.

        A slice's memory is valid until the next one is asked for; what was put into it then is the state.
        """
        spec, state = self.spec.blocks[block], self._states[block]
        hi, (start, stop) = self._hi[block], (state.start, state.stop)
        if stop > start:
            yield StateSlice(spec, PARAM, start, stop, hi[start:stop])
            yield StateSlice(spec, "exp_avg", start, stop, state.exp_avg)
            yield StateSlice(spec, "exp_avg_sq", start, stop, state.exp_avg_sq)
            if state.lo is not None:
                yield StateSlice(spec, "lo", start, stop, state.lo)
        a, b = self._frozen_slice(spec)
        if b > a:
            yield StateSlice(spec, PARAM, a, b, hi[a:b])

    def begin_save(self, directory: Path, places: TensorPlaces) -> None:
        """Write our slices as they are now, into files that are there already. Later steps may be run meanwhile."""
        assert self._saver is None, "a save is under way"
        order = [op.block for op in build_step(self.layout.shape(1, True)).lanes[update_lane(self.actor)].ops]
        order = list(dict.fromkeys([*order, *(block.index for block in self.spec.blocks)]))
        self._saver = BlockSaver(self.slices, order, directory, places, self.applied_steps)

    def poll_save(self) -> SaveReport | None:
        """What was written, once the save has ended. May be asked before `begin_save` and while a step runs."""
        report = self._saver.poll() if self._saver is not None else None
        if report is not None:
            self._saver = None
        return report

    def wait_save(self) -> SaveReport:
        assert self._saver is not None
        saver, self._saver = self._saver, None
        return saver.wait()

    def load(self, directory: Path, adam_step: int) -> None:
        """Fill our slices from a checkpoint that any number of actors wrote. Raises DamagedCheckpoint."""
        saved = SavedTensors(directory)
        saved.fill(piece for block in self.spec.blocks for piece in self.slices(block.index))
        self.applied_steps = adam_step

    def close(self) -> None:
        if self._saver is not None:
            self._saver.abandon()
        self.adam.close()


def row_segments(ids: np.ndarray, width: int, first: int, length: int) -> np.ndarray:
    """Elements of the distinct rows `ids` of a table, as int64 [s, 2] of (begin, end) in order.

    Neighbours are one segment. width: elements a row. first: where row 0 begins in the slice, negative if it begins
    before. length: of the slice, which cuts rows.
    """
    begins = first + np.unique(ids).astype(np.int64) * width
    begins = begins[(begins + width > 0) & (begins < length)]
    if not begins.size:
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(begins) > width) + 1
    starts, ends = (
        np.concatenate([begins[:1], begins[breaks]]),
        np.concatenate([begins[breaks - 1], begins[-1:]]) + width,
    )
    return np.ascontiguousarray(np.stack([starts.clip(0), ends.clip(max=length)], axis=1))


def complement(segments: np.ndarray, length: int) -> np.ndarray:
    """The elements of [0, length) that are in none of the segments, as segments."""
    bounds = np.concatenate([[0], segments.ravel(), [length]]).astype(np.int64).reshape(-1, 2)
    return np.ascontiguousarray(bounds[bounds[:, 0] < bounds[:, 1]])
