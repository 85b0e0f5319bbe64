"""Runs as Ray jobs, through Ray's own job commands and API, on clusters that are started as the docs say.

One cluster by `slideformer-ray up` serves the file; another, by the plain `ray start` line that a refused run is shown,
serves one test. Both have ports and a home directory of their own, and leave no process.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml
from recorded_run import is_running, quickstart_rows, small_config
from test_cluster import free_ports

from slideformer_ray.cluster import Cluster
from slideformer_ray.config import ConfigError
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.jobs import NAMESPACE, in_this_job, submission_id
from slideformer_ray.memory.plasma_store import ray_start_command
from slideformer_ray.observe.ray_metrics import METRICS

pytest.importorskip("aiohttp", reason="the extra `dashboard` is not installed")
pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parent.parent
MARK = f"SLIDEFORMER_RAY_TEST_JOBS={uuid.uuid4()}"
PORT_OPTIONS = ("--port", "--dashboard-port", "--metrics-port", "--client-port", "--agent-port")


class Workplace:
    """A home, a working directory with a run's files, and the environment for commands there."""

    def __init__(self, directory):
        self.directory, self.ray = directory, directory / "ray"
        self.work, home = directory / "work", directory / "home"
        self.work.mkdir(parents=True)
        home.mkdir()
        name, value = MARK.split("=")
        kept = {key: value for key, value in os.environ.items() if key not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
        self.environment = kept | {"HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", name: value}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        quickstart_rows(self.work / "rows.jsonl", 20)
        values = {
            "run_dir": str(directory / "run"),
            "model": {"path": str(quickstart_model_dir())},
            "data": {"train": "rows.jsonl", "eval_rows": 4, "seq_len": 64},
            "training": {"steps": 4, "rows_per_step": 4, "micro_batch_rows": 2},
            "placement": {"device": "cpu"},
        }
        (self.work / "run.yaml").write_text(yaml.safe_dump(values))

    def command(self, *words, check=True):
        result = subprocess.run(
            [str(word) for word in words], cwd=self.work, env=self.environment, text=True, capture_output=True
        )
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    def slideformer_ray(self, *words, check=True):
        return self.command(sys.executable, "-m", "slideformer_ray", *words, check=check)

    def client(self, url):
        """Ray's, with the token of this home: the test's own process has another."""
        from ray.job_submission import JobSubmissionClient

        token = (self.directory / "home" / ".ray" / "auth_token").read_text().strip()
        return JobSubmissionClient(url, headers={"Authorization": f"Bearer {token}"})

    def train(self, *overrides, run_dir="run"):
        words = [f"{self.work}/run.yaml", f"run_dir={self.directory / run_dir}", *overrides]
        return shlex.join(["slideformer-ray", "train", *words])


@pytest.fixture(scope="module")
def workplace():
    """Below /tmp, because Ray's sockets need a short path."""
    directory = Path(f"/tmp/sfr-jobs-{os.getpid()}")
    yield Workplace(directory)
    deadline = time.monotonic() + 20
    while (left := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
    assert left == []


@pytest.fixture(scope="module")
def cluster(workplace):
    """By `slideformer-ray up` with the run's own config, and ended by `down`."""
    ports = [word for pair in zip(PORT_OPTIONS, map(str, free_ports(5)), strict=True) for word in pair]
    workplace.slideformer_ray("up", "run.yaml", "--temp-dir", workplace.ray, *ports)
    yield Cluster.find(workplace.ray)
    workplace.slideformer_ray("down", "--stop-jobs", "--temp-dir", workplace.ray)
    assert Cluster.find(workplace.ray) is None


@pytest.fixture
def as_a_job(monkeypatch):
    """The environment variable by which Ray tells a job's command what it is."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}}))


def test_a_job_joins_its_cluster_unless_told_otherwise(tmp_path, as_a_job):
    """No setting is needed; one that is given stays. Outside a job nothing changes (next test)."""
    config = small_config(tmp_path)
    assert submission_id() == "raysubmit_1"
    assert in_this_job(config).placement.address == "auto"
    given = config.changed(["placement.address=10.0.0.1:6379"])
    assert in_this_job(given) is given


def test_outside_a_job_a_run_has_a_node_of_its_own(tmp_path, monkeypatch):
    """Also where RAY_ADDRESS is set for other work."""
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = small_config(tmp_path)
    assert in_this_job(config) is config and submission_id() is None


def test_results_inside_rays_copy_are_refused(tmp_path, as_a_job):
    """A relative run_dir of a file that went with --working-dir lies there, and would be removed with it."""
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / "runs" / "first"
    with pytest.raises(ConfigError, match=r"run_dir: .* give an absolute path: run_dir=\$PWD/runs/first"):
        in_this_job(small_config(tmp_path).changed([f"run_dir={copy}"]))


def marked_processes():
    """Everything that was started from a workplace's environment and still runs."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (directory / "environ").read_bytes() and is_running(int(directory.name)):
                found.append(int(directory.name))
    return found


def wait_for(client, job, text=None, seconds=90):
    """Until the job's log has the text, or without one, until the job has ended. The log."""
    deadline = time.monotonic() + seconds
    while True:
        log, status = client.get_job_logs(job), client.get_job_status(job)
        if (text in log) if text else status.is_terminal():
            return log
        assert not status.is_terminal() and time.monotonic() < deadline, (status, log)
        time.sleep(0.3)


def test_a_run_has_the_cluster_for_itself_and_leaves_it_usable(workplace, cluster):
    """While one trains, another is refused by name with exit code 2, and `down` too. Killed without a word, the first
    is a failed job; the next one, by the documented command, trains."""
    client = workplace.client(cluster.dashboard_url)
    first = client.submit_job(entrypoint=workplace.train("training.steps=100000", "observe.lanes_every=3"))
    wait_for(client, first, "step 10/")
    check_what_is_seen_of_it(workplace, cluster)
    refused = workplace.slideformer_ray("down", "--temp-dir", workplace.ray, check=False)
    assert refused.returncode == 2 and f"the cluster runs {first}; wait for its end" in refused.stderr

    second = client.submit_job(entrypoint=workplace.train(run_dir="second"))
    last = wait_for(client, second).splitlines()[-1]
    assert "exit code 2" in client.get_job_info(second).message
    assert f"trains already: {workplace.directory / 'run'}, job {first}. One run at a time has the GPU" in last
    assert not (workplace.directory / "second" / "model").exists()

    (driver,) = (pid for pid in marked_processes() if b"training.steps=100000" in cmdline(pid).split(b"\0"))
    os.kill(driver, signal.SIGKILL)
    wait_for(client, first)
    assert client.get_job_status(first) == "FAILED"
    check_the_documented_command(workplace, cluster.dashboard_url, client)


def check_what_is_seen_of_it(workplace, cluster):
    """Actors' names and what they hold, `status` with the run's figures, and every metric at the node's real endpoint,
    parsed as Prometheus does."""
    actors = ask(workplace, f"{cluster.dashboard_url}/api/v0/actors?detail=1")["data"]["result"]["result"]
    seen = {actor["name"]: actor["repr_name"] for actor in actors if actor["ray_namespace"] == NAMESPACE}
    assert seen.keys() == {"gpu", "optimizer-0", "storage"}
    assert seen["gpu"].startswith("gpu actor on cpu, ") and seen["gpu"].endswith("iB")
    assert re.fullmatch(r"optimizer actor 0, slice 1 of 1, 9.54 MiB of states", seen["optimizer-0"])

    found = json.loads(workplace.slideformer_ray("status", "--json", "--temp-dir", workplace.ray).stdout)
    assert found["cluster"]["jobs"][0]["status"] == "RUNNING"
    assert found["runs"][str(workplace.directory / "run")]["step"]["step"] >= 5

    wanted = {metric.prometheus_name: metric.label for metric in METRICS}
    for absent in ("ray_slideformer_skipped_steps_total", "ray_slideformer_gpu_sensor"):  # none was, and no GPU
        del wanted[absent]
    scraped = eventually(lambda: scrape(cluster.metrics_port, wanted))
    for name, label in wanted.items():
        assert all(
            sample.labels["run"] == "run" and (label is None or label in sample.labels) for sample in scraped[name]
        )
    (loss,) = scraped["ray_slideformer_loss"]
    assert 0 < loss.value < 10
    tiers = {sample.labels["tier"]: sample.value for sample in scraped["ray_slideformer_tier_bytes"]}
    assert tiers.keys() == {"gpu", "pinned", "private"} and tiers["private"] > tiers["pinned"] > 1 << 20
    # Each name that a task ever had is eight time series: a step's number must not be in it.
    names = {sample.labels["Name"] for sample in scraped["ray_tasks"]}
    assert "training step" in names and not [name for name in names if re.search(r"step \d", name)]


def scrape(port, wanted):
    """Samples by name; fails while a metric is not there yet, for Ray's agent passes them on every 10 s."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    found = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)
    assert not wanted.keys() - found.keys()
    return found


def ask(workplace, url):
    token = (workplace.directory / "home" / ".ray" / "auth_token").read_text().strip()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def check_the_documented_command(workplace, url, client):
    """`ray job submit --working-dir . -- slideformer-ray train run.yaml`: no setting says that it is a job. The log
    that streams is readable lines, and the results are where run_dir says."""
    submit = ("ray", "job", "submit", f"--address={url}", "--submission-id", "plain", "--working-dir", ".")
    result = workplace.command(*submit, "--", "slideformer-ray", "train", "run.yaml")
    ours = client.get_job_logs("plain").split("Running entrypoint")[1]  # Ray's own line before it has a tab
    assert ours.replace("\n", "").isprintable() and "step 4/4  loss" in ours and "step 4/4  loss" in result.stdout
    summary = json.loads((workplace.directory / "run" / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["spilled_bytes"] == 0
    assert (workplace.directory / "run" / "model" / "model.safetensors").exists()


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_job_that_is_refused_says_why_last(workplace, cluster):
    """A store too small for the run: the reason and the line that would start a right one are the job's last lines,
    with exit code 2."""
    client = workplace.client(cluster.dashboard_url)
    job = client.submit_job(entrypoint=workplace.train("data.seq_len=100000"))
    log = wait_for(client, job)
    assert "Traceback" not in log and "exit code 2" in client.get_job_info(job).message
    reason, line = log.splitlines()[-2:]
    assert "its object store here is 0.07 GiB" in reason and reason.endswith("Fix: `ray stop`, then"), log
    assert "RAY_JOB_STOP_WAIT_TIME_S=600 ray start --head" in line


def test_a_stopped_job_ends_cleanly_on_a_cluster_of_plain_ray(workplace):
    """The cluster is started by the very line that a refused run is shown. `ray job stop` ends the run within its
    step, with one line; its actors are gone, and the cluster has its CPUs back."""
    options = ("--port", "--dashboard-port", "--metrics-export-port", "--ray-client-server-port")
    options = [*options, "--dashboard-agent-listen-port"]
    ports = free_ports(5)
    line = " ".join([ray_start_command(80 << 20, 4), "--block", f"--temp-dir={workplace.directory}/plain"])
    line = " ".join([line, *(f"{option}={port}" for option, port in zip(options, ports, strict=True))])
    with subprocess.Popen(
        ["bash", "-c", line], env=workplace.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as ray:
        try:
            client = eventually(lambda: workplace.client(f"http://127.0.0.1:{ports[1]}"))
            job = eventually(lambda: client.submit_job(entrypoint=workplace.train("training.steps=100000")))
            wait_for(client, job, "step 10/")
            client.stop_job(job)
            log = wait_for(client, job)
            assert client.get_job_status(job) == "STOPPED"
            assert log.splitlines()[-1].startswith("slideformer-ray: stopped by SIGTERM")
            assert "Traceback" not in log
        finally:
            for pid in marked_processes():
                if f"--temp-dir={workplace.directory}/plain".encode() in cmdline(pid) and b"--block" in cmdline(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            ray.wait(timeout=60)


def eventually(call, seconds=60):
    """What the call returns, once the cluster is far enough to answer it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
