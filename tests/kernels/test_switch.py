"""kernels/switch.py: one variable decides, what cannot be is refused, and the log line says what runs."""

import os
import subprocess
import sys

import pytest
import torch

from slideformer_ray.kernels import switch


def chosen(monkeypatch, setting, interpret, device="cpu"):
    monkeypatch.delenv(switch.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(switch.VARIABLE, setting)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    switch._read_setting.cache_clear()
    try:
        return switch.use_triton(torch.empty(0, device=device))
    finally:
        switch._read_setting.cache_clear()


def test_the_cpu_takes_plain_pytorch_unless_asked(monkeypatch):
    """The interpreter is for tests: it runs where SLIDEFORMER_KERNELS asks for Triton, and nowhere else."""
    assert not chosen(monkeypatch, None, "1")
    assert not chosen(monkeypatch, "torch", "1")
    if switch.tl is not None:
        assert chosen(monkeypatch, "triton", "1")


def test_what_cannot_be_is_refused(monkeypatch):
    """Never a silent fallback: the message names the variable, the reason and the way out."""
    with pytest.raises(ValueError, match="SLIDEFORMER_KERNELS is triton, but .*; unset it, or set it to torch"):
        chosen(monkeypatch, "triton", "0")
    with pytest.raises(ValueError, match="SLIDEFORMER_KERNELS is 'cuda'; it must be triton or torch"):
        chosen(monkeypatch, "cuda", "0")
    if switch.tl is not None:
        with pytest.raises(ValueError, match="a tensor is on 'meta', where they do not run"):
            chosen(monkeypatch, "triton", "1", "meta")


def test_a_run_keeps_its_path(monkeypatch, use_path):
    """The variable is read once: a change half-way has no effect."""
    use_path("torch-cpu")
    assert not switch.use_triton(torch.empty(0))
    monkeypatch.setenv(switch.VARIABLE, "nonsense")
    assert not switch.use_triton(torch.empty(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the line is another one on a GPU")
def test_the_log_line_says_what_runs(use_path):
    """Path, device and origin of the choice."""
    use_path("torch-cpu")
    assert switch.describe() == "kernels: plain torch on the CPU (SLIDEFORMER_KERNELS=torch)"


def test_kernels_import_without_triton():
    """Off the GPU, PyTorch comes without Triton: every kernel file imports, and runs its plain path."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from slideformer_ray.kernels import rms_norm, rope, swiglu, switch
assert switch.tl is None
x = torch.ones(2, 4)
rms_norm.rms_norm(x, x[0], 1e-6), swiglu.swiglu(x, x)
"""
    environment = {name: value for name, value in os.environ.items() if name != switch.VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
