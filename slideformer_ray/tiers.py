"""Starts the three tiers and carries the driver's calls to them, as Ray actors or as threads of this process.

`RayTiers` and `LocalTiers` run the same pure classes over the same buffers and counters, so a schedule or a kernel is
checked without Ray, and what Ray adds is only where the code runs. The driver holds every buffer for the whole run.
Tested by tests/test_tiers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from transformers import PretrainedConfig

from slideformer_ray.actors.adam_shard import UpdateStepResult
from slideformer_ray.actors.block_saver import SaveReport
from slideformer_ray.actors.lanes import LaneError, StepInputs, counter_base
from slideformer_ray.actors.process import ActorReport, ActorSetup, open_page
from slideformer_ray.actors.sliding_window import GpuStepResult
from slideformer_ray.budget import BATCH_ROWS, BytePlan
from slideformer_ray.checkpoint_layout import TensorPlaces
from slideformer_ray.config import RunConfig
from slideformer_ray.memory import pinning
from slideformer_ray.memory.counters import Aborted, CounterPage
from slideformer_ray.memory.shared_buffer import SharedBuffer
from slideformer_ray.model.spec import ModelSpec
from slideformer_ray.observe.trace import Span
from slideformer_ray.schedule import GRAD_LANDED, build_step, updated_counter

if TYPE_CHECKING:
    from slideformer_ray.data.batches import MicroBatch

# A whole-model call is given up when it takes longer than this rate would, and `debug.wait_timeout_s` twice.
_SLOWEST_DISK_BYTES_PER_SECOND = 20e6
# After an error, how long the other actors have to notice the abort word (they look every 50 ms) and return.
_GRACE_SECONDS = 5.0


class TierError(RuntimeError):
    """An actor failed or died. The message names the actor, the step and what it was doing."""


@dataclass(frozen=True)
class StepReport:
    gpu: GpuStepResult
    updates: tuple[UpdateStepResult, ...]

    @property
    def spans(self) -> list[Span]:
        """Of all actors, if the step was traced."""
        return [*self.gpu.spans, *(span for update in self.updates for span in update.spans)]


@dataclass
class PendingStep:
    inputs: StepInputs
    gpu: Any
    updates: list[Any]


class Tiers:
    """The driver's view of the three tiers. Subclasses say where the tiers run."""

    def __init__(
        self, config: RunConfig, hf_config: PretrainedConfig, spec: ModelSpec, plan: BytePlan, total_steps: int
    ):
        self.config, self.hf_config, self.spec, self.plan, self.layout = config, hf_config, spec, plan, plan.layout
        self.total_steps = total_steps
        self._written: dict[int, tuple[MicroBatch, ...]] = {}
        self.buffers: dict[str, SharedBuffer] = {}
        self.page: CounterPage

    # ------------------------------------------------------------------------------------------------------ steps

    def write_batch(self, slot: int, micro_batches: tuple[MicroBatch, ...]) -> None:
        """Put ids and targets where the actors read them.

        The slot's last step must have been gathered, unless the slot holds these already.
        """
        if self._written.get(slot) is micro_batches:
            return
        self._written[slot] = micro_batches
        out = self.buffers[f"batch.{slot}"].numpy(np.int32).reshape(BATCH_ROWS, -1)
        at = 0
        for batch in micro_batches:
            out[0, at : at + batch.ids.size] = batch.ids.reshape(-1)
            out[1, at : at + batch.ids.size] = batch.targets.reshape(-1)
            at += batch.ids.size

    def submit(self, inputs: StepInputs) -> PendingStep:
        """Send the step to every actor that has work in it: one call each. Returns at once."""
        updates = (
            [self._call_optimizer(k, "run_step", inputs) for k in range(self.layout.num_optimizer_actors)]
            if inputs.shape.train
            else []
        )
        return PendingStep(inputs, self._call_gpu("run_step", inputs), updates)

    def gather(self, pending: PendingStep) -> StepReport:
        """Wait for every actor's end of the step. Raises TierError when one fails, within seconds."""
        gpu, *updates = self._wait([pending.gpu, *pending.updates], pending.inputs)
        return StepReport(gpu, tuple(updates))

    def progress(self, inputs: StepInputs) -> str:
        """How far a step has come, from the counters, in words; for error messages."""
        plan = build_step(inputs.shape)
        base = counter_base(inputs)
        value = lambda name: self.page.read(name) - base[name]  # noqa: E731
        if not inputs.shape.train:
            return "during an evaluation"
        landed = min(len(plan.gradient_order), max(0, value(GRAD_LANDED)))
        parts = [f"{landed} of {len(plan.gradient_order)} gradients had reached host memory"]
        for k in range(self.layout.num_optimizer_actors):
            missing = [self.spec.blocks[b].name for b in plan.gradient_order if value(updated_counter(k, b)) < 1]
            if missing:
                parts.append(
                    f"optimizer actor {k} had not updated {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
                )
        return f"in step {inputs.step}: {'; '.join(parts)}"

    def _where(self, inputs: StepInputs | None) -> str:
        return self.progress(inputs) if inputs is not None else "outside a step"

    def _raise(self, cause: BaseException, inputs: StepInputs | None) -> NoReturn:
        """Raise an actor's error in the driver: the user's mistakes (ValueError) as they are, all else as TierError."""
        if isinstance(cause, ValueError | TierError):
            raise cause
        if isinstance(cause, LaneError):  # a complete sentence already
            raise TierError(str(cause)) from cause
        raise TierError(f"{type(cause).__name__}: {cause} ({self._where(inputs)})") from cause

    # ---------------------------------------------------------------------------------------------- whole-model calls

    def load_weights(self, model_dir: Path | None) -> None:
        """Fill parameters and masters from a model directory, or draw them (`None`)."""
        method, args = ("draw_weights", ()) if model_dir is None else ("load_weights", (model_dir,))
        self.all_optimizers(method, *args)

    def master(self, name: str) -> torch.Tensor:
        """A parameter's fp32 master, whole, in its shape; a frozen one has none: its stored value. For checking.

        Not in a step.
        """
        block, param = next((b, p) for b in self.spec.blocks for p in b.params if p.name == name)
        shape = param.shape
        if param.frozen:
            hi = self.buffers[f"hi.{block.index}"].tensor(self.layout.dtype)
            return param.view(hi).float().clone()
        flat = np.zeros(int(np.prod(shape)), np.float32)
        for first, values in self.all_optimizers("master", name):
            flat[first : first + values.size] = values
        return torch.from_numpy(flat).view(shape)

    def gradient(self, name: str) -> torch.Tensor:
        """A parameter's gradient that the last step sent to the host, before clipping. Needs a slot for each layer."""
        for block in self.spec.blocks:
            for param in block.params:
                if param.name == name:
                    return param.view(self._host_gradient(block.index)).float().clone()
        raise KeyError(name)

    def _host_gradient(self, block: int) -> torch.Tensor:
        spec, layout = self.spec, self.layout
        if spec.blocks[block].kind != "decoder":
            return self.buffers[f"grad.{spec.blocks[block].kind}"].tensor(layout.dtype)
        if layout.gradient_slots < sum(layout.trainable[1:-1]):
            raise ValueError(
                f"placement.gradient_slots is {layout.gradient_slots}: layers share slots, so gradients do not stay; "
                f"{sum(layout.trainable[1:-1])} are needed to read them"
            )
        plan = build_step(layout.shape(1, True))
        slot = next(op.grad_slot for op in plan.ops if op.kind == "download_gradient" and op.block == block)
        return self.buffers[f"grad.{slot}"].tensor(layout.dtype)

    def state(self, state: str, name: str) -> torch.Tensor:
        """A trained parameter's "exp_avg", "exp_avg_sq" or "lo", whole, flat. For checking; not in a step."""
        pieces = [piece for piece in self.all_optimizers("state", state, name) if piece[1].numel()]
        return torch.cat([values for _, values in sorted(pieces, key=lambda piece: piece[0])])

    def begin_save(self, directory: Path, places: TensorPlaces) -> list[Any]:
        """Every optimizer actor writes its slices as they are after the steps submitted so far; returns at once.

        What comes back is for `wait_saves`.
        """
        return [
            self._call_optimizer(k, "begin_save", directory, places) for k in range(self.layout.num_optimizer_actors)
        ]

    def poll_save(self, actor: int) -> SaveReport | None:
        """An actor's report, once it has written all. May be asked while steps run."""
        raise NotImplementedError

    def wait_saves(self, begun: list[Any], actors: Sequence[int]) -> list[SaveReport]:
        """Wait until these actors have ended their steps and their save."""
        self._wait(begun, None)
        return self._wait([self._call_optimizer(k, "wait_save") for k in actors], None)

    def load_checkpoint(self, directory: Path, adam_step: int) -> None:
        """Fill parameters, masters and Adam states from a checkpoint; every actor reads its own slices."""
        self.all_optimizers("load", directory, adam_step)

    def save_model(self, out_dir: Path) -> None:
        self._wait([self._call_storage("save_model", out_dir)], None)

    def check_model(self, model_dir: Path) -> list[str]:
        return self._wait([self._call_storage("check_model", model_dir)], None)[0]

    def all_optimizers(self, method: str, *args: Any) -> list[Any]:
        return self._wait(
            [self._call_optimizer(k, method, *args) for k in range(self.layout.num_optimizer_actors)], None
        )

    def reports(self) -> list[ActorReport]:
        return []

    def close(self) -> None:
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------- where it runs

    def _call_gpu(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def _call_optimizer(self, actor: int, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def _call_storage(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def _wait(self, calls: list[Any], inputs: StepInputs | None) -> list[Any]:
        raise NotImplementedError

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalTiers(Tiers):
    """The tiers as threads of this process: for tests, `verify`, and debugging with one debugger."""

    def __init__(
        self, config: RunConfig, hf_config: PretrainedConfig, spec: ModelSpec, plan: BytePlan, total_steps: int
    ):
        from slideformer_ray.actors.gpu_actor import make_window
        from slideformer_ray.actors.optimizer_actor import draw_weights, load_weights, make_shard
        from slideformer_ray.actors.storage_actor import ModelFiles

        super().__init__(config, hf_config, spec, plan, total_steps)
        self.buffers = {name: SharedBuffer.private(name, size) for name, size in self.layout.buffers(spec).items()}
        self.registration = pinning.register([b.page_range for b in self.buffers.values()], device=self.layout.device)
        setup = ActorSetup(config, hf_config, spec, self.layout, (), total_steps)
        self.page = open_page(setup, self.buffers)
        try:
            self.window = make_window(setup, self.buffers, self.page)
        except BaseException:  # out of GPU memory, say: pinned memory must not be given back pinned
            self.registration.unregister()
            raise
        self.shards = [make_shard(setup, k, self.buffers, self.page) for k in range(self.layout.num_optimizer_actors)]
        self.files = ModelFiles(setup, self.buffers)
        self._more: dict[str, Callable[..., Any]] = {
            "load_weights": lambda shard, path: load_weights(shard, setup, path),
            "draw_weights": lambda shard: draw_weights(shard, setup),
        }
        # One thread an actor keeps its calls in order, as Ray does.
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix=f"actor{i}") for i in range(len(self.shards) + 1)]

    def _call_gpu(self, method: str, *args: Any) -> Future:
        return self._queues[-1].submit(getattr(self.window, method), *args)

    def _call_optimizer(self, actor: int, method: str, *args: Any) -> Future:
        shard, queue = self.shards[actor], self._queues[actor]
        if method in self._more:
            return queue.submit(self._more[method], shard, *args)
        return queue.submit(getattr(shard, method), *args)

    def poll_save(self, actor: int) -> SaveReport | None:
        return self.shards[actor].poll_save()

    def _call_storage(self, method: str, *args: Any) -> Future:
        return self._queues[-1].submit({"save_model": self.files.save, "check_model": self.files.check}[method], *args)

    def _wait(self, calls: list[Future], inputs: StepInputs | None) -> list[Any]:
        done, _ = wait_futures(calls, return_when=FIRST_EXCEPTION)
        failed = next((call.exception() for call in done if call.exception() is not None), None)
        if failed is not None and inputs is not None:
            self.page.abort(str(failed))  # a lane has done so itself; an error outside the lanes has told nobody yet
        wait_futures(calls)
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            self._raise(_most_telling(errors), inputs)
        return [call.result() for call in calls]

    def close(self) -> None:
        # A step that was submitted in part would wait for its other half.
        self.page.abort("the driver has ended the run")
        for queue in self._queues:
            queue.shutdown()
        self.window.close()
        for shard in self.shards:
            shard.close()
        self.registration.unregister()


class RayTiers(Tiers):
    """The tiers as Ray actors of one node."""

    def __init__(
        self, config: RunConfig, hf_config: PretrainedConfig, spec: ModelSpec, plan: BytePlan, total_steps: int
    ):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from slideformer_ray import jobs
        from slideformer_ray.actors.gpu_actor import GpuActor
        from slideformer_ray.actors.optimizer_actor import OptimizerActor
        from slideformer_ray.actors.storage_actor import StorageActor
        from slideformer_ray.memory import plasma_store

        super().__init__(config, hf_config, spec, plan, total_steps)
        layout = self.layout
        self._actors: dict[str, Any] = {}
        self._pulse: Any = None
        self._pulse_asked_at = 0.0
        gpus = 1 if layout.device == "cuda" else 0
        cpus = 2 + layout.num_optimizer_actors * layout.threads_per_optimizer_actor
        if config.placement.address is None:
            self.node = plasma_store.start_local_node(
                plan.store_bytes,
                cpus,
                gpus,
                include_dashboard=config.placement.include_dashboard,
                log_to_driver=config.debug.ray_output,
            )
        else:
            self.node = plasma_store.join_cluster(
                config.placement.address,
                plan.store_bytes,
                cpus,
                gpus,
                namespace=jobs.NAMESPACE,
                log_to_driver=config.debug.ray_output,
            )
        try:
            if config.placement.address is not None:
                jobs.refuse_second_run(self.node.address)
            for name, size in layout.buffers(spec).items():
                self.buffers[name] = SharedBuffer.create(name, size)
            handles = tuple(b.handle() for b in self.buffers.values())
            setup = ActorSetup(config, hf_config, spec, layout, handles, total_steps)
            self.page = open_page(setup, self.buffers)
            # All on this node: the buffers are its memory.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            # To mypy the decorator leaves a class as it is.
            gpu: Any = GpuActor.options(name=jobs.GPU_ACTOR, num_gpus=gpus, num_cpus=1, scheduling_strategy=here)  # type: ignore[attr-defined]
            self._actors["gpu actor"] = gpu.remote(setup, jobs.run_name(config))
            for k in range(layout.num_optimizer_actors):
                threads = layout.threads_per_optimizer_actor
                own: Any = OptimizerActor.options(name=f"optimizer-{k}", num_cpus=threads, scheduling_strategy=here)  # type: ignore[attr-defined]
                self._actors[f"optimizer actor {k}"] = own.remote(setup, k)
            storage: Any = StorageActor.options(name="storage", num_cpus=1, scheduling_strategy=here)  # type: ignore[attr-defined]
            self._actors["storage actor"] = storage.remote(setup)
            self._actor_reports = self._wait([actor.report.remote() for actor in self._actors.values()], None)
            self._pulse = self._actors["storage actor"].report.remote()
        except BaseException:
            self.close()
            raise

    def reports(self) -> list[ActorReport]:
        return self._wait([actor.report.remote() for actor in self._actors.values()], None)

    def _call_gpu(self, method: str, *args: Any) -> Any:
        return _named(self._actors["gpu actor"], method, args).remote(*args)

    def _call_optimizer(self, actor: int, method: str, *args: Any) -> Any:
        return _named(self._actors[f"optimizer actor {actor}"], method, args).remote(*args)

    def poll_save(self, actor: int) -> SaveReport | None:
        return self._wait([self._call_optimizer(actor, "poll_save")], None)[0]

    def _call_storage(self, method: str, *args: Any) -> Any:
        return getattr(self._actors["storage actor"], method).remote(*args)

    def _wait(self, calls: list[Any], inputs: StepInputs | None) -> list[Any]:
        """Results of all calls; on the first failure stop every lane, give the others a moment, and name the cause."""
        import ray

        bound = 2 * self.config.debug.wait_timeout_s
        if inputs is None:  # the whole model goes to or from a disk, which may be slow
            bound += self.plan.disk_bytes / _SLOWEST_DISK_BYTES_PER_SECOND
        signals, deadline = self.page.signals, time.monotonic() + bound
        waiting = list(calls)
        errors: list[BaseException] = []
        while waiting and not errors:
            if lost := self.node.lost():
                raise TierError(f"{lost} {self._where(inputs)}")
            done, waiting = ray.wait(waiting, num_returns=1, timeout=1.0)
            errors += [error for error in map(self._error_of, done) if error is not None]
            if (dead := self._storage_error()) is not None:
                errors.append(dead)
            if signals != (signals := self.page.signals):  # some lane moves on
                deadline = time.monotonic() + bound
            if not done and time.monotonic() > deadline:
                setting = f"debug.wait_timeout_s is {self.config.debug.wait_timeout_s:g}"
                errors.append(
                    TierError(f"no answer and no progress for {bound:.0f} s ({setting}) {self._where(inputs)}")
                )
        if not errors:
            return ray.get(calls)
        if inputs is not None:
            self.page.abort(str(errors[0]))
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_GRACE_SECONDS) if waiting else ([], [])
        errors += [error for error in map(self._error_of, done) if error is not None]
        error = _most_telling(errors)
        if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" in str(error):
            raise TierError(f"{self._name_of_dead()} could not start: {_last_line(error)}") from error
        if isinstance(error, ray.exceptions.RayActorError):
            raise TierError(f"{self._name_of_dead()} died {self._where(inputs)}") from error
        self._raise(error, inputs)

    def _storage_error(self) -> Exception | None:
        """The storage actor's death. A step may hold no call of its: without this, the final save would be the first
        to know, and the run be lost. Asked once a second, never waited for."""
        import ray

        if self._pulse is None or time.monotonic() < self._pulse_asked_at + 1.0:
            return None
        if not ray.wait([self._pulse], timeout=0)[0]:
            return None
        error = self._error_of(self._pulse)
        self._pulse, self._pulse_asked_at = self._actors["storage actor"].report.remote(), time.monotonic()
        return error

    def _error_of(self, call: Any) -> Exception | None:
        """The error that a finished call ended with, as the actor raised it."""
        import ray

        try:
            ray.get(call, timeout=0)
        except ray.exceptions.RayTaskError as error:
            return error.cause if isinstance(error.cause, Exception) else error
        except ray.exceptions.RayError as error:
            return error
        return None

    def _name_of_dead(self) -> str:
        """Which actors no longer answer. Ray's error has only an id."""
        import ray

        dead = []
        for name, actor in self._actors.items():
            try:
                ray.get(actor.report.remote(), timeout=2.0)
            except ray.exceptions.RayActorError:
                pid = next((r.pid for r in getattr(self, "_actor_reports", ()) if r.name == name), None)
                dead.append(f"{name} (process {pid})" if pid else name)
            except ray.exceptions.RayError:
                pass
        return " and ".join(dead) or "an actor"

    def close(self) -> None:
        """End actors and node; memory is given back. Safe to call twice and after errors."""
        import ray

        if hasattr(self, "page"):
            self.page.abort("the driver has ended the run")
            del self.page  # a view, like the buffers': while one is held, this process keeps the whole store mapped
        try:
            for actor in self._actors.values():
                with suppress(ray.exceptions.RayError):  # it, or the node, is gone already
                    ray.kill(actor)
        finally:
            self._actors.clear()
            for buffer in self.buffers.values():
                buffer.close()
            self.buffers.clear()
            self.node.shutdown()


def _named(actor: Any, method: str, args: tuple[Any, ...]) -> Any:
    """The actor's method under the name that the Dashboard's tables and timeline show.

    Not the step's number: Ray keeps eight time series for every name that it has seen (measured on Ray 2.60).
    """
    if args and isinstance(args[0], StepInputs):
        return getattr(actor, method).options(name="training step" if args[0].shape.train else "evaluation")
    return getattr(actor, method)


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _most_telling(errors: list[BaseException]) -> BaseException:
    """Of several actors' errors the cause: what failed itself, not what was told to stop."""
    for kind in (LaneError, Exception):
        for error in errors:
            if isinstance(error, kind) and not isinstance(error, Aborted):
                return error
    return errors[0]
