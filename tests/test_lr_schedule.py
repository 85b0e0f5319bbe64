import pytest
import torch
from transformers import get_scheduler

from slideformer_ray.lr_schedule import check_schedule, learning_rate

PEAK = 3e-4


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(1, 0), (1, 1), (7, 0), (50, 5), (50, 50), (123, 1)])
def test_every_step_has_the_rate_of_transformers(kind, total_steps, warmup_steps):
    """Optimizer step i runs at the rate that transformers' scheduler shows after i scheduler steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    for step in range(total_steps):
        ours = learning_rate(step, total_steps, PEAK, kind, warmup_steps)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-19)
        optimizer.step()
        scheduler.step()


def test_constant_without_warmup_is_exactly_the_peak():
    """No arithmetic is done on a constant rate."""
    assert {learning_rate(step, 10, PEAK, "constant", 0) for step in range(10)} == {PEAK}


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_peak_of_zero_is_zero_at_every_step(kind):
    """`learning_rate: 0` must change no bit of the model, so the rate may not be a small number or negative."""
    assert {learning_rate(step, 10, 0.0, kind, 3) for step in range(10)} == {0.0}


def test_a_warmup_longer_than_the_run_is_refused():
    """One line that names the field, both numbers and the fix."""
    with pytest.raises(ValueError, match=r"^optimizer.warmup_steps is 11, but the run has 10 .* at most 10$"):
        check_schedule(total_steps=10, warmup_steps=11)
    check_schedule(total_steps=10, warmup_steps=10)
