"""tables.py: what is printed."""

from bench_results import a_result
from rich.console import Console

from slideformer_ray.bench.case import Case
from slideformer_ray.bench.result import Failure
from slideformer_ray.bench.tables import tables


def printed(*outcomes):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(tables(outcomes))
    return capture.get()


def test_ratios_are_to_the_same_batch_and_to_the_fastest_one():
    """The resident model at 4 rows is twice as fast, at 8 rows four times."""
    text = printed(
        a_result(system="resident", seconds=(0.25,)),
        a_result(system="resident", label="8 rows", rows=8, tokens=512, seconds=(0.25,)),
        a_result(),
    )
    line = next(line for line in text.splitlines() if line.startswith("4 rows"))
    assert line.split()[-2:] == ["0.500", "0.250"]


def test_without_a_comparison_there_is_no_ratio():
    """A dash, and no line of the resident model."""
    text = printed(a_result())
    assert "resident, " not in text
    assert next(line for line in text.splitlines() if line.startswith("4 rows")).split()[-2:] == ["-", "-"]


def test_what_is_exposed_has_a_column_a_cause():
    """In milliseconds; a cause that costs nothing anywhere is left out."""
    text = printed(a_result())
    head, line = text.split("What the GPU waits for, ms a step")[1].strip().splitlines()[:2]
    assert head.split()[-3:] == ["exposed", "update", "tail"] and "upload_head" not in text
    assert line.split()[-5:] == ["2.50", "0.75", "14.5", "12.5", "2.0"]


def test_what_was_not_measured_is_said_with_its_reason():
    """Beside the lines that were."""
    failure = Failure(Case("64 rows", "tiny", "/m", 64, 64), "does not fit")
    assert "not measured: window, 64 rows: does not fit" in printed(a_result(), failure)
