"""Ends what is left of a private Ray node once its driver is gone, however it went.

Ray's processes notice a killed driver by themselves, but two of its agents then try for 60 s to report to a server that
died too (Ray 2.60), and an actor inside a long call notices late. So a small process waits for the end of a pipe that
only the driver holds, and kills what still has the node's mark in its environment. It is this very file, run by a bare
interpreter: 10 MB, no import of ours. Touches processes of that node alone. Tested by tests/memory/test_node_guard.py.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

# What a node's processes get to end by themselves. Nothing is lost by killing them: the run is over.
_GRACE_SECONDS = 2.0


class NodeGuard:
    """Guards the node of this raylet from now on until `close`, which ends the guard and, after the grace, the rest."""

    def __init__(self, raylet_pid: int):
        # A session of its own: Ctrl-C is for the driver.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(raylet_pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def processes_of(raylet_pid: int) -> list[int]:
    """Those that the raylet started and their children: it puts its process id into their environment."""
    mark = f"RAY_RAYLET_PID={raylet_pid}".encode()
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _guard(raylet_pid: int) -> None:
    sys.stdin.buffer.read()  # until the driver closes its end, or dies
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := processes_of(raylet_pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
