"""Every byte of a run, before the first one is allocated: counts, buffer sizes, and the table that `plan` prints.

`resolve` turns a config, a model and a machine into a `BytePlan`, whose `RunLayout` says what all actors allocate, or
raises `DoesNotFit`, naming each shortfall and a setting that mends it (shortfalls.py). Looks at the sizes of the data
files; loads no weights, starts nothing, allocates nothing. Tested by tests/test_budget.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slideformer_ray.checkpoint_layout import buffer_bytes
from slideformer_ray.config import GIB, ConfigError, RunConfig
from slideformer_ray.machine import Machine
from slideformer_ray.memory.counters import CounterPage
from slideformer_ray.memory.host_limits import gib, store_bytes
from slideformer_ray.model.spec import ModelSpec, slice_of
from slideformer_ray.schedule import StepShape, build_step, layers_with_backward, shared_counters
from slideformer_ray.shortfalls import find_shortfalls, gpu_ceiling, host_ceiling

if TYPE_CHECKING:
    import torch

KERNELS = "SLIDEFORMER_KERNELS"  # the variable of kernels/switch.py, which imports torch
BATCH_ROWS = 2  # a batch buffer holds two rows: ids and targets
NUM_SCALARS = 2
# Two steps are submitted at a time, and the second one's successor is there too: its embedding rows are updated first.
NUM_BATCH_BUFFERS = 3
NUM_ROW_BUFFERS = 2  # embedding rows are looked up into one while the other's travel to the GPU
FEWEST_ACTIVATION_SLOTS = 3  # a layer's input, its output, and one on its way

MIB = 1 << 20
# What processes take beside our buffers: their own pages and their share of file pages (PSS), measured over whole
# process trees (Ray 2.60, torch 2.13+cpu).
PROCESS_BYTES = 340 * MIB  # an interpreter with torch, transformers and Ray's worker: the driver and each actor
RAY_NODE_BYTES = 450 * MIB  # Ray's own processes of a private node: GCS, raylet, agents, monitors
# oneDNN compiles its bf16 kernels for each shape it meets and keeps up to 1,024 of them: the CPU device's compute actor
# grew by this much in 300 steps of the quickstart.
CPU_KERNELS_BYTES = 280 * MIB
# A CUDA context: in its process, with the libraries and processes that compile kernels (47.1 GiB were in use on an H200
# where everything else adds up to 42.9), and on the GPU.
CUDA_PROCESS_BYTES = 4 * GIB
CUDA_CONTEXT_BYTES = 700 * MIB


class DoesNotFit(ConfigError):
    """The run needs more than a tier has: one line a tier, each with the shortfall and what to change.

    `plan` has the bytes of every item, for a table beside the message.
    """

    def __init__(self, shortfalls: Sequence[str], plan: BytePlan):
        super().__init__("\n".join(shortfalls))
        self.shortfalls, self.plan = tuple(shortfalls), plan


@dataclass(frozen=True)
class RunLayout:
    """What a run allocates, in counts and elements. Every actor gets the same one."""

    precision: str
    device: str  # "cuda" or "cpu"
    num_layers: int
    trainable: tuple[bool, ...]
    tied: bool
    num_optimizer_actors: int
    threads_per_optimizer_actor: int
    param_units: int
    gradient_units: int
    gradient_slots: int
    activation_slots: int
    kept_attention: int  # decoder layers, from the last, whose backward finds attention's results on the GPU
    kept_gate_up: int  # the same of the gate and up projections
    num_host_cells: int
    max_micro_batches: int
    cell_tokens: int  # tokens of the largest micro-batch
    cell_numel: int
    clip: bool
    overlap: bool
    logits_budget_bytes: int
    num_batch_buffers: int = NUM_BATCH_BUFFERS

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def split_masters(self) -> bool:
        """bf16: the master is (hi, lo). fp32: the parameters that the GPU reads are the masters."""
        return self.precision == "bf16"

    @property
    def private_bytes_per_parameter(self) -> int:
        return 10 if self.split_masters else 8

    def shape(self, num_micro_batches: int, train: bool) -> StepShape:
        return StepShape(
            num_layers=self.num_layers,
            num_micro_batches=num_micro_batches,
            trainable=self.trainable,
            tied=self.tied,
            param_units=self.param_units,
            gradient_units=self.gradient_units,
            gradient_slots=self.gradient_slots,
            activation_slots=self.activation_slots,
            num_optimizer_actors=self.num_optimizer_actors,
            clip=self.clip,
            overlap=self.overlap,
            train=train,
        )

    def counter_names(self) -> list[str]:
        return shared_counters(self.num_layers + 2, self.num_optimizer_actors)

    def buffers(self, spec: ModelSpec) -> dict[str, int]:
        """Bytes of every shared buffer, by name."""
        e = self.element_bytes
        sizes = {f"hi.{b.index}": b.numel * e for b in spec.blocks}
        for i in range(self.gradient_slots):
            sizes[f"grad.{i}"] = spec.largest_decoder_numel * e
        for block in (spec.embed, spec.head):
            if block.trainable_numel:
                sizes[f"grad.{block.kind}"] = block.trainable_numel * e
        if self.num_host_cells:
            sizes["activations"] = self.num_host_cells * self.cell_numel * e
        for i in range(NUM_ROW_BUFFERS):
            sizes[f"rows.{i}"] = self.cell_numel * e
        for i in range(self.num_batch_buffers):
            sizes[f"batch.{i}"] = BATCH_ROWS * 4 * self.cell_tokens * self.max_micro_batches
        sizes["control"] = CounterPage.nbytes(len(self.counter_names()), NUM_SCALARS)
        return sizes


GPU, PINNED, PRIVATE = "GPU", "pinned host", "private host"


@dataclass(frozen=True)
class ByteItem:
    tier: str  # GPU, PINNED or PRIVATE
    what: str
    nbytes: int


@dataclass(frozen=True)
class BytePlan:
    layout: RunLayout
    items: tuple[ByteItem, ...]
    store_bytes: int  # /dev/shm, the object store's size: every shared buffer, the largest once more, 5 %
    gpu_limit: int | None
    host_limit: int
    save_peak_bytes: int  # host memory that a save or a resume takes on top, for a moment
    disk_bytes: int  # one training checkpoint
    model_bytes: int  # the final model directory, on disk

    def total(self, tier: str) -> int:
        return sum(item.nbytes for item in self.items if item.tier == tier)

    @property
    def gpu_bytes(self) -> int:
        return self.total(GPU)

    @property
    def host_bytes(self) -> int:
        return self.total(PINNED) + self.total(PRIVATE)


def resolve(
    config: RunConfig, spec: ModelSpec, intermediate_size: int, machine: Machine, *, local: bool = False
) -> BytePlan:
    """Choose every count that the user left open, and check every tier.

    local: the tiers are threads of one process (LocalTiers), with neither Ray nor /dev/shm. Raises ConfigError for
    settings that contradict each other and DoesNotFit for bytes.
    """
    draft = Draft(config, spec, intermediate_size, machine, local)
    plan = draft.best_plan()
    if shortfalls := find_shortfalls(draft, plan):
        raise DoesNotFit(shortfalls, plan)
    return plan


class Draft:
    """The plan of one config in the making: what the config fixes, what fits, and the items that come of both."""

    def __init__(self, config: RunConfig, spec: ModelSpec, intermediate_size: int, machine: Machine, local: bool):
        self.config, self.spec, self.machine, self.local = config, spec, machine, local
        self.intermediate_size = intermediate_size
        self.device = _device(config, machine)
        self.compute_tier = GPU if self.device == "cuda" else PRIVATE  # where the compute actor's own memory is
        self.e = 2 if config.training.precision == "bf16" else 4
        self.trainable = tuple(b.trainable_numel > 0 for b in spec.blocks)
        self.trained_layers = sum(self.trainable[1:-1])
        self.cell_tokens = config.micro_batch_rows * _round_up(config.data.seq_len, config.data.pad_to_multiple)
        self.cell_bytes = self.cell_tokens * spec.hidden_size * self.e
        self.host_limit = host_ceiling(config, machine.limits)
        self.gpu_limit = None if self.device == "cpu" else gpu_ceiling(config, machine)
        self.rows_bytes = sum(map(_rows_bytes, (*config.data.train, *config.data.eval)))

    def changed(self, section: str, **fields: Any) -> Draft:
        """The draft of the same run with some fields of a section changed."""
        part = getattr(self.config, section).model_copy(update=fields)
        config = self.config.model_copy(update={section: part})
        return Draft(config, self.spec, self.intermediate_size, self.machine, self.local)

    def best_plan(self) -> BytePlan:
        """The plan with the most gradient slots that fit, else the one with the fewest, whether it fits or not."""
        layout = self._layout()
        most, fewest = self._gradient_slots()
        for count in range(most, fewest, -1):
            plan = self._plan(replace(layout, gradient_slots=count))
            if self.fits_host(plan) and self.fits_shm(plan):
                return plan
        return self._plan(replace(layout, gradient_slots=fewest))

    def gpu_bytes(self) -> int:
        return _total(self._compute_items()) + self._activation_slots() * self.cell_bytes + _total(self._kept_items())

    def fits_gpu(self) -> bool:
        return self.gpu_limit is None or self.gpu_bytes() <= self.gpu_limit

    def fits_host(self, plan: BytePlan) -> bool:
        return plan.host_bytes + plan.save_peak_bytes <= self.host_limit

    @property
    def uses_shm(self) -> bool:
        """A given cluster's store has its size already; `plasma_store.join_cluster` looks at that."""
        return not self.local and self.config.placement.address is None

    def fits_shm(self, plan: BytePlan) -> bool:
        return not self.uses_shm or plan.store_bytes <= self.machine.limits.shm_free

    # ---------------------------------------------------------------------------------------------------------- counts

    def _layout(self) -> RunLayout:
        config, placement = self.config, self.config.placement
        slots = self._activation_slots()
        cores = self.machine.physical_cores
        actors = placement.num_optimizer_actors or (2 if cores >= 8 else 1)
        layout = RunLayout(
            precision=config.training.precision,
            device=self.device,
            num_layers=self.spec.num_layers,
            trainable=self.trainable,
            tied=self.spec.tied,
            num_optimizer_actors=actors,
            threads_per_optimizer_actor=placement.threads_per_optimizer_actor or max(1, (cores - 2) // actors),
            param_units=placement.param_units,
            gradient_units=placement.gradient_units,
            gradient_slots=self._gradient_slots()[0],
            activation_slots=slots,
            kept_attention=self._kept()[0],
            kept_gate_up=self._kept()[1],
            num_host_cells=0,
            max_micro_batches=config.num_micro_batches,
            cell_tokens=self.cell_tokens,
            cell_numel=self.cell_tokens * self.spec.hidden_size,
            clip=config.optimizer.max_grad_norm is not None,
            overlap=config.training.overlap,
            logits_budget_bytes=self._logits_budget(),
        )
        if slots >= self._most_cells():
            return layout
        # A step with fewer micro-batches and an evaluation never need more cells than the largest step: see the tests.
        return replace(layout, num_host_cells=build_step(layout.shape(config.num_micro_batches, True)).num_host_cells)

    def _most_cells(self) -> int:
        """Every layer's input and the head's, of every micro-batch."""
        return (self.spec.num_layers + 1) * self.config.num_micro_batches

    def _activation_slots(self) -> int:
        """As many as the GPU budget leaves room for; the user's number where there is one."""
        most = self._most_cells()
        if self.config.placement.activation_slots is not None:
            wanted = min(self.config.placement.activation_slots, most)
        elif self.gpu_limit is None:
            wanted = most
        else:
            wanted = min(most, (self.gpu_limit - _total(self._compute_items())) // self.cell_bytes)
        return max(FEWEST_ACTIVATION_SLOTS, wanted)

    @property
    def written_out(self) -> bool:
        """Whether layers run by model/recompute.py."""
        return self.spec.written_out and self.config.placement.layers in ("auto", "recomputed")

    @property
    def has_kernels(self) -> bool:
        return self.device == "cuda" and os.environ.get(KERNELS) != "torch"

    def _kept(self) -> tuple[int, int]:
        """(layers that keep attention's results, those that keep gate and up), from the last.

        By default what the GPU budget leaves when every activation has its slot, attention's first: they save the more
        time a byte. Raises ConfigError for a number where layers keep nothing.
        """
        placement = self.config.placement
        given = placement.kept_attention, placement.kept_gate_up
        if not self.written_out:
            if any(given):
                raise ConfigError(
                    "placement.kept_attention and placement.kept_gate_up are for layers that are written out "
                    "(placement.layers: auto or recomputed, a family that is); leave them out"
                )
            return 0, 0
        most = len(layers_with_backward(self.trainable))
        room = 0
        if self._activation_slots() >= self._most_cells():
            taken = _total(self._compute_items()) + self._activation_slots() * self.cell_bytes
            room = max(0, (self.gpu_limit or 0) - taken)
        # The attention that fp32 and deterministic runs take may record several times as much.
        training = self.config.training
        if training.precision != "bf16" or training.deterministic or not self.has_kernels:
            given = given[0] or 0, given[1]
        counts = []
        for count, each in zip(given, self._kept_bytes(), strict=True):
            chosen = min(most, room // each if count is None else count)
            room = max(0, room - chosen * each)
            counts.append(chosen)
        return counts[0], counts[1]

    def _kept_bytes(self) -> tuple[int, int]:
        """Of one layer over the micro-batches of a step: (attention, gate and up). See model/recompute.py.

        A softmax statistic of 4 bytes a head and token is attention's too, and 1 % is for the allocator's rounding.
        """
        spec, tokens = self.spec, self.cell_tokens * self.config.num_micro_batches
        queries, keys = spec.width("q_proj"), spec.width("k_proj")
        attention = (spec.hidden_size + 2 * queries + 2 * keys) * self.e + queries // 32 * 4
        gate_up = 2 * self.intermediate_size * self.e
        return int(1.01 * tokens * attention), int(1.01 * tokens * gate_up)

    def _gradient_slots(self) -> tuple[int, int]:
        """(most, fewest) host slots for the decoder layers' gradients. Raises ConfigError for too few with clipping."""
        given, every = self.config.placement.gradient_slots, max(1, self.trained_layers)
        if self.config.optimizer.max_grad_norm is None:
            return (given, given) if given else (every, min(2, every))
        if given is not None and given < self.trained_layers:
            raise ConfigError(
                f"placement.gradient_slots is {given}; max_grad_norm holds the gradients of all {self.trained_layers} "
                "trained layers until the norm is known: raise it to that, or set optimizer.max_grad_norm to null"
            )
        return given or every, given or every

    def _logits_budget(self) -> int:
        """For a chunk of rows. GIB // 8 keeps the projection's GEMM busy; a whole one costs nothing on a big GPU."""
        return GIB if (self.gpu_limit or 0) >= 16 * GIB else GIB // 8

    # ----------------------------------------------------------------------------------------------------------- items

    def _plan(self, layout: RunLayout) -> BytePlan:
        buffers = layout.buffers(self.spec)
        trained = self._trained_elements(layout)
        stored = self.spec.num_parameters * self.e
        activations = ByteItem(
            self.compute_tier, f"{layout.activation_slots} activation slots", layout.activation_slots * self.cell_bytes
        )
        return BytePlan(
            layout=layout,
            items=(
                *self._compute_items(),
                activations,
                *self._kept_items(),
                *self._pinned_items(layout, buffers),
                *self._private_items(layout, trained),
            ),
            store_bytes=store_bytes(list(buffers.values())),
            gpu_limit=self.gpu_limit,
            host_limit=self.host_limit,
            save_peak_bytes=self._save_peak(layout),
            disk_bytes=stored + trained * layout.private_bytes_per_parameter,
            model_bytes=stored,
        )

    def _compute_items(self) -> list[ByteItem]:
        """What the compute actor allocates beside activation slots."""
        spec, placement, e = self.spec, self.config.placement, self.e
        largest = spec.largest_decoder_numel
        vocab = spec.embed.numel + spec.head.numel if spec.tied else max(spec.embed.numel, spec.head.numel)
        working = (written_out_bytes if self.written_out and self.has_kernels else autograd_bytes)(
            spec, self.intermediate_size, self.cell_tokens, e
        )
        found = {
            f"{placement.param_units} parameter units": placement.param_units * largest * e,
            f"{placement.gradient_units} gradient units": placement.gradient_units * largest * e,
            "fp32 gradient sum of a layer": largest * 4,
            "vocabulary unit and its fp32 gradient sum": vocab * (e + 4),
            "a layer at work on one micro-batch": working,
            "the head at work, logits a chunk at a time": self._head_bytes(),
        }
        if self.device == "cuda":
            found["CUDA context"] = CUDA_CONTEXT_BYTES
        else:
            found["PyTorch's CPU kernels, one a shape"] = CPU_KERNELS_BYTES
        return [ByteItem(self.compute_tier, what, nbytes) for what, nbytes in found.items()]

    def _kept_items(self) -> list[ByteItem]:
        found = zip(self._kept(), ("attention", "gate and up"), self._kept_bytes(), strict=True)
        return [
            ByteItem(self.compute_tier, f"{count} layers' {what}, kept for the backward", count * each)
            for count, what, each in found
            if count
        ]

    def _head_bytes(self) -> int:
        """A chunk of logits and, in the PyTorch form of linear_cross_entropy.py, two fp32 copies, up to the budget.

        Worked, Qwen2.5-7B (152,064) at 4 x 1024 tokens: 4096 x 152,064 x 10 = 5.8 GiB, of which the budget allows 1.
        """
        return min(self._logits_budget(), self.cell_tokens * self.spec.vocab_size * (self.e + 8))

    def _pinned_items(self, layout: RunLayout, buffers: dict[str, int]) -> list[ByteItem]:
        def of(*prefixes: str) -> int:
            return sum(nbytes for name, nbytes in buffers.items() if name.startswith(prefixes))

        hi = "parameters that the GPU reads (hi)" if layout.split_masters else "parameters (fp32 masters)"
        return [
            ByteItem(PINNED, hi, of("hi.")),
            ByteItem(PINNED, f"gradients: {layout.gradient_slots} layer slots, embedding and head", of("grad.")),
            ByteItem(PINNED, f"{layout.num_host_cells} offloaded activations", of("activations")),
            ByteItem(PINNED, "batches and counters", of("batch.", "control")),
            ByteItem(PINNED, "embedding rows on their way", of("rows.")),
        ]

    def _private_items(self, layout: RunLayout, trained: int) -> list[ByteItem]:
        lo = [ByteItem(PRIVATE, "master remainders (lo)", trained * 2)] if layout.split_masters else []
        return [
            *lo,
            ByteItem(PRIVATE, "exp_avg and exp_avg_sq, fp32", trained * 8),
            ByteItem(PRIVATE, "rows of the data files", self.rows_bytes),
            self._process_item(layout),
        ]

    def _process_item(self, layout: RunLayout) -> ByteItem:
        cuda = CUDA_PROCESS_BYTES if self.device == "cuda" else 0
        if self.local:
            return ByteItem(PRIVATE, "one process", PROCESS_BYTES + cuda)
        count = 3 + layout.num_optimizer_actors  # driver, GPU actor, storage actor
        return ByteItem(PRIVATE, f"{count} processes and Ray", count * PROCESS_BYTES + cuda + RAY_NODE_BYTES)

    def _trained_elements(self, layout: RunLayout) -> int:
        actors = range(layout.num_optimizer_actors)
        slices = [slice_of(b.trainable_numel, k, len(actors)) for b in self.spec.blocks for k in actors]
        return sum(stop - start for start, stop in slices)

    def _save_peak(self, layout: RunLayout) -> int:
        """Buffers between the actors' memory and the files (actors/slice_files.py), whatever the model."""
        saving = self.config.checkpoint.enabled or self.config.checkpoint.resume != "none"
        return buffer_bytes(layout.num_optimizer_actors) if saving else 0


def written_out_bytes(spec: ModelSpec, intermediate_size: int, tokens: int, element_bytes: int) -> int:
    """What the backward of one layer takes beside the units, for one micro-batch, by model/recompute.py; and 5 %."""
    queries, keys = spec.width("q_proj"), spec.width("k_proj")
    per_token = 3 * intermediate_size + 3 * spec.hidden_size + 2 * queries + 2 * keys
    return int(1.05 * per_token * tokens * element_bytes)


def autograd_bytes(spec: ModelSpec, intermediate_size: int, tokens: int, element_bytes: int) -> int:
    """The same by autograd (model/autograd_layer.py), and by the plain PyTorch beside the kernels.

    Counted from the tensors that autograd keeps in a plain Llama layer, per token: about 6 of the MLP's width and 16 of
    the model's. Worked, Qwen2.5-3B (2048, 11008) at 32 x 1024 tokens in bf16: (6 x 11008 + 16 x 2048) x 2 x 32768 =
    6.0 GiB; plus the layer's own gradients, as large as its parameters.
    """
    per_token = (6 * intermediate_size + 16 * spec.hidden_size) * element_bytes
    return per_token * tokens + spec.largest_decoder_numel * element_bytes


def _rows_bytes(path: Path) -> int:
    """What the driver takes for a JSONL file, which it reads whole: about 2.5 bytes a byte and 1.5 KiB a row.

    Measured on 160,000 rows of 160 bytes (24 MiB): 249 MiB. The number of rows is guessed from the first 64 KiB. A file
    that is not there counts nothing: a plan can be made without data, and a run names the missing file itself.
    """
    try:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(1 << 16)
    except OSError:
        return 0
    rows = size * head.count(b"\n") // max(len(head), 1) + 1
    return size * 5 // 2 + rows * 1536


def _device(config: RunConfig, machine: Machine) -> str:
    if config.placement.device == "cuda" and machine.gpu_bytes is None:
        raise ConfigError(
            "placement.device is cuda and PyTorch finds no GPU; install a CUDA or ROCm build of torch, or set it to "
            "auto or cpu"
        )
    return "cuda" if config.placement.device != "cpu" and machine.gpu_bytes is not None else "cpu"


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to


def _total(items: Sequence[ByteItem]) -> int:
    return sum(item.nbytes for item in items)


def format_table(items: Sequence[ByteItem]) -> list[tuple[str, str, str]]:
    """(tier, what, size) rows, with a total a tier."""
    rows = []
    for tier in dict.fromkeys(item.tier for item in items):
        of_tier = [item for item in items if item.tier == tier]
        rows += [(tier, item.what, gib(item.nbytes)) for item in of_tier if item.nbytes]
        rows.append((tier, "total", gib(_total(of_tier))))
    return rows
