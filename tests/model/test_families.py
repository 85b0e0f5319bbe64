import pytest
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from slideformer_ray.model.families import FAMILIES, family_of


def test_supported_families_are_found(hf_config):
    """The family is that of model_type."""
    assert family_of(hf_config).model_type == hf_config.model_type


def test_an_unsupported_family_is_refused_by_name():
    """One line with the family found and those supported."""
    with pytest.raises(ValueError, match=r"^config.json: model_type 'gpt2' is not supported; supported: llama, qwen2$"):
        family_of(GPT2Config())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(attention_dropout=0.1), "attention_dropout is 0.1"),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), "quantized .quant_method 'gptq'."),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (LlamaConfig(auto_map={"AutoModelForCausalLM": "modeling_own.Own"}), "auto_map"),
        (LlamaConfig(is_causal=False), "is_causal is false"),
        (LlamaConfig(vocab_size=100, pad_token_id=100), "pad_token_id is 100, outside the vocabulary of 100"),
        (
            Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2),
            r"2 of 4 layers use sliding_attention \(the first is layer 2\)",
        ),
    ],
)
def test_a_feature_that_cannot_be_run_exactly_is_refused(config, message):
    """One line that names the key of config.json; never trained as if it were not there."""
    with pytest.raises(ValueError, match=f"^config.json: .*{message}[^\n]*$"):
        family_of(config)


def test_every_refused_feature_has_its_own_line():
    """A user sees all that must change at once."""
    with pytest.raises(ValueError) as error:
        family_of(LlamaConfig(attention_dropout=0.1, quantization_config={"quant_method": "gptq"}))
    assert len(str(error.value).splitlines()) == 2


def test_a_sliding_window_that_no_layer_uses_is_accepted():
    """Qwen2.5 ships use_sliding_window false beside a window size."""
    family_of(Qwen2Config(num_hidden_layers=2, use_sliding_window=False, sliding_window=64, max_window_layers=0))
    family_of(Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=64, max_window_layers=2))


def test_a_padding_token_of_minus_one_is_accepted():
    """torch counts it from the vocabulary's end; the first Llama checkpoints have it."""
    family_of(LlamaConfig(pad_token_id=-1))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_keys_and_classes_are_those_of_the_whole_model(family):
    """What the family names is what transformers' causal language model is made of."""
    sizes = dict(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = family.causal_lm(family.config(**sizes))
    assert type(model.model.layers[0]) is family.decoder_layer
    assert type(model.model.rotary_emb) is family.rotary
    assert type(model.model.norm) is family.norm
    keys = model.state_dict().keys()
    assert {family.embed_key, family.norm_key, family.head_key, family.layer_key(1, "mlp.up_proj.weight")} <= keys
