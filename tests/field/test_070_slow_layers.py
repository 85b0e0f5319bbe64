"""Field case 70: ray PR #49600, #49326.

In: a layer that takes longer than the 10 s default of Ray's compiled graphs.
Bad: a timeout, whose message does not name the setting.
Good: no Ray timeout is on a step's way: waits are our own, 600 s by default, and the one that ends a run names its
setting.
"""

import os
import signal
import time
from concurrent.futures import Future

import pytest
from pipeline import make_config, open_tiers, random_batch, run_steps, save_small_model

from slideformer_ray.config import DebugSection
from slideformer_ray.tiers import RayTiers, TierError
from slideformer_ray.trainer import submit_batch


def test_a_step_may_take_longer_than_rays_default(tmp_path):
    """An optimizer actor that stands still for 11 s delays its step, and ends nothing."""
    assert DebugSection().wait_timeout_s == 600
    model = save_small_model(tmp_path / "model", "llama")
    with open_tiers(make_config(model), RayTiers) as tiers:
        run_steps(tiers, [random_batch(4, 2, seed=0)])
        pid = next(report.pid for report in tiers.reports() if report.name == "optimizer actor 0")
        os.kill(pid, signal.SIGSTOP)
        pending = submit_batch(tiers, random_batch(4, 2, seed=1), 1, 1, train=True)
        time.sleep(11)
        os.kill(pid, signal.SIGCONT)
        assert tiers.gather(pending).gpu.loss > 0


def test_a_wait_that_is_given_up_names_its_setting(tmp_path):
    """And who waited for what: here the GPU actor, for updates that nobody does."""
    model = save_small_model(tmp_path / "model", "llama")
    with open_tiers(make_config(model, debug__wait_timeout_s=1)) as tiers:
        nobody = Future()
        nobody.set_result(None)
        tiers._call_optimizer = lambda *call: nobody
        tiers.gather(submit_batch(tiers, random_batch(4, 2, seed=0), 0, 0, train=True))
        with pytest.raises(TierError, match=r"gpu actor: step 1: .*'updated.0.\d' .*\(debug.wait_timeout_s is 1\)"):
            tiers.gather(submit_batch(tiers, random_batch(4, 2, seed=1), 1, 1, train=True))
