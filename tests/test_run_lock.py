"""One run at a time in a directory; the lock goes with its process, however that ends."""

import os
import subprocess
import sys

import pytest

from slideformer_ray.config import ConfigError
from slideformer_ray.run_lock import run_lock

HOLD = """
import sys, time
from pathlib import Path
from slideformer_ray.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_gives_the_lock_back(tmp_path):
    """SIGKILL: nothing of the process runs any more, and the next run starts at once. Until then it is named."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"is in use by another run \(process {holder.pid}\); wait for it, stop"):
            with run_lock(tmp_path):
                pass
        holder.kill()
        holder.wait()
        with run_lock(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_children_do_not_keep_it(tmp_path):
    """A Ray node outlives its driver by seconds: what the run has started does not hold the directory."""
    with run_lock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
