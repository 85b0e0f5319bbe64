"""cluster.py and `slideformer-ray up`, `down` as far as no cluster is started: what is refused, and with which words.

With a cluster: tests/test_jobs.py.
"""

import dataclasses
import json
import os
import shlex
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slideformer_ray import cluster
from slideformer_ray.cli import app
from slideformer_ray.cluster import Cluster, ClusterSettings, largest_store, up
from slideformer_ray.config import ConfigError
from slideformer_ray.memory.host_limits import GIB, HostLimits, StoreTooSmall
from slideformer_ray.memory.plasma_store import SYSTEM_CONFIG, find_store_problems

BIG = HostLimits(64 * GIB, 60 * GIB, None, 0, 32 * GIB, 30 * GIB)


def free_ports(count):
    """Ports that nothing listens on now."""
    probes = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def settings(temp_dir, **changes):
    names = ("port", "dashboard_port", "metrics_port", "client_port", "agent_port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return ClusterSettings(80 << 20, 4, temp_dir, **ports | changes)


@pytest.fixture
def temp_dir():
    """Short, as Ray's sockets need it; removed when it is empty of what a start would leave."""
    directory = Path(f"/tmp/sfr-test-{os.getpid()}")
    yield directory
    for path in directory.iterdir() if directory.exists() else ():
        path.unlink()
    if directory.exists():
        directory.rmdir()


def test_the_command_starts_a_cluster_that_a_run_accepts(temp_dir):
    """Store, spilling, ports, metrics and temporary directory are all said; a run's own check finds no problem."""
    found = settings(temp_dir)
    words = dict(word.split("=", 1) for word in shlex.split(found.shell_line()) if "=" in word)
    assert (
        find_store_problems(80 << 20, int(words["--object-store-memory"]), json.loads(words["--system-config"])) == []
    )
    assert json.loads(words["--system-config"]) == SYSTEM_CONFIG
    assert words["--temp-dir"] == str(temp_dir)
    assert {words[f"--{name}"] for name in ("port", "dashboard-port", "metrics-export-port")} == {
        str(port) for port in (found.port, found.dashboard_port, found.metrics_port)
    }


def test_a_stopped_job_has_time_to_save(temp_dir, monkeypatch):
    """Ray kills a job 3 s after its SIGTERM otherwise. And nobody without the user's token is let in."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    environment = settings(temp_dir).environment()
    assert environment["RAY_JOB_STOP_WAIT_TIME_S"] == "600" and environment["RAY_AUTH_MODE"] == "token"


def test_without_a_config_the_store_is_sized_by_the_machine():
    """The least of nine tenths of /dev/shm and half of the memory that is left, the cgroup's included."""
    assert largest_store(BIG) == 27 * GIB
    assert largest_store(dataclasses.replace(BIG, cgroup_limit=20 * GIB, cgroup_used=4 * GIB)) == 8 * GIB


@pytest.mark.parametrize("option", ["--port", "--dashboard-port", "--metrics-port", "--client-port", "--agent-port"])
def test_a_port_that_is_taken_is_named(temp_dir, option):
    """With the option that gives another one; Ray itself would start half a node. Nothing is started."""
    with socket.create_server(("", 0)) as other:
        taken = other.getsockname()[1]
        field = option.removeprefix("--").replace("-", "_")
        with pytest.raises(ConfigError, match=rf"{option}: something listens on port {taken} already"):
            up(settings(temp_dir, **{field: taken}), BIG)
    assert not temp_dir.exists()


def test_a_store_that_does_not_fit_is_refused(temp_dir):
    """By the same words as a run's."""
    with pytest.raises(StoreTooSmall, match="/dev/shm has"):
        up(dataclasses.replace(settings(temp_dir), store_bytes=31 * GIB), BIG)


def test_a_long_directory_is_refused(tmp_path):
    """Ray would fail at a socket's path, which says nothing of the directory."""
    with pytest.raises(ConfigError, match="leave room for 40; give a shorter one"):
        up(settings(tmp_path / ("long" * 10)), BIG)


def test_a_missing_dashboard_is_refused(temp_dir, monkeypatch):
    """Jobs come through it; plain `ray` has none."""
    monkeypatch.setattr("ray._private.utils.get_dashboard_dependency_error", lambda: ImportError("no aiohttp"))
    with pytest.raises(
        ConfigError, match=r"not installed \(no aiohttp\). Fix: pip install 'slideformer-ray\[dashboard"
    ):
        up(settings(temp_dir), BIG)


def test_a_dead_cluster_is_no_cluster(temp_dir):
    """A note whose process has ended, or whose process id is another program's now, is not believed."""
    temp_dir.mkdir()
    note = {"pid": os.getpid(), "started": 1, "store_bytes": 1, "num_cpus": 1, "temp_dir": str(temp_dir)}
    ports = {"port": 1, "dashboard_port": 1, "metrics_port": 1, "auth_mode": "token"}
    (temp_dir / "cluster.json").write_text(json.dumps(note | ports))
    assert Cluster.find(temp_dir) is None
    (temp_dir / "cluster.json").write_text(json.dumps(note | ports | {"started": cluster._start_of(os.getpid())}))
    found = Cluster.find(temp_dir)
    with pytest.raises(ConfigError, match="a cluster runs already .* end it with: slideformer-ray down"):
        up(settings(temp_dir), BIG)
    with pytest.raises(ConfigError, match="does not answer"):
        found.jobs()


def test_down_without_a_cluster_says_so(temp_dir):
    """Exit code 2, and no process is touched."""
    result = CliRunner().invoke(app, ["down", "--temp-dir", str(temp_dir)])
    assert result.exit_code == 2 and "no cluster of `slideformer-ray up` runs in" in result.stderr


def test_up_can_show_what_it_would_do(temp_dir):
    """`--print`: one shell line on stdout, nothing started."""
    result = CliRunner().invoke(app, ["up", "--print", "--store-gib", "1", "--temp-dir", str(temp_dir)])
    assert result.exit_code == 0, result.output
    assert f"--object-store-memory={GIB}" in result.stdout and not temp_dir.exists()
