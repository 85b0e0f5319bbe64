"""Named shapes are the models they are called after."""

import pytest

from slideformer_ray.model.layers import describe_model
from slideformer_ray.model.shapes import SHAPES, shape

PARAMETERS = {  # as the models' cards state them, billions
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "llama3.1-8b": 8.030,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_its_models_parameter_count(name):
    """Within 0.1 %: a wrong width, depth or tie shows."""
    assert describe_model(shape(name)).num_parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=1e-3)
