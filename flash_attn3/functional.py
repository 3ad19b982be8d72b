"""Forward and backward of attention as two plain functions, for code that owns the step between.

A context-parallel (ring) step computes partial results, merges them by their LSE, and later calls
the backward of each part with the *merged* out and LSE; activation checkpointing of one's own keeps
what it likes. `torch.autograd` saves only what one call saw, so such code needs the pair:

    out, lse = flash_attn_fwd(q, k_part, v_part, causal=...)
    ...
    dq, dk, dv = flash_attn_bwd(dout, q, k_part, v_part, merged_out, merged_lse, causal=...)

The sum of dq over the parts, and dk and dv of each part, are the gradients of the whole. Both take
dense tensors (B, S, H, D), or ragged ones (total, H, D) with cu_seqlens and max_seqlen.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from . import ops
from .backends import operators as _fallback  # noqa: F401 - registers the fallback operators
from .backends.call import lse_shape
from .env import forced_backend

__all__ = ["flash_attn_fwd", "flash_attn_bwd"]


def flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention; the options mean what they mean to `flash_attn_func`.

    out: like q with the head dim of v. lse (float32): (B, H, Sq) or (H, total_q), the natural log
    of each row's sum of exponentials; -inf, with out 0, where a query sees no key. Both are
    differentiable; under `torch.no_grad()`, or inside an autograd.Function, nothing is recorded.
    """
    options = _options(
        q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, deterministic, sm_margin)
    if _runs_on_kernels(q, k, v):
        return torch.ops.flash_attn3.fwd(q, k, v, *options)
    return torch.ops.flash_attn3.fallback_fwd(q, k, v, *options)


def flash_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of `out`, and of the LSE where `dlse` is given.

    out and lse may be those of `flash_attn_fwd` on the same arguments, or of a larger softmax that
    these keys are a part of (merged over ring steps, with a sink): P is exp(scores - lse), and
    rowsum(dout * out) is taken from what is given. A row whose lse is -inf or +inf contributes
    nothing: its dq is 0 and it adds 0 to dk and dv. Rows outside of every sequence get 0.
    `deterministic=True` gives equal bits from run to run.
    """
    options = _options(
        q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, deterministic, sm_margin)
    out_shape = (*q.shape[:-1], v.shape[-1])
    of_lse = lse_shape(q, cu_seqlens_q is not None)
    for name, t, shape in (("dout", dout, out_shape), ("out", out, out_shape),
                           ("lse", lse, of_lse), ("dlse", dlse, of_lse)):
        if t is not None and t.shape != torch.Size(shape):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; expected {tuple(shape)}")
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected {q.device}, where q is")
    if _runs_on_kernels(q, k, v):
        return torch.ops.flash_attn3.bwd(dout, dlse, q, k, v, out, lse, *options)
    # Of the two sentinels for "nothing here", some of PyTorch's kernels know one: exp(s - inf) = 0.
    lse = lse.masked_fill(lse == -float("inf"), float("inf"))
    return torch.ops.flash_attn3.fallback_bwd(dout, dlse, q, k, v, out, lse, *options)


def _runs_on_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    forced = forced_backend()
    if forced is not None and forced != "sm90":
        return False
    refusal = ops.kernel_refusal(q, k, v)
    if refusal is not None and forced == "sm90":
        raise ValueError(f"FLASH_ATTN3_BACKEND=sm90 can't run this call: {refusal}")
    return refusal is None


def _options(q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, cu_seqlens_q,
             cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, deterministic,
             sm_margin) -> tuple:
    """The operator's arguments after v, checked as far as shapes tell."""
    for name, t, cu_seqlens in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k),
                                ("v", v, cu_seqlens_k)):
        rank, layout = (4, "(B, S, H, D)") if cu_seqlens is None else (3, "(total, H, D)")
        if t.dim() != rank:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; expected {layout} "
                f"{'without' if cu_seqlens is None else 'with'} cu_seqlens")
        if t.dtype != q.dtype or t.device != q.device:
            raise TypeError(
                f"{name} is {t.dtype} on {t.device}; expected {q.dtype} on {q.device}, like q")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; expected that of k, {tuple(k.shape)}, up to the head "
            "dim")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head dim {k.shape[-1]}; expected {q.shape[-1]}, that of q")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            f"q has {q.shape[-2]} heads and k has {k.shape[-2]}; expected a multiple of those of k")
    if cu_seqlens_q is None and cu_seqlens_k is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; expected {q.shape[0]}, that of q")
    if cu_seqlens_q is None:
        max_seqlen_q = q.shape[1]
    elif max_seqlen_q is None:
        raise ValueError("max_seqlen_q is None; expected an int, since cu_seqlens_q is given")
    if cu_seqlens_k is None:
        max_seqlen_k = k.shape[1]
    elif max_seqlen_k is None:
        raise ValueError("max_seqlen_k is None; expected an int, since cu_seqlens_k is given")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(f"window_size is {window_size}; expected two ints of at least -1")
    return (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
            float(softmax_scale), causal, left, 0 if causal else right, attention_chunk,
            float(softcap), deterministic, sm_margin)
