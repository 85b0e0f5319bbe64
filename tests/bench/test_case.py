"""case.py: what is measured, and the run that it stands for."""

import json
from pathlib import Path

import pytest

from slideformer_ray.bench.case import Case, model_directory, window_cases
from slideformer_ray.config import ConfigError
from slideformer_ray.data.quickstart import quickstart_model_dir
from slideformer_ray.model.layers import load_hf_config


def test_a_case_survives_the_way_to_its_process():
    """It travels as JSON."""
    case = Case("4 rows", "tiny", "/model", 4, 64, settings=("placement.device=cpu",), local=True)
    assert Case.from_record(json.loads(json.dumps(case.record()))) == case


def test_the_run_has_every_step_and_the_given_settings(tmp_path):
    """Random weights, warm-up and traced steps among the steps; settings win over the benchmark's own."""
    (case,) = window_cases(
        "tiny", tmp_path, [8], 64, 2, ["optimizer.max_grad_norm=1"], warmup=1, steps=3, traced=2, local=True
    )
    config = case.config(tmp_path / "run")
    assert config.model.random_init and config.model.path == tmp_path
    assert (config.training.steps, config.training.rows_per_step, config.micro_batch_rows) == (6, 8, 2)
    assert config.optimizer.max_grad_norm == 1.0 and config.data.seq_len == 64


def test_a_micro_batch_is_never_larger_than_the_step(tmp_path):
    """One number for several steps."""
    cases = window_cases("tiny", tmp_path, [2, 8], 64, 4, [])
    assert [case.config(tmp_path).micro_batch_rows for case in cases] == [2, 4]


def test_a_wrong_setting_is_refused_before_anything_is_measured(tmp_path):
    """By the message that a run would give."""
    with pytest.raises(ConfigError, match=r"budget.gpu_gi: unknown key; did you mean gpu_gib\?"):
        window_cases("tiny", tmp_path, [2], 64, None, ["budget.gpu_gi=4"])


@pytest.mark.parametrize("given", ["", "config.json"])
def test_a_shape_is_a_directory_or_its_config(given):
    """Named after the directory."""
    assert model_directory(str(quickstart_model_dir() / given), Path("unused"))[1] == quickstart_model_dir()


def test_a_shape_is_a_name(tmp_path):
    """Its config.json is made; nothing is downloaded."""
    name, directory = model_directory("qwen2.5-0.5b", tmp_path)
    assert name == "qwen2.5-0.5b" and load_hf_config(directory).num_hidden_layers == 24


def test_an_unknown_shape_is_refused_with_those_that_there_are(tmp_path):
    """Neither a name nor a path."""
    with pytest.raises(ConfigError, match=r"shape 'qwen': no such name and no config.json there; .* qwen2.5-3b"):
        model_directory("qwen", tmp_path)
