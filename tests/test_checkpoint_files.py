"""What stands beside a checkpoint's weights: the model's own files, byte for byte, as transformers reads them."""

import json
import shutil

from recorded_run import run_in_threads, small_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from slideformer_ray.checkpoint import checkpoint_dir
from slideformer_ray.data.quickstart import quickstart_model_dir

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{{ eos_token }}{% endfor %}"


def test_generation_config_template_and_tokenizer_are_the_models(tmp_path):
    """Also in the final model. config.json differs in its dtype alone."""
    source = shutil.copytree(quickstart_model_dir(), tmp_path / "source")
    generation = json.loads((source / "generation_config.json").read_text()) | {"temperature": 0.25, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation, indent=7))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    config = small_config(tmp_path, training__steps=2, checkpoint__save_every=2).changed([f"model.path={source}"])
    run_in_threads(config)
    chat = [{"role": "user", "content": "Define: cat"}]
    rendered = AutoTokenizer.from_pretrained(source).apply_chat_template(chat, tokenize=False)
    assert rendered.startswith("<user> ")
    for model_dir in (checkpoint_dir(config.run_dir, 2) / "model", config.run_dir / "model"):
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                assert (model_dir / path.name).read_bytes() == path.read_bytes(), path.name
        values = [json.loads((directory / "config.json").read_text()) for directory in (source, model_dir)]
        assert values[0] | {"dtype": None} == values[1] | {"dtype": None}
        assert AutoTokenizer.from_pretrained(model_dir).apply_chat_template(chat, tokenize=False) == rendered
        assert AutoModelForCausalLM.from_pretrained(model_dir).generation_config.temperature == 0.25
