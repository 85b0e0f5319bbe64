"""run.py and worker.py: each case in a process of its own; and the command that asks for them."""

import json
import re

import pytest
from bench_results import a_result
from typer.testing import CliRunner

from slideformer_ray.bench import run as run_module
from slideformer_ray.bench.case import Case, window_cases
from slideformer_ray.bench.result import BenchResult, Failure, from_line, of_system, to_line
from slideformer_ray.bench.run import Benchmark
from slideformer_ray.cli import app
from slideformer_ray.config import ConfigError
from slideformer_ray.data.quickstart import quickstart_model_dir

CASE = Case("4 rows", "tiny", "/model", 4, 64)


@pytest.fixture
def workers(monkeypatch):
    """Stand-ins for the processes: (exit code, last words, lines of outcomes) each; what they were asked is kept."""
    answers, asked = [], []

    def run_worker(request, debug):
        asked.append(request)
        code, words, outcomes = answers.pop(0)
        with open(request["outcomes"], "w") as file:
            file.writelines(to_line(outcome) + "\n" for outcome in outcomes)
        return code, words

    monkeypatch.setattr(run_module, "_run_worker", run_worker)
    return answers, asked


def measure(benchmark):
    heard = []
    outcomes = benchmark.run(heard.append, lambda line: None)
    assert heard == outcomes
    return outcomes


def test_the_resident_model_comes_first_and_once(workers):
    """One process for all its batches; cases that differ in settings alone share one."""
    answers, asked = workers
    answers += [(0, "", [a_result(system="resident")])] + [(0, "", [a_result()])] * 3
    cases = window_cases("tiny", "/model", [8, 4], 64, None, [])
    cases.append(Case("other", "tiny", "/model", 4, 64, settings=("training.overlap=false",)))
    measure(Benchmark(cases, compare_resident=True))
    assert [[(c["system"], c["rows"]) for c in request["cases"]] for request in asked] == [
        [("resident", 4), ("resident", 8)],
        [("window", 8)],
        [("window", 4)],
        [("window", 4)],
    ]
    assert [request["larger"] for request in asked] == [True, False, False, False]


def test_a_case_that_does_not_fit_is_told_beside_the_others(workers):
    """What was measured before is kept, and what comes after is measured."""
    answers, _ = workers
    answers += [(0, "", [a_result()]), (2, "GPU: 3 GiB short", []), (0, "", [a_result()])]
    outcomes = measure(Benchmark([CASE] * 3))
    assert outcomes[1] == Failure(CASE, "GPU: 3 GiB short", crashed=False)
    assert len(of_system(outcomes, "window")) == 2


def test_when_all_are_refused_it_is_the_users_mistake(workers):
    """One message, as a run gives it."""
    workers[0].extend([(2, "GPU: 3 GiB short", [])] * 2)
    with pytest.raises(ConfigError, match="^GPU: 3 GiB short$"):
        Benchmark([CASE] * 2).run(lambda outcome: None, lambda line: None)


def test_a_process_that_dies_is_a_crash(workers):
    """With what it said last; a resident model's batches that it came to are kept."""
    answers, _ = workers
    answers += [(-9, "", [a_result(system="resident")]), (1, "optimizer actor 0 died", [])]
    cases = window_cases("tiny", "/model", [4], 64, None, [])
    found = measure(Benchmark(cases, compare_resident=True))
    assert isinstance(found[0], BenchResult) and found[1] == Failure(cases[0], "optimizer actor 0 died", crashed=True)


def test_nothing_is_begun_that_would_pass_the_time_limit(workers, monkeypatch):
    """As long as the longest so far is what the next one is expected to take."""
    now = iter([0.0, 0.0, 40.0, 40.0, 80.0, 80.0])
    monkeypatch.setattr(run_module.time, "monotonic", lambda: next(now))
    workers[0].extend([(0, "", [a_result()])] * 2)
    outcomes = measure(Benchmark([CASE] * 3, time_limit=100))
    assert [isinstance(outcome, BenchResult) for outcome in outcomes] == [True, True, False]
    assert "not begun" in outcomes[2].reason and "100 s" in outcomes[2].reason


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_measures_both_systems(tmp_path):
    """Real processes, without Ray: lines of JSON on stdout and in the file, the larger batch of the resident model
    beside the asked one."""
    arguments = ["bench", quickstart_model_dir(), "placement.device=cpu", "--rows", "4", "--micro-batch-rows", "2"]
    arguments += ["--seq-len", "32", "--compare", "resident", "--local", "--steps", "2", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, "--out", tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == lines
    outcomes = [from_line(line) for line in lines]
    assert [r.rows for r in of_system(outcomes, "resident")][:2] == [4, 8]
    (window,) = of_system(outcomes, "window")
    assert window.tokens == 128 and window.micro_batch_rows == 2 and len(window.seconds) == 2
    assert all(seconds > 0 for seconds in window.seconds) and window.traced_step_seconds > 0
    # The same weights' distribution and ids: both begin at about the entropy of a uniform guess.
    assert window.losses[0] == pytest.approx(of_system(outcomes, "resident")[0].losses[0], abs=0.3)
    assert json.loads(lines[-1])["result"]["tflops_6n"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no-such-shape"], r"shape 'no-such-shape': no such name"),
        (["qwen2.5-3b", "--rows", "8,x"], r"--rows: give positive integers, .* \(found 8,x\)"),
        (["qwen2.5-3b", "--compare", "deepspeed"], r"--compare: give resident \(found deepspeed\)"),
        (["qwen2.5-3b", "training.precision=fp16"], r"training.precision"),
    ],
)
def test_a_wrong_argument_is_one_message(arguments, message):
    """Exit code 2, and nothing is measured."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and result.stdout == ""
    assert re.search(message, result.stderr)
