"""The driver: 100 steps through Ray give the bits of the same run as threads and leave nothing; what a run writes.

The two 100-step runs are tests/recorded_run.py's and shared with other files. Killed actors and drivers:
tests/field/test_066_*.py and test_067_*.py; Ctrl-C: tests/test_cli.py; resuming: tests/test_checkpoint.py.
"""

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import pytest
import ray
import torch
from recorded_run import NUM_STEPS, SETTLED_STEP, Record, local_run, quickstart_rows, ray_run, small_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slideformer_ray.budget import DoesNotFit
from slideformer_ray.config import ConfigError, OptimizerSection
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.data.rows import DataError
from slideformer_ray.reference import ReferenceTrainer
from slideformer_ray.tiers import TierError
from slideformer_ray.trainer import FINAL_MODEL_MARK, Trainer, TrainingDiverged

MIB = 1 << 20
# 0.9 MiB was seen in the driver, Python's and Ray's own bookkeeping, and 0.4 MiB in an actor. A layer's gradients that
# are kept by mistake are 0.3 MiB a step.
ALLOWED_GROWTH = 2 * MIB


def train(directory, **changes):
    """A run as threads, and what its callbacks heard."""
    directory.mkdir(exist_ok=True)
    changes = {"training__steps": 3, "placement__num_optimizer_actors": 1} | changes
    record = Record()
    record.config = small_config(directory, **changes)
    record.summary = Trainer(record.config, callbacks=[record], local=True).train()
    return record


def tensors_of(directory):
    return {
        f"{path.name}: {key}": tensor
        for path in sorted(directory.rglob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [key for key in wanted if not torch.equal(found[key], wanted[key])]


# ------------------------------------------------------------------------------------------------------- through Ray


def test_100_steps_put_and_spill_nothing():
    """All memory is there before step 0: no ray.put, no object made by Ray itself, and not a byte on a disk."""
    run = ray_run()
    assert [metrics.step for metrics in run.steps] == list(range(NUM_STEPS))
    assert run.num_puts == 0
    assert run.store[NUM_STEPS - 1] == run.store[SETTLED_STEP]
    assert run.summary.spilled_bytes == 0


def test_no_process_grows_in_100_steps():
    """Resident memory of the driver and of every actor is flat from step 3 on. All steps have the same rows: with other
    shapes PyTorch's CPU kernels (oneDNN) keep a compiled primitive for each, up to 1,024 of them."""
    memory = ray_run().memory
    assert len(memory[SETTLED_STEP]) == 5
    # What is kept: the lowest of the last samples. glibc holds freed memory for a while, which came and went by 2 to 4
    # MiB in some runs; what a step leaves behind stays in every sample after it.
    last = [of_step for step, of_step in memory.items() if step >= NUM_STEPS // 2]
    assert len(last) >= 5
    kept = {name: min(of_step[name] for of_step in last) for name in memory[SETTLED_STEP]}
    growth = {name: kept[name] - memory[SETTLED_STEP][name] for name in kept}
    assert max(growth.values()) < ALLOWED_GROWTH, growth


def test_ray_gives_the_bits_of_threads():
    """Where the code runs changes nothing: losses, norms and evaluations, then model and every state of the save."""
    by_ray, by_threads = ray_run(), local_run()
    for found, wanted in zip(by_ray.steps, by_threads.steps, strict=True):
        assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm), found.step
    assert by_ray.evals == by_threads.evals
    found, wanted = tensors_of(by_ray.checkpoint), tensors_of(by_threads.checkpoint)
    assert len(wanted) > 100 and differing(found, wanted) == []


def test_what_is_learned_shows():
    """100 steps over four rows: they are known by heart."""
    run = ray_run()
    assert run.steps[0].loss > 6 and run.steps[-1].loss < 1
    assert run.summary.first_eval_loss == run.evals[0].eval_loss
    assert run.summary.last_eval_loss == run.evals[-1].eval_loss


# --------------------------------------------------------------------------------------------------- what a run writes


def test_a_run_leaves_metrics_summary_config_and_model(tmp_path):
    """One JSON line an event, in order; the summary as returned; a config that can be loaded again."""
    record = train(tmp_path, training__eval_every=2)
    run_dir = record.config.run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("eval", 0),
        ("step", 0),
        ("step", 1),
        ("eval", 2),
        ("step", 2),
        ("eval", 3),
    ]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [m.loss for m in record.steps]
    assert json.loads((run_dir / "summary.json").read_text()) == dataclasses.asdict(record.summary)
    assert type(record.config).from_dict(json.loads((run_dir / "config.json").read_text())) == record.config


def test_the_final_model_is_an_ordinary_directory(tmp_path):
    """transformers loads it; its held-out loss is the one that the run reported last."""
    record = train(tmp_path)
    model_dir = record.config.run_dir / "model"
    assert record.summary.model_dir == str(model_dir)
    source = AutoModelForCausalLM.from_pretrained(quickstart_model_dir()).state_dict()
    assert AutoModelForCausalLM.from_pretrained(model_dir).state_dict().keys() == source.keys()
    data = Trainer(record.config, local=True).data
    reference = ReferenceTrainer(model_dir, precision="bf16", device="cpu", optimizer=OptimizerSection(), total_steps=1)
    (batch,) = data.eval_batches()
    loss = reference.evaluate([(torch.from_numpy(m.ids), torch.from_numpy(m.targets)) for m in batch.micro_batches])
    assert record.summary.last_eval_loss == pytest.approx(loss, rel=2e-3)


def test_a_second_run_replaces_the_first_ones_model(tmp_path):
    """The same run directory again: no mixture of two models, and no refusal either."""
    train(tmp_path)
    record = train(tmp_path, training__steps=2)
    fresh = train(tmp_path / "fresh", training__steps=2)
    found, wanted = (tensors_of(r.config.run_dir / "model") for r in (record, fresh))
    assert differing(found, wanted) == []


def test_metrics_count_real_tokens(tmp_path):
    """Padding is no token; supervised tokens are those that the loss is divided by; the norm is before clipping."""
    record = train(tmp_path, optimizer__max_grad_norm=1e-3)
    data = Trainer(record.config, local=True).data
    for metrics in record.steps:
        batch = data.step_batch(metrics.step)
        assert metrics.tokens == batch.num_tokens < sum(m.ids.size for m in batch.micro_batches)
        assert metrics.supervised_tokens == batch.num_supervised
        assert metrics.grad_norm > 0.1


# -------------------------------------------------------------------------------------------------- how a run goes


def test_lr_0_changes_no_bit(tmp_path):
    """Weight decay and all: the model that comes out is the model that went in."""
    record = train(tmp_path, optimizer__learning_rate=0.0)
    found = tensors_of(record.config.run_dir / "model")
    assert differing(found, tensors_of(quickstart_model_dir())) == []
    assert record.summary.first_eval_loss == record.summary.last_eval_loss


def test_epochs_give_the_ceil_of_steps_and_the_rates_end_there(tmp_path):
    """7 rows, 4 a step, 1 epoch: two steps, the last with 3 rows; the schedule is that long."""
    record = train(
        tmp_path,
        num_rows=9,
        training__steps=None,
        training__epochs=1,
        optimizer__warmup_steps=0,
        optimizer__schedule="linear",
    )
    assert [m.learning_rate for m in record.steps] == [5e-3, 2.5e-3]
    assert record.summary.steps == 2


def test_a_run_that_diverges_stops_with_advice(tmp_path):
    """A gradient that is not finite skips its step; after three in a row the run ends, and says what to change."""
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row up to step 3 .* lower optimizer.learning_rate"):
        train(tmp_path, training__steps=10, optimizer__learning_rate=1e30, optimizer__warmup_steps=0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines if line["kind"] == "step"][:3] == [False, True, True]


def test_without_a_norm_the_first_bad_gradient_stops_the_run(tmp_path):
    """Nothing could skip the step, so no master may see it. The block is named, and what to continue from."""
    bad = {"optimizer__learning_rate": 1e30, "optimizer__warmup_steps": 0, "optimizer__max_grad_norm": None}
    message = r"step 1: .*the gradient of [\w.]+ holds NaN or infinity.*; "
    with pytest.raises(TierError, match=message + "there is no checkpoint to continue from"):
        train(tmp_path, **bad)
    with pytest.raises(TierError, match=message + r"continue from checkpoint.resume=\S*/run/checkpoints/step-1$"):
        train(tmp_path, **bad, checkpoint__save_every=1)


def test_a_trainer_starts_nothing(tmp_path, monkeypatch):
    """Everything that can be wrong is found when it is built: no Ray, no run directory, no buffer."""
    trainer = Trainer(small_config(tmp_path))
    assert trainer.plan.host_bytes > 0 and trainer.data.num_steps == 10
    assert not ray.is_initialized() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"budget__ram_gib": 0.5}, DoesNotFit, "budget.ram_gib is 0.50 GiB"),
        ({"optimizer__warmup_steps": 11}, ValueError, "warmup_steps is 11, but the run has 10"),
        ({"data__train": ["none.jsonl"]}, DataError, "none.jsonl: cannot be read"),
        ({"model__frozen": ["lm_head.*"]}, ValueError, "lm_head.weight is tied to model.embed_tokens.weight"),
        ({"checkpoint__resume": "/nowhere"}, ConfigError, "checkpoint.resume: /nowhere is no directory"),
    ],
    ids=["memory", "warm-up", "data", "frozen", "resume"],
)
def test_mistakes_are_refused_before_anything_starts(tmp_path, changes, error, message):
    """One clear error each, a ValueError (exit 2), raised by the constructor."""
    with pytest.raises(error, match=message) as caught:
        Trainer(small_config(tmp_path, **changes))
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "run").exists()


def test_a_torn_shard_is_refused_before_anything_starts(tmp_path):
    """By name, and before the data is read."""
    model = tmp_path / "model"
    model.mkdir()
    for path in quickstart_model_dir().iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors: torn"):
        Trainer(small_config(tmp_path, model__path=model, data__train=["none.jsonl"]))


def test_rows_without_a_supervised_token_are_refused(tmp_path):
    """A run that would train nothing."""
    rows = quickstart_rows(tmp_path / "silent.jsonl", 0)
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with pytest.raises(DataError, match="none of the 1 training rows has a supervised token"):
        Trainer(small_config(tmp_path, data__train=[rows], data__eval_rows=0))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """An id beyond the embedding's rows would be read past its end, on the host, in the middle of a step."""
    model = tmp_path / "model"
    shutil.copytree(quickstart_model_dir(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"its tokenizer gives id \d+, and the model's vocabulary has 1000 rows"):
        Trainer(small_config(tmp_path, model__path=model, model__random_init=True))


def test_a_run_never_replaces_the_model_that_it_starts_from(tmp_path):
    """The natural second run, from RUN/model into RUN, is refused and loses nothing; so is what no run wrote."""
    first = train(tmp_path, training__steps=2)
    model = Path(first.summary.model_dir)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ConfigError, match="the final model would replace the one that the run starts from"):
        Trainer(small_config(tmp_path, model__path=model))
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    (model / FINAL_MODEL_MARK).unlink()
    with pytest.raises(ConfigError, match="holds something that no run wrote"):
        Trainer(small_config(tmp_path))


def test_an_earlier_model_stays_until_the_new_one_is_written(tmp_path, monkeypatch):
    """A save that fails leaves the earlier run's model whole."""
    first = train(tmp_path, training__steps=2)
    before = tensors_of(Path(first.summary.model_dir))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slideformer_ray.actors.storage_actor.save_model", full)
    with pytest.raises(TierError, match="No space left"):
        train(tmp_path, training__steps=2)
    assert not differing(tensors_of(Path(first.summary.model_dir)), before)


def test_train_may_be_called_twice(tmp_path):
    """Each call is a whole run, with the same result."""
    record = Record()
    trainer = Trainer(small_config(tmp_path, training__steps=3), callbacks=[record], local=True)
    first, second = trainer.train(), trainer.train()
    assert first.last_loss == second.last_loss and first.steps == second.steps == 3


# ---------------------------------------------------------------------------------------------------- step by step


# A rate that does not depend on how long the run is: a stopped run equals a short one.
CONSTANT = {"optimizer__schedule": "constant", "optimizer__warmup_steps": 0, "placement__num_optimizer_actors": 1}


def fitted(directory, **changes):
    directory.mkdir()
    return Trainer(small_config(directory, **CONSTANT | changes), local=True)


def test_fit_gives_each_step_and_train_is_a_loop_over_it(tmp_path):
    """What callbacks hear, in order; afterwards the summary is there, and the model is the one of `train`."""
    record = train(tmp_path / "train")
    trainer = Trainer(
        small_config(tmp_path / "train", **{"training__steps": 3, "placement__num_optimizer_actors": 1}), local=True
    )
    before = tensors_of(record.config.run_dir / "model")
    steps = list(trainer.fit())
    assert [(m.step, m.loss, m.grad_norm) for m in steps] == [(m.step, m.loss, m.grad_norm) for m in record.steps]
    assert trainer.summary.last_eval_loss == record.summary.last_eval_loss
    assert differing(tensors_of(Path(trainer.summary.model_dir)), before) == []


def test_stop_makes_the_step_under_way_the_last(tmp_path):
    """Stopped at step 1, step 2 is under way and is done too; then the run ends as one of three steps does."""
    trainer = fitted(tmp_path / "stopped")
    steps = []
    for metrics in trainer.fit():
        steps.append(metrics.step)
        if metrics.step == 1:
            trainer.stop()
    assert steps == [0, 1, 2] and trainer.summary.steps == 3
    short = fitted(tmp_path / "short", training__steps=3).train()
    assert trainer.summary.last_eval_loss == short.last_eval_loss
    assert differing(tensors_of(Path(trainer.summary.model_dir)), tensors_of(Path(short.model_dir))) == []


def test_a_learning_rate_that_is_set_acts_two_steps_later(tmp_path):
    """The next step is under way already. It takes the schedule's peak's place; with 0 nothing moves any more."""
    trainer = fitted(tmp_path / "run", training__steps=5, optimizer__learning_rate=1e-3)
    rates = []
    for metrics in trainer.fit():
        rates.append(metrics.learning_rate)
        if metrics.step == 0:
            trainer.set_learning_rate(0.0)
    assert rates == [1e-3, 1e-3, 0.0, 0.0, 0.0]
    short = fitted(tmp_path / "short", training__steps=2, optimizer__learning_rate=1e-3).train()
    assert differing(tensors_of(Path(trainer.summary.model_dir)), tensors_of(Path(short.model_dir))) == []
    with pytest.raises(
        ValueError, match="set_learning_rate: the rate must be a finite number of at least 0, found nan"
    ):
        trainer.set_learning_rate(float("nan"))


def test_leaving_the_loop_ends_everything(tmp_path):
    """`break`: no actor's thread is left, no model and no summary is written; the trainer can start anew."""
    trainer = fitted(tmp_path / "run", training__steps=4)
    for metrics in trainer.fit():
        if metrics.step == 1:
            break
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("actor")]
    assert not (trainer.config.run_dir / "model").exists() and trainer.summary is None
    assert trainer.train().steps == 4
