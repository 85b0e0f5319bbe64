"""What every test runs under: no network; `gpu` tests only where there is a GPU. Time limits: pyproject.toml."""

import os

import pytest

# Set before anything imports ray or transformers. A test that would download something fails instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise the first ray.init writes a token into the home directory of whoever runs the tests.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Models this small lose time on a second thread, most of all beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU the tests of kernels/ run in Triton's interpreter, which must be chosen before anything imports triton.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    # Imported here: a run that selects no GPU test should not pay for torch.
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is false"))
