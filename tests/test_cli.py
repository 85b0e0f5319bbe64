"""cli.py: what each command prints, its exit codes, and how it ends when it is told to.

Ray is started by the last tests only, each time in a process of its own, through the real command.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
import yaml
from recorded_run import is_running, quickstart_rows
from typer.testing import CliRunner

from slideformer_ray import verify as verify_module
from slideformer_ray.cli import app
from slideformer_ray.config import GIB
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.machine import Machine
from slideformer_ray.model.shapes import write_shape
from slideformer_ray.observe.memory import process_tree
from slideformer_ray.tiers import TierError
from slideformer_ray.trainer import Trainer, TrainingDiverged
from slideformer_ray.verify import CheckRow, VerifyReport

ROOT = Path(__file__).resolve().parent.parent


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config_file(tmp_path):
    """The quickstart's model on 20 of its rows."""
    values = {
        "run_dir": "run",
        "model": {"path": str(quickstart_model_dir())},
        "data": {"train": str(quickstart_rows(tmp_path / "rows.jsonl", 20)), "eval_rows": 4, "seq_len": 64},
        "optimizer": {"weight_decay": 0.1},
        "training": {"steps": 4, "rows_per_step": 4, "micro_batch_rows": 2},
        "placement": {"device": "cpu"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def model_copy(tmp_path):
    """A copy of the quickstart's model directory, to be damaged."""
    target = tmp_path / "model"
    target.mkdir()
    for path in quickstart_model_dir().iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def assert_refused(result, config_file, message):
    """One message on stderr and nothing else, exit code 2, nothing started, nothing written."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("slideformer-ray: ") and re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not (config_file.parent / "run").exists()
    assert not ray.is_initialized()


# ------------------------------------------------------------------------------------------------------- wrong input: 2


def test_help_needs_neither_torch_nor_ray():
    """The command answers at once; every command is listed with what it does."""
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("quickstart", "train", "plan", "verify"))
    code = "import sys, slideformer_ray.cli; assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "optimizer.learning_rat=1",
            r"override 'optimizer.learning_rat=1': optimizer.learning_rat: unknown key; did you mean learning_rate\?",
        ),
        ("training.steps=none", r"override 'training.steps=none': training.steps: input should be a valid integer"),
        ("training.steps", r"override 'training.steps': expected section.key=value"),
        ("data.train=none.jsonl", r"none.jsonl: cannot be read: No such file"),
        ("optimizer.warmup_steps=5", r"optimizer.warmup_steps is 5, but the run has 4 optimizer steps"),
        ("model.frozen=nothing.*", r"model.frozen: pattern 'nothing.\*' matches no parameter"),
        ("checkpoint.resume=step-3", r"checkpoint.resume: .*step-3 is no directory"),
        ("checkpoint.resume=null", r"checkpoint.resume: give auto, none or a checkpoint directory \(found None\)"),
        ("run_dir=/proc/run", r"run_dir: "),
    ],
)
def test_a_wrong_setting_is_refused_in_one_message(config_file, override, message):
    """Before anything is started: what, where, the number found, the number needed."""
    assert_refused(invoke("train", config_file, override), config_file, message)


def test_a_config_that_is_not_there_is_named(config_file):
    """With the reason."""
    assert_refused(
        invoke("train", config_file.with_name("none.yaml")), config_file, "none.yaml: cannot be read: No such"
    )


@pytest.mark.parametrize(
    "rows, message",
    [
        ("", r"rows.jsonl: the file holds no row"),
        (
            '{"messages": [{"role": "user", "content": "Define: a"}]}\n' * 6,
            r"none of the \d training rows has a supervised",
        ),
        ('{"text": "a"}\n{"text": \n', r"rows.jsonl:2: not valid JSON"),
    ],
    ids=["empty", "unsupervised", "torn"],
)
def test_data_that_nothing_can_be_learned_from_is_refused(config_file, rows, message):
    """An empty file, rows without a supervised token, a row that is no JSON."""
    (config_file.parent / "rows.jsonl").write_text(rows)
    assert_refused(invoke("train", config_file, "data.eval_rows=0"), config_file, message)


def test_a_torn_shard_is_refused(config_file, model_copy):
    """Shorter than its header says, as after a download that broke off."""
    file = model_copy / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert_refused(invoke("train", config_file, f"model.path={model_copy}"), config_file, "model.safetensors: torn: ")


def test_a_missing_shard_is_refused(config_file, model_copy):
    """The index names a file that is not there."""
    file = model_copy / "model.safetensors"
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    file.unlink()
    (model_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    message = "model-00002-of-00002.safetensors: this shard is missing"
    assert_refused(invoke("train", config_file, f"model.path={model_copy}"), config_file, message)


def test_a_family_that_is_not_supported_is_refused_before_the_data_is_read(config_file, model_copy):
    """By name; also by `plan`."""
    values = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**values, "model_type": "mamba"}))
    for command in ("train", "plan"):
        result = invoke(command, config_file, f"model.path={model_copy}", "data.train=none.jsonl")
        assert_refused(result, config_file, "model_type 'mamba' is not supported; supported: llama, qwen2")


def test_a_run_that_does_not_fit_is_refused_with_its_bytes(config_file):
    """The table of every item, then the shortfall and what mends it."""
    result = invoke("train", config_file, "budget.ram_gib=0.5")
    assert result.exit_code == 2 and not ray.is_initialized() and not (config_file.parent / "run").exists()
    assert "exp_avg and exp_avg_sq, fp32" in result.stderr
    message = result.stderr.splitlines()[-1]
    assert re.search(r"budget.ram_gib is 0.50 GiB, [\d.]+ GiB short; raise budget.ram_gib to [\d.]+$", message)


def test_a_dev_shm_too_small_is_refused_with_the_command_that_mends_it(config_file, monkeypatch):
    """As in a container's 64 MB: found from the plan, before Ray starts."""
    here = Machine.read("cpu")
    small = dataclasses.replace(here.limits, shm_total=64 << 20, shm_free=64 << 20)
    monkeypatch.setattr(Machine, "read", classmethod(lambda cls, device: dataclasses.replace(here, limits=small)))
    result = invoke("train", config_file)
    assert result.exit_code == 2 and not ray.is_initialized() and not (config_file.parent / "run").exists()
    assert "/dev/shm has 0.06 GiB free of 0.06 GiB, the object store needs 0.07 GiB" in result.stderr
    assert "--shm-size=1g" in result.stderr


def test_debug_shows_where_a_message_comes_from(config_file):
    """`--debug`: the traceback, then the message."""
    result = invoke("train", config_file, "data.train=none.jsonl", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "DataError" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("slideformer-ray: ")


# ---------------------------------------------------------------------------------------------------- a failed run: 1


@pytest.mark.parametrize(
    "error", [TierError("optimizer actor 0 died in step 3"), TrainingDiverged("3 steps were skipped")]
)
def test_a_run_that_fails_says_why(config_file, monkeypatch, error):
    """Exit code 1, and the message alone: it names actor, step and what to do."""

    def train(trainer):
        raise error

    monkeypatch.setattr(Trainer, "train", train)
    result = invoke("train", config_file)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"slideformer-ray: {error}"
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_a_full_disk_is_named(config_file, monkeypatch):
    """An OSError of the system's, with its file."""

    def train(trainer):
        raise OSError(28, "No space left on device", "/disk/model.safetensors")

    monkeypatch.setattr(Trainer, "train", train)
    result = invoke("train", config_file)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "slideformer-ray: /disk/model.safetensors: No space left on device"


def test_a_defect_of_ours_keeps_its_traceback(config_file, monkeypatch):
    """Only errors that say all there is to say are made short."""

    def train(trainer):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Trainer, "train", train)
    result = invoke("train", config_file)
    assert result.exit_code == 1 and isinstance(result.exception, RuntimeError)


# ----------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_shows_every_tier_and_limit(config_file):
    """Bytes of each item; /dev/shm, RAM, disk; the counts that were chosen. Nothing is started or written."""
    result = invoke("plan", config_file)
    assert result.exit_code == 0, result.output
    for shown in (
        "parameters that the GPU reads (hi)",
        "exp_avg and exp_avg_sq, fp32",
        "/dev/shm (object store)",
        "(available RAM)",
        "a save or a resume",
        "disk: a checkpoint",
        "num_optimizer_actors",
    ):
        assert shown in result.stdout
    assert result.stderr == ""
    assert not ray.is_initialized() and not (config_file.parent / "run").exists()


def test_a_plan_can_be_made_for_another_machine(config_file, tmp_path):
    """From config.json alone: neither weights nor data are there, which is said."""
    model = write_shape("qwen2.5-7b", tmp_path / "shape")
    overrides = [f"model.path={model}", "data.train=none.jsonl", "placement.device=auto", "data.seq_len=1024"]
    result = invoke("plan", config_file, *overrides, "--gpu-gib", 24, "--ram-gib", 128, "--cores", 16, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["fits"] and record["layout"]["device"] == "cuda" and record["layout"]["num_optimizer_actors"] == 2
    assert record["gpu_bytes"] < 24 * GIB and 90 * GIB < record["host_bytes"] < 110 * GIB
    assert record["machine"]["limits"]["shm_free"] == 64 * GIB
    assert len(record["notes"]) == 2
    assert "none.jsonl is not there" in result.stderr and "holds no *.safetensors" in result.stderr


def test_a_plan_that_does_not_fit_is_refused_with_its_table(config_file, tmp_path):
    """Exit code 2; the table on stdout, shortfall and advice on stderr; in JSON too."""
    model = write_shape("qwen2.5-7b", tmp_path / "shape")
    arguments = ["plan", config_file, f"model.path={model}", "placement.device=auto", "--gpu-gib", 24, "--ram-gib", 48]
    result = invoke(*arguments)
    assert result.exit_code == 2 and not ray.is_initialized()
    assert "exp_avg and exp_avg_sq, fp32" in result.stdout
    assert "available RAM is 48.00 GiB" in result.stderr and "mount -o remount,size=" in result.stderr
    record = json.loads(invoke(*arguments, "--json").stdout)
    assert record["fits"] is False and len(record["shortfalls"]) == 2


# --------------------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("error, exit_code", [(1e-7, 0), (1e-5, 1)])
def test_verify_ends_with_what_it_found(config_file, monkeypatch, error, exit_code):
    """0 when every check passed, 1 when one did not; the report on stdout, progress on stderr."""
    report = VerifyReport({"rows": 8}, (CheckRow("fp32: masters", "model.norm.weight", error, 1e-6, "fixed"),))
    asked = []

    def verify(config, *, steps, local, on_line):
        asked.append((config.run_dir.name, config.training.steps, steps, local))
        on_line("comparing")
        return report

    monkeypatch.setattr(verify_module, "verify", verify)
    result = invoke("verify", config_file, "training.steps=9", "--steps", 4, "--ray", "--json")
    assert result.exit_code == exit_code
    assert json.loads(result.stdout)["passed"] is (exit_code == 0)
    assert result.stderr == "comparing\n"
    assert "model.norm.weight" in invoke("verify", config_file).stdout
    invoke("verify")
    assert asked == [("run", 9, 4, False), ("run", 4, 5, True), ("verify", 100, 5, True)]


# ----------------------------------------------------------------------------------------------------------- quickstart


def test_quickstart_keeps_its_hands_off_other_directories(tmp_path):
    """Only what an earlier quickstart left is replaced."""
    (tmp_path / "thesis.txt").write_text("do not lose me")
    result = invoke("quickstart", "--run-dir", tmp_path)
    assert result.exit_code == 2 and "holds something else than an earlier quickstart" in result.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_quickstart_replaces_an_earlier_one(tmp_path, monkeypatch):
    """Its metrics would otherwise be appended to."""
    run_dir = tmp_path / "quickstart"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(
        json.dumps({"model": {"path": f"/elsewhere/quickstart/{quickstart_model_dir().name}"}})
    )
    (run_dir / "metrics.jsonl").write_text("{}\n")

    def train(trainer):
        assert not run_dir.exists()
        raise TierError("far enough")

    monkeypatch.setattr(Trainer, "train", train)
    assert invoke("quickstart", "--run-dir", run_dir).exit_code == 1


# ------------------------------------------------------------------------------------------- through Ray, in a process


def start(*arguments):
    """The command as a user starts it from a terminal: with a process group of its own."""
    # A shell's background job, tests in it included, starts with SIGINT ignored; a command at a terminal does not.
    reset = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", reset + "runpy.run_module('slideformer_ray', run_name='__main__')"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def proportional_bytes(pids):
    """Resident memory of all processes, shared pages once (PSS): what is really taken from the machine."""
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024
    return total


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_leaves_nothing(config_file, number, exit_code):
    """Ctrl-C (which a terminal sends to every process of the group) and SIGTERM, between two steps or in one.

    Within 10 seconds the command has ended with its code and one line, no process is left and /dev/shm is as before.
    Until then the run takes no more memory than `plan` said.
    """
    arguments = [config_file, "training.steps=100000"]
    planned = json.loads(invoke("plan", *arguments, "--json").stdout)["host_bytes"]
    shm_before = set(os.listdir("/dev/shm"))
    with start("train", *arguments, "--log-every", 5) as run:
        lines = []
        for line in run.stderr:
            lines.append(line)
            if line.startswith("step 10/"):
                break
        pids = process_tree(run.pid)
        assert len(pids) >= 8  # driver, three actors, Ray's own
        if torch.version.cuda is None and torch.version.hip is None:  # whose processes the plan's constants are of
            assert 0.95 * planned - (400 << 20) <= proportional_bytes(pids) <= planned
        stopped = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        stdout, stderr = run.communicate(timeout=30)
        assert time.monotonic() - stopped < 10
    assert run.returncode == exit_code
    assert stdout == ""
    # A step that was under way may still have its line in between.
    asked, said = [line for line in stderr.splitlines() if not line.startswith("step ")][-2:]
    assert asked == "stopping after the steps that are under way; once more ends at once"
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert re.fullmatch(rf"slideformer-ray: stopped by {name} after \d+ steps; nothing is saved", said)
    assert "Traceback" not in stderr and "SIGTERM received" not in stderr and "INFO" not in "".join(lines)
    assert wait_until_gone(pids, 10 - (time.monotonic() - stopped)) == []
    assert set(os.listdir("/dev/shm")) <= shm_before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quickstart_trains_the_shipped_model(tmp_path):
    """Held-out loss before and after, the same prompt's answer before and after, peak host bytes; exit code 0.

    Without a terminal stderr has plain lines; stdout has the JSON and nothing else.
    """
    with start("quickstart", "--run-dir", tmp_path / "run", "--json") as run:
        stdout, stderr = run.communicate(timeout=280)
    assert run.returncode == 0, stderr
    found = json.loads(stdout)
    assert 6.9 < found["first_eval_loss"] < 7.3 and found["last_eval_loss"] < 5.0
    assert found["prompt"] and found["text_before"] and found["text_after"] != found["text_before"]
    assert found["peak_host_bytes"] > GIB // 2 and found["spilled_bytes"] == 0
    assert stderr.replace("\n", "").isprintable() and "step 100/100" in stderr
    for shown in ("torch 2.", "weight decay", "none for 9 tensors", "optimizer actor 0: process"):
        assert shown in stderr
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        ".lock",
        "config.json",
        "metrics.jsonl",
        "model",
        "summary.json",
    ]
