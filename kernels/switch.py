"""Which path a kernel takes: the Triton kernels of this folder, or the plain PyTorch beside them.

One environment variable decides for all of them, SLIDEFORMER_KERNELS:
    triton   the Triton kernels; a tensor that they cannot serve is an error, never a silent fallback
    torch    plain PyTorch everywhere
    unset    Triton for tensors on a GPU (CUDA or ROCm) where `triton` imports, else PyTorch
On the CPU the kernels run in Triton's interpreter, which TRITON_INTERPRET=1 switches on before `triton` is imported:
for tests, thousands of times slower than PyTorch. Kernel files import `triton` and `tl` from here, so that they import
where it is not installed. Touches nothing; tested by tests/kernels/test_switch.py.
"""

import functools
import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not bring it

    class _Missing:
        """`@triton.jit` leaves the function as it is; `use_triton` sees to it that nothing launches it."""

        __version__ = ""

        @staticmethod
        def jit(function=None, **_):
            return function if function is not None else lambda f: f

    triton, tl = _Missing(), None

__all__ = ["describe", "tl", "triton", "use_triton"]

VARIABLE = "SLIDEFORMER_KERNELS"


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels run in Triton for `tensor`'s device.

    Raises ValueError where SLIDEFORMER_KERNELS is neither triton nor torch, and where it is triton but cannot be.
    """
    return _chosen(tensor.device.type)


@torch.compiler.assume_constant_result  # a compiled layer has one path; reading the environment would break its graph
def _chosen(device_type: str) -> bool:
    return _read_setting(device_type)


@functools.cache  # read once: a run cannot change paths half-way
def _read_setting(device_type: str) -> bool:
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "triton", "torch"):
        raise ValueError(f"{VARIABLE} is {setting!r}; it must be triton or torch, or unset for the default")
    if setting == "torch" or (not setting and device_type == "cpu"):
        return False
    obstacle = _obstacle(device_type)
    if setting == "triton" and obstacle:
        raise ValueError(f"{VARIABLE} is triton, but {obstacle}; unset it, or set it to torch")
    return not obstacle


def _obstacle(device_type: str) -> str:
    """Why Triton's kernels cannot run on that type of device; empty where they can."""
    if tl is None:
        return "the package triton is not installed"
    if device_type == "cuda":
        return ""
    if device_type != "cpu":
        return f"a tensor is on {device_type!r}, where they do not run"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return "a tensor is on the CPU, where TRITON_INTERPRET=1 must be set before triton is imported"


def describe() -> str:
    """What runs where, and why: one line for the run's log."""
    setting = os.environ.get(VARIABLE)
    origin = f"{VARIABLE}={setting}" if setting else f"{VARIABLE} is not set"
    if not torch.cuda.is_available():
        return f"kernels: {'triton, interpreted,' if _chosen('cpu') else 'plain torch'} on the CPU ({origin})"
    device = torch.cuda.get_device_name()
    if _chosen("cuda"):
        return f"kernels: triton {triton.__version__} on {device} ({origin})"
    return f"kernels: plain torch on {device} ({_obstacle('cuda') or origin})"
