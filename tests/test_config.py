"""config.py: every mistake is one line that names the field, and files, overrides and Python give the same config."""

import subprocess
import sys
from pathlib import Path

import pytest

from slideformer_ray.config import ConfigError, RunConfig

MINIMAL = {
    "run_dir": "run",
    "model": {"path": "model"},
    "data": {"train": ["rows.jsonl"]},
    "training": {"steps": 3},
}


def changed(**sections):
    """MINIMAL with some sections' fields replaced or added."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in MINIMAL.items()}
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return values


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(values)
    return str(caught.value)


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def config_file(tmp_path):
    return write(
        tmp_path / "run.yaml",
        "run_dir: run\nmodel: {path: model}\ndata: {train: [rows.jsonl]}\ntraining: {steps: 3}\n",
    )


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "values, message",
    [
        (changed(optimizer={"learning_rat": 1}), "optimizer.learning_rat: unknown key; did you mean learning_rate?"),
        (changed(optimiser={"eps": 1}), "optimiser: unknown key; did you mean optimizer?"),
        (
            changed(debug={"zzz": 1}),
            "debug.zzz: unknown key; known keys: poison_freed_slots, wait_timeout_s, ray_output",
        ),
        ({k: v for k, v in MINIMAL.items() if k != "model"}, "model: missing, and it has no default"),
        (changed(optimizer={"eps": -1}), "optimizer.eps: input should be greater than 0 (found -1)"),
        (
            changed(optimizer={"learning_rate": "fast"}),
            "optimizer.learning_rate: input should be a valid number, unable to parse string as a number "
            "(found 'fast')",
        ),
        (
            changed(optimizer={"learning_rate": float("inf")}),
            "optimizer.learning_rate: input should be a finite number (found inf)",
        ),
        (changed(optimizer={"betas": [0.9, 1.0]}), "optimizer.betas.1: input should be less than 1 (found 1.0)"),
        (
            changed(training={"precision": "fp16"}),
            "training.precision: input should be 'bf16' or 'fp32' (found 'fp16')",
        ),
        (changed(training={"epochs": 1}), "training: give exactly one of steps and epochs (found steps=3, epochs=1.0)"),
        (
            changed(training={"steps": None}),
            "training: give exactly one of steps and epochs (found steps=None, epochs=None)",
        ),
        (
            changed(training={"micro_batch_rows": 17}),
            "training: micro_batch_rows (17) is larger than rows_per_step (16); lower it to at most that",
        ),
        (
            changed(data={"train": []}),
            "data.train: give at least one (found [])",
        ),
        (changed(data={"train": None}), "data.train: expected a value, or a list of them (found None)"),
        (MINIMAL | {"model": "tiny"}, "model: expected a section with keys of its own (found 'tiny')"),
        (MINIMAL | {"learning_rate": 1}, "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        (
            changed(placement={"layers": "fast"}),
            "placement.layers: input should be 'auto', 'recomputed', 'compiled' or 'plain' (found 'fast')",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(values, message):
    """What, where, the value found; for a key the nearest right one."""
    assert refusal(values) == f"config: {message}"


def test_every_mistake_is_named_at_once():
    """Two wrong fields are two lines."""
    lines = refusal(changed(optimizer={"eps": 0}, training={"steps": -1})).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["optimizer.eps", "training.steps"]


def test_a_config_cannot_be_changed_in_place():
    """Actors get copies: what was checked is what runs."""
    config = RunConfig.from_dict(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 4


# ---------------------------------------------------------------------------------------------------------------- files


def test_relative_paths_in_a_file_are_relative_to_the_file(config_file):
    """So that a config works from any working directory."""
    config = RunConfig.load(config_file)
    found = [config.run_dir, config.model.path, *config.data.train]
    assert found == [config_file.parent / name for name in ("run", "model", "rows.jsonl")]


def test_relative_paths_elsewhere_are_relative_to_the_working_directory(config_file, monkeypatch, tmp_path):
    """Overrides and Python: made absolute at once, because actors have other working directories."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert RunConfig.load(config_file, ["run_dir=out"]).run_dir == tmp_path / "elsewhere" / "out"
    assert RunConfig.from_dict(MINIMAL).model.path == tmp_path / "elsewhere" / "model"


def test_the_home_directory_can_be_written_as_a_tilde(config_file, monkeypatch):
    """In files, overrides and Python."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert RunConfig.load(config_file, ["model.path=~/model"]).model.path == Path("/home/someone/model")
    assert RunConfig.from_dict(changed(model={"path": "~/model"})).model.path == Path("/home/someone/model")
    write(config_file, config_file.read_text().replace("path: model", "path: ~/model"))
    assert RunConfig.load(config_file).model.path == Path("/home/someone/model")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a mapping of sections, found an empty file"),
        ("- a\n", "expected a mapping of sections, found list"),
        ("run_dir: [a\n", "not valid YAML: line 2: expected ',' or ']', but got '<stream end>'"),
        ("run_dir: a\nmodel: {path: a}\nmodel: {path: b}\n", "not valid YAML: line 1: the key 'model' is given twice"),
        (
            "model: {frozen: [*.bias]}\n",
            "not valid YAML: line 1: expected alphabetic or numeric character, but found '.'; put a value that begins "
            "with * in quotes",
        ),
        (
            "model: {frozen: *all}\n",
            "not valid YAML: line 1: found undefined alias 'all'; put a value that begins with * in quotes",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, text, message):
    """Also a section given twice, of which YAML would silently keep the second."""
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value) == f"{path}: {message}"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Missing, a directory, or not text."""
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "bytes.yaml", "not valid YAML: 'utf-8' codec can't decode"),
    ):
        with pytest.raises(ConfigError) as caught:
            RunConfig.load(path)
        assert str(caught.value).startswith(f"{path}: {message}")


def test_a_section_without_settings_has_its_defaults(config_file):
    """`optimizer:` with all its lines commented out reads as null."""
    write(config_file, config_file.read_text() + "optimizer:\n")
    assert RunConfig.load(config_file) == RunConfig.load(config_file, ["optimizer.eps=1e-8"])


# ------------------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    "override, found",
    [
        ("optimizer.learning_rate=2e-5", lambda c: c.optimizer.learning_rate == 2e-5),  # YAML 1.1 reads a string
        ("optimizer.max_grad_norm=null", lambda c: c.optimizer.max_grad_norm is None),
        ("optimizer.betas=[0.8, 0.95]", lambda c: c.optimizer.betas == (0.8, 0.95)),
        ("placement.layers=plain", lambda c: c.placement.layers == "plain"),
        ("training.overlap=off", lambda c: c.training.overlap is False),
        ("run_dir=2026", lambda c: c.run_dir.name == "2026"),  # YAML reads a number
        ("run_dir=2026-11-29", lambda c: c.run_dir.name == "2026-11-29"),  # a date
        ("run_dir=1e5", lambda c: c.run_dir.name == "1e5"),
        ("data.train=a.jsonl", lambda c: [p.name for p in c.data.train] == ["a.jsonl"]),
        ("data.train=[a.jsonl, b.jsonl]", lambda c: [p.name for p in c.data.train] == ["a.jsonl", "b.jsonl"]),
        ("checkpoint.resume=auto", lambda c: c.checkpoint.resume == "auto"),
        ("checkpoint.resume=none", lambda c: c.checkpoint.resume == "none"),
        ("checkpoint.resume=step-2", lambda c: c.checkpoint.resume == Path.cwd() / "step-2"),
        ("model.frozen=model.embed_tokens.*", lambda c: c.model.frozen == ("model.embed_tokens.*",)),
        ("model.frozen=*.bias", lambda c: c.model.frozen == ("*.bias",)),  # to YAML an alias
        ("model.frozen=['*.bias', '*.norm.*']", lambda c: c.model.frozen == ("*.bias", "*.norm.*")),
    ],
)
def test_an_override_means_what_it_says(config_file, override, found):
    """Numbers as people write them, paths as they stand, one file where a list is wanted."""
    assert found(RunConfig.load(config_file, [override]))


@pytest.mark.parametrize(
    "override, message",
    [
        ("optimizer.eps", "override 'optimizer.eps': expected section.key=value, such as optimizer.learning_rate=2e-5"),
        ("=3", "override '=3': expected section.key=value, such as optimizer.learning_rate=2e-5"),
        ("run_dir.x=3", "override 'run_dir.x=3': run_dir is not a section"),
        ("optimizer.betas=[1", "override 'optimizer.betas=[1': not a YAML value: line 1: expected ',' or ']', but got"),
    ],
)
def test_a_malformed_override_is_quoted(config_file, override, message):
    """No traceback of the YAML parser."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, [override])
    assert str(caught.value).startswith(message)


def test_an_override_with_a_wrong_value_is_blamed_and_not_the_file(config_file):
    """The file is blamed for its own mistakes."""
    with pytest.raises(ConfigError, match=r"^override 'optimizer.eps=-1': optimizer.eps: .*\(found -1\)$"):
        RunConfig.load(config_file, ["optimizer.eps=1e-8", "optimizer.eps=-1"])
    with pytest.raises(ConfigError, match=r"^override 'optimizer.epsilon=1': optimizer.epsilon: unknown key; .*eps"):
        RunConfig.load(config_file, ["optimizer.epsilon=1"])
    with pytest.raises(ConfigError, match=r"^override 'optimiser.eps=1': optimiser: unknown key; .*optimizer\?$"):
        RunConfig.load(config_file, ["optimiser.eps=1"])
    with config_file.open("a") as file:
        file.write("\nbudget: {ram_gib: -3}\n")
    with pytest.raises(ConfigError, match=rf"^{config_file}: budget.ram_gib"):
        RunConfig.load(config_file, ["optimizer.eps=1e-8"])


def test_a_config_made_in_python_takes_overrides_too():
    """As the command does with the quickstart's."""
    config = RunConfig.from_dict(MINIMAL).changed(["training.steps=7", "debug.ray_output=true"])
    assert (config.training.steps, config.debug.ray_output) == (7, True)
    assert config.changed([]) == config


# ----------------------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("rows, micro, count", [(16, None, 1), (16, 8, 2), (16, 5, 4), (1, 1, 1)])
def test_the_last_micro_batch_may_have_fewer_rows(rows, micro, count):
    """micro_batch_rows need not divide rows_per_step."""
    config = RunConfig.from_dict(changed(training={"rows_per_step": rows, "micro_batch_rows": micro}))
    assert config.num_micro_batches == count


@pytest.mark.parametrize(
    "sections, named",
    [
        ({"training": {"eval_every": 2}}, "training.eval_every"),
        ({"optimizer": {"max_grad_norm": None, "max_skipped_steps": 2}}, "optimizer.max_skipped_steps"),
        ({"budget": {"gpu_gib": 4}, "placement": {"device": "cpu"}}, "budget.gpu_gib"),
        ({"training": {"deterministic": True}, "placement": {"device": "cpu"}}, "training.deterministic"),
        ({"placement": {"address": "auto", "include_dashboard": True}}, "placement.include_dashboard"),
    ],
)
def test_a_setting_that_will_not_be_looked_at_is_named(sections, named):
    """Only where the user gave it: a default needs no excuse."""
    (line,) = RunConfig.from_dict(changed(**sections)).settings_without_effect()
    assert line.startswith(f"{named}: ") and line.endswith("; it has no effect")
    assert RunConfig.from_dict(MINIMAL).settings_without_effect() == []


def test_every_field_says_what_it_is():
    """The page of settings is made from these descriptions."""
    for name, section in RunConfig.model_fields.items():
        for key, field in getattr(section.annotation, "model_fields", {"": section}).items():
            assert field.description, f"{name}.{key} has no description"


def test_a_config_needs_neither_torch_nor_ray():
    """Programs that only look at a config start at once."""
    code = "import sys, slideformer_ray.config; assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)
