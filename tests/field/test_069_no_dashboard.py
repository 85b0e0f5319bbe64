"""Field case 69: ray #48571, #11940, #61045.

In: a machine without Prometheus, or without the Dashboard; a second run on the same host.
Bad: "refused to connect"; a clash of ports kills the agent, and the agent the node.
Good: training does not depend on the Dashboard, neither on its life nor on its being installed. Two private nodes of
one host have ports of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from recorded_run import SETTLED_STEP, ray_run, small_config

from slideformer_ray.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 15
# What `ray[default]` brings and plain `ray` does not, as Python finds it where it is not installed. Not aiohttp, of
# which plain `ray` has a copy of its own.
DASHBOARD_MODULES = ("aiohttp_cors", "colorful", "opencensus", "opentelemetry", "prometheus_client", "smart_open")
BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {DASHBOARD_MODULES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
RUN = """
import json, sys
from pathlib import Path
import ray._private.utils
from recorded_run import NUM_STEPS, small_config
from slideformer_ray.trainer import Trainer

assert ray._private.utils.get_dashboard_dependency_error() is not None
trainer, losses = Trainer(small_config(Path(sys.argv[1]), training__steps=NUM_STEPS)), []
for metrics in trainer.fit():
    losses.append(metrics.loss)
    if len(losses) == int(sys.argv[2]) - 1:
        trainer.stop()
print(json.dumps(losses))
"""


@pytest.mark.timeout(300)
def test_training_does_not_need_the_dashboard(tmp_path):
    """Losses are those of an ordinary run, to the bit, in two runs at once on this host: one whose Dashboard is killed
    in the middle, and one in an environment where it is not installed."""
    wanted = [metrics.loss for metrics in ray_run().steps[:NUM_STEPS]]
    for name in ("killed", "absent", "blocked"):
        (tmp_path / name).mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCKED)
    config = small_config(tmp_path / "killed", training__steps=len(ray_run().steps), placement__include_dashboard=True)
    trainer, losses, absent = Trainer(config), [], None
    for metrics in trainer.fit():
        losses.append(metrics.loss)
        if metrics.step == SETTLED_STEP:
            dashboard = ray._private.worker._global_node.all_processes["dashboard"][0].process
            dashboard.kill()
            dashboard.wait()
            path = f"{tmp_path / 'blocked'}:{ROOT}:{ROOT / 'tests'}"
            absent = subprocess.Popen(
                [sys.executable, "-c", RUN, str(tmp_path / "absent"), str(NUM_STEPS)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        if len(losses) == NUM_STEPS - 1:
            stdout, stderr = absent.communicate(timeout=180)  # the other node comes and goes while this one is here
            assert absent.returncode == 0, stderr
            trainer.stop()
    assert losses == wanted
    assert json.loads(stdout.splitlines()[-1]) == wanted
