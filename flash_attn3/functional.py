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

from . import checks, dispatch, interface
from .backends.call import lse_shape, make_call
from .quantized import is_e4m3_call

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
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, sm_margin)
    return interface._run(q, k, v, None, None, None, None, options)


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
    rowsum(dout * out) is taken from what is given. dout, out, lse and dlse may be of any
    floating-point dtype, as a merged out in float32; what runs may round them to the dtypes that
    `flash_attn_fwd` gives. A row whose lse is -inf or +inf contributes nothing: its dq is 0 and it
    adds 0 to dk and dv. Rows outside of every sequence get 0.
    `deterministic=True` gives equal bits from run to run.
    """
    options = _options(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, sm_margin)
    if is_e4m3_call(q, k, v):
        raise TypeError(
            "q, k or v is float8_e4m3fn; expected a dtype that has gradients (give the inputs that "
            "it was quantised from)")
    out_shape = (*q.shape[:-1], v.shape[-1])
    of_lse = lse_shape(q, cu_seqlens_q is not None)
    for name, t, shape in (("dout", dout, out_shape), ("out", out, out_shape),
                           ("lse", lse, of_lse), ("dlse", dlse, of_lse)):
        if t is not None or name != "dlse":
            checks.tensor(name, t)
            checks.shape(name, t, shape)
            checks.on_device(name, t, q)
            checks.floating_point(name, t)
    if dispatch.uses_kernels(make_call(q, k, v, *options[:-1])):
        return torch.ops.flash_attn3.bwd(dout, dlse, q, k, v, out, lse, *options)
    return torch.ops.flash_attn3.fallback_bwd(dout, dlse, q, k, v, out, lse, *options)


def _options(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
             softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
             sm_margin) -> tuple:
    """Every argument checked; what the operators take after v (or lse)."""
    return interface._prepare(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, None, None, None, None, window_size, attention_chunk, softcap,
        1, None, deterministic, sm_margin)
