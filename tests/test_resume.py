"""What a run continues from: one history a run directory; damage and changed settings are found before the start."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from recorded_run import small_config

from slideformer_ray.actors.slice_files import DamagedCheckpoint
from slideformer_ray.checkpoint import checkpoint_dir, complete_checkpoints
from slideformer_ray.config import ConfigError, RunConfig
from slideformer_ray.resume import RULES, find_source, rule_of
from slideformer_ray.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of four steps, saved after the second and the fourth."""
    directory = tmp_path_factory.mktemp("saved")
    config = small_config(
        directory, num_rows=14, training__steps=4, checkpoint__save_every=2, checkpoint__save_final=False
    )
    Trainer(config, local=True).train()
    return config.run_dir


@pytest.fixture
def copy(tmp_path, run_dir):
    """A checkpoint to spoil."""
    return shutil.copytree(checkpoint_dir(run_dir, 4), tmp_path / "step-4")


def resume(tmp_path, path, **changes):
    changes = {"training__steps": 8, **changes}
    return Trainer(small_config(tmp_path, num_rows=14, checkpoint__resume=path, **changes), local=True)


# -------------------------------------------------------------------------------------------------------------- sources


def test_the_newest_complete_one_is_continued(tmp_path, run_dir):
    """Lightning #688: a save that did not end is passed over; the numbers are compared as numbers."""
    own = shutil.copytree(run_dir, tmp_path / "run")
    config = small_config(tmp_path, num_rows=14, checkpoint__resume="auto")
    assert find_source(config) == checkpoint_dir(own, 4)
    shutil.copytree(checkpoint_dir(own, 4), checkpoint_dir(own, 10))
    assert find_source(config) == checkpoint_dir(own, 10)
    (checkpoint_dir(own, 10) / "COMPLETE").unlink()
    assert find_source(config) == checkpoint_dir(own, 4)


def test_a_run_dir_with_checkpoints_is_not_started_over(tmp_path, run_dir):
    """Forgetting resume must not mix two histories, nor remove an hour's work: what to do is said."""
    shutil.copytree(run_dir, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"checkpoints of an earlier run, the newest step-4; set checkpoint.resume=auto"
    ):
        resume(tmp_path, "none")


def test_a_run_goes_on_from_the_newest_of_its_directory(tmp_path, run_dir):
    """From an older one, or from elsewhere, it would write step-4 a second time."""
    own = shutil.copytree(run_dir, tmp_path / "run")
    for path in (checkpoint_dir(own, 2), checkpoint_dir(run_dir, 2)):
        with pytest.raises(ConfigError, match=r"holds step-4, which a run from there would mix"):
            resume(tmp_path, path)
    assert resume(tmp_path, checkpoint_dir(own, 4)).resumed.steps_done == 4


def test_remains_of_a_save_are_removed_at_the_next_start(tmp_path, run_dir, caplog):
    """Temporary directories, and one that was renamed and not marked; nothing that is not ours."""
    own = shutil.copytree(run_dir, tmp_path / "run")
    shutil.copytree(checkpoint_dir(own, 4), own / "checkpoints" / ".step-6.0a1b.tmp")
    shutil.copytree(checkpoint_dir(own, 4), checkpoint_dir(own, 6))
    (checkpoint_dir(own, 6) / "COMPLETE").unlink()
    (checkpoint_dir(own, 7)).mkdir()
    (checkpoint_dir(own, 7) / "notes.txt").touch()
    resume(tmp_path, "auto", training__steps=4, checkpoint__save_final=False).train()
    assert sorted(path.name for path in (own / "checkpoints").iterdir()) == ["step-2", "step-4", "step-7"]
    assert "step-6: removed: its save did not end" in caplog.text


# --------------------------------------------------------------------------------------------------------------- damage


def test_an_incomplete_checkpoint_is_refused(tmp_path, copy):
    """Everything is there but the marker: the save did not end."""
    (copy / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint.resume: \S+step-4 has no COMPLETE marker"):
        resume(tmp_path, copy)


FILES = [
    "COMPLETE",
    "index.json",
    "training.json",
    "model/config.json",
    "model/tokenizer.json",
    "model/model.safetensors",
    "state/layer.2.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "lost", "first byte"])
def test_a_damaged_file_is_refused_by_name(tmp_path, copy, name, damage):
    """A user's matter (ValueError, exit 2), found before anything is started; what to do is said."""
    path = copy / name
    if damage == "lost":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if damage == "cut" else b"\0" + content[1:])
        if (name, damage) == ("COMPLETE", "cut"):  # the line's end, which says nothing
            path.write_bytes(content[:-4])
    wanted = rf"/{re.escape(name)}: .*remove \S+"
    if (name, damage) == ("COMPLETE", "lost"):
        wanted = "has no COMPLETE marker"
    with pytest.raises(ValueError, match=wanted):
        resume(tmp_path, copy)
    assert issubclass(DamagedCheckpoint, ValueError)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, copy):
    """The first tensor that differs is named, with what was saved and what is needed."""
    model = shutil.copytree(copy / "model", tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    wanted = r"exp_avg of model.layers.3\S+: saved as F32 \[.*\], the run needs nothing; .* another model"
    with pytest.raises(DamagedCheckpoint, match=wanted):
        resume(tmp_path, copy, model__path=model)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"training__seed": 7}, "saved with training.seed 0, this config has 7; set it to 0"),
        ({"training__rows_per_step": 6}, "saved with training.rows_per_step 4, this config has 6"),
        ({"training__precision": "fp32"}, "saved with training.precision bf16, this config has fp32"),
        ({"model__frozen": ["model.norm.*"]}, r"saved with model.frozen \[\], this config has \['model.norm"),
        ({"training__steps": 3}, "step-4 is of step 4, the run has 3 steps"),
    ],
    ids=["seed", "rows", "precision", "frozen", "steps"],
)
def test_a_resume_that_would_train_something_else_is_refused(tmp_path, copy, changes, message):
    """With another seed or batch the next step's rows are others; a newly frozen parameter would lose its remainder."""
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path, copy, **changes)


@pytest.mark.parametrize("spoil", ["one more", "another word"])
def test_a_resume_on_other_rows_is_refused(tmp_path, copy, spoil):
    """The order is over the number of rows: with one more, every row comes at another step. As many others show."""
    config = small_config(tmp_path, num_rows=14 + (spoil == "one more"), checkpoint__resume=copy)
    if spoil == "another word":
        (path,) = config.data.train
        path.write_text(path.read_text().replace('"content": "', '"content": "so '))
    with pytest.raises(ConfigError, match=r"was trained on 12 rows, crc32 \w+, data.train gives 1[23] rows"):
        Trainer(config, local=True)


def test_what_changes_the_training_is_said(tmp_path, copy, caplog):
    """Another rate or more steps is a wish that a resumed run may have, and never an accident."""
    with caplog.at_level(logging.WARNING):
        resume(tmp_path, copy, optimizer__learning_rate=1e-4, training__steps=9)
    assert "optimizer.learning_rate is 0.0001, was 0.005 when" in caplog.text
    assert "training.steps is 9, was 4 when" in caplog.text


def test_where_it_runs_may_change_without_a_word(tmp_path, copy, caplog):
    """Actors, budget, micro-batches, directories: the bits of a step do not depend on them, or only its sums' order."""
    changes = {"placement__num_optimizer_actors": 3, "budget__ram_gib": 16, "training__micro_batch_rows": 1}
    resume(tmp_path, copy, training__steps=4, checkpoint__keep=None, **changes)
    assert caplog.text == ""


def every_setting():
    for section, field in RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        yield from ((section, name) for name in inner) if inner else ((section, None),)


def test_the_table_of_settings_is_the_rules():
    """docs/checkpoints.md has a row for each rule, and each rule is of a setting that exists."""
    text = (ROOT / "docs" / "checkpoints.md").read_text().split("\n## Settings that change")[1]
    on_page = dict(re.findall(r"^\| `([\w.]+)` \| (free|warns|refused) \|", text, re.MULTILINE))
    assert on_page == RULES
    names = {section if field is None else f"{section}.{field}" for section, field in every_setting()}
    assert RULES.keys() <= names | set(RunConfig.model_fields)
    assert rule_of("a_new_section", "field") == "refused"
    assert {rule_of(*setting) for setting in every_setting()} == {"free", "warns", "refused"}


def test_complete_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """10 comes after 9; files and foreign names are no checkpoints."""
    for name in ("step-9", "step-10", "step-2", "step-x", "final"):
        (checkpoint_dir(tmp_path, 0).with_name(name)).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "COMPLETE").touch()
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 9, 10]
