"""grafana_dashboard.json and prometheus.yml: they ask for the metrics that a run reports, all and no others."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from slideformer_ray.cluster import ClusterSettings
from slideformer_ray.observe.ray_metrics import METRICS

FOLDER = Path(__file__).resolve().parents[2] / "cluster_configs"
NAMES = {metric.prometheus_name: metric for metric in METRICS}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((FOLDER / "grafana_dashboard.json").read_text())


def targets(dashboard):
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def test_it_is_a_dashboard(dashboard):
    """What Grafana's import asks for: a title, a schema, panels with an id, a type and a place of their own, queries
    with an id, and a data source that is chosen at the import."""
    assert dashboard["title"] and dashboard["schemaVersion"] >= 36 and dashboard["uid"]
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["type"] == "timeseries"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        ids = [target["refId"] for target in panel["targets"]]
        assert ids and len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus" and variables["run"]["query"]
    assert all(target["datasource"]["uid"] == "${datasource}" for target in targets(dashboard))


def test_every_metric_is_shown_and_no_other_is_asked_for(dashboard):
    """A renamed metric would leave an empty panel."""
    asked = {name for target in targets(dashboard) for name in re.findall(r"ray_slideformer_\w+", target["expr"])}
    assert asked == NAMES.keys()
    (run,) = (variable for variable in dashboard["templating"]["list"] if variable["name"] == "run")
    assert re.findall(r"ray_slideformer_\w+", run["query"])[0] in NAMES


def test_legends_use_labels_that_are_there(dashboard):
    """`{{tier}}` of a metric without that label would show the braces."""
    for target in targets(dashboard):
        (name,) = re.findall(r"ray_slideformer_\w+", target["expr"])
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {"run", NAMES[name].label}


def test_prometheus_reads_the_port_of_the_cluster():
    """The default of `up --metrics-port`, often enough for Ray's 10 s."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{ClusterSettings.metrics_port}"]
    assert config["global"]["scrape_interval"] == "10s"


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian's prometheus)")
def test_prometheus_itself_accepts_config_and_queries(dashboard, tmp_path):
    """promtool reads the configuration, and every query of the dashboard as a rule."""
    rules = {
        "groups": [
            {
                "name": "dashboard",
                "rules": [
                    {"record": f"query:{i}", "expr": target["expr"].replace("$run", ".*")}
                    for i, target in enumerate(targets(dashboard))
                ],
            }
        ]
    }
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    for command in (["config", FOLDER / "prometheus.yml"], ["rules", tmp_path / "rules.yml"]):
        result = subprocess.run(["promtool", "check", *map(str, command)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
