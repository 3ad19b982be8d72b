"""The public functions; the docstring of flash_attn_func has the meanings, shapes and units.

Scores are softmax_scale * q k^T, capped, then masked; masks align to the bottom right: with
p = i + Sk - Sq, query i sees key j only where the options below allow it, per sequence.
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
from torch import Tensor

from . import checks, dispatch, env, ops, quantized
from .backends import e4m3, kvcache
from .backends.call import make_call, unpacked
from .quantized import Quantized

_compiled = getattr(ops, "_C", None)
_dense_fast = getattr(_compiled, "fwd_dense_fast", None)
_varlen_fast = getattr(_compiled, "fwd_varlen_fast", None)
_qkvpacked_fast = getattr(_compiled, "fwd_qkvpacked_fast", None)
_LENGTHS = 6  # of the operators' options: those that a call of whole tensors does not need


def _vector(t: Optional[Tensor]) -> Optional[Tensor]:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _prepare(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
             softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size,
             attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin):
    """Checks every argument; returns the operators' arguments after q, k, v."""
    given = q, k, v
    q, k, v = quantized.plain(q, k, v)
    ragged_q, ragged_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    checks.qkv(q, k, v, ragged_q, ragged_k, has_qv=qv is not None, quantises_q=True)
    checks.options(softmax_scale, causal, attention_chunk, softcap, num_splits, pack_gqa,
                   deterministic, sm_margin)
    left, right = checks.window(window_size)
    if ragged_q:
        checks.int_vector("cu_seqlens_q", cu_seqlens_q, None, q)
        batch = cu_seqlens_q.shape[0] - 1
    else:
        batch = q.shape[0]
    if ragged_k:
        checks.int_vector("cu_seqlens_k", cu_seqlens_k, batch + 1, q, "batch + 1 as for q")
    else:
        checks.shape("k", k, (batch,) + tuple(k.shape[1:]), "with q's batch size")
    if ragged_q or max_seqlen_q is not None:
        checks.integer("max_seqlen_q", max_seqlen_q, 0)
    if ragged_k or max_seqlen_k is not None:
        checks.integer("max_seqlen_k", max_seqlen_k, 0)
    max_seqlen_q = max_seqlen_q if ragged_q else q.shape[1]
    max_seqlen_k = max_seqlen_k if ragged_k else k.shape[1]
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            checks.int_vector(name, used, batch, q, "one length per sequence")
    if qv is not None:
        checks.qv_tensor(qv, q, v)
    quantized.check(given, (q_descale, k_descale, v_descale), q, k, v, batch, cu_seqlens_q,
                    cu_seqlens_k, softcap, qv)
    if env.check_values():
        _check_values(q, k, batch, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                      seqused_q, seqused_k)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[-1] + (0 if qv is None else qv.shape[-1]))
    return (
        _vector(cu_seqlens_q), _vector(cu_seqlens_k), _vector(seqused_q), _vector(seqused_k),
        max_seqlen_q, max_seqlen_k, float(softmax_scale), bool(causal), left,
        0 if causal else right, attention_chunk, float(softcap), bool(deterministic), sm_margin)


def _check_values(q, k, batch, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
                  seqused_k) -> None:
    for side, t, cu, longest, used in (("q", q, cu_seqlens_q, max_seqlen_q, seqused_q),
                                       ("k", k, cu_seqlens_k, max_seqlen_k, seqused_k)):
        limits = [t.shape[1]] * batch if cu is None else checks.offsets_values(
            f"cu_seqlens_{side}", cu, t.shape[0], longest, f"max_seqlen_{side}", side)
        if used is not None:
            checks.lengths_values(f"seqused_{side}", used, limits)


def _has_descales(q_descale, k_descale, v_descale) -> bool:
    return not (q_descale is None and k_descale is None and v_descale is None)


def _scaled(t: Tensor, descale: Optional[Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    return e4m3.dequantize(t, descale, 0, tuple(t.shape[:-2]), cu_seqlens)


def _run(q, k, v, qv, q_descale, k_descale, v_descale, options,
         with_lse: bool = True, qkv: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call, by the backend that dispatch selects.

    qkv: the tensor that q, k, v of a dense call are packed in, if so.
    """
    descales = q_descale, k_descale, v_descale
    if quantized.is_e4m3_call(q, k, v):
        return quantized.attend(q, k, v, qv, descales, options, with_lse)
    has_descales = _has_descales(*descales)
    call, why = dispatch.described(
        make_call(q, k, v, *options[:-1]), k.dtype, qv is not None, has_descales)
    if dispatch.uses_kernels(call, why):
        if qkv is not None:
            return torch.ops.flash_attn3.fwd_qkvpacked(qkv, q.shape[2], *options[_LENGTHS:])
        return torch.ops.flash_attn3.fwd(q, k, v, *options)
    dtype = q.dtype
    if has_descales:
        q, k, v = (_scaled(t, descale, cu) for t, descale, cu in zip(
            (q, k, v), descales, (options[0], options[1], options[1])))
        qv = None if qv is None else _scaled(qv, q_descale, options[0])
    if qv is not None:
        # softmax(q k^T + qv v^T) is attention of (q, qv) to (k, v) joined along the head dimension.
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
    out, lse = torch.ops.flash_attn3.fallback_fwd(q, k, v, *options)
    return out.to(dtype), lse


def backend_for(
    q: Union[Tensor, Quantized],
    k: Union[Tensor, Quantized],
    v: Union[Tensor, Quantized],
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> dispatch.Backend:
    """Which backend would run this call of flash_attn_func or, with cu_seqlens_q and cu_seqlens_k,
    of flash_attn_varlen_func; arguments and errors as theirs.

    Returns:
        an object with `name` ("sm90", "aten_flash", "aten_cpu_flash", "aten_efficient", "flex" or
        "blockwise") and `reasons`, a dict from each preferred backend to why it can't run the call.
    """
    options = _prepare(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, num_splits, pack_gqa, deterministic, sm_margin)
    q, k, v = quantized.plain(q, k, v)
    return dispatch.select(*dispatch.described(
        make_call(q, k, v, *options[:-1]), k.dtype, qv is not None,
        _has_descales(q_descale, k_descale, v_descale)))


def flash_attn_func(
    q: Union[Tensor, Quantized],
    k: Union[Tensor, Quantized],
    v: Union[Tensor, Quantized],
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Exact attention of a dense batch, differentiable in q, k, v.

    Args:
        q: (B, Sq, H, D), float16, bfloat16 or float8_e4m3fn (float32, float64 on the fallback).
        k: (B, Sk, Hk, D); H is a multiple of Hk. D, Dv: multiples of 8 (e4m3: 16) up to 256.
        v: (B, Sk, Hk, Dv). All of one dtype; or k and v in e4m3 and q in float16 or bfloat16,
            which the call then quantises, a scale for each 128 rows of a head. Each of q, k, v can
            be a `Quantized` of `quantize`, which brings its scales.
        softmax_scale: factor of q k^T; None is 1/sqrt(D), with qv 1/sqrt(D + Dv).
        causal: query i sees key j only if j <= p.
        qv: (B, Sq, H, Dv) with D 64 and Dv 256 or 512: qv v^T is added to q k^T.
        q_descale, k_descale, v_descale: (B, Hk) float32 of any strides, multiply the values of
            q, k, v (q's head h by that of KV head h // (H / Hk)); None is 1.
        window_size: (l, r): keys p - l to p + r, both included; -1 is unlimited.
        attention_chunk: c > 0: keys j with floor(j / c) = floor(p / c) only.
        softcap: c > 0: scores become c * tanh(score / c).
        num_splits, pack_gqa: hints, without influence on the result beyond rounding.
        deterministic: gradients bitwise equal from run to run (the forward always is).
        sm_margin: number of SMs that the attention kernels leave free (the short passes before
            and after a gradient's take all).
        return_attn_probs: return (out, lse), not out alone.

    Returns:
        out (B, Sq, H, Dv) in q's dtype (e4m3: bfloat16), and with return_attn_probs lse
        (B, H, Sq) float32, the natural log of the sum of exponentials, differentiable too. A query
        that sees no key has out 0, lse -inf and gradients 0.

    Raises:
        ValueError, TypeError: an argument is not as above, or not in the range of float32 or int64;
            the message names it.
        NotImplementedError: a gradient is asked of a call with e4m3 inputs
            (`flash_attn_fp8_func` has one).
        RuntimeError: CUDA reported an error, or a second derivative was asked for.
    """
    if not torch.compiler.is_compiling() and _dense_fast is not None and (
            qv is None and q_descale is None and k_descale is None and v_descale is None
            and num_splits == 1 and pack_gqa is None and type(window_size) is tuple
            and len(window_size) == 2):
        result = _dense_fast(q, k, v, softmax_scale, causal, *window_size, attention_chunk,
                             softcap, deterministic, sm_margin)
        if result is not None:
            return result if return_attn_probs else result[0]
    options = _prepare(
        q, k, v, None, None, None, None, None, None, softmax_scale, causal, qv, q_descale,
        k_descale, v_descale, window_size, attention_chunk, softcap, num_splits, pack_gqa,
        deterministic, sm_margin)
    out, lse = _run(
        q, k, v, qv, q_descale, k_descale, v_descale, options, with_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """`flash_attn_func` of q, k, v packed in one tensor; they are read where they lie.

    The kernels write the gradients of q, k, v where they lie in one gradient of qkv. So the way
    from a projection to qkv is to be one of views: a call of `flash_attn_func` with
    `qkv.unbind(2)` gives the same values, but its backward copies all gradients together.

    Args:
        qkv: (B, S, 3, H, D), or (B, S, H + 2 Hk, D) with the heads of q, k, v in this order.
        num_heads_q: H, required for a 4-dimensional qkv, and otherwise None or qkv's H.

    Other arguments, results and errors: see `flash_attn_func`.
    """
    if not torch.compiler.is_compiling() and _qkvpacked_fast is not None and (
            q_descale is None and k_descale is None and v_descale is None
            and type(window_size) is tuple and len(window_size) == 2):
        result = _qkvpacked_fast(qkv, num_heads_q, softmax_scale, causal, *window_size,
                                 attention_chunk, softcap, deterministic, sm_margin)
        if result is not None:
            return result if return_attn_probs else result[0]
    checks.tensor("qkv", qkv, (4, 5))
    checks.dtype("qkv", qkv)
    checks.head_dim("qkv", qkv.shape[-1], qkv.dtype)
    if qkv.dtype == dispatch.E4M3:
        checks.no_gradient_of_e4m3([("qkv", qkv)])
    if num_heads_q is not None:
        checks.integer("num_heads_q", num_heads_q, 1)
    if qkv.dim() == 5:
        if qkv.shape[2] != 3 or qkv.shape[3] < 1:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}; expected (batch, seqlen, 3, heads, head dim) "
                "with a head or more")
        if num_heads_q is not None and num_heads_q != qkv.shape[3]:
            raise ValueError(
                f"num_heads_q is {num_heads_q}; expected None or {qkv.shape[3]}, the heads of qkv")
    else:
        if num_heads_q is None:
            raise ValueError(
                "num_heads_q is None; expected the number of query heads, since qkv has 4 "
                f"dimensions, shape {tuple(qkv.shape)}")
        rest = qkv.shape[2] - num_heads_q
        if rest < 2 or rest % 2:
            raise ValueError(
                f"num_heads_q is {num_heads_q}; expected qkv's {qkv.shape[2]} heads less an even "
                "number of KV heads")
        if num_heads_q % (rest // 2):
            raise ValueError(
                f"num_heads_q is {num_heads_q}; expected a multiple of {rest // 2}, the KV heads "
                f"that it leaves of qkv's {qkv.shape[2]} heads")
    q, k, v = unpacked(qkv, num_heads_q)
    options = _prepare(
        q, k, v, None, None, None, None, None, None, softmax_scale, causal, None, q_descale,
        k_descale, v_descale, window_size, attention_chunk, softcap, 1, None, deterministic,
        sm_margin)
    out, lse = _run(
        q, k, v, None, q_descale, k_descale, v_descale, options, with_lse=return_attn_probs,
        qkv=qkv)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Union[Tensor, Quantized],
    k: Union[Tensor, Quantized],
    v: Union[Tensor, Quantized],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Exact attention of sequences that lie one behind another, differentiable in q, k, v.

    Args:
        q: (total_q, H, D).  k: (total_k, Hk, D).  v: (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device: sequence b is rows cu[b] to
            cu[b + 1] - 1. Rows outside of every sequence may hold anything, NaN included; their
            outputs and gradients are 0.
        max_seqlen_q, max_seqlen_k: ints; no sequence is longer.
        seqused_q, seqused_k: (B,) int32: rows in use of each sequence, from its first on.

    Other arguments and errors: see `flash_attn_func`; descales are (B, Hk).

    Returns:
        out (total_q, H, Dv), and with return_attn_probs lse (H, total_q) float32.
    """
    if not torch.compiler.is_compiling() and _varlen_fast is not None and (
            qv is None and q_descale is None and k_descale is None and v_descale is None
            and num_splits == 1 and pack_gqa is None and type(window_size) is tuple
            and len(window_size) == 2):
        result = _varlen_fast(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                              seqused_q, seqused_k, softmax_scale, causal, *window_size,
                              attention_chunk, softcap, deterministic, sm_margin)
        if result is not None:
            return result if return_attn_probs else result[0]
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(name, t)
    options = _prepare(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, num_splits, pack_gqa, deterministic, sm_margin)
    out, lse = _run(
        q, k, v, qv, q_descale, k_descale, v_descale, options, with_lse=return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Attention to a key and value cache, which new keys and values are first appended to.

    Args:
        q: (B, Sq, H, D), or (total_q, H, D) with cu_seqlens_q.
        k_cache, v_cache: (B_cache, S_cache, Hk, D or Dv), or pages (num_pages, page_size, Hk, D or
            Dv) with page_table. Written in place when k and v are given.
        k, v: (B, S_new, Hk, D or Dv), or (total_new, Hk, D or Dv) with cu_seqlens_k_new: put at
            slots cache_seqlens[b], cache_seqlens[b] + 1, ...; slots past the cache are dropped.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), a float dtype. Keys are turned at the
            positions of their slots; queries too (causal, windowed or chunked), or all at position
            cache_seqlens (no mask).
        cache_seqlens: int or (B,) int32: slots in use before the append; None is the whole cache.
        cache_batch_idx: (B,) int32: the row of the cache of each sequence; None is 0 to B - 1.
        cache_leftpad: (B,) int32: the first slot in use of each sequence; None is 0.
        page_table: (B, max_pages) int32; entries past a length may hold anything.
        cu_seqlens_q: (B + 1,) int32 with max_seqlen_q, an int.
        rotary_seqlens: (B,) int32: replaces cache_seqlens as the first rotary position.
        rotary_interleaved: pairs are (0, 1), (2, 3), ...; else (0, r / 2), (1, r / 2 + 1), ...
        scheduler_metadata: what get_scheduler_metadata gave for the same batch size, heads, head
            dims and page size, or None.
        return_softmax_lse: return (out, lse), not out alone.

    Other arguments and errors: see `flash_attn_func`. There is no gradient: a call that would need
    one raises NotImplementedError.

    Returns:
        out like q with Dv; and lse (B, H, Sq), or (H, total_q), float32.
    """
    out, lse = kvcache.attend(
        q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk,
        softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, _run)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them.

    Args:
        out_partial: (splits, B, S, H, Dv) or (splits, total, H, Dv), a float dtype.
        lse_partial: (splits, B, S, H) or (splits, total, H) float32, -inf where a split saw no key.
        out: written in place and returned, if given: (B, S, H, Dv) or (total, H, Dv), a float
            dtype.
        out_dtype: float dtype of the result; None is out's, or out_partial's.

    Returns:
        out, and lse (B, S, H) or (total, H) float32.
    """
    return kvcache.combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> Tensor:
    """A plan for calls of flash_attn_with_kvcache with these sizes: an int32 tensor.

    Pass it as `scheduler_metadata`; a call of another batch size, of other head counts or head
    dims, or of another page size raises ValueError. Everything else may change between the plan
    and the calls: nothing in it depends on lengths, dtype, masks or the values of `cache_seqlens`,
    a (B,) int32 tensor.

    Args:
        headdim, headdim_v: D and Dv as to `flash_attn_with_kvcache`, Dv 256 or 512 with D 64 for qv
            included; headdim_v None is headdim.
        page_size: rows of a page of a cache with page_table; None without.
    """
    return kvcache.scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, page_size,
        max_seqlen_k_new, causal, window_size, attention_chunk, has_softcap, num_splits, pack_gqa,
        sm_margin)
