"""Field case 54: Soup's README, v0.72.0 adapters.

In: a wrapper around the model changes the names of its parameters.
Bad: saved keys carry a segment of the wrapper's, and a loader matches no tensor, without an error.
Good: the keys of a checkpoint are exactly those that transformers saves, and it misses none and ignores none.
"""

import pytest
from pipeline import make_config, open_tiers, save, save_small_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slideformer_ray.export import export_model


def keys(directory):
    return {key for path in directory.glob("*.safetensors") for key in load_file(path)}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_saved_keys_are_those_that_transformers_saves(tmp_path, family, tied):
    """Of a checkpoint's model and of an export, in several files; loaded with a report of what was not matched."""
    source = save_small_model(tmp_path / "source", family, tied=tied)
    config = make_config(source, precision="bf16", checkpoint__shard_gib=1e-4)
    with open_tiers(config) as tiers:
        saved = save(tiers, config, 1)
    export_model(config.run_dir, tmp_path / "export")
    for directory in (saved / "model", tmp_path / "export"):
        assert len(list(directory.glob("*.safetensors"))) > 1
        assert keys(directory) == keys(source)
        _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
