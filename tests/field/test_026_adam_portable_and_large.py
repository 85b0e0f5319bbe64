"""Field case 26: DeepSpeed #7556, #4698, #679.

In: an AMD CPU, or one without AVX-512; a tensor of more than 2^30 elements.
Bad: the build fails on AVX-512, a warning scares, or the update segfaults past a tile constant.
Good: one library holds every instruction set and the CPU's is chosen at run time; sizes around 2^30 and 2^31 work.
"""

import mmap
from pathlib import Path

import pytest
import torch

from slideformer_ray.kernels import layer_adam, native_build
from slideformer_ray.kernels.layer_adam import AdamHyper, LayerAdam, join_master, split_master

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


def test_no_flag_ties_the_library_to_the_build_machine():
    """A wheel built on one CPU runs on another: no -march, -mcpu, -mtune or -mavx."""
    assert not [flag for flag in native_build.FLAGS if flag.startswith("-m")]


def test_portable_runs_where_no_vector_instructions_are(monkeypatch):
    """On a CPU that reports no AVX, auto takes the portable version of the same library and works."""
    library, origin = layer_adam._native_library()
    if library is None:
        pytest.skip(origin)

    class CpuWithoutAvx:
        def __getattr__(self, name):
            return getattr(library, name)

        def layer_adam_isa_supported(self, code):
            return code == layer_adam.ISA_CODES["portable"]

    monkeypatch.setattr(layer_adam, "_native_library", lambda: (CpuWithoutAvx(), origin))
    adam = LayerAdam(1)
    assert (adam.backend, adam.isa) == ("native", "portable")
    param = torch.ones(100)
    adam.step_fp32(param, torch.zeros(100), torch.zeros(100), torch.ones(100), HYPER)
    torch.testing.assert_close(param, torch.full((100,), 1 - HYPER.lr - HYPER.lr * HYPER.weight_decay))


def reserve(numel, dtype):
    """A tensor of zeros that is address space only: a page takes memory when it is written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.12; Linux's value
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags), dtype=dtype)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("boundary", [2**30, 2**31])
def test_a_buffer_beyond_a_large_index(boundary, monkeypatch):
    """A step over a buffer of more than 2^30 or 2^31 elements reaches those around that index and no others. One
    thread's slice is all that is run of it, so that seconds and little memory suffice."""
    begin, end = boundary - 7, boundary + 9
    monkeypatch.setattr(layer_adam, "thread_slices", lambda numel, num_threads: [(begin, end)])
    adam = LayerAdam(1)
    if adam.backend != "native":
        pytest.skip(adam.reason)
    resident_before = resident_bytes()
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    tensors = hi, lo, exp_avg, exp_avg_sq, grad = [reserve(end + 64, dtype) for dtype in dtypes]
    split_master(torch.ones(144), hi[begin - 64 : end + 64], lo[begin - 64 : end + 64])
    grad[begin - 64 : end + 64] = 1.0
    adam.step_split(*tensors, HYPER)
    expected = torch.ones(144)
    expected[64:-64] -= HYPER.lr + HYPER.lr * HYPER.weight_decay
    found = join_master(hi[begin - 64 : end + 64], lo[begin - 64 : end + 64])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(exp_avg[begin - 64 : end + 64] != 0, expected != 1)
    assert resident_bytes() - resident_before < 64 * 2**20
