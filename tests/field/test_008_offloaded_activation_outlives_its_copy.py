"""Field case 8: torchtune #1867.

In: activations go to host memory on a side stream.
Bad: the tensor is freed, and its memory used again, while its copy still runs: NaN gradients.
Good: the slot is kept until the copy is over.
"""

import pytest
from disturb import FEWEST, LONG_SECONDS, change_gpu_plan, train, without_waits
from pipeline import random_batch, save_small_model

from slideformer_ray.schedule import DOWNLOAD

STEPS = 3


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama", layers=4)


def batches():
    return [random_batch(6, 2, seed=step) for step in range(STEPS)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slow_offloads_change_no_bit(model, device):
    """Three slots for twelve activations, every copy to and from the host late, against all of them staying."""
    changes = {"device": device, "precision": "bf16"}
    kept = train(model, batches(), **changes)
    slow = ["download_activation", "upload_activation"]
    offloaded = train(model, batches(), slow=slow, **FEWEST, **changes)
    assert offloaded == kept, offloaded.differing(kept)


def test_a_slot_given_away_too_early_is_noticed(model, monkeypatch):
    """The same with the waits for the download lane taken out of the plan: freed slots hold NaN, so it shows."""
    kept = train(model, batches()[:1], precision="bf16")
    change_gpu_plan(monkeypatch, lambda op: without_waits(op, DOWNLOAD))
    late = {"slow": ["download_activation"], "seconds": LONG_SECONDS}
    broken = train(model, batches()[:1], precision="bf16", **late, **FEWEST)
    assert broken != kept
