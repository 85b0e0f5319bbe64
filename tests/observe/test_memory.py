"""memory.py: the memory of a process and of everything that it started."""

import os
import subprocess
import sys
import time

from slideformer_ray.observe.memory import anonymous_bytes, process_tree

HELD_BYTES = 64 << 20
# Starts a child that holds memory of its own, says its id, and waits for its input to end.
PARENT = """
import subprocess, sys
code = "import sys; held = bytearray(b'x') * int(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


def test_a_tree_is_a_process_with_all_its_descendants():
    """Children of children too, whose memory counts; once they have ended they are gone, and count nothing."""
    command = [sys.executable, "-c", PARENT, str(HELD_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        grandchild = int(parent.stdout.readline())
        tree = process_tree(os.getpid())
        assert {os.getpid(), parent.pid, grandchild} <= tree
        assert process_tree(parent.pid) == {parent.pid, grandchild}
        held = anonymous_bytes([grandchild])
        assert HELD_BYTES <= held < HELD_BYTES + (48 << 20)
        assert anonymous_bytes([parent.pid, grandchild]) > held
        parent.stdin.close()
        parent.wait()
    time.sleep(0.1)
    assert not {parent.pid, grandchild} & process_tree(os.getpid())
    assert anonymous_bytes([grandchild]) == 0
