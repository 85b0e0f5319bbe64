"""Encoded rows to the micro-batches of each step, and the data set of a run.

Loss is a sum over the supervised tokens of the WHOLE step, divided once by `StepBatch.num_supervised`: how a step is
cut into micro-batches changes neither loss nor gradient (transformers #37766). Imports no torch: a step batch is plain
numpy that the driver hands to the GPU actor. Tested by tests/data/test_batches.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from slideformer_ray.data.chat import EncodedRow, RowEncoder
from slideformer_ray.data.order import RowOrder, permutation
from slideformer_ray.data.rows import DataError, RawRow, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slideformer_ray.config import RunConfig

IGNORE_INDEX = -100  # torch.nn.functional.cross_entropy's default ignore_index

NEEDED = "a row needs an assistant turn that begins before data.seq_len, or two tokens of text"

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Rows of one GPU call, padded on the right: attention is causal, so no token sees padding and needs no mask."""

    ids: np.ndarray  # int32[rows, seq]
    targets: np.ndarray  # int32[rows, seq]: targets[r, t] is ids[r, t + 1] if that token is supervised, else -100


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    micro_batches: tuple[MicroBatch, ...]
    num_supervised: int  # of all micro-batches: what the summed loss is divided by
    num_tokens: int  # padding not counted
    row_ids: tuple[int, ...]  # of the rows of micro_batches[0], then of micro_batches[1], ...


def make_step_batch(rows: Sequence[EncodedRow], micro_batch_rows: int, pad_to_multiple: int, pad_id: int) -> StepBatch:
    """Cut `rows` into micro-batches of `micro_batch_rows`; the last may have fewer.

    Rows are sorted by length (stable), so that those of one micro-batch are about as long and little is padding, the
    longest first, so that what does not fit in memory shows at once. A micro-batch without a supervised token is no
    mistake: its gradient is zero. Raises DataError, naming the rows, when the whole step has none (Automodel #3796: NaN
    in every weight).
    """
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    row_ids = tuple(row.row_id for row in ordered)
    num_supervised = sum(row.num_supervised for row in ordered)
    if num_supervised == 0:
        raise DataError(f"no supervised token in a whole step: rows {_some(row_ids)} have none; {NEEDED}")
    micro_batches = tuple(
        _pad(ordered[start : start + micro_batch_rows], pad_to_multiple, pad_id)
        for start in range(0, len(ordered), micro_batch_rows)
    )
    return StepBatch(micro_batches, num_supervised, sum(len(row.ids) for row in ordered), row_ids)


def _pad(rows: Sequence[EncodedRow], pad_to_multiple: int, pad_id: int) -> MicroBatch:
    longest = max(len(row.ids) for row in rows)
    shape = (len(rows), -(-longest // pad_to_multiple) * pad_to_multiple)
    ids = np.full(shape, pad_id, np.int32)
    targets = np.full(shape, IGNORE_INDEX, np.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        # By position, never by id: where padding and end of turn share an id, the end of turn must stay a target.
        targets[index, : len(row.ids) - 1] = np.where(row.supervised[1:], row.ids[1:], IGNORE_INDEX)
    return MicroBatch(ids, targets)


@dataclass(frozen=True)
class DataCounts:
    """What became of the rows of one split."""

    rows: int  # in use
    dropped: int  # left out: no supervised token
    truncated: int  # cut to data.seq_len, dropped ones included
    tokens: int  # of the rows in use, after truncation
    supervised_tokens: int


@dataclass(frozen=True, eq=False)
class DataSet:
    """The rows of a run, tokenised, and the order in which its steps take them."""

    train: tuple[EncodedRow, ...]
    eval: tuple[EncodedRow, ...]  # held out; may be empty
    train_counts: DataCounts
    eval_counts: DataCounts
    order: RowOrder
    micro_batch_rows: int
    pad_to_multiple: int
    pad_id: int

    @classmethod
    def load(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataSet:
        """Read, check and tokenise all rows. Raises DataError: a bad row, or a split with nothing to learn from."""
        data, training = config.data, config.training
        train_rows = load_rows(data.train)
        if data.eval:
            eval_rows = load_rows(data.eval)
            if data.eval_rows:
                log.warning("data.eval_rows=%d has no effect: data.eval is given", data.eval_rows)
        else:
            train_rows, eval_rows = _hold_out(train_rows, data.eval_rows, training.seed)
        encoder = RowEncoder(tokenizer)
        train, train_counts = _encode(encoder, train_rows, data.seq_len, "training")
        held_out, eval_counts = _encode(encoder, eval_rows, data.seq_len, "held-out")
        if training.steps is not None:
            num_positions = training.steps * training.rows_per_step
        else:
            assert training.epochs is not None, "RunConfig asks for one of steps and epochs"
            num_positions = max(1, round(training.epochs * len(train)))
        order = RowOrder(len(train), training.rows_per_step, training.seed, num_positions)
        return cls(
            train=train,
            eval=held_out,
            train_counts=train_counts,
            eval_counts=eval_counts,
            order=order,
            micro_batch_rows=config.micro_batch_rows,
            pad_to_multiple=data.pad_to_multiple,
            pad_id=next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0),
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run, so also the length of the learning rate schedule."""
        return self.order.num_steps

    def step_batch(self, step: int) -> StepBatch:
        """The batch of step `step` (0 is the first): a pure function of the seed and the step."""
        return self._batch([self.train[index] for index in self.order.step_rows(step)])

    def eval_batches(self) -> list[StepBatch]:
        """Every held-out row once, always in the same batches of rows_per_step; the last may have fewer."""
        size = self.order.rows_per_step
        return [self._batch(self.eval[start : start + size]) for start in range(0, len(self.eval), size)]

    def _batch(self, rows: Sequence[EncodedRow]) -> StepBatch:
        return make_step_batch(rows, self.micro_batch_rows, self.pad_to_multiple, self.pad_id)


def _hold_out(rows: list[RawRow], num_eval: int, seed: int) -> tuple[list[RawRow], list[RawRow]]:
    """(train, held out), each in file order. Split untokenised: no tokenizer, no seq_len changes what is held out."""
    if num_eval == 0:
        return rows, []
    if num_eval >= len(rows):
        raise DataError(f"data.eval_rows={num_eval} leaves none of {len(rows)} rows to train on; lower it")
    held_out = set(permutation(len(rows), seed)[-num_eval:].tolist())
    return [row for row in rows if row.row_id not in held_out], [row for row in rows if row.row_id in held_out]


def _encode(
    encoder: RowEncoder, raw_rows: list[RawRow], seq_len: int, split: str
) -> tuple[tuple[EncodedRow, ...], DataCounts]:
    """Tokenise, truncate on the right, and leave out the rows that nothing can be learned from."""
    used: list[EncodedRow] = []
    dropped: list[int] = []
    num_truncated = 0
    console = Console(stderr=True)
    progress = track(
        raw_rows, f"Tokenising {split} rows", console=console, transient=True, disable=not console.is_terminal
    )
    for raw in progress:
        row = encoder.encode(raw)
        if len(row.ids) > seq_len:
            num_truncated += 1
            row = row.truncated(seq_len)
        if row.num_supervised:
            used.append(row)
        else:
            dropped.append(row.row_id)
    if raw_rows and not used:
        raise DataError(
            f"{raw_rows[0].file}: none of the {len(raw_rows)} {split} rows has a supervised token ({num_truncated} "
            f"truncated to data.seq_len={seq_len}); {NEEDED}"
        )
    if dropped:
        log.warning(
            f"{len(dropped)} of {len(raw_rows)} {split} rows have no supervised token within data.seq_len={seq_len} "
            f"and are left out: rows {_some(dropped)}"
        )
    num_tokens = sum(len(row.ids) for row in used)
    num_supervised = sum(row.num_supervised for row in used)
    return tuple(used), DataCounts(len(used), len(dropped), num_truncated, num_tokens, num_supervised)


def _some(row_ids: Sequence[int], limit: int = 16) -> str:
    shown = ", ".join(map(str, row_ids[:limit]))
    return shown if len(row_ids) <= limit else f"{shown}, ... ({len(row_ids)} in all)"
