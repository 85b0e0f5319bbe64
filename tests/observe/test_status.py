"""status.py and `slideformer-ray status`: a run's last figures, found by its directory or by itself."""

import json
import os

import pytest
from recorded_run import small_config
from typer.testing import CliRunner

from slideformer_ray.cli import app
from slideformer_ray.observe import status
from slideformer_ray.observe.status import RunNote, last_records, running
from slideformer_ray.trainer import Trainer


@pytest.fixture(autouse=True)
def own_notes(tmp_path, monkeypatch):
    """Not those of other runs on this machine."""
    monkeypatch.setattr(status, "notes_dir", lambda: tmp_path / "notes")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("status")
    config = small_config(directory, training__steps=5, observe__lanes_every=3)
    Trainer(config, local=True).train()
    return config.run_dir


def invoke(*arguments):
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


def test_the_last_record_of_each_kind_is_shown(run_dir):
    """Names are those of docs/metrics.md; bytes are readable; a mapping has a line a key."""
    result = invoke(run_dir)
    assert result.exit_code == 0, result.output
    lines = {line.rsplit(None, 1)[0].strip(): line for line in result.stdout.splitlines() if line.strip()}
    for name in ("loss", "tokens_per_second", "eval_loss", "hiding_factor", "exposed_seconds update"):
        assert name in lines, result.stdout
    assert "MiB" in result.stdout and "tier_bytes pinned" in result.stdout
    assert result.stdout.replace("\n", "").isprintable()


def test_programs_get_the_records_themselves(run_dir):
    """`--json`."""
    found = json.loads(invoke(run_dir, "--json").stdout)["runs"][str(run_dir)]
    assert found["step"]["step"] == 4 and found["eval"]["step"] == 5 and found["lanes"]["step"] == 2


def test_a_directory_that_no_run_wrote_is_named(tmp_path):
    """Exit code 2."""
    result = invoke(tmp_path)
    assert result.exit_code == 2 and "metrics.jsonl: cannot be read: No such file" in result.stderr


def test_a_run_that_goes_on_is_found_by_itself(run_dir, tmp_path):
    """From its start to its end, however it ends; a killed one's note is removed."""
    arguments = ("--temp-dir", tmp_path / "no-cluster")
    assert "no run of this user's goes on" in invoke(*arguments).stdout
    note = RunNote(run_dir)
    note.on_start(5, 0)
    assert [(found["pid"], found["run_dir"]) for found in running()] == [(os.getpid(), str(run_dir))]
    assert str(run_dir.name) in invoke(*arguments).stdout
    note.close()
    note.close()
    assert running() == []
    (status.notes_dir() / "99999999.json").write_text("{}")  # beyond the kernel's largest process id
    assert running() == [] and not list(status.notes_dir().iterdir())


def test_half_a_line_is_no_record(run_dir, tmp_path):
    """A line that is being written, and the first one of a long file's end, are left out."""
    path = tmp_path / "metrics.jsonl"
    text = (run_dir / "metrics.jsonl").read_text()
    path.write_text(text[20:] + '{"kind": "step", "st')
    assert last_records(tmp_path)["step"]["step"] == 4


def test_a_note_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    """It is said, and the run goes on."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(status, "notes_dir", lambda: tmp_path / "file" / "runs")
    note = RunNote(tmp_path)
    note.on_start(5, 0)
    note.close()
    assert "will not find this run by itself" in caplog.text
