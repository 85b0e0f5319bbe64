"""A Ray cluster of this one workstation, for runs that are sent as jobs: `slideformer-ray up`, `down`, `status`.

`up` starts `ray start --block` in a session of its own, with the object store and the settings that the shared buffers
need, and notes it in TEMP_DIR/cluster.json; `down` ends that process, which ends its node and no other. (`ray stop`
ends every Ray process of the user.) Imports ray only where a cluster is started or asked. Tested by
tests/test_cluster.py and, with a cluster, tests/test_jobs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slideformer_ray.config import ConfigError
from slideformer_ray.machine import readable
from slideformer_ray.memory.host_limits import HostLimits, check_store_fits

# Ray puts sockets below it, whose paths Linux limits to 107 bytes: TEMP/session_2026-11-30_21-18-39_696247_16911/...
_LONGEST_TEMP_DIR = 40
_START_SECONDS = 60.0
_END_SECONDS = 30.0
# `ray job stop` otherwise kills a job 3 s after its SIGTERM, too soon for a save.
JOB_STOP_SECONDS = 600


def default_temp_dir() -> Path:
    return Path(tempfile.gettempdir()) / f"slideformer-ray-{os.getuid()}"


@dataclass(frozen=True)
class ClusterSettings:
    """What `up` starts. Every port that other programs on the machine could want has its own setting."""

    store_bytes: int
    num_cpus: int
    temp_dir: Path
    port: int = 6379
    dashboard_port: int = 8265
    metrics_port: int = 8080
    client_port: int = 10001
    agent_port: int = 52365

    def command(self) -> list[str]:
        from slideformer_ray.memory.plasma_store import SYSTEM_CONFIG

        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            f"--num-cpus={self.num_cpus}",
            f"--object-store-memory={self.store_bytes}",
            f"--system-config={json.dumps(SYSTEM_CONFIG, separators=(',', ':'))}",
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            f"--temp-dir={self.temp_dir}",
            *(f"--{option.replace('_', '-')}={port}" for option, port in self.ray_ports().items()),
        ]

    def ray_ports(self) -> dict[str, int]:
        return {
            "port": self.port,
            "dashboard_port": self.dashboard_port,
            "metrics_export_port": self.metrics_port,
            "ray_client_server_port": self.client_port,
            "dashboard_agent_listen_port": self.agent_port,
        }

    def environment(self) -> dict[str, str]:
        """Of `ray start`, and so of every job: its command and Python are found, and a stop leaves it time to save."""
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "RAY_JOB_STOP_WAIT_TIME_S": os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", str(JOB_STOP_SECONDS)),
            # Ray listens on every address whatever it is told, and who reaches it can run any code. So it asks for a
            # token: this user's, in ~/.ray/auth_token.
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
            # There is no other node that work could move to.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }

    def shell_line(self) -> str:
        """The whole of it for a shell; the token must be there (`ray get-auth-token --generate`)."""
        environment = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items() if name != "PATH"]
        return " ".join([*environment, "ray", *map(shlex.quote, self.command()[3:])])

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"


def largest_store(limits: HostLimits) -> int:
    """A store for any run of this machine: pinned buffers are a third of a run's bytes, so half of the memory will do.

    Memory is taken when a run fills it, not before.
    """
    memory = limits.ram_available
    if limits.cgroup_limit is not None:
        memory = min(memory, limits.cgroup_limit - limits.cgroup_used)
    return min(limits.shm_free * 9 // 10, memory // 2)


@dataclass(frozen=True)
class Cluster:
    """One that `up` started. `pid` leads its session; `started` is that process's start, for ids come back."""

    pid: int
    started: int
    store_bytes: int
    num_cpus: int
    temp_dir: str
    port: int
    dashboard_port: int
    metrics_port: int
    auth_mode: str

    @classmethod
    def find(cls, temp_dir: Path) -> Cluster | None:
        """The one that runs in this directory, or None."""
        try:
            found = cls(**json.loads(_note(temp_dir).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return found if _start_of(found.pid) == found.started else None

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def lines(self) -> list[str]:
        token = "" if self.auth_mode == "disabled" else " (it asks for the token that `ray get-auth-token` shows)"
        return [
            f"cluster        process {self.pid}, object store {readable(self.store_bytes)}, {self.num_cpus} CPUs",
            f"dashboard      {self.dashboard_url}" + token,
            f"metrics        http://127.0.0.1:{self.metrics_port}/metrics",
            f"logs           {self.temp_dir}/session_latest/logs",
        ]

    @property
    def submit_line(self) -> str:
        mode = "" if self.auth_mode == "disabled" else f"RAY_AUTH_MODE={self.auth_mode} "
        return f"{mode}ray job submit --address={self.dashboard_url} --working-dir . -- slideformer-ray train"

    def jobs(self) -> list[Job]:
        """Jobs that the cluster knows of, the newest first. Raises ConfigError when it does not answer."""
        found = [job for job in self._ask("api/jobs/") if job.get("submission_id")]
        found.sort(key=lambda job: job.get("start_time") or 0, reverse=True)
        return [Job(job["submission_id"], job["status"], job["entrypoint"]) for job in found]

    def stop_job(self, submission_id: str) -> None:
        self._ask(f"api/jobs/{submission_id}/stop", method="POST")

    def _ask(self, path: str, method: str = "GET") -> Any:
        """By HTTP: `status` would otherwise wait for the import of Ray."""
        request = urllib.request.Request(f"{self.dashboard_url}/{path}", method=method)
        if token := _auth_token():
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the cluster at {self.dashboard_url} does not answer: {error}") from None


def _auth_token() -> str | None:
    """Where Ray itself looks for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else None


@dataclass(frozen=True)
class Job:
    submission_id: str
    status: str
    entrypoint: str

    @property
    def active(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def up(settings: ClusterSettings, limits: HostLimits) -> Cluster:
    """Start it and wait until it takes jobs. Raises ConfigError, or StoreTooSmall, before anything is started."""
    _check(settings, limits)
    settings.temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.temp_dir.stat().st_uid != os.getuid():
        raise ConfigError(f"--temp-dir: {settings.temp_dir} belongs to another user; give another directory")
    environment = {**os.environ, **settings.environment()}
    if environment["RAY_AUTH_MODE"] == "token":
        command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = settings.temp_dir / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            settings.command(),
            env=environment,
            cwd=settings.temp_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the command, and `down` finds all of it by the session
        )
    started = _start_of(process.pid)
    assert started is not None
    cluster = Cluster(
        process.pid,
        started,
        settings.store_bytes,
        settings.num_cpus,
        str(settings.temp_dir),
        settings.port,
        settings.dashboard_port,
        settings.metrics_port,
        environment["RAY_AUTH_MODE"],
    )
    _note(settings.temp_dir).write_text(json.dumps(dataclasses.asdict(cluster)) + "\n")
    try:
        _wait_until_it_answers(process, settings, log)
    except BaseException:
        _end(cluster, process)
        raise
    return cluster


def down(cluster: Cluster, stop_jobs: bool) -> None:
    """End it and all of its processes. Raises ConfigError while a job runs, unless it is to be stopped first."""
    try:
        active = [job.submission_id for job in cluster.jobs() if job.active]
    except ConfigError:  # one that does not answer has no job that could be saved
        active = []
    if active and not stop_jobs:
        raise ConfigError(
            f"the cluster runs {' and '.join(active)}; wait for its end, or stop it, which saves, with --stop-jobs"
        )
    _stop(cluster, active)
    _end(cluster)


def _stop(cluster: Cluster, submission_ids: list[str]) -> None:
    """Like `ray job stop`: the runs save. Waits as long as the cluster itself would before it kills them."""
    for submission_id in submission_ids:
        cluster.stop_job(submission_id)
    deadline = time.monotonic() + JOB_STOP_SECONDS
    while submission_ids and any(job.active for job in cluster.jobs()) and time.monotonic() < deadline:
        time.sleep(0.5)


def _check(settings: ClusterSettings, limits: HostLimits) -> None:
    import ray._private.utils

    if running := Cluster.find(settings.temp_dir):
        raise ConfigError(
            f"a cluster runs already (process {running.pid}, {readable(running.store_bytes)} of object store, "
            f"{running.dashboard_url}); end it with: slideformer-ray down"
        )
    # Jobs come through the Dashboard.
    if missing := ray._private.utils.get_dashboard_dependency_error():
        raise ConfigError(
            f"Ray's Dashboard, which takes the jobs, is not installed ({missing}). "
            "Fix: pip install 'slideformer-ray[dashboard]'"
        )
    if len(str(settings.temp_dir)) > _LONGEST_TEMP_DIR:
        raise ConfigError(
            f"--temp-dir: {settings.temp_dir} has {len(str(settings.temp_dir))} characters, Ray's sockets below it "
            f"leave room for {_LONGEST_TEMP_DIR}; give a shorter one"
        )
    check_store_fits(settings.store_bytes, 0, limits)
    options = ("--port", "--dashboard-port", "--metrics-port", "--client-port", "--agent-port")
    for option, port in zip(options, settings.ray_ports().values(), strict=True):
        if not _is_free(port):
            raise ConfigError(
                f"{option}: something listens on port {port} already (`ss -tlnp sport = :{port}` says what); "
                "give another port"
            )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _wait_until_it_answers(process: subprocess.Popen, settings: ClusterSettings, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"Ray did not start: {_last_line(log)} (all of it: {log})")
        try:
            urllib.request.urlopen(f"{settings.dashboard_url}/api/version", timeout=5).close()
            return
        except urllib.error.HTTPError:  # it wants a token, so it is there
            return
        except OSError:
            time.sleep(0.2)
    raise ConfigError(f"Ray's Dashboard does not answer after {_START_SECONDS:.0f} s; what it said: {log}")


def _last_line(log: Path) -> str:
    return next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "it said nothing")


def _end(cluster: Cluster, process: subprocess.Popen | None = None) -> None:
    """SIGTERM to `ray start --block`, which ends its node; SIGKILL for what is left of the session after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(cluster.pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while (left := _session(cluster.pid)) and time.monotonic() < deadline:
        if process is not None:
            process.poll()  # a child of ours stays a zombie until it is asked for
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _note(Path(cluster.temp_dir)).unlink(missing_ok=True)


def _session(leader: int) -> list[int]:
    """Processes of the session, zombies left out."""
    fields = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    # State, parent, group and session follow the name in proc(5).
    return [pid for pid, found in fields.items() if found and int(found[3]) == leader and found[0] not in "ZX"]


def _start_of(pid: int) -> int | None:
    """Clock ticks since boot at which the process started; None if it is gone."""
    found = _stat(pid)
    return int(found[19]) if found and found[0] not in "ZX" else None


def _stat(pid: int) -> list[str] | None:
    try:
        # The name in parentheses may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _note(temp_dir: Path) -> Path:
    return temp_dir / "cluster.json"


def status_record(cluster: Cluster | None) -> dict[str, Any]:
    """For programs: the cluster and its jobs; an empty object without one."""
    if cluster is None:
        return {}
    return dataclasses.asdict(cluster) | {
        "dashboard_url": cluster.dashboard_url,
        "jobs": [dataclasses.asdict(job) for job in cluster.jobs()],
    }
