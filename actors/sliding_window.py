"""The GPU tier: a sliding window of pre-allocated cache units over the layers (SlideFormer, section 3.2).

`SlidingWindow` owns everything on the device and does the operations of the three GPU lanes of a StepPlan. It runs
without Ray (the tests give it private buffers) and without a GPU (the same lanes as plain calls). `gpu_actor.py` is its
thin Ray wrapper.

Device memory, all of it allocated once (E bytes an element of the compute dtype, D elements of the largest decoder
layer):
    param_units x D x E         layers' parameters, filled by the upload lane
    grad_units x D x E          layers' gradients on their way to the host
    D x 4                       fp32 sum of a layer's gradient over the micro-batches
    V x E and V x 4             the head's parameters, then its gradient; fp32 sum of the vocabulary's gradients
    activation_slots x cell x E inputs of the layers, one micro-batch each
What a layer needs while it computes comes from PyTorch's caching allocator on the compute stream; the micro-batch
bounds it. So does what the last layers keep from forward to backward, where the budget has room for it.

Tested by tests/actors/test_sliding_window.py against reference.py.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from slideformer_ray.actors.lanes import (
    CLIP_COEFFICIENT,
    SKIP_STEP,
    CudaStream,
    HostStream,
    LaneContext,
    LaneError,
    StepInputs,
    Stopwatch,
    run_in_order,
)
from slideformer_ray.budget import BATCH_ROWS, NUM_ROW_BUFFERS, RunLayout
from slideformer_ray.kernels.linear_cross_entropy import linear_cross_entropy
from slideformer_ray.memory.counters import Aborted, CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.memory.slots import SlotPool, SlotState
from slideformer_ray.model.autograd_layer import Layer, LayerChoice, make_layer
from slideformer_ray.model.layers import HeadTemplate, LayerTemplate, RotaryTable, flat_views, padding_row
from slideformer_ray.model.recompute import Kept, RecomputedLayer
from slideformer_ray.model.spec import BlockSpec, ModelSpec
from slideformer_ray.observe.gpu_sensors import read_gpu_sensors
from slideformer_ray.observe.trace import Span
from slideformer_ray.schedule import COMPUTE, DOWNLOAD, UPLOAD, Op, build_step

_NORM_PIECE = 1 << 24  # elements whose squares are summed at a time: 128 MiB in fp64
IGNORED = -100  # target of a position that is not supervised


class NonFiniteGradient(RuntimeError):
    """A gradient holds NaN or infinity and no clipping norm could skip the step."""


@dataclass(frozen=True)
class GpuStepResult:
    loss: float  # mean over the step's supervised tokens
    grad_norm: float | None  # global norm before clipping; None without training
    skipped: bool
    peak_gpu_bytes: int
    reserved_gpu_bytes: int
    waited_seconds: dict[str, float] = field(default_factory=dict)  # host waits for other actors, by counter family
    spans: tuple[Span, ...] = ()  # what the lanes did, if the step was traced
    sensors: dict[str, float] = field(default_factory=dict)  # the GPU's own, if the step was traced


@dataclass
class _MicroBatch:
    """One micro-batch of the step, on the device."""

    rows: int
    seq: int
    ids: np.ndarray  # [rows * seq], host: the embedding is looked up there
    device_ids: Tensor | None  # [rows * seq], only where the embedding's gradient is wanted
    num_supervised: int
    supervised: Tensor  # [num_supervised and more] flat positions; those beyond are ignored
    targets: Tensor  # as many
    cos: Tensor
    sin: Tensor


class SlidingWindow:
    """Buffers by the names of `RunLayout.buffers()`. `device`: torch device of the compute lane."""

    def __init__(
        self,
        spec: ModelSpec,
        hf_config: PretrainedConfig,
        layout: RunLayout,
        buffers: Mapping[str, SharedBuffer],
        page: CounterPage,
        device: torch.device,
        *,
        layers: LayerChoice = "auto",
        poison: bool = False,
        timeout_s: float = 600.0,
        max_grad_norm: float | None = None,
        actor_name: str = "gpu actor",
    ):
        self.spec, self.layout, self.page, self.device = spec, layout, page, device
        self.timeout_s, self.max_grad_norm, self.actor_name, self.poison = timeout_s, max_grad_norm, actor_name, poison
        self.dtype = layout.dtype
        cuda = device.type == "cuda"
        self.streams = {
            COMPUTE: CudaStream(torch.cuda.current_stream(device)) if cuda else HostStream(),
            UPLOAD: CudaStream(torch.cuda.Stream(device)) if cuda else HostStream(),
            DOWNLOAD: CudaStream(torch.cuda.Stream(device)) if cuda else HostStream(),
        }
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lane")

        # ---- host side: views of the shared buffers
        view = lambda name: buffers[name].tensor(self.dtype)  # noqa: E731
        self.hi = [view(f"hi.{b.index}")[: b.numel] for b in spec.blocks]
        self._grad_slots = [view(f"grad.{i}") for i in range(layout.gradient_slots)]
        self._vocab_grads = {b.index: view(f"grad.{b.kind}") for b in (spec.embed, spec.head) if b.trainable_numel}
        self._host_cells = view("activations").view(-1, layout.cell_numel) if layout.num_host_cells else None
        self._row_buffers = [view(f"rows.{i}") for i in range(NUM_ROW_BUFFERS)]
        self._rows_sent: list[Any] = [None] * NUM_ROW_BUFFERS
        self._row_turn = 0
        self._batches = [
            buffers[f"batch.{i}"].numpy(np.int32).reshape(BATCH_ROWS, -1) for i in range(layout.num_batch_buffers)
        ]

        # ---- device side
        new = lambda n, dtype=self.dtype: torch.zeros(n, dtype=dtype, device=device)  # noqa: E731
        largest = spec.largest_decoder_numel
        self.units = SlotPool("parameter unit", [new(largest) for _ in range(layout.param_units)], debug_poison=poison)
        self._grad_units = [new(largest) for _ in range(layout.gradient_units)]
        self._layer_sum = new(largest, torch.float32)
        # Tied: the embedding's weight is the projection, and the head block is the final norm alone, which lies behind.
        # Untied: the head, and after the head's gradient has left, the embedding's gradient.
        self._head_at = spec.embed.numel if spec.tied else 0
        vocab = spec.embed.numel + spec.head.numel if spec.tied else max(spec.embed.numel, spec.head.numel)
        self._vocab_unit = new(vocab)
        self._vocab_sum = new(vocab, torch.float32)
        self._activations = [new(layout.cell_numel) for _ in range(layout.activation_slots)]
        if poison:
            for cell in self._activations:
                cell.fill_(math.nan)
        self._square_sums = new(len(spec.blocks), torch.float64)
        self._host_square_sums = torch.zeros(len(spec.blocks), dtype=torch.float64, pin_memory=cuda)
        self._loss_sum = new((), torch.float64)

        # ---- one layer for each kind of layer, run with whatever unit holds the parameters
        self._layers: dict[str, Layer] = {}
        in_use = {}
        for kind in dict.fromkeys(block.template for block in spec.decoder):
            blocks = [block for block in spec.decoder if block.template == kind]
            layer = blocks[0].layer
            assert layer is not None
            template = LayerTemplate(hf_config, layer, self.dtype, device)
            self._layers[kind], in_use[kind] = make_layer(template, blocks, layers)
        self.layers_in_use = "; ".join(dict.fromkeys(in_use.values()))
        self._head = HeadTemplate(hf_config)
        self._projection_param = next(
            p for p in (*spec.embed.params, *spec.head.params) if p.name == self._head.projection_key
        )
        self._norm_trained = [not p.frozen for key in self._head.norm_keys for p in spec.head.params if p.name == key]
        self._padding_row = padding_row(hf_config)
        # oneDNN compiles a bf16 product for each number of rows it meets, 1 MB each: on the CPU they come in multiples.
        self._row_multiple = 1 if cuda else 64
        self._rotary = RotaryTable(hf_config, device, self.dtype)
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._gradient_views: dict[tuple[int, bool], tuple[Tensor | None, ...]] = {}
        # A step of one micro-batch has nothing to sum: its gradients go, in their dtype, where the sums are otherwise.
        self._only_gradient = self._layer_sum.view(self.dtype)
        self._has_padding = any(
            b.trainable_numel > sum(p.numel for p in b.params if not p.frozen) for b in spec.decoder
        )
        self._ops: dict[str, Callable[[Op], Any]] = {
            "gather_embedding": self._gather_embedding,
            "upload_params": self._upload_params,
            "upload_head": self._upload_head,
            "upload_activation": self._upload_activation,
            "forward": self._forward,
            "head": self._head_loss,
            "finish_head": self._finish_head,
            "backward": self._backward,
            "finish_gradient": self._finish_gradient,
            "embed_gradient": self._embed_gradient,
            "finish_embed": self._finish_embed,
            "norm": self._norm,
            "download_gradient": self._download_gradient,
            "download_activation": self._download_activation,
        }
        self._micro_batches: list[_MicroBatch] = []
        self._kept: dict[tuple[int, int], Kept] = {}  # by block and micro-batch
        self._inputs: StepInputs | None = None

    # ------------------------------------------------------------------------------------------------------- one step

    def run_step(self, inputs: StepInputs) -> GpuStepResult:
        """Run the step's three GPU lanes to their end. Raises LaneError (ours) or Aborted (another actor's fault)."""
        plan = build_step(inputs.shape)
        context = LaneContext.create(self.actor_name, plan, inputs, self.page, self.timeout_s, gpu=True)
        watches = {name: Stopwatch(inputs.trace) for name in self.streams}
        self._begin(inputs)
        signals = _SignalThread(context)

        def run(name: str) -> None:
            with self.streams[name].context(), torch.no_grad():
                run_in_order(context, plan.lanes[name], self.streams[name], self._execute, signals.put, watches[name])

        others = [self._threads.submit(run, name) for name in (UPLOAD, DOWNLOAD)]
        errors: list[BaseException] = []
        for finish in (lambda: run(COMPUTE), *(future.result for future in others), signals.close):
            try:
                finish()
            except Exception as error:  # every lane must have ended before the first error is raised
                errors.append(error)
                self.page.abort(str(error))
        try:
            for stream in self.streams.values():
                stream.synchronize()  # after an error too: the caller may give the buffers back
        except RuntimeError as error:
            errors.append(error)
        if errors:
            raise next(
                (e for e in errors if isinstance(e, LaneError)),
                next((e for e in errors if not isinstance(e, Aborted)), errors[0]),
            )
        return self._result(inputs, watches)

    def _execute(self, op: Op) -> Any:
        return self._ops[op.kind](op)

    def _begin(self, inputs: StepInputs) -> None:
        """Bring the small things of the step to the device: positions, targets, which rows are supervised."""
        self._inputs = inputs
        if self.poison and self._host_cells is not None:
            self._host_cells.fill_(math.nan)  # of the step before: whoever reads one that this step has not written
        ids_all, targets_all = self._batches[inputs.batch_slot]
        train_embed = inputs.shape.train and inputs.shape.trainable[self.spec.embed.index]
        self._micro_batches = []
        tables: dict[int, tuple[Tensor, Tensor]] = {}
        start = 0
        for rows, seq in inputs.micro_batch_shapes:
            stop = start + rows * seq
            ids, targets = ids_all[start:stop].copy(), targets_all[start:stop]
            supervised = np.flatnonzero(targets != IGNORED)
            wanted = targets[supervised]
            padding = -supervised.size % self._row_multiple
            if padding:
                supervised, wanted = (
                    np.pad(supervised, (0, padding)),
                    np.pad(wanted, (0, padding), constant_values=IGNORED),
                )
            to_device = lambda a: torch.from_numpy(a.astype(np.int64)).to(self.device)  # noqa: E731
            # Rows are right-padded and start at position 0, so all rows of a length share one table.
            if seq not in tables:
                tables[seq] = self._rotary(torch.arange(seq, device=self.device)[None])
            self._micro_batches.append(
                _MicroBatch(
                    rows=rows,
                    seq=seq,
                    ids=ids,
                    device_ids=to_device(ids) if train_embed else None,
                    num_supervised=supervised.size - padding,
                    supervised=to_device(supervised),
                    targets=to_device(wanted),
                    cos=tables[seq][0],
                    sin=tables[seq][1],
                )
            )
            start = stop
        self._kept.clear()  # of a step that failed
        self._loss_sum.zero_()
        self._square_sums.zero_()
        if self.device.type == "cuda":
            if inputs.trace:
                self._set_clocks()
            torch.cuda.synchronize(self.device)

    def _set_clocks(self) -> None:
        streams = [stream for stream in self.streams.values() if isinstance(stream, CudaStream)]
        reference = streams[0].mark()  # of the compute lane
        streams[0].synchronize()
        for stream in streams:
            stream.set_clock(reference, time.monotonic())

    def _result(self, inputs: StepInputs, watches: Mapping[str, Stopwatch]) -> GpuStepResult:
        waited: dict[str, float] = {}
        for watch in watches.values():
            for family, seconds in watch.waited.items():
                waited[family] = waited.get(family, 0.0) + seconds
        cuda = self.device.type == "cuda"
        norm = math.sqrt(float(self._square_sums.sum())) if inputs.shape.train else None
        return GpuStepResult(
            loss=float(self._loss_sum) / max(inputs.num_supervised, 1),
            grad_norm=norm,
            skipped=norm is not None and inputs.shape.clip and not math.isfinite(norm),
            peak_gpu_bytes=torch.cuda.max_memory_allocated(self.device) if cuda else 0,
            reserved_gpu_bytes=torch.cuda.memory_reserved(self.device) if cuda else 0,
            waited_seconds=waited,
            spans=tuple(
                span for name, watch in watches.items() for span in watch.spans(inputs.step, self.streams[name])
            ),
            sensors=read_gpu_sensors(self.device) if inputs.trace else {},
        )

    # ------------------------------------------------------------------------------------------------------ upload lane

    def _gather_embedding(self, op: Op) -> None:
        """Rows of the embedding are looked up in host memory: only the micro-batch's rows travel, never the table."""
        batch = self._micro_batches[op.micro_batch]
        hidden = self.spec.hidden_size
        table = self.spec.embed.params[0].view(self.hi[self.spec.embed.index])
        turn = self._row_turn = (self._row_turn + 1) % NUM_ROW_BUFFERS
        if self._rows_sent[turn] is not None:
            self._rows_sent[turn].synchronize()  # its last load has left
        rows = self._row_buffers[turn][: batch.ids.size * hidden].view(-1, hidden)
        torch.index_select(table, 0, torch.from_numpy(batch.ids.astype(np.int64)), out=rows)
        self._fresh(op.slot)[: rows.numel()].copy_(rows.view(-1), non_blocking=True)
        self._rows_sent[turn] = self.streams[UPLOAD].record()

    def _upload_params(self, op: Op) -> None:
        slot = self.units[op.unit]
        if slot.state is SlotState.READY:  # its layer comes again later in the step, from the host
            slot.free()
        slot.begin_fill(("params", op.block))
        assert slot.tensor is not None
        host = self.hi[op.block]
        slot.tensor[: host.numel()].copy_(host, non_blocking=True)
        slot.end_fill()

    def _upload_head(self, op: Op) -> None:
        spec = self.spec
        if spec.tied:
            self._vocab_unit[: spec.embed.numel].copy_(self.hi[spec.embed.index], non_blocking=True)
        head = self.hi[spec.head.index]
        self._vocab_unit[self._head_at : self._head_at + head.numel()].copy_(head, non_blocking=True)

    def _upload_activation(self, op: Op) -> None:
        assert self._host_cells is not None
        self._fresh(op.slot).copy_(self._host_cells[op.host_slot], non_blocking=True)

    def _fresh(self, slot: int) -> Tensor:
        """The slot, about to get new content: whoever still reads the old one must notice."""
        tensor = self._activations[slot]
        if self.poison:
            tensor.fill_(math.nan)
        return tensor

    # ----------------------------------------------------------------------------------------------------- compute lane

    def _cell(self, slot: int, batch: _MicroBatch) -> Tensor:
        hidden = self.spec.hidden_size
        return self._activations[slot][: batch.rows * batch.seq * hidden].view(batch.rows, batch.seq, hidden)

    def _params(self, op: Op) -> tuple[BlockSpec, tuple[Tensor, ...]]:
        """The layer's parameters as views of the unit that holds them."""
        block = self.spec.blocks[op.block]
        key = op.unit, op.block
        if key not in self._views:
            unit = self.units[op.unit].tensor
            assert unit is not None
            views = self._layers[block.template].views(block, unit)
            self._views[key] = tuple(view for view in views if view is not None)
        return block, self._views[key]

    def _gradients(self, block: BlockSpec) -> tuple[Tensor | None, ...]:
        """Where the layer's gradients go before `finish_gradient`: views, and None for frozen parameters."""
        key = block.index, len(self._micro_batches) == 1
        if key not in self._gradient_views:
            total = self._only_gradient if key[1] else self._layer_sum
            self._gradient_views[key] = self._layers[block.template].views(block, total[: block.trainable_numel])
        return self._gradient_views[key]

    def _forward(self, op: Op) -> None:
        batch = self._micro_batches[op.micro_batch]
        unit = self.units[op.unit]
        unit.begin_use(("params", op.block))
        block, params = self._params(op)
        self._fresh(op.out_slot)
        out = self._cell(op.out_slot, batch)
        layer, x = self._layers[block.template], self._cell(op.slot, batch)
        if isinstance(layer, RecomputedLayer) and (kept := self._to_keep(op)):
            layer.forward(x, batch.cos, batch.sin, params, out=out, kept=kept)
        else:
            layer.forward(x, batch.cos, batch.sin, params, out=out)
        unit.end_use(release=op.last)

    def _to_keep(self, op: Op) -> Kept | None:
        """Where the layer's forward leaves what its backward would compute again: in the last layers, which the
        backward reaches first."""
        assert self._inputs is not None
        from_the_end = self.spec.num_layers - op.block
        attention, gate_up = from_the_end < self.layout.kept_attention, from_the_end < self.layout.kept_gate_up
        if not self._inputs.shape.train or not (attention or gate_up):
            return None
        return self._kept.setdefault((op.block, op.micro_batch), Kept(attention, gate_up))

    def _backward(self, op: Op) -> None:
        batch = self._micro_batches[op.micro_batch]
        unit = self.units[op.unit]
        unit.begin_use(("params", op.block))
        block, params = self._params(op)
        if op.first and self._has_padding:
            self._layer_sum.zero_()  # what another layer, or another number of micro-batches, left between parameters
        cell, layer = self._cell(op.slot, batch), self._layers[block.template]
        backward = layer.backward
        if isinstance(layer, RecomputedLayer):
            backward = partial(layer.backward, kept=self._kept.pop((op.block, op.micro_batch), None))
        backward(
            cell,
            batch.cos,
            batch.sin,
            params,
            self._cell(op.out_slot, batch),
            grads=self._gradients(block),
            accumulate=not op.first,
            out=cell,
        )
        unit.end_use(release=op.last)

    def _finish_gradient(self, op: Op) -> None:
        """Round the fp32 sum once to the gradient dtype, into the unit that leaves for the host."""
        n = self.spec.blocks[op.block].trainable_numel
        total = self._only_gradient if len(self._micro_batches) == 1 else self._layer_sum
        unit = self._grad_units[op.grad_unit][:n]
        unit.copy_(total[:n])
        self._square_sum(op.block, unit)

    def _square_sum(self, block: int, gradient: Tensor) -> None:
        """The norm is of what the optimizer will consume. In fp64, because sums of 1e8 squares lose digits in fp32; in
        pieces, because PyTorch widens what it sums, and a vocabulary's gradient would take gigabytes at once."""
        total = self._square_sums[block]
        for piece in gradient.split(_NORM_PIECE):
            total += torch.linalg.vector_norm(piece, dtype=torch.float64).square()

    def _finish_vocab(self, block: int, at: slice) -> None:
        """Round the fp32 sum once to the gradient dtype, over the parameters, which are not needed any more."""
        self._vocab_unit[at].copy_(self._vocab_sum[at])
        self._square_sum(block, self._vocab_unit[at])

    def _head_loss(self, op: Op) -> None:
        """Final norm, projection and loss of a micro-batch's supervised rows; in training their gradients too."""
        assert self._inputs is not None
        batch, train = self._micro_batches[op.micro_batch], self._inputs.shape.train
        if op.first and train:
            self._vocab_sum.zero_()
        rows = self._cell(op.slot, batch).view(-1, self.spec.hidden_size).index_select(0, batch.supervised)
        norm_params = self._norm_params(self._vocab_unit)
        wants_input = op.out_slot >= 0
        with torch.set_grad_enabled(train):
            rows = rows.detach().requires_grad_(wants_input)
            leaves = [
                p.detach().requires_grad_(train and trained)
                for p, trained in zip(norm_params, self._norm_trained, strict=True)
            ]
            normed = self._head.norm(rows, tuple(leaves))
        wanted = [leaf for leaf in (rows, *leaves) if leaf.requires_grad]
        projection = self._projection_param
        loss, grad_normed = linear_cross_entropy(
            normed.detach(),
            projection.view(self._vocab_unit),
            batch.targets,
            gradient_scale=1.0 / self._inputs.num_supervised,  # the one place that divides
            grad_weight_VH=projection.view(self._vocab_sum) if train and not projection.frozen else None,
            need_grad_hidden=bool(wanted),
            budget_bytes=self.layout.logits_budget_bytes,
        )
        self._loss_sum += loss.double()
        if not wanted:
            return
        grads = dict(zip(wanted, torch.autograd.grad(normed, wanted, grad_normed), strict=True))
        for total, leaf in zip(self._norm_params(self._vocab_sum), leaves, strict=True):
            if leaf.requires_grad:
                total += grads[leaf]
        if wants_input:
            cell = self._cell(op.out_slot, batch).view(-1, self.spec.hidden_size)
            cell.zero_()  # rows that are not supervised have no gradient
            n = batch.num_supervised
            cell.index_copy_(0, batch.supervised[:n], grads[rows][:n])

    def _norm_params(self, vocab: Tensor) -> list[Tensor]:
        """The final norm's parameters (or their gradients) inside the vocabulary unit."""
        views = flat_views(self.spec.head, vocab[self._head_at :])
        return [views[key] for key in self._head.norm_keys]

    def _finish_head(self, op: Op) -> None:
        self._finish_vocab(op.block, slice(self._head_at, self._head_at + self.spec.head.trainable_numel))

    def _embed_gradient(self, op: Op) -> None:
        batch = self._micro_batches[op.micro_batch]
        assert batch.device_ids is not None
        # Tied: the projection's gradient is in there already, and belongs to the same weight.
        if op.first and not self.spec.tied:
            self._vocab_sum.zero_()
        total = self.spec.embed.params[0].view(self._vocab_sum)
        rows = self._cell(op.slot, batch).view(-1, self.spec.hidden_size).float()
        if self._padding_row is not None:  # as in transformers: looking up the padding token trains nothing
            rows = rows.masked_fill((batch.device_ids == self._padding_row)[:, None], 0.0)
        # The same bits every run: CUDA's index_add_ adds in any order, its index_put_ sorts first; on the CPU it is the
        # other way round.
        if total.is_cuda:
            total.index_put_((batch.device_ids,), rows, accumulate=True)
        else:
            total.index_add_(0, batch.device_ids, rows)

    def _finish_embed(self, op: Op) -> None:
        self._finish_vocab(op.block, slice(0, self.spec.embed.trainable_numel))

    def _norm(self, op: Op) -> Callable[[], None]:
        """Global norm of the gradients; the coefficient goes to the optimizers once the number has reached the host."""
        self._host_square_sums.copy_(self._square_sums, non_blocking=True)
        limit = self.max_grad_norm
        assert limit is not None

        def publish() -> None:
            norm = math.sqrt(float(self._host_square_sums.sum()))
            finite = math.isfinite(norm)
            self.page.write_scalar(CLIP_COEFFICIENT, clip_coefficient(norm, limit) if finite else 0.0)
            self.page.write_scalar(SKIP_STEP, 0.0 if finite else 1.0)

        return publish

    # ---------------------------------------------------------------------------------------------------- download lane

    def _download_gradient(self, op: Op) -> Callable[[], None] | None:
        block = self.spec.blocks[op.block]
        n = block.trainable_numel
        if block.kind == "decoder":
            source, host = self._grad_units[op.grad_unit][:n], self._grad_slots[op.grad_slot][:n]
        else:
            start = self._head_at if block.kind == "head" else 0
            source, host = self._vocab_unit[start : start + n], self._vocab_grads[op.block][:n]
        if self.poison:
            host.fill_(math.nan)  # whoever still reads the gradient of the step before must notice
        host.copy_(source, non_blocking=True)
        if self.poison:
            source.fill_(math.nan)  # it has left; the next gradient is written only after this lane says so
        if self.max_grad_norm is not None:
            return None
        # Without a norm nothing can skip the step, so a gradient that is not finite stops the run before it reaches the
        # masters.
        check = self._host_square_sums[op.block : op.block + 1]
        check.copy_(self._square_sums[op.block : op.block + 1], non_blocking=True)

        def refuse_non_finite() -> None:
            if not math.isfinite(float(check)):
                raise NonFiniteGradient(
                    f"the gradient of {block.name} holds NaN or infinity. It was not applied, but what landed before "
                    "it in this step may have been: do not go on from these masters. Lower optimizer.learning_rate, "
                    "set optimizer.max_grad_norm (such a step is then skipped whole), or check the data of this step"
                )

        return refuse_non_finite

    def _download_activation(self, op: Op) -> None:
        assert self._host_cells is not None
        self._host_cells[op.host_slot].copy_(self._activations[op.slot], non_blocking=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def clip_coefficient(norm: float, limit: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by, in its fp32 arithmetic."""
    return float(min(np.float32(1.0), np.float32(limit) / (np.float32(norm) + np.float32(1e-6))))


class _SignalThread:
    """Raises shared counters when the GPU has done the work before them: a host thread waits for events, in order.

    On the CPU the work is done already, and the counter is raised where it is signalled.
    """

    def __init__(self, context: LaneContext):
        self._context = context
        self._queue: queue.SimpleQueue[tuple[Op, str, int, Any, Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, op: Op, counter: str, value: int, event: Any, before: Callable[[], None] | None) -> None:
        if event is None:
            self._raise(counter, value, before)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
            self._thread.start()
        self._queue.put((op, counter, value, event, before))

    def _raise(self, counter: str, value: int, before: Callable[[], None] | None) -> None:
        if before is not None:
            before()
        self._context.page.signal(counter, value)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            op, counter, value, event, before = item
            try:
                event.synchronize()
                self._raise(counter, value, before)
            except Exception as cause:  # handed to the step's caller by close()
                self._error = self._error or self._context.error(op.lane, op, cause)
                self._context.page.abort(str(self._error))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error
