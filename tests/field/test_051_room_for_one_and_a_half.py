"""Field case 51: open_lm #154, ms-swift #6392, transformers PR #25136.

In: a disk for 1.5 checkpoints, one of which is to be kept.
Bad: a crash after an epoch; or the limit is not honoured; or the only checkpoint goes before the new one is there.
Good: space is checked before the first step, with what would mend it; an old one goes once the new one is complete.
"""

import os

import pytest
from recorded_run import run_in_threads, small_config

from slideformer_ray import shortfalls
from slideformer_ray.checkpoint import complete_checkpoints
from slideformer_ray.config import ConfigError
from slideformer_ray.trainer import Trainer

KEEP_ONE = {"checkpoint__save_every": 1, "checkpoint__keep": 1, "checkpoint__save_final": False, "training__steps": 3}


def test_it_is_refused_before_the_first_step(tmp_path, monkeypatch):
    """The message has the free bytes, the needed ones and the settings; with room for two the run may start."""
    config = small_config(tmp_path, **KEEP_ONE)
    one = Trainer(config, local=True).plan.disk_bytes
    monkeypatch.setattr(shortfalls, "disk_free", lambda path: one * 3 // 2)
    with pytest.raises(ConfigError, match=r"has \S+ MiB free, \S+ MiB are needed for up to 2 check.*; free space"):
        Trainer(config, local=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shortfalls, "disk_free", lambda path: one * 2)
    Trainer(config, local=True)


def test_the_old_one_goes_when_the_new_one_is_complete(tmp_path, monkeypatch):
    """At every rename and removal on the way there is a complete one; at the end, exactly as many as were asked for."""
    seen, first_is_complete = [], False

    def watched(real):
        def operation(*args, **kwargs):
            nonlocal first_is_complete
            complete = [step for step, _ in complete_checkpoints(tmp_path / "run")]
            first_is_complete |= bool(complete)
            if first_is_complete:
                seen.append(complete)
            return real(*args, **kwargs)

        return operation

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    run_in_threads(small_config(tmp_path, **KEEP_ONE))
    assert all(complete in ([1], [1, 2], [2], [2, 3], [3]) for complete in seen)
    assert [1, 2] in seen and [2, 3] in seen
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-3"]
