"""AdamW on the host over split master weights, the optimizer actors' arithmetic (SlideFormer, arXiv 2603.16428).

An fp32 master weight with bits u is kept as two 16-bit halves: `hi = (u + 0x8000) >> 16`, which is the bf16 parameter
that the GPU reads, and `lo = u & 0xffff`, which stays on the host; back: `u = (hi << 16) + sign_extend(lo)`. A step
reads a bf16 gradient, hi, lo and the two fp32 moments and writes all but the gradient, in one pass: 26 bytes of memory
traffic a parameter.

The work is done by layer_adam.c where it is compiled (native_build.py), else by PyTorch's own fused AdamW over small
fp32 chunks; `LayerAdam.reason` says which and why. Both agree bit for bit with `torch.optim.AdamW(fused=True)` on fp32
masters, but for two habits of PyTorch. It rounds exp_avg_sq of the last numel % 8 elements of each tensor differently
(its remainder loop fuses the other multiply-add); here an element's bits never depend on its position, so that any
slicing of a layer, for threads or for optimizer actors, gives the same bits. And with lr 0 it turns a parameter of -0.0
into +0.0, where here no bit changes. Seen with the AVX2 and AVX-512 builds of torch 2.11 and 2.13; its build without
fused multiply-adds (`ATEN_CPU_CAPABILITY=default`) rounds differently everywhere.

This module writes only the tensors it is handed. Tests: tests/kernels/test_layer_adam.py; speed:
benchmarks/kernels/bench_layer_adam.py.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from slideformer_ray.kernels import native_build

# Slices handed to threads begin on a cache line of every array (64 elements of 16 bits are two lines, of 32 bits four).
SLICE_ALIGNMENT = 64
# Waking a thread costs tens of microseconds, about as long as one thread needs for this many elements.
MIN_ELEMENTS_PER_THREAD = 65536
# Elements that the torch code converts to fp32 at a time: 4 MiB of scratch an array, whatever the layer's size.
CHUNK = 1 << 20
# PyTorch's widest vector of fp32. A tensor of whole vectors has no remainder, so all its elements are rounded alike.
TORCH_VECTOR = 16

ISA_CODES = {"portable": 0, "avx2": 1, "avx512": 2}  # the enum of layer_adam.c, narrowest first


@dataclass(frozen=True)
class AdamHyper:
    """What one AdamW step of one parameter group needs. `step` is 1 for the first step; `grad_scale` is the clip
    coefficient.

    Weight decay is decoupled: the parameter is multiplied by 1 - lr * weight_decay. With lr 0 no bit of a parameter
    changes (the moments do). Raises ValueError for a value out of range.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"AdamHyper.{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"AdamHyper.{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.step < 1:
            raise ValueError(f"AdamHyper.step is {self.step}; the first step is 1")


class _Coefficients(ctypes.Structure):
    """`adam_coefficients` of layer_adam.c. Computed in double and rounded to fp32 once, where PyTorch does so."""

    _fields_ = [
        ("grad_scale", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("lerp_weight", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("bias_correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
        ("delta_sign", ctypes.c_uint32),
        ("lerp_from_grad", ctypes.c_uint32),
        ("flush_denormals", ctypes.c_uint32),
    ]

    @classmethod
    def of(cls, hyper: AdamHyper, flush_denormals: bool) -> "_Coefficients":
        lerp_weight = _fp32(1.0 - hyper.beta1)
        lerp_from_grad = lerp_weight >= 0.5  # PyTorch's lerp starts from the nearer end
        step_size = _step_size(hyper)
        return cls(
            grad_scale=hyper.grad_scale,
            decay=1.0 - hyper.lr * hyper.weight_decay,
            lerp_weight=lerp_weight - 1.0 if lerp_from_grad else lerp_weight,
            beta2=hyper.beta2,
            one_minus_beta2=1.0 - hyper.beta2,
            bias_correction2_sqrt=math.sqrt(1.0 - hyper.beta2 ** float(hyper.step)),
            eps=hyper.eps,
            negative_step_size=-step_size,
            delta_sign=0x80000000 if step_size == 0.0 else 0,
            lerp_from_grad=lerp_from_grad,
            flush_denormals=flush_denormals,
        )


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _step_size(hyper: AdamHyper) -> float:
    return _fp32(hyper.lr / (1.0 - hyper.beta1 ** float(hyper.step)))


def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Writes the halves of fp32 `master` [n] into `hi` [n] (bf16) and `lo` [n] (int16); exact for every bit pattern.

    `hi` is `master` rounded to bf16 with ties away from zero, where `.to(torch.bfloat16)` rounds ties to even. A NaN
    of 0x7fff8000 or more (the sign aside) carries over, and `hi` alone reads as zero; those that arithmetic makes are
    0x7fc00000, and a bf16 NaN has 16 zeros below.
    """
    _check_tensors({"master": (master, torch.float32), "hi": (hi, torch.bfloat16), "lo": (lo, torch.int16)})
    bits, hi_bits = master.view(torch.int32), hi.view(torch.int16)
    for begin, end in _chunks(0, master.numel()):
        # On int32 the addition wraps and the copies keep the lower 16 bits, as the definition on unsigned bits wants.
        hi_bits[begin:end] = (bits[begin:end] + 0x8000).bitwise_right_shift_(16)
        lo[begin:end] = bits[begin:end]


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 master weights [n] of `hi` [n] (bf16) and `lo` [n] (int16): the inverse of `split_master`."""
    _check_tensors({"hi": (hi, torch.bfloat16), "lo": (lo, torch.int16)})
    master = hi.to(torch.float32)  # the bits of hi, and 16 zeros
    master.view(torch.int32).add_(lo)
    return master


class LayerAdam:
    """Steps AdamW over slices of layers, on threads of its own.

    `num_threads`: threads that share one step, the calling thread among them. The others start with the first step that
    is large enough for them, and inherit the CPU affinity of that moment. The torch fallback uses torch's own threads
    instead (`torch.set_num_threads`).
    `backend`: "native" is layer_adam.c; "torch" is PyTorch's fused AdamW; "auto" is native where it can be had, else
    torch.
    `isa`: the instruction set of the native backend; "auto" is the widest that this CPU has. All give the same bits.
    `flush_denormals`: treat numbers below 1.2e-38 as zero. Worth it where many moments have decayed that far, such as
    exp_avg of embedding rows that no token has touched for 900 steps: with all of them denormal a step takes 5 to 10
    times as long on a Xeon (PyTorch's too), up to 1.5 times on a Zen 5. Off by default, because on it changes bits
    against PyTorch and between backends, and turns a denormal parameter into zero even with lr 0. No effect in the
    torch fallback and off x86-64; then `reason` says so.

    After construction `backend` and `isa` say what is in use ("torch" for both with the fallback) and `reason` says
    why. Raises ValueError if what was asked for by name cannot be had.
    """

    backend: str
    isa: str
    reason: str

    def __init__(
        self,
        num_threads: int,
        *,
        backend: Literal["auto", "native", "torch"] = "auto",
        isa: Literal["auto", "avx512", "avx2", "portable"] = "auto",
        flush_denormals: bool = False,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"LayerAdam: num_threads is {num_threads}; it must be 1 or more")
        if backend not in ("auto", "native", "torch"):
            raise ValueError(f"LayerAdam: backend is {backend!r}; it must be auto, native or torch")
        if isa != "auto" and isa not in ISA_CODES:
            raise ValueError(f"LayerAdam: isa is {isa!r}; it must be auto, {', '.join(ISA_CODES)}")
        self.num_threads = num_threads
        self._flush_denormals = flush_denormals
        self._pool = ThreadPoolExecutor(max(num_threads - 1, 1), thread_name_prefix="layer_adam")
        self._library: ctypes.CDLL | None = None
        if backend != "torch":
            self._library, origin = _native_library()
            if self._library is None and (backend == "native" or isa != "auto"):
                wanted = 'backend="native"' if backend == "native" else f"isa={isa!r}"
                raise ValueError(
                    f"LayerAdam: {wanted} needs a compiled layer_adam.c and there is none: {origin}. Install a C "
                    "compiler and run `python -m slideformer_ray.kernels.native_build`, or use "
                    'backend="torch", isa="auto"'
                )
        elif isa != "auto":
            raise ValueError(f'LayerAdam: isa={isa!r} has no meaning with backend="torch"; use isa="auto"')

        if self._library is None:
            self.backend, self.isa = "torch", "torch"
            asked_for = backend == "torch"
            self.reason = "torch was asked for" if asked_for else f"no compiled layer_adam: torch fallback; {origin}"
            can_flush = False
        else:
            self.backend = "native"
            self.isa, choice = _choose_isa(self._library, isa)
            self.reason = f"{choice}; {origin}"
            can_flush = bool(self._library.layer_adam_can_flush_denormals())
        if flush_denormals and not can_flush:
            self.reason += "; flush_denormals has no effect here"

    def step_split(
        self,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        hyper: AdamHyper,
        segments: np.ndarray | None = None,
    ) -> None:
        """One AdamW step, in place, on split master weights.

        All are contiguous CPU tensors [n]: `hi` bf16, `lo` int16, `exp_avg` and `exp_avg_sq` fp32, `grad` bf16 (only
        read). The gradient is widened to fp32 and multiplied by `hyper.grad_scale` in fp32. Returns when every element
        is written. `segments`: int64 [s, 2], the (begin, end) of the elements to update, in order and disjoint; all
        without. Raises ValueError for a tensor of another shape, dtype or place, or segments outside of it.
        """
        tensors = {
            "hi": (hi, torch.bfloat16),
            "lo": (lo, torch.int16),
            "exp_avg": (exp_avg, torch.float32),
            "exp_avg_sq": (exp_avg_sq, torch.float32),
            "grad": (grad, torch.bfloat16),
        }
        _check_tensors(tensors)
        segments = _check_segments(segments, hi.numel())
        if self._library is not None:
            self._step_native(
                self._library.layer_adam_split, [tensor for tensor, _ in tensors.values()], hyper, segments
            )
            return
        for begin, end in _segment_chunks(segments):
            chunk = slice(begin, end)
            master = join_master(hi[chunk], lo[chunk])
            _fused_adamw(master, exp_avg[chunk], exp_avg_sq[chunk], grad[chunk], hyper)
            split_master(master, hi[chunk], lo[chunk])

    def step_fp32(
        self,
        param: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        hyper: AdamHyper,
        segments: np.ndarray | None = None,
    ) -> None:
        """The same step on fp32 parameters with an fp32 gradient: four contiguous CPU tensors [n], all fp32."""
        tensors = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
        _check_tensors({name: (tensor, torch.float32) for name, tensor in tensors.items()})
        segments = _check_segments(segments, param.numel())
        if self._library is not None:
            self._step_native(self._library.layer_adam_fp32, list(tensors.values()), hyper, segments)
            return
        for begin, end in _segment_chunks(segments):
            chunk = slice(begin, end)
            _fused_adamw(param[chunk], exp_avg[chunk], exp_avg_sq[chunk], grad[chunk], hyper)

    def close(self) -> None:
        """Ends the threads. A later step that needs them raises RuntimeError."""
        self._pool.shutdown()

    def _step_native(
        self, entry: Callable[..., None], tensors: list[Tensor], hyper: AdamHyper, segments: np.ndarray
    ) -> None:
        coefficients = _Coefficients.of(hyper, self._flush_denormals)
        addresses = [tensor.data_ptr() for tensor in tensors]

        def update(part: np.ndarray) -> None:  # ctypes releases the interpreter lock for the call
            entry(ISA_CODES[self.isa], ctypes.byref(coefficients), part.ctypes.data, len(part), *addresses)

        own, *others = thread_segments(segments, self.num_threads) or [segments]
        pending = [self._pool.submit(update, part) for part in others]
        try:
            update(own)
        finally:  # also after Ctrl-C: nobody may write into the tensors once this returns
            for future in pending:
                future.result()


def thread_slices(numel: int, num_threads: int) -> list[tuple[int, int]]:
    """Cuts [0, numel) into at most `num_threads` slices (begin, end), aligned to cache lines and none of them tiny."""
    if numel == 0:
        return []
    share = max(-(-numel // num_threads), MIN_ELEMENTS_PER_THREAD)
    share = -(-share // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    return [(begin, min(begin + share, numel)) for begin in range(0, numel, share)]


def thread_segments(segments: np.ndarray, num_threads: int) -> list[np.ndarray]:
    """Cuts segments, int64 [s, 2], into lists of segments of about as many elements each, one a thread.

    A segment that lies across a cut is cut: the shares are those of `thread_slices` over all elements in a row.
    """
    ends = np.cumsum(segments[:, 1] - segments[:, 0])  # in elements of all segments laid end to end
    parts = []
    for begin, end in thread_slices(int(ends[-1]) if len(ends) else 0, num_threads):
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        part = segments[first : last + 1].copy()
        part[0, 0] = segments[first, 1] - (ends[first] - begin)
        part[-1, 1] = segments[last, 1] - (ends[last] - end)
        parts.append(part)
    return parts


@functools.cache
def _native_library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled layer_adam.c with its functions declared, and where it came from, or None and why there is none."""
    library, origin = native_build.load_layer_adam()
    if library is not None:
        leading: list[Any] = [ctypes.c_int, ctypes.POINTER(_Coefficients), ctypes.c_void_p, ctypes.c_int64]
        library.layer_adam_split.argtypes = [*leading, *[ctypes.c_void_p] * 5]
        library.layer_adam_split.restype = None
        library.layer_adam_fp32.argtypes = [*leading, *[ctypes.c_void_p] * 4]
        library.layer_adam_fp32.restype = None
    return library, origin


def _choose_isa(library: ctypes.CDLL, isa: str) -> tuple[str, str]:
    supported = [name for name, code in ISA_CODES.items() if library.layer_adam_isa_supported(code)]
    if isa == "auto":
        return supported[-1], f"{supported[-1]} is the widest of layer_adam.c that this CPU has"
    if isa not in supported:
        raise ValueError(
            f'LayerAdam: isa={isa!r}, but this CPU has {", ".join(supported)}; use one of these or isa="auto"'
        )
    return isa, f"{isa} was asked for"


def _fused_adamw(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, hyper: AdamHyper) -> None:
    """PyTorch's fused AdamW on one fp32 chunk, in place, without its remainder loop (see the module's docstring)."""
    tensors = [param, exp_avg, exp_avg_sq, grad.to(torch.float32) * hyper.grad_scale]
    padding = -param.numel() % TORCH_VECTOR
    padded = [torch.nn.functional.pad(tensor, (0, padding)) for tensor in tensors] if padding else tensors
    before = padded[0].clone() if _step_size(hyper) == 0.0 else None
    torch._fused_adamw_(
        [padded[0]],
        [padded[3]],
        [padded[1]],
        [padded[2]],
        [],
        [torch.tensor(float(hyper.step))],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )
    if before is not None:  # PyTorch turns -0.0 into +0.0 here; see layer_adam.c, updated_param
        torch.where(padded[0] == before, before, padded[0], out=padded[0])
    if padding:
        for tensor, source in zip(tensors[:3], padded, strict=False):
            tensor.copy_(source[: tensor.numel()])


def _chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((chunk, min(chunk + CHUNK, end)) for chunk in range(begin, end, CHUNK))


def _segment_chunks(segments: np.ndarray) -> Iterator[tuple[int, int]]:
    for begin, end in segments.tolist():
        yield from _chunks(begin, end)


def _check_segments(segments: np.ndarray | None, numel: int) -> np.ndarray:
    if segments is None:
        return np.array([[0, numel]], np.int64)
    bounds = segments.ravel()
    if segments.dtype != np.int64 or segments.ndim != 2 or segments.shape[1] != 2 or not segments.flags.c_contiguous:
        raise ValueError(
            f"LayerAdam: segments are {segments.dtype} {segments.shape}; they must be contiguous int64 [s, 2]"
        )
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > numel or (np.diff(bounds) < 0).any()):
        raise ValueError(f"LayerAdam: segments must be in order, disjoint and within [0, {numel}]")
    return segments


def _check_tensors(tensors: dict[str, tuple[Tensor, torch.dtype]]) -> None:
    """The native code trusts the addresses it is given, so every tensor is checked first."""
    first_name, (first, _) = next(iter(tensors.items()))
    for name, (tensor, dtype) in tensors.items():
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"layer_adam: {name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on "
                f"{tensor.device}; it must be a contiguous one-dimensional {dtype} tensor on the CPU"
            )
        if tensor.numel() != first.numel():
            raise ValueError(
                f"layer_adam: {name} has {tensor.numel()} elements, {first_name} has {first.numel()}; they must match"
            )
