"""slideformer-ray.service: systemd reads it, and it says what the command understands."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slideformer_ray.cli import app
from slideformer_ray.cluster import JOB_STOP_SECONDS

FILE = Path(__file__).resolve().parents[2] / "cluster_configs" / "slideformer-ray.service"


def unit():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(FILE)
    return parser


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_it(tmp_path):
    """`systemd-analyze verify`, with a program that is there in the place of the user's."""
    text = FILE.read_text().replace("%h/slideformer-ray/.venv/bin/slideformer-ray", "/bin/true")
    path = tmp_path / FILE.name
    path.write_text(text)
    result = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert result.returncode == 0 and FILE.name not in result.stderr, result.stderr


@pytest.mark.parametrize("key", ["ExecStart", "ExecStop"])
def test_its_commands_are_ours(key):
    """Subcommand and options exist."""
    program, command, *words = unit()["Service"][key].split()
    assert program.endswith("/bin/slideformer-ray")
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert all(word in text for word in words if word.startswith("--"))


def test_it_waits_for_a_save():
    """systemd would kill what does not end in 90 s."""
    assert int(unit()["Service"]["TimeoutStopSec"]) > JOB_STOP_SECONDS
