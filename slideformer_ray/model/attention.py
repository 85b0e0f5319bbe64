"""One attention function for all cases: it picks the fastest PyTorch path that is right for the case, and says which.

    path        on                                  serves
    cudnn       Hopper and later, bf16 and fp16     causal rows
    flash       Ampere and later, ROCm, the same    causal rows
    varlen      Ampere and later, the same          packed rows, sliding windows
    efficient   any GPU, fp32 too                   causal rows, masks; packing and windows as masks
    math        any GPU                             what nothing above takes; holds all scores at once
    cpu         no GPU                              everything; packing and windows as masks
The order is that of the table. Which path a case takes hangs on dtype, head size and device, never on values, so a run
keeps its paths. PyTorch promises equal bits of gradients for equal input only under
`torch.use_deterministic_algorithms(True)`. Without it, on one H200 with PyTorch 2.11, cudnn's repeated in 9 of 9 runs
and flash's did not (docs/measurements.md).

A window of W means what it means in transformers' masks: a token sees itself and the W - 1 before it; 0 or None means
none. transformers' own "sdpa" function ignores the window where it is given no mask, and then silently attends to the
whole row; `register` makes this one known to transformers under the name "slideformer", with transformers' masks.
Tested by tests/model/test_attention.py against transformers' eager attention.

Shape suffixes: B rows, N query heads, K key-value heads, S positions, D head size.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

varlen_attn: Any = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    pass

NAME = "slideformer"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Before 9.15.1 cuDNN is wrong for some lengths that are no multiple of 128 (pytorch issue 169849); since then PyTorch
# itself prefers it.
CUDNN_TRUSTED_FROM = 91501

_VARLEN_KEYWORDS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()


def attend(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    path: str | None = None,
) -> Tensor:
    """Attention output [B, S, N, D], contiguous on the paths of the GPU. Differentiable.

    N is a multiple of K. Heads are [rows, heads, positions, size] with any strides but 1 along the size.
    scale: default 1 / sqrt(D). window: see the module. mask: [B or 1, 1 or N, S, S], bool (True: attend) or additive;
    it alone then decides, `window` and `causal` being in it already.
    cu_seqlens: int32 [number of sequences + 1], where sequences packed into the rows begin and end, counted over all
    B x S positions, which they must cover; each attends to itself alone. max_seqlen: the longest of them, default S.
    path: one of the table, instead of the fastest. Raises ValueError where lengths differ without a mask, and where the
    named path does not serve the case.
    """
    seq_q, seq_k = q_BNSD.shape[2], k_BKSD.shape[2]
    window = window if window and window < seq_k else None
    if mask is None and seq_q != seq_k:
        if seq_q != 1 or cu_seqlens is not None:
            raise ValueError(f"attention: {seq_q} queries over {seq_k} keys need a mask; only equal lengths do without")
        causal, k_BKSD, v_BKSD, window = False, *(t[:, :, -(window or seq_k) :] for t in (k_BKSD, v_BKSD)), None
    if mask is not None:
        causal, window, cu_seqlens = False, None, None
    bounded = window is not None or cu_seqlens is not None
    if bounded and not causal:
        raise ValueError("attention: windows and packed rows are causal; without it, give a mask")
    path = path or _choose(q_BNSD, k_BKSD, mask is not None, causal, bounded)
    if path == "varlen":
        return _varlen(q_BNSD, k_BKSD, v_BKSD, scale, window, cu_seqlens, max_seqlen)
    if bounded:
        mask, causal = _bounded_mask(q_BNSD, window, cu_seqlens), False
    return _sdpa(q_BNSD, k_BKSD, v_BKSD, mask, causal, scale, path).transpose(1, 2)


def _choose(q: Tensor, k: Tensor, masked: bool, causal: bool, bounded: bool) -> str:
    if not q.is_cuda:
        return "cpu"
    return _gpu_path(
        q.device.index, q.dtype, q.shape[1], k.shape[1], q.shape[3], k.shape[2] == 1, masked, causal, bounded
    )


@torch.compiler.assume_constant_result  # to the compiler, a layer has one path
def _gpu_path(*case: Any) -> str:
    return _probe(*case, torch.are_deterministic_algorithms_enabled())


@functools.cache
def _probe(
    device: int,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    single: bool,
    masked: bool,
    causal: bool,
    bounded: bool,
    deterministic: bool,
) -> str:
    """Ask PyTorch what takes such heads. Its answers hang on lengths in one case alone: cuDNN takes no single key."""
    hip, capability = torch.version.hip is not None, torch.cuda.get_device_capability(device)
    half = dtype in (torch.bfloat16, torch.float16)
    if bounded and half and not hip and capability[0] >= 8 and head_dim % 8 == 0 and head_dim <= 256:
        if "window_size" in _VARLEN_KEYWORDS:
            return "varlen"
    seq = 1 if single else 64
    new = functools.partial(torch.empty, device=f"cuda:{device}")
    q, k = (new(1, n, seq, head_dim, dtype=dtype, requires_grad=True) for n in (num_heads, num_kv_heads))
    mask = new(1, 1, seq, seq, dtype=torch.bool) if masked or bounded else None
    causal = causal and not bounded
    if mask is None:
        params = SDPAParams(q, k, k, None, 0.0, causal, num_heads != num_kv_heads)
        trusted = not hip and capability[0] >= 9 and (torch.backends.cudnn.version() or 0) >= CUDNN_TRUSTED_FROM
        if trusted and can_use_cudnn_attention(params):
            return "cudnn"
        if can_use_flash_attention(params):
            return "flash"
    # This path takes no grouped heads: keys and values are repeated for it, so the query stands for them here.
    if can_use_efficient_attention(SDPAParams(q, q, q, mask, 0.0, causal, False)):
        return "efficient"
    return "math"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, path: str) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and path == "efficient":
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        grouped = False
    arguments: dict[str, Any] = dict(attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    if path == "cpu":
        return F.scaled_dot_product_attention(q, k, v, **arguments)
    if path not in BACKENDS:
        raise ValueError(
            f"attention: path {path!r} does not serve this case; known: {', '.join(BACKENDS)}, varlen, cpu"
        )
    with sdpa_kernel(BACKENDS[path]):
        return F.scaled_dot_product_attention(q, k, v, **arguments)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    if varlen_attn is None or not q.is_cuda:
        raise ValueError("attention: the path varlen needs a GPU and torch 2.10 or later")
    rows, _, seq, _ = q.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (rows + 1) * seq, seq, dtype=torch.int32, device=q.device)
    options = {"enable_gqa": True} if "enable_gqa" in _VARLEN_KEYWORDS else {}  # earlier versions ask for nothing
    longest = seq if max_seqlen is None else max_seqlen
    out = varlen_attn(
        *(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)), cu_seqlens, cu_seqlens, longest, longest,
        scale=scale, window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    return out.unflatten(0, (rows, seq))


def _bounded_mask(q: Tensor, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """[B or 1, 1, S, S], True where a position attends: causal, within the window, within its packed sequence."""
    rows, _, seq, _ = q.shape
    position = torch.arange(seq, device=q.device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    mask = mask[None, None]
    if cu_seqlens is not None:
        token = torch.arange(rows * seq, dtype=cu_seqlens.dtype, device=q.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True).view(rows, 1, seq)
        mask = mask & (sequence[..., :, None] == sequence[..., None, :])
    return mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` under the names that transformers' attention modules use. Raises ValueError for what it does not do."""
    if dropout:
        raise ValueError(f"attention: dropout {dropout}; only 0 is supported, set attention_dropout so in config.json")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention: {type(module).__name__} asks for {name}, which only 'eager' has")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attend(
        query, key, value, scale=scaling, window=sliding_window, mask=attention_mask, causal=causal,
        cu_seqlens=cu_seq_lens_q, max_seqlen=max_length_q,
    )  # fmt: skip
    return out.contiguous(), None


def register() -> str:
    """Make `attention_forward` known to transformers; returns the name for `attn_implementation`.

    With it goes transformers' mask function of "sdpa": for an attention that has none registered, transformers makes no
    mask at all, and padding would be attended to.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def describe(
    device: torch.device | str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    packed: bool = False,
) -> str:
    """Which path such a layer takes: one line for the run's log."""
    q, k = (torch.empty(1, n, 2, head_dim, device=device, dtype=dtype) for n in (num_heads, num_kv_heads))
    bounded = bool(window) or packed
    path = _choose(q, k, False, True, bounded)
    case = [name for name, there in (("packed rows", packed), (f"window {window}", window)) if there]
    notes = []
    if bounded and path != "varlen":
        notes.append("as a mask")
    if num_heads != num_kv_heads and path == "efficient":
        notes.append("keys and values repeated")
    if path == "math":
        notes.append("slow: all scores are held at once")
    line = f"attention: {path} for {', '.join(case) or 'causal rows'}"
    line += f", {dtype} {num_heads}/{num_kv_heads} heads of {head_dim}"
    return line + (f" ({'; '.join(notes)})" if notes else "")
