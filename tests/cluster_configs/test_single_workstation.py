"""cluster_configs/single_workstation.sh as far as it goes without a cluster: how it is called.

No cluster is started here: `stop` would end the nodes of other tests.
"""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cluster_configs" / "single_workstation.sh"


def run(*arguments):
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def test_the_script_is_valid_bash():
    """bash parses it, to the end."""
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).stderr == b""


@pytest.mark.parametrize("arguments", [(), ("start",), ("start", "a.yaml", "b"), ("submit",), ("stop", "a"), ("up",)])
def test_wrong_words_show_the_right_ones(arguments):
    """Anything but the three commands prints how they are called, exit code 2, and touches nothing."""
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert all(f"single_workstation.sh {word}" in result.stderr for word in ("start CONFIG", "submit CONFIG", "stop"))
