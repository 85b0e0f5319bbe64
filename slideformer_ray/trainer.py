"""The driver: checks everything, starts the tiers, submits one step plan a step, gathers results, evaluates, saves.

    trainer = Trainer(RunConfig.load("run.yaml"))   # reads and checks; nothing is started
    print(trainer.plan)                             # bytes of every tier
    summary = trainer.train()

or, with a say in it, `for step in trainer.fit(): ...`.

Tested by tests/test_trainer.py.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slideformer_ray.actors.lanes import StepInputs
from slideformer_ray.actors.process import ActorReport
from slideformer_ray.budget import NUM_BATCH_BUFFERS, PRIVATE, BytePlan, Machine, resolve
from slideformer_ray.checkpoint import CheckpointWriter, SavedCheckpoint, SaveFailed, remove_remains
from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.data.batches import DataSet, StepBatch
from slideformer_ray.durable import fsync_path
from slideformer_ray.jobs import in_this_job
from slideformer_ray.lr_schedule import check_schedule
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.model.spec import ModelSpec
from slideformer_ray.model.weights import WeightFiles
from slideformer_ray.observe.callbacks import configured_callbacks
from slideformer_ray.observe.lane_metrics import LaneSampler
from slideformer_ray.observe.memory import anonymous_bytes, process_tree
from slideformer_ray.observe.metrics import Callback, EvalMetrics, MetricsFile, StepMetrics, to_json
from slideformer_ray.observe.report import version_numbers
from slideformer_ray.observe.status import RunNote
from slideformer_ray.resume import check_tensors, find_source, read_checkpoint, rows_digest
from slideformer_ray.run_lock import run_lock
from slideformer_ray.shortfalls import check_disk
from slideformer_ray.tiers import LocalTiers, PendingStep, RayTiers, StepReport, TierError, Tiers

log = logging.getLogger(__name__)

# How often the memory of all processes is read for the summary's peak, seconds.
_MEMORY_EVERY_SECONDS = 2.0


# Steps submitted and not gathered: one at work and one waiting behind it, so that no actor waits for the driver.
STEPS_AHEAD = 2
assert STEPS_AHEAD < NUM_BATCH_BUFFERS


class Interrupted(RuntimeError):
    """The run ended as `Trainer.interrupt` asked; the message says after how many steps, and what was saved."""


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a non-finite gradient norm."""


@dataclass(frozen=True)
class Summary:
    """What a run did; written to RUN/summary.json."""

    steps: int
    skipped_steps: int
    first_eval_loss: float | None
    last_eval_loss: float | None
    last_loss: float
    seconds: float
    median_step_seconds: float
    tokens_per_second: float
    peak_host_bytes: int
    peak_gpu_bytes: int
    spilled_bytes: int
    model_dir: str | None
    failed_saves: int = 0


@dataclass(frozen=True)
class _Submitted:
    pending: PendingStep
    batch: StepBatch
    started: float


class Trainer:
    """`local=True` runs the tiers as threads of this process instead of Ray actors."""

    def __init__(
        self,
        config: RunConfig,
        *,
        callbacks: Sequence[Callback] = (),
        local: bool = False,
        machine: Machine | None = None,
    ):
        if not local:
            config = in_this_job(config)
        self.config, self.local = config, local
        self.machine = machine or Machine.read(config.placement.device)
        self.hf_config = load_hf_config(config.model.path)
        self.resume_from = find_source(config)
        self.resumed = read_checkpoint(self.resume_from, config) if self.resume_from else None
        self.spec = describe_model(self.hf_config, config.model.frozen)
        if config.checkpoint.save_final:
            check_final_model_dir(config, self.resume_from)
        self.plan: BytePlan = resolve(config, self.spec, self.hf_config.intermediate_size, self.machine, local=local)
        check_disk(config, self.plan)
        if self.resume_from is not None:
            check_tensors(self.resume_from, self.spec, config)
        elif not config.model.random_init:
            with WeightFiles(config.model.path) as files:
                files.check(self.spec)
        self.tokenizer = load_tokenizer(config.model.path)
        self.data = DataSet.load(config, self.tokenizer)
        check_vocabulary(self.data, self.spec, config)
        self._rows = rows_digest(self.data.train)
        if self.resumed and self.resumed.training["rows"] != self._rows:
            raise ConfigError(
                f"checkpoint.resume: {self.resume_from} was trained on {self.resumed.training['rows']}, data.train "
                f"gives {self._rows}; the next step would train other rows: give the same files"
            )
        check_schedule(self.data.num_steps, config.optimizer.warmup_steps)
        if self.resumed and self.resumed.steps_done > self.data.num_steps:
            raise ConfigError(
                f"checkpoint.resume: {self.resume_from} is of step {self.resumed.steps_done}, the run has "
                f"{self.data.num_steps} steps; raise training.steps (or epochs)"
            )
        self.callbacks: list[Callback] = [
            MetricsFile(config.run_dir / "metrics.jsonl"),
            RunNote(config.run_dir),
            *configured_callbacks(config, local),
            *callbacks,
        ]
        self.actor_reports: Sequence[ActorReport] = ()  # of this run's actors, once they have started
        self.summary: Summary | None = None  # of the last run that came to its end
        self._begin()

    def _begin(self) -> None:
        """What one run counts; `train` may be called again, and starts anew."""
        self._next_batch: StepBatch | None = None  # of the step after the last one submitted
        self._last_checkpoint = self.resume_from  # complete, to the best of this run's knowledge
        self._saved_at = time.monotonic()  # the last checkpoint, or the start
        self._saved_state: dict[str, Any] = {}  # of the save under way
        self._failed_saves = 0
        self.saves: list[SavedCheckpoint] = []  # those of this run that are complete
        self._train_steps = 0  # submitted in this process: where the shared counters stand
        self._steps_done = 0  # of the whole training, those before a resumed checkpoint included
        self._stopping, self._interrupted = False, False
        self._stepping = False
        self._peak_rate: float | None = None  # None: optimizer.learning_rate
        self._last_eval: tuple[int, float | None] = (-1, None)  # steps done before it, loss
        self._sampler = LaneSampler(self.config.observe.lanes_every, self.spec, self.plan.layout)
        self._peak_host_bytes, self._private_bytes, self._memory_read_at = 0, 0, 0.0
        self._peak_gpu_bytes = 0
        self._skipped_in_a_row, self._skipped = 0, 0
        if self.resumed:
            saved = self.resumed.training
            self._skipped_in_a_row = saved["skipped_in_a_row"]
            if saved["config"]["optimizer"]["learning_rate"] == self.config.optimizer.learning_rate:
                self._peak_rate = saved["peak_learning_rate"]
        self._step_seconds: list[float] = []
        self._tokens = 0
        self._last_end = 0.0

    # ------------------------------------------------------------------------------------------------------ the run

    def train(self) -> Summary:
        """Run to the last step and write RUN. Raises TierError or TrainingDiverged.

        Whatever happens, every process is ended.
        """
        with closing(self.fit()) as steps:
            for _ in steps:
                pass
        assert self.summary is not None
        return self.summary

    def fit(self) -> Generator[StepMetrics, None, None]:
        """The run as a generator: each step's metrics, after every callback has had them. `train` is a loop over it.

            for step in trainer.fit():
                if step.loss < 0.5:
                    trainer.stop()

        The next step is under way by then, so that no actor waits for this loop. When the last step has been given
        out, evaluation, final model and summary follow, and `trainer.summary` is set. Who leaves the loop before, by
        `break` or an error, ends the run as it stands: every process is ended, and no model is written.
        """
        try:
            with run_lock(self.config.run_dir):
                yield from self._fit()
        finally:
            for callback in self.callbacks:
                callback.close()

    def _fit(self) -> Iterator[StepMetrics]:
        config = self.config
        self._begin()
        for path in remove_remains(config.run_dir):
            log.warning("%s: removed: its save did not end", path)
        if find_source(config) != self.resume_from:
            raise ConfigError(f"run_dir: {config.run_dir}: another run has written checkpoints meanwhile; start again")
        (config.run_dir / "config.json").write_text(config.model_dump_json(indent=1) + "\n")
        started = time.perf_counter()
        make_tiers = LocalTiers if self.local else RayTiers
        with (
            self._way_back_named(),
            make_tiers(config, self.hf_config, self.spec, self.plan, self.data.num_steps) as tiers,
        ):
            self.actor_reports = tiers.reports()
            first = self._steps_done = self._load(tiers)
            for callback in self.callbacks:
                callback.on_start(self.data.num_steps, first)
            first_eval = self.evaluate(tiers, first)
            last = math.nan
            self._writer = CheckpointWriter(config, self.spec, tiers)
            self._stepping = True
            for metrics in self._run_steps(tiers, first):
                last = metrics.loss
                yield metrics
            self._end_save()
            self._stepping = False
            if self._interrupted:
                self._end_interrupted()
            if self._last_eval[0] != self._steps_done:
                self.evaluate(tiers, self._steps_done)
            model_dir = config.run_dir / "model" if config.checkpoint.save_final else None
            if model_dir is not None:
                _save_final_model(tiers, model_dir)
            self._read_memory(tiers, force=True)
            spilled = tiers.node.spilled_bytes() if isinstance(tiers, RayTiers) else 0
        seconds = time.perf_counter() - started
        ordered = sorted(self._step_seconds) or [math.nan]
        summary = Summary(
            steps=self._steps_done - first,
            skipped_steps=self._skipped,
            first_eval_loss=first_eval,
            last_eval_loss=self._last_eval[1],
            last_loss=last,
            seconds=seconds,
            median_step_seconds=ordered[len(ordered) // 2],
            tokens_per_second=self._tokens / max(sum(self._step_seconds), 1e-9),
            peak_host_bytes=self._peak_host_bytes,
            peak_gpu_bytes=self._peak_gpu_bytes,
            spilled_bytes=spilled,
            model_dir=str(model_dir) if model_dir else None,
            failed_saves=self._failed_saves,
        )
        (config.run_dir / "summary.json").write_text(to_json(dataclasses.asdict(summary), indent=1) + "\n")
        self.summary = summary
        for callback in self.callbacks:
            callback.on_end(summary)

    def stop(self) -> None:
        """Make the steps that are under way the last ones of the run, which then ends as always. From any thread."""
        self._stopping = True

    def interrupt(self) -> bool:
        """Make the steps that are under way the last ones, save, and raise Interrupted; from a signal handler, say.

        The run then ends without evaluation, final model and summary. False: no step is under way yet, or any more.
        """
        if self._stepping:
            self._stopping = self._interrupted = True
        return self._stepping

    def set_learning_rate(self, peak: float) -> None:
        """Put `peak` in the place of `optimizer.learning_rate`, from the next step that is submitted on.

        The schedule's shape stays. Called for step n of `fit`, it acts on step n + 2, for n + 1 is under way;
        `StepMetrics.learning_rate` says what each step had. A checkpoint holds it.
        """
        if not (math.isfinite(peak) and peak >= 0):
            raise ValueError(f"set_learning_rate: the rate must be a finite number of at least 0, found {peak}")
        self._peak_rate = peak

    @contextmanager
    def _way_back_named(self) -> Iterator[None]:
        """An error that ends the run says what to continue from."""
        try:
            yield
        except TierError as error:
            way = (
                f"continue from checkpoint.resume={self._last_checkpoint}"
                if self._last_checkpoint
                else "there is no checkpoint to continue from (checkpoint.save_every)"
            )
            raise TierError(f"{error}; {way}") from error

    def _load(self, tiers: Tiers) -> int:
        """Weights and states; returns the number of steps done before."""
        if self.resumed is None:
            tiers.load_weights(None if self.config.model.random_init else self.config.model.path)
            return 0
        tiers.load_checkpoint(self.resumed.path, self.resumed.adam_step)
        return self.resumed.steps_done

    def _run_steps(self, tiers: Tiers, first: int) -> Iterator[StepMetrics]:
        """All steps from `first`. One step is always submitted ahead, so that no actor waits for the driver."""
        total, training = self.data.num_steps, self.config.training
        ahead: deque[_Submitted] = deque()
        self._last_end = time.perf_counter()
        for step in range(first, total):
            if len(ahead) == STEPS_AHEAD:
                yield self._finish(tiers, ahead.popleft())
            if self._stopping:
                break
            ahead.append(self._submit(tiers, step))
            done = step + 1
            evaluates = (
                bool(self.data.eval) and training.eval_every > 0 and done % training.eval_every == 0 and done < total
            )
            saves = self._save_is_due(done)
            if saves and self.config.checkpoint.async_save:
                # The save before may be waited for now: its steps are gathered and recorded first.
                while (self._writer.steps_done or 0) > self._steps_done:
                    yield self._finish(tiers, ahead.popleft())
                self._save(done)
                saves = False
            if evaluates or saves or done == total:
                while ahead:
                    yield self._finish(tiers, ahead.popleft())
                if evaluates:
                    self.evaluate(tiers, done)
                if saves:
                    self._save(done)
                self._sampler.interrupt()
                self._last_end = time.perf_counter()
        while ahead:  # stopped
            yield self._finish(tiers, ahead.popleft())

    def _save_is_due(self, done: int) -> bool:
        saving = self.config.checkpoint
        minutes = saving.save_every_minutes
        by_clock = minutes is not None and time.monotonic() - self._saved_at >= minutes * 60
        return by_clock or (saving.save_every > 0 and done % saving.save_every == 0)

    def _save(self, done: int) -> None:
        """Save the state after `done` steps, which have all been submitted; with async_save only begin to.

        One save at a time: on a disk that is slower than save_every, the run waits here for the last one.
        """
        self._end_save()
        self._saved_at = time.monotonic()
        self._saved_state = {"peak_learning_rate": self._peak_rate, "skipped_in_a_row": self._skipped_in_a_row}
        with self._save_may_fail(done):
            self._writer.begin(done)
        if not self.config.checkpoint.async_save:
            self._end_save()

    def _end_save(self) -> None:
        """Wait for the save that is under way, if there is one."""
        if (done := self._writer.steps_done) is not None:
            with self._save_may_fail(done):
                self._note(self._writer.finish(self._training_state(done)))

    def _poll_save(self) -> None:
        """Complete the save that is under way, if its steps are gathered and everything is written."""
        if (done := self._writer.steps_done) is not None and done <= self._steps_done:
            with self._save_may_fail(done):
                self._note(self._writer.poll(self._training_state(done)))

    def _note(self, saved: SavedCheckpoint | None) -> None:
        if saved is not None:
            self._last_checkpoint = saved.path
            self.saves.append(saved)

    @contextmanager
    def _save_may_fail(self, done: int) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            self._failed_saves += 1
            if self.config.checkpoint.on_save_error == "stop":
                raise
            log.warning("no checkpoint of step %d: %s", done, error)

    def _training_state(self, done: int) -> dict[str, Any]:
        """What a resumed run needs beside tensors. No generator's state: every draw is a function of seed and step."""
        return {
            "rows": self._rows,
            "data_position": done * self.config.training.rows_per_step,
            **self._saved_state,
            "config": self.config.model_dump(mode="json"),
            "versions": version_numbers(),
        }

    def _end_interrupted(self) -> None:
        """Save, if the run saves at all, and raise Interrupted."""
        done = self._steps_done
        last = self._last_checkpoint
        if self.config.checkpoint.enabled and (last is None or last.name != f"step-{done}"):
            self._save(done)
            self._end_save()
        saved = self._last_checkpoint
        way = f"; {saved} is saved: continue with checkpoint.resume=auto" if saved else "; nothing is saved"
        raise Interrupted(f"after {done} steps{way}")

    def _submit(self, tiers: Tiers, step: int) -> _Submitted:
        batch = self._next_batch or self.data.step_batch(step)
        self._next_batch = self.data.step_batch(step + 1) if step + 1 < self.data.num_steps else None
        submitted = submit_batch(
            tiers,
            batch,
            step,
            self._train_steps,
            train=True,
            following=self._next_batch,
            trace=self._sampler.wants(step),
            peak_learning_rate=self._peak_rate,
        )
        self._train_steps += 1
        if self._writer.steps_done == step:  # the first step after the one that is being saved
            self._saved_state["peak_learning_rate"] = self._peak_rate
        return _Submitted(submitted, batch, time.perf_counter())

    def _finish(self, tiers: Tiers, submitted: _Submitted) -> StepMetrics:
        report = tiers.gather(submitted.pending)
        now = time.perf_counter()
        seconds = now - max(submitted.started, self._last_end)
        self._last_end = now
        self._count(submitted.pending.inputs.step, report)
        self._steps_done = submitted.pending.inputs.step + 1
        self._step_seconds.append(seconds)
        self._tokens += submitted.batch.num_tokens
        self._read_memory(tiers)
        metrics = StepMetrics(
            step=submitted.pending.inputs.step,
            loss=report.gpu.loss,
            grad_norm=report.gpu.grad_norm,
            learning_rate=report.updates[0].learning_rate,
            skipped=report.gpu.skipped,
            tokens=submitted.batch.num_tokens,
            supervised_tokens=submitted.batch.num_supervised,
            step_seconds=seconds,
            tokens_per_second=submitted.batch.num_tokens / seconds,
            update_busy_seconds=max(u.busy_seconds for u in report.updates),
            gpu_wait_seconds=report.gpu.waited_seconds,
            gpu_peak_bytes=report.gpu.peak_gpu_bytes,
            tier_bytes={
                "gpu": report.gpu.peak_gpu_bytes,
                "pinned": sum(buffer.nbytes for buffer in tiers.buffers.values()),
                "private": self._private_bytes,
            },
            tier_reserved_bytes={
                "gpu": report.gpu.reserved_gpu_bytes,
                "pinned": self.plan.store_bytes,
                "private": self.plan.total(PRIVATE),
            },
        )
        lanes = self._sampler.add(submitted.pending.inputs, report.spans, report.gpu.sensors)
        for callback in self.callbacks:
            callback.on_step(metrics)
            if lanes is not None:
                callback.on_lanes(lanes)
        self._poll_save()  # last: a run that is killed must not have a checkpoint of a step and no record of it
        return metrics

    def _count(self, step: int, report: StepReport) -> None:
        self._peak_gpu_bytes = max(self._peak_gpu_bytes, report.gpu.peak_gpu_bytes)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if report.gpu.skipped else 0
        if self._writer.steps_done == step + 1:
            self._saved_state["skipped_in_a_row"] = self._skipped_in_a_row
        if not report.gpu.skipped:
            return
        self._skipped += 1
        if self._skipped_in_a_row >= self.config.optimizer.max_skipped_steps:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} steps in a row up to step {step} had a gradient norm of NaN or infinity and "
                f"were skipped (optimizer.max_skipped_steps is {self.config.optimizer.max_skipped_steps}); lower "
                f"optimizer.learning_rate ({self.config.optimizer.learning_rate:g}) or check the data of these steps. "
                "Masters and states are those of the last good step"
            )

    def evaluate(self, tiers: Tiers, step: int) -> float | None:
        """Mean loss of a supervised held-out token; None without held-out rows. Keeps two numbers a batch."""
        self._last_eval = (step, None)
        if not self.data.eval:
            return None
        total, count = 0.0, 0
        for batch in self.data.eval_batches():
            report = tiers.gather(submit_batch(tiers, batch, step, self._train_steps, train=False))
            total += report.gpu.loss * batch.num_supervised
            count += batch.num_supervised
        metrics = EvalMetrics(step, total / count, count)
        for callback in self.callbacks:
            callback.on_eval(metrics)
        self._last_eval = (step, metrics.eval_loss)
        return metrics.eval_loss

    def _read_memory(self, tiers: Tiers, force: bool = False) -> None:
        """Host memory of the run: own pages of every process, Ray's too on a node of our own; shared buffers once."""
        now = time.perf_counter()
        if not force and now - self._memory_read_at < _MEMORY_EVERY_SECONDS:
            return
        self._memory_read_at = now
        shared = sum(b.nbytes for b in tiers.buffers.values())
        pids = process_tree(os.getpid()) | {report.pid for report in self.actor_reports}
        self._private_bytes = anonymous_bytes(pids)
        self._peak_host_bytes = max(self._peak_host_bytes, shared + self._private_bytes)


def submit_batch(
    tiers: Tiers,
    batch: StepBatch,
    step: int,
    train_steps: int,
    *,
    train: bool,
    following: StepBatch | None = None,
    trace: bool = False,
    peak_learning_rate: float | None = None,
) -> PendingStep:
    """Write the batch where the actors read it and submit the step.

    following: the training step after this one, if it is known: its embedding rows are then updated before all others.
    peak_learning_rate: in the place of the config's.
    """
    slot = train_steps % NUM_BATCH_BUFFERS
    tiers.write_batch(slot, batch.micro_batches)
    next_batch = None
    if following is not None:
        next_batch = ((train_steps + 1) % NUM_BATCH_BUFFERS, sum(m.ids.size for m in following.micro_batches))
        tiers.write_batch(next_batch[0], following.micro_batches)
    shape = tiers.layout.shape(len(batch.micro_batches), train)
    sizes = tuple((int(m.ids.shape[0]), int(m.ids.shape[1])) for m in batch.micro_batches)
    return tiers.submit(
        StepInputs(step, shape, train_steps, slot, sizes, batch.num_supervised, next_batch, trace, peak_learning_rate)
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model directory's own tokenizer, never from a hub."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: {path} has no tokenizer that transformers can load ({str(error).splitlines()[0]})"
        ) from None


def check_vocabulary(data: DataSet, spec: ModelSpec, config: RunConfig) -> None:
    """Every id must have a row in the embedding: another model's tokenizer would read past it. Raises ConfigError."""
    highest = max(int(row.ids.max()) for row in (*data.train, *data.eval))
    if highest >= spec.vocab_size:
        raise ConfigError(
            f"model.path: {config.model.path}: its tokenizer gives id {highest}, and the model's vocabulary has "
            f"{spec.vocab_size} rows; use the tokenizer that belongs to the model"
        )


# In the final model's directory: a run wrote it, so the next run may replace it.
FINAL_MODEL_MARK = ".written_by_slideformer_ray"


def check_final_model_dir(config: RunConfig, resume_from: Path | None) -> None:
    """RUN/model must not be where the run reads its weights, nor something that no run wrote. Raises ConfigError."""
    model_dir = config.run_dir / "model"
    sources = [config.model.path, *([resume_from / "model"] if resume_from else [])]
    if any(model_dir.resolve() == source.resolve() for source in sources):
        raise ConfigError(
            f"run_dir: {config.run_dir}: the final model would replace the one that the run starts from, {model_dir}; "
            "give another run_dir, or set checkpoint.save_final to false"
        )
    if model_dir.exists() and any(model_dir.iterdir()) and not (model_dir / FINAL_MODEL_MARK).exists():
        raise ConfigError(
            f"run_dir: {model_dir} holds something that no run wrote; move it, give another run_dir, or set "
            "checkpoint.save_final to false"
        )


def _save_final_model(tiers: Tiers, model_dir: Path) -> None:
    """Written beside and renamed: an earlier run's model stays until the new one is on the disk."""
    new, old = model_dir.with_name("model.tmp"), model_dir.with_name("model.old")
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    tiers.save_model(new)
    (new / FINAL_MODEL_MARK).touch()
    if model_dir.exists():
        model_dir.rename(old)
    new.rename(model_dir)
    fsync_path(model_dir.parent)
    shutil.rmtree(old, ignore_errors=True)
