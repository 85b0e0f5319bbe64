"""Field case 6: DeepSpeed #5545, PR #7965, #8061.

In: asynchronous copies through pooled buffers, three steps and more.
Bad: a buffer is recycled before the work that was queued on it ended; NaN at step 3, and only with overlap.
Good: the overlapped run equals the one in which each operation waits for the one before, bit for bit.
"""

import pytest
from disturb import FEWEST, train
from pipeline import random_batch, save_small_model

STEPS = 5
SLOW = {
    "nothing": [],
    "downloads": ["download_gradient", "download_activation"],
    "uploads": ["upload_params", "upload_activation", "gather_embedding", "upload_head"],
    "updates": ["update"],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_grad_norm", [0.5, None], ids=["clipping", "no clipping"])
def test_any_slow_lane_gives_the_serial_bits(tmp_path, max_grad_norm, device):
    """The fewest units, slots and cells there may be, each used again many times a step, and one lane late."""
    model = save_small_model(tmp_path / "model", "qwen2", tied=True)
    batches = [random_batch(6, 2, seed=step) for step in range(STEPS)]
    changes = {**FEWEST, "device": device, "precision": "bf16", "optimizer__max_grad_norm": max_grad_norm}
    if max_grad_norm is None:
        changes["placement__gradient_slots"] = 1
    serial = train(model, batches, training__overlap=False, **changes)
    for name, kinds in SLOW.items():
        found = train(model, batches, slow=kinds, **changes)
        assert found == serial, (name, found.differing(serial))
