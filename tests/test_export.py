"""A checkpoint's exact masters as a Hugging Face directory, and what is refused."""

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save, save_small_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slideformer_ray.actors.slice_files import DamagedCheckpoint
from slideformer_ray.config import ConfigError
from slideformer_ray.export import export_model


@pytest.fixture(params=["bf16", "fp32"])
def trained(tmp_path, request):
    """(run directory, masters) of a tied model with a frozen layer, three steps after its start."""
    model = save_small_model(tmp_path / "source", "qwen2", tied=True)
    changes = {"precision": request.param, "model__frozen": ["model.layers.1.*"], "checkpoint__shard_gib": 1e-4}
    config = make_config(model, **changes)
    with open_tiers(config) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed) for seed in range(3)])
        save(tiers, config, 3)
        masters = {p.name: tiers.master(p.name) for block in tiers.spec.blocks for p in block.params}
    return config.run_dir, masters


def test_masters_come_out_bit_for_bit(trained, tmp_path):
    """Key set, shapes and bits, in shards; transformers loads them, and the tied head is not there twice."""
    run_dir, masters = trained
    exported = export_model(run_dir, tmp_path / "out")
    assert exported.steps_done == 3 and exported.num_parameters == sum(m.numel() for m in masters.values())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert len(files) > 1 and found.keys() == masters.keys()
    assert all(torch.equal(found[name].view(torch.int32), masters[name].view(torch.int32)) for name in masters)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_bf16_is_the_masters_rounded_to_nearest(trained, tmp_path):
    run_dir, masters = trained
    export_model(run_dir, tmp_path / "out", dtype="bf16")
    for file in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, masters[name].bfloat16()), name


def test_what_cannot_be_exported_is_refused(trained, tmp_path):
    """A directory in use, a step that is not there, a flipped bit: one message, and nothing is left behind."""
    run_dir, _ = trained
    with pytest.raises(ConfigError, match=r"--out: \S+ is not an empty directory"):
        export_model(run_dir, run_dir)
    with pytest.raises(ConfigError, match=r"--step: \S+step-7 is no complete checkpoint; there are those of 3"):
        export_model(run_dir, tmp_path / "out", step=7)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        export_model(tmp_path, tmp_path / "out")
    (path,) = (run_dir / "checkpoints" / "step-3" / "model").glob("model-00002-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name}: bytes"):
        export_model(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
