"""The pages say what the code says: tables are made of or compared with it, examples run, links lead somewhere."""

import contextlib
import dataclasses
import importlib.util
import io
import re
from pathlib import Path

import pytest
import yaml

from slideformer_ray.config import RunConfig
from slideformer_ray.observe.lane_metrics import LaneMetrics
from slideformer_ray.observe.metrics import EvalMetrics, StepMetrics
from slideformer_ray.observe.ray_metrics import METRICS
from slideformer_ray.schedule import COMPUTE, GPU_LANES, StepShape, build_step, shared_counters, update_lane
from slideformer_ray.simulator import simulate
from slideformer_ray.trainer import Summary

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.glob("*.md")), ROOT / "cluster_configs" / "README.md"]


def script(name):
    """docs/NAME.py as a module; docs/ is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# Pages that are made


def test_the_page_of_settings_is_the_one_that_config_makes():
    """docs/configuration.md differs from what config.py says: run `python docs/make_configuration.py --write`."""
    assert (DOCS / "configuration.md").read_text() == script("make_configuration").page()


def test_the_byte_table_is_the_plans():
    """README.md's byte table differs from what `plan` says: run `python docs/make_byte_table.py --write`."""
    module = script("make_byte_table")
    table = (ROOT / "README.md").read_text().split(module.BEGIN)[1].split(module.END)[0]
    assert table.strip() == module.table()


def number_fields(schema, model):
    for name, field in schema["$defs"].get(model, schema)["properties"].items():
        kinds = {kind.get("type") for kind in field.get("anyOf", [field])}
        if kinds & {"integer", "number"}:
            yield name, field


def test_every_number_among_the_settings_has_a_unit():
    """A number without one is a rate, a coefficient or the seed, and is listed here; any other needs its unit."""
    unit_of = script("make_configuration").unit_of
    schema = RunConfig.model_json_schema()
    numbers = [entry for model in schema["$defs"] for entry in number_fields(schema, model)]
    without = {name for name, field in numbers if not unit_of(name, field)}
    assert without == {"learning_rate", "eps", "weight_decay", "max_grad_norm", "seed"}


# ----------------------------------------------------------------------------------------------------------------------
# Pages that are written


def table_below(page, heading):
    """Rows of the first table below a heading, as lists of cells, without the table's own two head lines."""
    below = page.read_text().split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("Step: `StepMetrics`", StepMetrics),
        ("Held-out evaluation: `EvalMetrics`", EvalMetrics),
        ("Lanes: `LaneMetrics`", LaneMetrics),
        ("The run: `Summary`", Summary),
    ],
)
def test_every_metric_is_in_the_table(heading, record):
    """docs/metrics.md has the dataclass's fields, in its order, each with a unit and a meaning."""
    rows = table_below(DOCS / "metrics.md", heading)
    assert [row[0] for row in rows] == [f"`{field.name}`" for field in dataclasses.fields(record)]
    assert all(len(row) == 3 and all(row) for row in rows)


def test_every_metric_of_prometheus_is_in_its_table():
    """Names, labels, origins and meanings are those of observe/ray_metrics.py, in its order."""
    rows = table_below(DOCS / "metrics.md", "Prometheus")
    wanted = [
        [f"`{m.prometheus_name}`", f"`{m.label}`" if m.label else "-", f"`{m.of.__name__}.{m.field}`", f"{m.meaning}."]
        for m in METRICS
    ]
    assert rows == wanted


def a_plan_with_everything():
    """Few slots, several micro-batches and a norm: every kind of operation there is."""
    shape = StepShape(4, 2, (True,) * 6, tied=False, gradient_slots=4, activation_slots=3, clip=True)
    return build_step(shape)


def test_the_lanes_of_the_architecture_page_are_those_of_a_plan():
    """Each lane's row names the operations of that lane, all and no others."""
    rows = table_below(DOCS / "architecture.md", "A step is data: lanes and counters")
    on_page = {lane.strip("`"): set(re.findall(r"`(\w+)`", operations)) for lane, _, operations in rows}
    plan = a_plan_with_everything()
    in_plan = {lane.name: {op.kind for op in lane.ops} for lane in plan.lanes.values()}
    in_plan["update.k"] = in_plan.pop(update_lane(0))
    assert on_page == in_plan


def test_the_counters_of_the_architecture_page_are_those_of_a_plan():
    """Every counter that a plan waits for or signals is in the table."""
    section = (DOCS / "architecture.md").read_text().split("| counter | who raises it |")[1].split("\n\n")[0]
    on_page = set(re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in section.splitlines()[2:])))
    patterns = {r"updated\.\d+\.\d+": "updated.k.b", r"rows\.\d+": "rows.k"}
    shared = {next((p for r, p in patterns.items() if re.fullmatch(r, name)), name) for name in shared_counters(6, 2)}
    assert on_page == shared | set(GPU_LANES)


def test_the_plan_in_contributing_is_what_its_code_prints():
    """The example under "Reading a plan" runs, and prints the block below it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_yaml_example_is_a_configuration(page):
    """Whoever copies an example gets no error."""
    for example in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        RunConfig.from_dict(yaml.safe_load(example))


def anchors(page):
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page):
    """Files and headings that pages point to exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


@pytest.fixture
def draw_lanes():
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    return script("draw_lanes")


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize("name", ["draw_lanes", "draw_tiers"])
def test_the_pictures_can_be_drawn_again(name, tmp_path, monkeypatch):
    """Each script makes the pictures that docs/images holds, in their size."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    monkeypatch.setattr("sys.argv", [name, str(tmp_path)])
    script(name).main()
    drawn = {path.name: png_size(path) for path in tmp_path.iterdir()}
    assert drawn == {name: png_size(DOCS / "images" / name) for name in drawn}


def test_what_is_exposed_adds_up_to_the_step(draw_lanes):
    """The numbers above a panel: compute and exposed seconds are the step."""
    for rows in (8, 32):
        shape, durations = draw_lanes.qwen_3b(rows, clip=False)
        timeline = simulate([build_step(shape)] * 4, durations)
        exposed = draw_lanes.steady_exposed(shape, durations)
        computing = timeline.busy_seconds[COMPUTE] / 4
        assert computing + sum(exposed.values()) == pytest.approx(timeline.steady_step_seconds)


def test_the_numbers_under_the_picture_are_the_simulations(draw_lanes):
    """docs/architecture.md says how long updates, the embedding's update and the GPU's own work take."""
    text = " ".join((DOCS / "architecture.md").read_text().split())
    shape, durations = draw_lanes.qwen_3b(8, clip=False)
    busy = simulate([build_step(shape)], durations).busy_seconds
    updates, gpu = busy[update_lane(0)], busy[COMPUTE]
    assert f"all updates together take {updates * 1e3:.0f} ms, the GPU's own work {gpu * 1e3:.0f} ms" in text
    seconds = draw_lanes.qwen_3b(32, clip=False)[1].seconds
    rows, embedding = seconds["update_rows"], seconds["update_rows"] + seconds["update.embed"]
    assert f"(311M parameters, {embedding * 1e3:.0f} ms), only those rows are waited for ({rows * 1e3:.0f} ms)" in text


def test_every_operation_has_a_colour(draw_lanes):
    """`draw` takes any plan: each kind of operation has a label and a colour."""
    assert {op.kind for op in a_plan_with_everything().ops} == draw_lanes._LABELS_AND_COLOURS.keys()
