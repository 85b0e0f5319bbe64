"""What a user sees of a run while it goes: a bar on a terminal, a line every few steps elsewhere.

Both are `Callback`s and context managers, so that the terminal is given back however the run ends. Tested by
tests/observe/test_progress.py.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slideformer_ray.observe.metrics import Callback, EvalMetrics, StepMetrics


class ProgressReport(Callback):
    """What bar and lines have in common: the notable events, each a line of its own."""

    def __init__(self, console: Console):
        self.console = console

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.skipped:
            self.line(f"step {metrics.step + 1}: skipped, the gradient norm is {metrics.grad_norm}")

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.line(f"step {metrics.step}: held-out loss {metrics.eval_loss:.4f}")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class ProgressBar(ProgressReport):
    """A bar with the last step's loss and speed. For terminals."""

    def __init__(self, console: Console):
        super().__init__(console)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def on_start(self, total_steps: int, first_step: int) -> None:
        self._task = self._bar.add_task("", total=total_steps, completed=first_step, state="")
        self._bar.start()

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        assert self._task is not None
        state = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=metrics.step + 1, state=state)


class ProgressLines(ProgressReport):
    """A line every `every` steps and one for the last. For files and pipes: no control characters."""

    def __init__(self, console: Console, every: int):
        super().__init__(console)
        self.every, self._total = every, 0

    def on_start(self, total_steps: int, first_step: int) -> None:
        self._total = total_steps

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        done = metrics.step + 1
        if done % self.every and done != self._total:
            return
        norm = "" if metrics.grad_norm is None else f"  grad norm {metrics.grad_norm:.3f}"
        self.line(
            f"step {done}/{self._total}  loss {metrics.loss:.4f}{norm}  lr {metrics.learning_rate:.2e}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )


def progress_report(console: Console, log_every: int) -> ProgressReport:
    return ProgressBar(console) if console.is_terminal else ProgressLines(console, log_every)
