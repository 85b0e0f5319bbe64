"""Ends what is left of a private Ray node once its driver is gone, however it went.

Ray's processes notice a killed driver by themselves, but two of its agents then try for 60 s to report to a server that
died too (Ray 2.60), and an actor inside a long call notices late. So a small process waits for the end of a pipe that
only the driver holds, and kills what belonged to the node. And when it is the raylet that dies, Ray ends the driver
within the second, without a word: the guard is then the one to say why. It is this very file, run by a bare
interpreter: 10 MB, no import of ours. Touches processes of that node alone. Tested by tests/memory/test_node_guard.py.
"""

import os
import pathlib
import select
import signal
import subprocess
import sys
import time

# What a node's processes get to end by themselves. Nothing is lost by killing them: the run is over.
_GRACE_SECONDS = 2.0
# How often the raylet's children are noted: 2 ms a time on a machine with 66 processes. Agents are there before the
# guard is, and take longer than this to get to their process title.
_WATCH_SECONDS = 1.0
_EXPECTED = b"."


class NodeGuard:
    """Guards the node of this raylet from now on until `close`, which ends the guard and, after the grace, the rest.

    `expect_end` comes before the driver itself ends the raylet: from then on its end is no news.
    """

    def __init__(self, raylet_pid: int, logs_dir: str):
        # A session of its own: Ctrl-C is for the driver.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(raylet_pid), logs_dir],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def expect_end(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_EXPECTED)
            self._process.stdin.flush()
        except BrokenPipeError:  # somebody killed the guard
            pass

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class NodeProcesses:
    """Who belongs to a raylet: itself, its children as they were seen, and who has its mark in the environment.

    The raylet puts its process id into the environment of what it starts, and grandchildren inherit that. But its
    agents set a process title, which may write over it; and a child is nobody's child once its parent is dead. A
    process is known by its id and start time: ids come back.
    """

    def __init__(self, raylet_pid: int):
        self._raylet_pid = raylet_pid
        self._mark = f"RAY_RAYLET_PID={raylet_pid}".encode()
        self._seen: set[tuple[int, int]] = set()

    def watch(self) -> None:
        """Note the raylet and its children, and forget those that have ended."""
        alive = {}
        for directory in pathlib.Path("/proc").glob("[0-9]*"):
            parent_and_start = _parent_and_start(directory)
            if parent_and_start is not None:
                pid = int(directory.name)
                alive[pid, parent_and_start[1]] = self._raylet_pid in (pid, parent_and_start[0])
        self._seen = {process for process, is_of_raylet in alive.items() if is_of_raylet or process in self._seen}

    def left(self) -> list[int]:
        """Process ids of those that have not ended."""
        self.watch()
        found = {pid for pid, _ in self._seen}
        for directory in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (directory / "environ").read_bytes().split(b"\0"):
                    found.add(int(directory.name))
            except OSError:  # it has ended, or is another user's
                continue
        return sorted(found)


def _parent_and_start(directory: pathlib.Path) -> tuple[int, int] | None:
    """Parent's id and start time in clock ticks since boot, from proc(5); None of a process that has ended."""
    try:
        # The name in parentheses may hold anything. State, parent and, as the 22nd field of all, the start follow it.
        fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _wait_for_the_driver(node: NodeProcesses, raylet_pid: int, logs_dir: str) -> None:
    """Until it closes its end of the pipe, or dies. Watches the node meanwhile, and says it when the raylet is lost."""
    try:
        raylet = [os.pidfd_open(raylet_pid)]
    except OSError:  # it has ended already, or the kernel is older than 5.3
        raylet = []
    while True:
        node.watch()
        readable = select.select([sys.stdin.fileno(), *raylet], [], [], _WATCH_SECONDS)[0]
        if sys.stdin.fileno() in readable:
            if not os.read(sys.stdin.fileno(), 1):
                return
            raylet = []
        elif readable:
            sys.stderr.write(
                f"slideformer-ray: Ray's raylet (process {raylet_pid}) was killed or has crashed, which ends this run; "
                f"what it said last: {logs_dir}/raylet.err\n"
            )
            raylet = []


def _guard(raylet_pid: int, logs_dir: str) -> None:
    node = NodeProcesses(raylet_pid)
    _wait_for_the_driver(node, raylet_pid, logs_dir)
    grace_ends = time.monotonic() + _GRACE_SECONDS
    while left := node.left():
        if time.monotonic() > grace_ends:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if time.monotonic() > 2 * _GRACE_SECONDS + grace_ends:  # another user's, or stuck in the kernel
            break
        time.sleep(0.1)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
