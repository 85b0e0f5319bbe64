"""The Triton kernels compile for NVIDIA and AMD: Triton needs neither a GPU nor a driver for that.

In a process of its own, because here the kernels may belong to the interpreter.
"""

import os
import subprocess
import sys

import pytest

from slideformer_ray.kernels import switch

TARGETS = ["cuda:80:32", "cuda:90:32", "hip:gfx942:64", "hip:gfx1100:32"]
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from slideformer_ray.kernels import rms_norm, rope, swiglu

WIDTH = {"ROWS": 1, "BLOCK": 2048}
GATE = {"ROWS": 1, "COLS": 1024}
HEADS = {"Q_HEADS": 16, "K_HEADS": 2, "HALF": 64}
KERNELS = [
    (rms_norm._forward_kernel, {"HAS_RESIDUAL": True, "ONE_PLUS": False, **WIDTH}),
    (rms_norm._backward_kernel, {"HAS_GRAD_SUM": True, "NEED_GRAD_WEIGHT": True, "ONE_PLUS": True, **WIDTH}),
    (rope._rotate_kernel, {"INVERSE": False, "REST": 0, **HEADS}),
    (rope._rotate_kernel, {"INVERSE": True, "REST": 32, **HEADS}),
    *((swiglu._forward_kernel, {"ACTIVATION": a, **GATE}) for a in range(3)),
    *((swiglu._backward_kernel, {"ACTIVATION": a, "NEED_INNER": True, **GATE}) for a in range(3)),
]
POINTERS = ("_TH", "_H", "_TF", "_BNSD", "_BSR")


def kind(name, constants):
    if name in constants:
        return "constexpr"
    if name.endswith("_PH"):
        return "*fp32"
    if name.endswith(POINTERS):
        return "*bf16"
    return "fp32" if name == "eps" else "i32"


backend, arch, warp = sys.argv[1].split(":")
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
for kernel, constants in KERNELS:
    signature = {name: kind(name, constants) for name in kernel.arg_names}
    binary = compile(ASTSource(kernel, signature, constexprs=constants), target=target)
    assert binary.asm["cubin" if backend == "cuda" else "hsaco"], kernel
"""


@pytest.mark.skipif(switch.tl is None, reason="triton is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for(target, tmp_path):
    """Every kernel, with its options, to machine code: Ampere, Hopper, CDNA 3 and RDNA 3."""
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, script, target], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
