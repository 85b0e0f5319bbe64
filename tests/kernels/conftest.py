"""Which path a kernel's test runs on, and outputs that show what was not written."""

import os

import pytest
import torch

from slideformer_ray.kernels import switch

PATHS = [
    "torch-cpu",
    "triton-cpu",
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
    pytest.param("triton-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def use_path(monkeypatch):
    """use_path("triton-cpu") switches the kernels over and returns the device; on the CPU that is the interpreter."""

    def switch_to(path):
        kernels, device = path.split("-")
        if kernels == "triton" and device == "cpu":
            if switch.tl is None:
                pytest.skip("triton is not installed")
            if os.environ.get("TRITON_INTERPRET") != "1":
                pytest.skip("there is a GPU: the kernels run there, not in the interpreter")
        monkeypatch.setenv(switch.VARIABLE, kernels)
        switch._read_setting.cache_clear()
        return device

    yield switch_to
    monkeypatch.undo()
    switch._read_setting.cache_clear()


@pytest.fixture(params=PATHS)
def device(request, use_path):
    """The device of a path; the kernels take that path."""
    return use_path(request.param)


@pytest.fixture(params=["triton-cpu", pytest.param("triton-cuda", marks=pytest.mark.gpu)])
def triton_device(request, use_path):
    """The same for Triton's paths alone."""
    return use_path(request.param)


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that torch.empty hands out holds NaN: an element that no kernel wrote shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
