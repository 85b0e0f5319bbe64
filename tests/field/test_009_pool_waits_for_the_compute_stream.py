"""Field case 9: torchtitan PR #2581.

In: a pool of buffers is used again in step 2.
Bad: "the current stream" was read inside the side stream's context, so the wait for it waited for nothing, and the
pool was overwritten while it was read, in silence.
Good: the compute stream is known from the start; three steps with reuse are right, however late it is.
"""

import pytest
import torch
from disturb import FEWEST, LONG_SECONDS, change_gpu_plan, slow_down, train, without_waits
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model, state_of

from slideformer_ray.schedule import COMPUTE, UPLOAD
from slideformer_ray.tiers import TierError

SLOW = ["forward", "backward", "head"]


@pytest.fixture
def model(tmp_path):
    return save_small_model(tmp_path / "model", "llama", layers=4)


def batches():
    return [random_batch(4, 2, seed=step) for step in range(3)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_uploads_wait_for_a_slow_compute_stream(model, device):
    """Two units for four layers; the upload lane is always ahead and must not overwrite what is still read."""
    changes = {"device": device, "precision": "bf16", **FEWEST}
    serial = train(model, batches(), training__overlap=False, **changes)
    found = train(model, batches(), slow=SLOW, **changes)
    assert found == serial, found.differing(serial)


def test_an_upload_that_does_not_wait_is_noticed(model, monkeypatch):
    """The waits for the compute lane taken out of the upload lane: an illegal transition, not a wrong gradient."""
    change_gpu_plan(monkeypatch, lambda op: without_waits(op, COMPUTE) if op.lane == UPLOAD else op)
    with pytest.raises(TierError, match=r"parameter unit\[\d\]: illegal transition|its reader wants"):
        train(model, batches(), slow=SLOW, seconds=LONG_SECONDS, precision="bf16", **FEWEST)


@pytest.mark.gpu
def test_gpu_streams_do_not_depend_on_who_calls(model):
    """Made and run while another stream is current: each lane still has its own stream, and the bits are the same."""
    config = make_config(model, device="cuda", precision="bf16", **FEWEST)
    states = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream), open_tiers(config) as tiers:
            streams = {lane.stream.cuda_stream for lane in tiers.window.streams.values()}
            assert len(streams) == 3
            slow_down(tiers, SLOW)
            states.append(state_of(tiers, run_steps(tiers, batches())))
    assert states[0] == states[1], states[0].differing(states[1])
