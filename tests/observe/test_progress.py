"""progress.py: a bar on a terminal, plain lines elsewhere, the notable events in both."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from slideformer_ray.observe.metrics import EvalMetrics, StepMetrics
from slideformer_ray.observe.progress import ProgressBar, ProgressLines, progress_report

STEP = StepMetrics(
    step=0,
    loss=2.5,
    grad_norm=1.25,
    learning_rate=1e-5,
    skipped=False,
    tokens=100,
    supervised_tokens=60,
    step_seconds=0.5,
    tokens_per_second=1234.5,
    update_busy_seconds=0.1,
)


def run(terminal, steps, first_step=0, log_every=10, **changes):
    """What a run of `steps` steps shows."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress_report(console, log_every) as progress:
        progress.on_start(steps, first_step)
        progress.on_eval(EvalMetrics(first_step, 7.0625, 600))
        for step in range(first_step, steps):
            progress.on_step(dataclasses.replace(STEP, step=step, **changes))
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_every_n_steps():
    """And one for the last step; no control character, so that a log file stays readable."""
    shown = run(False, 25)
    assert [line.split()[1] for line in shown.splitlines()] == ["0:", "10/25", "20/25", "25/25"]
    assert shown.splitlines()[1] == "step 10/25  loss 2.5000  grad norm 1.250  lr 1.00e-05  1,234 tokens/s"
    assert shown.replace("\n", "").isprintable()


def test_without_clipping_there_is_no_norm_to_show():
    """The line has no place for it then."""
    assert "grad norm" not in run(False, 10, grad_norm=None)


def test_a_terminal_has_a_bar_with_loss_and_speed():
    """Up to the last step, and the cursor is given back."""
    shown = run(True, 25)
    assert "25/25" in shown and "loss 2.5000" in shown and "1,234 tokens/s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_resumed_run_begins_where_it_stood():
    """Steps done before count as done."""
    shown = run(False, 25, first_step=20, log_every=1)
    assert "step 21/25" in shown and "step 20/25" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_evaluations_and_skipped_steps_have_lines_of_their_own(terminal):
    """A number that passes by in a bar is no report."""
    shown = run(terminal, 1, skipped=True, grad_norm=math.inf)
    assert "step 0: held-out loss 7.0625" in shown
    assert "step 1: skipped, the gradient norm is inf" in shown


def test_the_terminal_is_given_back_after_an_error():
    """Also when the run is stopped before its first step."""
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), progress_report(console, 1) as progress:
        progress.on_start(5, 0)
        raise KeyboardInterrupt
    assert console.file.getvalue().endswith("\x1b[?25h")
    with pytest.raises(KeyboardInterrupt), progress_report(console, 1):
        raise KeyboardInterrupt


def test_the_console_decides():
    """A terminal gets the bar, a pipe the lines."""
    assert isinstance(progress_report(Console(file=io.StringIO(), force_terminal=True), 1), ProgressBar)
    assert isinstance(progress_report(Console(file=io.StringIO()), 1), ProgressLines)
