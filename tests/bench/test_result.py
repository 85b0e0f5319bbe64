"""result.py: figures that follow from what was measured, and their JSON."""

import json

import pytest
from bench_results import a_result

from slideformer_ray.bench.case import Case
from slideformer_ray.bench.result import Failure, from_line, to_line


def test_speed_follows_from_the_median_step():
    """6 and 8 operations a parameter and token."""
    result = a_result(seconds=(3.0, 2.0, 100.0), tokens=600, parameters=10**9)
    assert result.step_seconds == 3.0 and result.tokens_per_second == 200.0
    assert result.tflops(6) == pytest.approx(1.2) and result.tflops(8) == pytest.approx(1.6)
    record = result.record()
    assert (record["min_seconds"], record["max_seconds"]) == (2.0, 100.0)
    assert record["tflops_8n"] == pytest.approx(1.6)


@pytest.mark.parametrize(
    "outcome",
    [a_result(settings=("a.b=1",), losses=(1.5,)), Failure(Case("4 rows", "tiny", "/m", 4, 64), "too large", True)],
)
def test_an_outcome_survives_its_line_of_json(outcome):
    """Between the process that measures and the one that prints, and for programs that read it."""
    line = to_line(outcome)
    assert "\n" not in line and from_line(line) == outcome
    assert json.loads(line).keys() <= {"result", "failure"}
