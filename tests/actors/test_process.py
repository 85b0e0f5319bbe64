"""What an actor does to its process before anything computes, and what it reports of itself."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slideformer_ray.actors.process import ActorReport, prepare_process, private_memory

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
# Ray's worker, without Ray: one OpenMP thread, nice 15.
WORKER = """
import json, os
os.nice(15)
from slideformer_ray.actors.process import ActorReport, prepare_process
before = ActorReport.of("worker", "")
prepare_process(3)
after = ActorReport.of("worker", "")
print(json.dumps([[r.threads, r.niceness] for r in (before, after)]))
"""


def test_threads_and_niceness_are_set_and_reported():
    """Ray starts workers with one thread at nice 15. Afterwards: the threads asked for, and nice 0 where that is
    allowed; the report says what is the case, not what was asked for."""
    result = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()
    before, after = json.loads(result.stdout)
    assert before == [1, 15]
    assert after[0] == 3
    assert after[1] == (0 if os.geteuid() == 0 else 15)


def test_a_process_at_nice_0_stays_there():
    """Our own node starts workers so: nothing to ask for, no error without the right to."""
    import torch

    before = torch.get_num_threads()
    try:
        prepare_process(before)
    finally:
        torch.set_num_threads(before)
    assert os.nice(0) == 0


def test_the_report_is_of_this_process():
    report = ActorReport.of("optimizer actor 0", "native avx2")
    assert (report.name, report.detail, report.pid) == ("optimizer actor 0", "native avx2", os.getpid())
    assert report.cpus == len(os.sched_getaffinity(0))
    assert report.private_bytes == pytest.approx(private_memory(), rel=0.1)


def test_private_memory_counts_what_this_process_alone_holds():
    """Anonymous pages count once they are touched; memory shared with others does not count."""
    before = private_memory()
    shared = np.frombuffer(mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), np.uint8)
    shared[:] = 1
    assert private_memory() - before < 8 * MIB
    own = np.ones(64 * MIB, np.uint8)
    assert private_memory() - before == pytest.approx(own.nbytes, rel=0.15)
