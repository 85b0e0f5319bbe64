"""report.py: the lines before, beside and after a run, from a trainer that is not started."""

import dataclasses
import json

import pytest
from recorded_run import small_config

from slideformer_ray.actors.process import ActorReport
from slideformer_ray.observe.report import (
    actor_lines,
    byte_lines,
    condense,
    plan_lines,
    plan_notes,
    plan_record,
    run_notes,
    start_lines,
    summary_lines,
    verify_lines,
)
from slideformer_ray.trainer import Summary, Trainer
from slideformer_ray.verify import CheckRow, VerifyReport

SUMMARY = Summary(
    steps=100,
    skipped_steps=0,
    first_eval_loss=7.0625,
    last_eval_loss=4.625,
    last_loss=4.5,
    seconds=12.5,
    median_step_seconds=0.1,
    tokens_per_second=6000.0,
    peak_host_bytes=1 << 30,
    peak_gpu_bytes=0,
    spilled_bytes=0,
    model_dir="run/model",
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(small_config(tmp_path_factory.mktemp("report"), model__frozen=["model.layers.0.*"]))


def line_of(lines, name):
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return line


def test_parameters_that_differ_in_the_layer_are_one_pattern():
    """Seven matrices a layer are seven patterns, not 200 names."""
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.11.mlp.up_proj.weight"]
    assert condense(names) == ["model.embed_tokens.weight", "model.layers.*.mlp.up_proj.weight"]


def test_the_start_shows_what_weight_decay_is_applied_to(trainer):
    """Two lists: matrices, and what has none (norms, biases); frozen parameters are in neither."""
    lines = start_lines(trainer)
    decayed = line_of(lines, "weight decay")
    undecayed = lines[lines.index(decayed) + 1]
    assert "0.1 for 22 tensors: model.embed_tokens.weight, model.layers.*.self_attn.q_proj.weight" in decayed
    assert "none for 7 tensors: model.layers.*.input_layernorm.weight" in undecayed
    assert "model.norm.weight" in undecayed and "norm" not in decayed
    assert "9 tensors: model.layers.*.self_attn.q_proj.weight" in line_of(lines, "frozen")


def test_the_start_shows_versions_data_schedule_and_bytes(trainer):
    """What a user would want to see in a log a year later."""
    text = "\n".join(start_lines(trainer))
    for shown in (
        "torch 2.",
        "transformers 5.",
        "1,000,576 parameters, 4 layers, tied embeddings",
        "bf16 compute, fp32 masters split into hi and lo",
        "4 training rows",
        "2 held-out rows",
        "10 of 4 rows (2 micro-batches of 2), 10.00 epochs",
        "cosine, peak 0.005 after 2 warm-up steps",
        "gradients clipped to norm 1",
        "/dev/shm 75.00 MiB of",
    ):
        assert shown in text


def test_each_count_says_who_chose_it(trainer):
    """The config, or a default."""
    chosen = line_of(start_lines(trainer), "chosen")
    assert "num_optimizer_actors 2 (config)" in chosen and "gradient_slots 3 (default)" in chosen


def test_actors_say_where_they_run():
    """Process, threads, and which code does AdamW."""
    reports = [
        ActorReport("gpu actor", 1, 4, 0, 8, 1 << 20, "cpu"),
        ActorReport("optimizer actor 0", 2, 7, 0, 8, 1, "avx2"),
    ]
    first, second = actor_lines(reports)
    assert first.split() == "actors gpu actor: process 1, 4 threads, nice 0; cpu".split()
    assert second.strip() == "optimizer actor 0: process 2, 7 threads, nice 0; avx2"


def test_a_plan_s_lines_add_up(trainer):
    """Items of a tier, then their total; beside it what the machine has; the disk; then the counts."""
    plan = trainer.plan
    lines = plan_lines(trainer.config, trainer.spec, trainer.machine, plan)
    assert set(byte_lines(plan)) <= set(lines)
    shown = {line.strip().split("  ")[0] for line in byte_lines(plan)}
    assert {item.what for item in plan.items if item.nbytes} <= shown and "total" in shown
    for name in ("host", "/dev/shm (object store)", "a save or a resume, for a moment", "disk: a checkpoint", "chosen"):
        assert any(line.strip().startswith(name) for line in lines), name


def test_a_plan_s_record_is_json_with_every_byte(trainer):
    """For programs: items add up to the totals, in bytes."""
    record = plan_record(trainer.config, trainer.spec, trainer.machine, trainer.plan, ["short"], ["a note"])
    record = json.loads(json.dumps(record))
    host = sum(item["nbytes"] for item in record["items"] if "host" in item["tier"])
    assert record["host_bytes"] == host == trainer.plan.host_bytes
    assert (record["fits"], record["shortfalls"], record["notes"]) == (False, ["short"], ["a note"])
    assert record["layout"]["gradient_slots"] == 3 and record["machine"]["limits"]["shm_free"] > 0


def test_a_plan_notes_what_a_run_would_miss(trainer, tmp_path):
    """Data files and weights that are not there, and settings without effect; no note where all is well."""
    assert plan_notes(trainer.config, trainer.hf_config) == []
    config = trainer.config.changed([f"model.path={tmp_path}", "data.train=none.jsonl", "data.eval_rows=0"])
    config = config.changed(["training.eval_every=2"])
    notes = plan_notes(config, trainer.hf_config)
    assert [note.split()[0].rsplit("/")[-1] for note in notes] == ["training.eval_every:", "none.jsonl", tmp_path.name]


def test_rows_longer_than_the_model_was_made_for_are_noted(trainer):
    """Rotary positions go on for ever, so such a run works, and is seldom what was meant."""
    longest = trainer.hf_config.max_position_embeddings
    (note,) = run_notes(trainer.config.changed([f"data.seq_len={longest + 1}"]), trainer.hf_config)
    assert note.startswith(f"data.seq_len is {longest + 1}, the model's max_position_embeddings {longest}: ")
    assert run_notes(trainer.config.changed([f"data.seq_len={longest}"]), trainer.hf_config) == []


def test_the_summary_has_losses_before_and_after_and_the_peak():
    """And says what was skipped, if anything was."""
    text = "\n".join(summary_lines(SUMMARY))
    assert "7.0625 before, 4.6250 after" in text and "host 1.00 GiB (1,073,741,824 bytes)" in text
    assert "run/model" in text and "skipped" not in text
    assert "skipped" in "\n".join(summary_lines(dataclasses.replace(SUMMARY, skipped_steps=2)))


def test_a_failed_check_stands_out():
    """Error and tolerance of the worst tensor; how many failed."""
    rows = (CheckRow("fp32: masters", "a", 1e-7, 1e-6, "fixed"), CheckRow("fp32: masters", "b", 2e-6, 1e-6, "fixed"))
    first, second, count = verify_lines(VerifyReport({}, rows))
    assert first.startswith("ok ") and "1.00e-07 <= 1.00e-06  a" in first
    assert second.startswith("FAIL ") and "2.00e-06 >  1.00e-06  b" in second
    assert count == "2 checks, 1 failed"
