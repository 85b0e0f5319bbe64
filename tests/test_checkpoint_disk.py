"""A real file system that fills up, or becomes read-only, under a run: its path is said, nothing complete is lost.

On a tmpfs of 32 MiB in a mount namespace of the child's own; skipped where a user may not have one. Failures of single
calls: tests/test_checkpoint.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=32m none "$0"'
RUN = """
import os, subprocess, sys
from pathlib import Path
from recorded_run import Record, small_config
from slideformer_ray.checkpoint import complete_checkpoints
from slideformer_ray.resume import read_checkpoint
from slideformer_ray.trainer import Trainer

directory, spoil, on_error = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

class Spoils(Record):
    def on_step(self, metrics):
        if metrics.step == 1 and spoil == "full":  # somebody else's file takes all but 4 MiB
            stat = os.statvfs(directory)
            (directory / "other").write_bytes(bytes(stat.f_bavail * stat.f_frsize - (4 << 20)))
        elif metrics.step == 1:
            subprocess.run(["mount", "--bind", directory, directory], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)

fixed = {"checkpoint__save_every": 1, "checkpoint__keep": 1, "checkpoint__save_final": False, "training__steps": 4}
config = small_config(directory, num_rows=14, **fixed, checkpoint__on_save_error=on_error)
try:
    Trainer(config, callbacks=[Spoils()], local=True).train()
finally:
    ((step, path),) = complete_checkpoints(config.run_dir)
    read_checkpoint(path, config)
    print("complete:", path.name, sorted(p.name for p in path.parent.iterdir()))
"""


@pytest.fixture
def run_on_tmpfs(tmp_path):
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "sh", "-c", MOUNT, tmp_path]).returncode:
        pytest.skip("no mount namespace for this user")

    def run(spoil, on_error):
        command = [*UNSHARE, "sh", "-c", MOUNT + ' && exec "$@"', tmp_path, sys.executable, "-c", RUN]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        return subprocess.run(
            [*command, tmp_path, spoil, on_error], env=environment, capture_output=True, text=True, timeout=100
        )

    return run


def test_a_disk_that_fills_up_costs_checkpoints_and_not_the_run(run_on_tmpfs):
    """Step 1 is saved, then the disk is full: bytes needed and free are named, and step 1 stays as it was."""
    ended = run_on_tmpfs("full", "continue")
    assert ended.returncode == 0, ended.stderr
    assert "no checkpoint of step 2: " in ended.stderr
    assert "a checkpoint needs 11.48 MiB and 4.00 MiB are free" in ended.stderr
    assert ended.stdout.startswith("complete: step-1 ['step-1']")


def test_a_disk_that_becomes_read_only_is_named(run_on_tmpfs):
    """As ext4 does after an error of the drive. metrics.jsonl cannot be written either, so the run ends."""
    ended = run_on_tmpfs("read-only", "stop")
    assert ended.returncode == 1 and "Read-only file system: '" in ended.stderr
    assert "complete: step-" in ended.stdout
