"""Field case 20: DeepSpeed PR #5150, #7220.

In: gradients whose norm is ten times the maximum.
Bad: the coefficient was applied wrongly for long; and users took the reported norm for the clipped one.
Good: what AdamW gets has the maximum's norm within 1e-5; the reported norm is the one before clipping.
"""

import math

import pytest
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model


class ConsumedNorm:
    """Norm of `grad_scale x gradient` over all calls of all actors' kernels."""

    def __init__(self, shards):
        self.squares = []
        for shard in shards:
            for name in ("step_split", "step_fp32"):
                setattr(shard.adam, name, self._spy(getattr(shard.adam, name)))

    def _spy(self, step):
        def spied(*args):
            *_, grad, hyper, segments = args
            pieces = [grad] if segments is None else [grad[begin:end] for begin, end in segments.tolist()]
            self.squares += [(piece.double() * hyper.grad_scale).square().sum().item() for piece in pieces]
            step(*args)

        return spied

    @property
    def norm(self):
        return math.sqrt(sum(self.squares))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ratio", [10.0, 0.5], ids=["above", "below"])
def test_what_adam_gets_has_the_maximum_norm(tmp_path, ratio, precision, device):
    """Ten times the maximum is scaled to it exactly; half of it is left as it is."""
    model = save_small_model(tmp_path / "model", "llama")
    batch = random_batch(4, 2, seed=0)
    with open_tiers(make_config(model, device=device, precision=precision)) as tiers:
        (report,) = run_steps(tiers, [batch])
        norm = report.gpu.grad_norm
    changes = {"optimizer__max_grad_norm": norm / ratio, "placement__num_optimizer_actors": 2}
    with open_tiers(make_config(model, device=device, precision=precision, **changes)) as tiers:
        consumed = ConsumedNorm(tiers.shards)
        (report,) = run_steps(tiers, [batch])
    assert report.gpu.grad_norm == norm  # before clipping, whatever the maximum
    assert consumed.norm == pytest.approx(min(norm, norm / ratio), rel=1e-5)
