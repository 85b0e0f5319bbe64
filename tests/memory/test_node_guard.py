"""The guard of a private node, without Ray: processes with the node's mark end when the driver does, in any way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slideformer_ray.memory import node_guard
from slideformer_ray.memory.node_guard import NodeGuard, NodeProcesses

ROOT = Path(__file__).resolve().parents[2]
RAYLET = 10**7  # no process has this number: it is beyond the kernel's largest
# Starts the guard, says so, and waits to be killed.
DRIVER = f"""
import signal, time
from slideformer_ray.memory.node_guard import NodeGuard
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job, tests in it included, starts with it ignored
guard = NodeGuard({RAYLET}, "/logs")
print(guard._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Starts a process that sleeps, with this raylet's mark, and ends it if nobody else has."""
    started = []

    def start_one(raylet_pid):
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet_pid)}
        started.append(subprocess.Popen(["sleep", "60"], env=environment))
        deadline = time.monotonic() + 5
        while started[-1].pid not in NodeProcesses(raylet_pid).left():  # it is another program until exec
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_is_left_ends_with_the_driver(start, ending):
    """Within seconds, and the guard after it; a process of another node is left alone."""
    agent, other = start(RAYLET), start(RAYLET + 1)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        guard = int(driver.stdout.readline())
        time.sleep(0.3)
        assert agent.poll() is None
        driver.send_signal(ending)
    assert agent.wait(timeout=8) == -signal.SIGKILL
    assert other.poll() is None
    deadline = time.monotonic() + 5
    while Path(f"/proc/{guard}/cmdline").exists() and Path(f"/proc/{guard}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_closing_is_quick_when_nothing_is_left():
    """The usual end of a run: Ray has ended its processes, so there is no grace to wait for."""
    guard = NodeGuard(RAYLET, "/logs")
    started = time.monotonic()
    guard.close()
    assert time.monotonic() - started < 2 and guard._process.returncode == 0


def test_closing_ends_what_ray_left_behind(start):
    agent = start(RAYLET)
    guard = NodeGuard(RAYLET, "/logs")
    guard.close()
    assert agent.wait(timeout=1) == -signal.SIGKILL


def test_a_child_without_the_mark_is_known_by_its_parent():
    """Ray's agents overwrite their environment by a process title. They stay the raylet's, even after its end."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as raylet:
        agent = int(raylet.stdout.readline())
        guard = NodeGuard(raylet.pid, "/logs")
        time.sleep(1.0)  # it is up, and has looked once
        raylet.kill()
    assert Path(f"/proc/{agent}").exists()
    guard.close()
    assert not Path(f"/proc/{agent}/cmdline").exists() or not Path(f"/proc/{agent}/cmdline").read_bytes()


@pytest.mark.parametrize("expected", [False, True])
def test_a_raylet_that_dies_first_is_named(capfd, expected):
    """Ray ends the driver then without a word; but a raylet that the driver itself ends is no news."""
    with subprocess.Popen(["sleep", "60"]) as raylet:
        guard = NodeGuard(raylet.pid, "/logs")
        time.sleep(1.0)
        if expected:
            guard.expect_end()
            time.sleep(0.5)
        raylet.kill()
    time.sleep(0.5)
    guard.close()
    said = capfd.readouterr().err
    assert (
        f"raylet (process {raylet.pid}) was killed or has crashed" in said and "/logs/raylet.err" in said
    ) != expected


def test_it_imports_nothing_of_ours():
    """It runs for as long as the driver does, so it must be small: a bare interpreter and this file."""
    guard = NodeGuard(RAYLET, "/logs")
    time.sleep(0.5)
    statm = Path(f"/proc/{guard._process.pid}/statm").read_text().split()
    guard.close()
    assert int(statm[1]) * os.sysconf("SC_PAGE_SIZE") < 24 << 20
    assert Path(node_guard.__file__).read_text().count("slideformer_ray") == 0
