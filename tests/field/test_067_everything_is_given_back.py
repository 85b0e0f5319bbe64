"""Field case 67: ray #31451, #11608, #23785.

In: Ctrl-C, or SIGKILL, with pinned buffers.
Bad: GPU memory, or /dev/shm, stays taken.
Good: within 10 seconds no process is left, /dev/shm is as before, and so is the GPU's memory.

Here: a run that ends well and a driver that is killed. Ctrl-C: tests/test_cli.py; killed actors: test_066_*.py.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from pipeline import save_small_model
from recorded_run import is_running, ray_run

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIDEFORMER_RAY_TEST_RUN"
DRIVER = """
import itertools, sys
from pathlib import Path
from pipeline import make_config, open_tiers, random_batch, run_steps
from slideformer_ray.tiers import RayTiers

with open_tiers(make_config(Path(sys.argv[1]), device=sys.argv[2]), RayTiers) as tiers:
    for step in itertools.count():
        run_steps(tiers, [random_batch(4, 2, seed=step)], first=step)
        print(step, flush=True)
"""


def test_a_run_that_ends_leaves_nothing():
    """100 steps through Ray: its processes are gone, and this process maps none of the store's memory any more."""
    run = ray_run()
    assert run.pids_left == []
    assert run.mappings_left == []
    assert run.shm_left == set()


def processes_of(run_id):
    """All processes with the run's mark in their environment, which children inherit: Ray's own and the actors."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={run_id}".encode() in (directory / "environ").read_bytes()
            name = (directory / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if marked and is_running(int(directory.name)):
            found[int(directory.name)] = name
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def gpu_free_bytes():
    import torch

    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_killed_driver_takes_everything_with_it(tmp_path, device):
    """SIGKILL between two steps or in one: nothing of ours runs on the way down, so nothing may depend on it."""
    model = save_small_model(tmp_path / "model", "llama")
    shm_before, run_id = set(os.listdir("/dev/shm")), str(uuid.uuid4())
    gpu_before = gpu_free_bytes() if device == "cuda" else 0
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    environment = {**os.environ, MARK: run_id, "PYTHONPATH": path}
    command = [sys.executable, "-c", DRIVER, str(model), device]
    errors = tmp_path / "stderr"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr) as driver,
    ):
        for line in driver.stdout:
            if line.strip() == b"3":
                break
        # Ray's agents come last, and are the ones that would go last (node_guard.py).
        wait_for(lambda: "ray::DashboardA" in processes_of(run_id).values(), 15)
        # also the driver, three actors, raylet, GCS
        assert len(processes_of(run_id)) >= 7, errors.read_text()[-4000:]
        driver.send_signal(signal.SIGKILL)
    wait_for(lambda: not processes_of(run_id), 10)
    assert processes_of(run_id) == {}
    assert set(os.listdir("/dev/shm")) <= shm_before
    if device == "cuda":
        assert gpu_free_bytes() > gpu_before - (64 << 20)
