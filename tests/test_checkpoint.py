"""Saving and resuming: the same bits as the run that never stopped, and no half-written checkpoint is ever resumed."""

import json
import shutil

import pytest
import torch
from recorded_run import Record, small_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slideformer_ray import checkpoint
from slideformer_ray.actors.state_files import StateError, StateReader
from slideformer_ray.checkpoint import checkpoint_dir
from slideformer_ray.config import ConfigError
from slideformer_ray.model.layers import describe_model, load_hf_config
from slideformer_ray.tiers import LocalTiers
from slideformer_ray.trainer import Trainer

STEPS, SAVED_AT = 8, 4
DTYPES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "lo": torch.int16}


def run(directory, **changes):
    """A run as threads, 12 training rows: each epoch of three steps has its own order."""
    directory.mkdir(exist_ok=True)
    fixed = {"training__steps": STEPS, "checkpoint__save_every": SAVED_AT, "checkpoint__save_final": False}
    if changes.get("training__steps") == 1:
        fixed["optimizer__warmup_steps"] = 0
    record = Record()
    record.config = small_config(directory, num_rows=14, **{**fixed, **changes})
    record.trainer = Trainer(record.config, callbacks=[record], local=True)
    record.summary = record.trainer.train()
    return record


def bits_of(saved, precision="bf16"):
    """Model and states of a checkpoint, whole parameters, from however many actors' files."""
    reader = StateReader(saved / "state")
    found = dict(load_file(saved / "model" / "model.safetensors"))
    spec = describe_model(load_hf_config(saved / "model"))
    for param in (p for block in spec.blocks for p in block.params):
        for state, dtype in DTYPES.items():
            if state != "lo" or precision == "bf16":
                found[f"{state} {param.name}"] = out = torch.empty(param.numel, dtype=dtype)
                reader.read(state, param.name, 0, param.numel, out)
    return found | {"adam step": torch.tensor(reader.adam_step)}


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Eight steps in bf16 with clipping, never stopped, saved after the fourth and the eighth."""
    return run(tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def saved(straight):
    return checkpoint_dir(straight.config.run_dir, SAVED_AT)


# ---------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("num_actors", [2, 3])
def test_a_resumed_run_has_the_bits_of_the_straight_one(tmp_path, straight, saved, num_actors):
    """Masters, both moments, Adam's step, losses, norms, rates and rows; also with another number of actors. Moments
    that are rounded on their way show at the second resumed step's norm (KempnerForge #114)."""
    resumed = run(
        tmp_path / "resumed",
        checkpoint__resume=saved,
        placement__num_optimizer_actors=num_actors,
    )
    for found, wanted in zip(resumed.steps, straight.steps[SAVED_AT:], strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens"):
            assert getattr(found, name) == getattr(wanted, name), (found.step, name)
        assert not found.skipped and found.grad_norm > resumed.config.optimizer.max_grad_norm  # clipping is active
    assert resumed.evals[-1] == straight.evals[-1]
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS)) for r in (resumed, straight)]
    assert differing(*ends) == []


def test_a_resumed_fp32_run_has_the_bits_of_the_straight_one(tmp_path):
    """There the model's files are the masters."""
    changes = {"training__precision": "fp32"}
    whole = run(tmp_path / "straight", **changes)
    source = checkpoint_dir(whole.config.run_dir, SAVED_AT)
    resumed = run(tmp_path / "resumed", checkpoint__resume=source, **changes)
    assert [m.loss for m in resumed.steps] == [m.loss for m in whole.steps[SAVED_AT:]]
    ends = [bits_of(checkpoint_dir(r.config.run_dir, STEPS), "fp32") for r in (resumed, whole)]
    assert differing(*ends) == []


def test_other_micro_batches_after_a_resume_stay_close(tmp_path, straight, saved):
    """Rows of a step may be cut otherwise: the same sums in another order, so close and not equal. In bf16 each
    micro-batch's gradients are rounded before they are summed."""
    resumed = run(tmp_path / "resumed", checkpoint__resume=saved, training__micro_batch_rows=3)
    losses = [m.loss for m in straight.steps[SAVED_AT:]]
    assert [m.loss for m in resumed.steps] == pytest.approx(losses, rel=1e-2)
    assert [m.loss for m in resumed.steps] != losses


def test_a_run_that_was_done_has_nothing_to_resume(tmp_path, straight):
    """Its last checkpoint: no step is run, the held-out loss is the same."""
    resumed = run(tmp_path / "resumed", checkpoint__resume=checkpoint_dir(straight.config.run_dir, STEPS))
    assert resumed.steps == [] and resumed.evals == [straight.evals[-1]]


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def copy(tmp_path, saved):
    """A checkpoint to spoil."""
    return shutil.copytree(saved, tmp_path / "step-4")


def resume(tmp_path, path, **changes):
    return Trainer(small_config(tmp_path, num_rows=14, checkpoint__resume=path, **changes), local=True)


def test_an_incomplete_checkpoint_is_refused(tmp_path, copy):
    """Everything is there but the marker: the save did not end."""
    (copy / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint.resume: \S+step-4 has no COMPLETE marker"):
        resume(tmp_path, copy)


def test_another_precision_is_refused(tmp_path, copy):
    """In fp32 there would be no remainder to make the masters from."""
    with pytest.raises(ConfigError, match="saved with training.precision bf16, this config has fp32"):
        resume(tmp_path, copy, training__precision="fp32")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"training__seed": 7}, "saved with training.seed 0, this config has 7; set it to 0"),
        ({"training__rows_per_step": 6}, "saved with training.rows_per_step 4, this config has 6"),
        ({"model__frozen": ["model.norm.*"]}, r"saved with model.frozen \[\], this config has \['model.norm"),
    ],
)
def test_a_resume_that_would_train_something_else_is_refused(tmp_path, copy, changes, message):
    """With another seed or batch the next step's rows are others; a newly frozen parameter would lose its remainder."""
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path, copy, **changes)


def test_a_resume_on_other_rows_is_refused(tmp_path, copy):
    """The order is over the number of rows: with one more, every row comes at another step."""
    config = small_config(tmp_path, num_rows=15, checkpoint__resume=copy)
    with pytest.raises(ConfigError, match="was trained on 12 rows, data.train gives 13"):
        Trainer(config, local=True)


def test_a_torn_training_json_is_refused_by_name(tmp_path, copy):
    """Half a file is one line that names it, not a parser's error."""
    path = copy / "training.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(ConfigError, match=r"checkpoint.resume: \S+training.json is torn \(JSONDecodeError"):
        resume(tmp_path, copy)


def test_a_checkpoint_beyond_the_run_is_refused(tmp_path, copy):
    """Four steps are done, three were asked for."""
    with pytest.raises(ConfigError, match="step-4 is of step 4, the run has 3 steps"):
        resume(tmp_path, copy, training__steps=3)


def test_a_torn_state_file_is_refused_by_name(tmp_path, copy):
    """A user's matter (ValueError, exit 2), found before anything is started."""
    torn = copy / "state" / "actor-1.layer.2.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.raises(StateError, match=r"actor-1.layer.2.safetensors: not a readable state file .* torn"):
        resume(tmp_path, copy)
    assert isinstance(StateError(""), ValueError)


def test_a_lost_state_file_is_refused(tmp_path, copy):
    """Its part is never left at zero: bias correction and moments would be wrong in silence."""
    (copy / "state" / "actor-0.layer.1.safetensors").unlink()
    trainer = resume(tmp_path, copy)
    with pytest.raises(StateError, match=r"of model.layers.1.\S+ ends at element 0, .* lost a file"):
        trainer.train()


def test_a_torn_model_file_is_refused_by_name(tmp_path, copy):
    shard = copy / "model" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"step-4/model/model.safetensors: torn"):
        resume(tmp_path, copy)


# -------------------------------------------------------------------------------------------------------------- saving


def test_a_checkpoint_says_what_it_is(straight, saved):
    """Steps, Adam's step, the config and versions; its model is an ordinary Hugging Face directory; no remains."""
    state = json.loads((saved / "training.json").read_text())
    assert (state["steps_done"], state["adam_step"]) == (SAVED_AT, SAVED_AT)
    assert state["config"] == straight.config.model_dump(mode="json")
    assert set(state["versions"]) == {"slideformer_ray", "torch", "transformers", "ray"}
    AutoModelForCausalLM.from_pretrained(saved / "model")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-4", "step-8"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


PHASES = {
    "model": (LocalTiers, "save_model"),
    "states": (LocalTiers, "save_states"),
    "training.json": (checkpoint, "_write_json"),
    "rename": (checkpoint.Path, "rename"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_save_that_is_killed_leaves_the_one_before(tmp_path, monkeypatch, phase):
    """Whenever it happens: the new directory is not a checkpoint, the old one is, and the next save succeeds."""
    first = run(tmp_path, training__steps=2, checkpoint__save_every=1)
    before = bits_of(checkpoint_dir(first.config.run_dir, 2))
    monkeypatch.setattr(*PHASES[phase], lambda *args, **kwargs: (_ for _ in ()).throw(Killed))
    source = checkpoint_dir(first.config.run_dir, 1)
    with pytest.raises(Killed):
        run(tmp_path, training__steps=3, checkpoint__resume=source, checkpoint__save_every=3)
    monkeypatch.undo()
    third = checkpoint_dir(first.config.run_dir, 3)
    assert not third.exists()
    assert differing(bits_of(checkpoint_dir(first.config.run_dir, 2)), before) == []
    run(tmp_path, training__steps=3, checkpoint__resume=source, checkpoint__save_every=3)
    assert (third / "COMPLETE").exists() and not third.with_name("step-3.tmp").exists()


def test_the_marker_comes_last(tmp_path, monkeypatch):
    """Killed between the rename and the marker: everything is there, but a resume does not take it."""
    write = checkpoint._write_json

    def killed_at_the_marker(path, value):
        if path.name == checkpoint.COMPLETE:
            raise Killed
        write(path, value)

    monkeypatch.setattr(checkpoint, "_write_json", killed_at_the_marker)
    with pytest.raises(Killed):
        run(tmp_path, training__steps=1, checkpoint__save_every=1)
    with pytest.raises(ConfigError, match="no COMPLETE marker"):
        resume(tmp_path, tmp_path / "run" / "checkpoints" / "step-1")


def test_a_replaced_checkpoint_loses_its_marker_first(tmp_path, monkeypatch):
    """A save of the same step removes the old directory: cut short, what is left must not look complete."""
    first = run(tmp_path, training__steps=1, checkpoint__save_every=1)
    existing = checkpoint_dir(first.config.run_dir, 1)

    def killed_inside(path, ignore_errors=False):
        if path == existing:
            raise Killed

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed_inside)
    with pytest.raises(Killed):
        run(tmp_path, training__steps=1, checkpoint__save_every=1)
    assert existing.exists() and not (existing / "COMPLETE").exists()


def test_a_disk_that_filled_up_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch, caplog):
    """It had room when the run began: nothing is half written, the log has the bytes, the final model is saved."""
    trainer = Trainer(small_config(tmp_path, num_rows=14, training__steps=2, checkpoint__save_every=2), local=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    summary = trainer.train()
    assert "no checkpoint of step 2" in caplog.text
    assert "a checkpoint needs 0.01 GiB and 0.00 GiB are free; free space or set" in caplog.text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert summary.steps == 2 and (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_disk_bytes_of_the_plan_are_those_of_a_checkpoint(straight, saved):
    """Within 2 %: headers, JSON and the tokenizer's files beside the tensors."""
    extras = sum(path.stat().st_size for path in (saved / "model").iterdir() if path.suffix != ".safetensors")
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) - extras
    assert size == pytest.approx(straight.trainer.plan.disk_bytes, rel=0.02)
