import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

# Odd sizes, grouped key-value heads, and a pad token that is an ordinary token of the vocabulary.
SIZES = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)

CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied-biases": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose time on a second thread, most of all beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=CONFIGS)
def hf_config(request):
    return CONFIGS[request.param]()


@pytest.fixture
def hf_model(hf_config):
    return random_model(hf_config)


@pytest.fixture
def make_model():
    """random_model(config): the same weights at each call; norms and biases are not at their initial values."""
    return random_model


def random_model(hf_config):
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            mean = 1.0 if p.ndim == 1 else 0.0
            p.copy_(mean + 0.1 * torch.randn(p.shape, generator=generator))
    return model
