"""Field case 84 (unsloth PR #6197, TransformerEngine #1245): rotary positions far out, for every rope type.

In: Llama-3.1's config, position 30,000; the model in bf16.
Bad: the scaling is dropped, or frequencies are cast to bf16: gibberish past some thousands of tokens.
Good: frequencies stay fp32 and equal transformers' for every rope type, and what the kernel makes of them equals the
rotation in float64 at position 30,000.
"""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slideformer_ray.kernels.rope import rope
from slideformer_ray.model.layers import RotaryTable

HALF = 8
FACTORS = {"factor": 8.0, "original_max_position_embeddings": 8192}
ROPES = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 8.0},
    "yarn": FACTORS,
    "longrope": {"short_factor": [1.0] * HALF, "long_factor": [2.0] * HALF, **FACTORS},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **FACTORS},
}
POSITIONS = torch.arange(30000, 30016)[None]


def config_of(rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 500000.0, **ROPES[rope_type]}
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=65536, rope_parameters=parameters)


def test_every_rope_type_of_transformers_is_here():
    """A type that transformers adds must be looked at before it is trained."""
    assert set(ROPES) - {"default"} <= set(ROPE_INIT_FUNCTIONS)
    assert set(ROPE_INIT_FUNCTIONS) <= {*ROPES, "proportional"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope_type", ROPES)
def test_position_30000(rope_type, dtype):
    """Frequencies are transformers' in fp32 whatever the model's dtype; the rotation equals float64."""
    config = config_of(rope_type)
    table, theirs = RotaryTable(config, "cpu", dtype), LlamaRotaryEmbedding(config)
    theirs(torch.empty(1), POSITIONS)  # some types settle their frequencies at the first call
    cos, sin = table(POSITIONS)
    assert table.module.inv_freq.dtype == torch.float32
    assert torch.equal(table.module.inv_freq, theirs.inv_freq)

    q, k = (torch.randn(1, n, 16, 2 * HALF, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (4, 2))
    angle = POSITIONS[0, :, None].double() * theirs.inv_freq.double()
    turn = torch.polar(torch.full_like(angle, table.module.attention_scaling), angle)
    for found, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
        x1, x2 = x.double().chunk(2, dim=-1)
        rotated = torch.complex(x1, x2) * turn
        truth = torch.cat((rotated.real, rotated.imag), dim=-1)
        error = ((found.double() - truth).norm() / truth.norm()).item()
        # fp32 holds an angle of 30,000 to 2e-3; each rounding to bf16 costs 2^-9.
        assert error < (2e-3 if dtype == torch.float32 else 1e-2)


def test_llama3_scaling_is_not_dropped():
    """Low frequencies are divided by the factor: without it, the angles at 30,000 differ by whole turns."""
    scaled, plain = (RotaryTable(config_of(t), "cpu", torch.float32) for t in ("llama3", "default"))
    assert (plain.module.inv_freq / scaled.module.inv_freq).max().item() == pytest.approx(8.0)
