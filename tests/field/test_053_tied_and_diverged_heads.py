"""Field case 53: Automodel #2571, DeepSpeed #1896, LlamaFactory #10560, OpenRLHF PR #1316.

In: tied embeddings, or a head of its own.
Bad: the head is dropped though it has diverged; or it is saved twice; or it is missing.
Good: one saved tensor and one Adam state of a tied weight; plain transformers loads a checkpoint to the same logits.
"""

import pytest
import torch
from pipeline import make_config, open_tiers, random_batch, run_steps, save, save_small_model, saved_tensors
from transformers import AutoModelForCausalLM

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_the_trained_state(tmp_path, tied, precision):
    """Logits of `from_pretrained(step-N/model)` are those of a model given the tiers' own parameters, bit for bit."""
    source = save_small_model(tmp_path / "source", "qwen2", tied=tied)
    config = make_config(source, precision=precision)
    with open_tiers(config) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed) for seed in range(3)])
        saved = save(tiers, config, 3)
        trained = {
            param.name: param.view(tiers.buffers[f"hi.{block.index}"].tensor(tiers.layout.dtype)).clone()
            for block in tiers.spec.blocks
            for param in block.params
        }
    loaded = AutoModelForCausalLM.from_pretrained(saved / "model")
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=loaded.dtype)
    wanted.load_state_dict(trained, strict=not tied)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=loaded.dtype)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = loaded(ids).logits
        assert loaded.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        assert torch.equal(logits, wanted(ids).logits)
        assert not torch.equal(logits, before(ids).logits)
    same = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert same is tied
    keys = saved_tensors(saved).keys()
    for state in ("", "exp_avg.", "exp_avg_sq."):
        assert state + EMBED in keys and (state + HEAD in keys) is not tied
