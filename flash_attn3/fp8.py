"""e4m3 attention from float16 and bfloat16 inputs: `quantize`, and the calls that quantise
themselves and have a gradient.

A scale for each block of rows of a head keeps an outlier's harm to its block; a Hadamard rotation
of q and k along D spreads it over the block's columns and cancels in q k^T (both as published for
FlashAttention-3's FP8: https://arxiv.org/abs/2407.08608, section 3.3). Taking K's mean over the
sequence off its rows moves all scores of a query alike, which softmax does not see (published for
SageAttention: https://arxiv.org/abs/2410.02367). docs/fp8.md has the errors.
"""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

from . import checks, dispatch, interface, quantized
from .backends.call import lse_shape, make_call
from .ops import OPTIONS_SCHEMA
from .quantized import QuantizedQKV

INPUT_DTYPES = checks.HALF_DTYPES + (torch.float32,)


def _check_block(block) -> int:
    """As the operators take it: None is 0."""
    if block is None:
        return 0
    checks.integer("block", block, 0, "64, 128 or None", "64, 128 or None")
    if block not in (64, 128):
        raise ValueError(f"block is {block}; expected 64, 128 or None (one scale a KV head)")
    return block


def _check_input(q, k, v) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, t, (3, 4))
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{name} has dtype {t.dtype}; expected torch.float16 or torch.bfloat16 "
                "(or torch.float32, which PyTorch quantises)")
    for name, d in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if d < 16 or d > 256 or d % 16:
            raise ValueError(
                f"{name} has head dim {d}; expected a multiple of 16 from 16 to 256 for "
                "torch.float8_e4m3fn")


def _attends_by_kernel(q, k, v, options) -> bool:
    call, why = dispatch.described(
        make_call(q, k, v, *options[:-1]), torch.float8_e4m3fn, False, False)
    return dispatch.uses_kernels(call, why)


def _prepare(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
             seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
             window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
             sm_margin=0) -> tuple:
    _check_input(q, k, v)
    return interface._prepare(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, None, None, None, None, window_size, attention_chunk, softcap, 1,
        None, deterministic, sm_margin)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: Optional[int] = 128,
    rotate: bool = False,
    smooth_k: bool = False,
    transpose_v: Optional[bool] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
) -> QuantizedQKV:
    """q, k, v in e4m3 with their scales, for `flash_attn_func(*quantize(q, k, v), ...)` or
    `flash_attn_varlen_func`. One kernel a tensor: largest magnitude of a block, scale, cast.

    Args:
        q: (B, Sq, H, D), or (total_q, H, D) with cu_seqlens_q: float16 or bfloat16 (float32 too,
            by PyTorch). D, Dv: multiples of 16 up to 256.
        k, v: (B, Sk, Hk, D or Dv), or (total_k, Hk, D or Dv) with cu_seqlens_k.
        block: rows of a head of q that share a scale, 64 or 128; for k and v it is 128 with
            either; scales are powers of two. None: one scale a KV head and sequence, like the
            descales of `flash_attn_func`, made by PyTorch.
        rotate: multiply q and k by a Hadamard matrix along D (by the largest power of two that
            divides D), which spreads outliers and does not change q k^T.
        smooth_k: take the mean over the sequence off each head's rows of k. Softmax does not see
            it; attention puts what it does to the LSE back (q.shift). Not with a soft cap.
        transpose_v: write v as the kernel reads it at once, (blocks, Hk, Dv, 128), so that
            attention need not transpose it; None: where the attention kernel runs and block is
            given.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as to `flash_attn_varlen_func`, which
            must get the same: rows past them don't count for a scale, and a transposed v is 0
            there, which the kernel relies on.

    Returns:
        QuantizedQKV: three `Quantized` (data, scale, and how they lie). scale is float32,
        (B, H, blocks), or ragged (H, total // block + B), where sequence b's blocks start at
        cu_seqlens[b] // block + b; block None: (B, Hk). data * scale is the input, rotated and
        centred. Infinities become the largest value, a NaN stays in its row (with rotate: in a
        part of its row), a block of zeros has scale 1. Values of rows that no sequence has are
        unspecified.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it.
        NotImplementedError: q, k or v requires a gradient (`flash_attn_fp8_func` has one).
    """
    block_rows = _check_block(block)
    checks.boolean("rotate", rotate)
    checks.boolean("smooth_k", smooth_k)
    checks.boolean("transpose_v", transpose_v, optional=True)
    _check_input(q, k, v)
    longest = [None if cu is None else t.shape[0]
               for t, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k))]
    options = _prepare(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k)
    if torch.is_grad_enabled():
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, and quantize has none: use flash_attn_fp8_func, "
                    "or call under torch.no_grad()")
    if transpose_v is None:
        transpose_v = block_rows != 0 and _attends_by_kernel(q, k, v, options)
    return quantized.quantize_qkv(
        q, k, v, block_rows, bool(rotate), bool(smooth_k), bool(transpose_v), *options[:4])


def _check_scheme(smooth_k: bool, softcap: float) -> None:
    if smooth_k and softcap > 0:
        raise ValueError(
            f"smooth_k is True and softcap is {softcap}; expected one of them: a soft cap does "
            "not pass over what smooth_k takes off the scores")


def _attend(q, k, v, block, rotate, smooth_k, options, with_lse) -> tuple[Tensor, Tensor]:
    block = _check_block(block)
    checks.boolean("rotate", rotate)
    checks.boolean("smooth_k", smooth_k)
    _check_scheme(smooth_k, options[-3])
    with_lse = with_lse or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    return torch.ops.flash_attn3.fp8_fwd(
        q, k, v, block, bool(rotate), bool(smooth_k), with_lse, *options)


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block: Optional[int] = 128,
    rotate: bool = False,
    smooth_k: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Attention computed in e4m3 from float16 or bfloat16 q, k, v: `quantize`, then the kernel.

    Differentiable, straight through: gradients are those of the exact attention of q, k, v, from
    the saved inputs with this forward's out and LSE, by the 16-bit backward.

    Args:
        q, k, v: as to `flash_attn_func`, float16 or bfloat16; D, Dv multiples of 16 up to 256.
        block, rotate, smooth_k: as to `quantize`.

    Other arguments and errors: see `flash_attn_func`.

    Returns:
        out in q's dtype, and with return_attn_probs the LSE of the scores of q and k in e4m3 (with
        smooth_k too), float32, differentiable.
    """
    options = _prepare(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        attention_chunk=attention_chunk, softcap=softcap, deterministic=deterministic,
        sm_margin=sm_margin)
    out, lse = _attend(q, k, v, block, rotate, smooth_k, options, return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_fp8_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block: Optional[int] = 128,
    rotate: bool = False,
    smooth_k: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """`flash_attn_fp8_func` of sequences that lie one behind another: q (total_q, H, D), k and v
    (total_k, Hk, D or Dv). Lengths as to `flash_attn_varlen_func`; lse is (H, total_q)."""
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(name, t)
    options = _prepare(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, sm_margin)
    out, lse = _attend(q, k, v, block, rotate, smooth_k, options, return_attn_probs)
    return (out, lse) if return_attn_probs else out


# ---- flash_attn3::fp8_fwd: one operator, so that autograd and a trace see one step ---------------


def _fp8_fwd(q, k, v, block, rotate, smooth_k, with_lse, *options) -> tuple[Tensor, Tensor]:
    # Once more, for a direct call of the operator.
    _check_block(block or None)
    _check_scheme(smooth_k, options[-3])
    _check_input(q, k, v)
    checks.qkv(q, k, v, options[0] is not None, options[1] is not None)
    transpose_v = block != 0 and _attends_by_kernel(q, k, v, options)
    operands = quantized.quantize_qkv(
        q, k, v, block, rotate, smooth_k, transpose_v, *options[:4], with_shift=with_lse)
    out, lse = quantized.attend(*operands, None, (None,) * 3, options, with_lse)
    return out.to(q.dtype), lse


def _fake_fp8_fwd(q, k, v, block, rotate, smooth_k, with_lse, cu_seqlens_q, *options):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)


# block, rotate, smooth_k and with_lse stand between v and the options.
_FIRST_OPTION = 7


def _setup_context(ctx, inputs, output) -> None:
    q, k, v = inputs[:3]
    lengths, rest = inputs[_FIRST_OPTION:_FIRST_OPTION + 4], inputs[_FIRST_OPTION + 4:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *lengths)
    ctx.rest = rest


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    nothing = (None,) * (_FIRST_OPTION - 3 + len(lengths) + len(ctx.rest))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    rest = list(ctx.rest)
    rest[-2] = bool(rest[-2]) or torch.are_deterministic_algorithms_enabled()
    options = (*lengths, *rest)
    if dispatch.uses_kernels(make_call(q, k, v, *options[:-1])):
        backward = torch.ops.flash_attn3.bwd
    else:
        backward = torch.ops.flash_attn3.fallback_bwd
    return (*backward(dout, dlse, q, k, v, out, lse, *options), *nothing)


_library = torch.library.Library("flash_attn3", "FRAGMENT")
_library.define(
    "fp8_fwd(Tensor q, Tensor k, Tensor v, SymInt block, bool rotate, bool smooth_k, "
    f"bool with_lse, {OPTIONS_SCHEMA}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("fp8_fwd", _fp8_fwd, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn3::fp8_fwd", _fake_fp8_fwd, lib=_library)
torch.library.register_autograd(
    "flash_attn3::fp8_fwd", _backward, setup_context=_setup_context, lib=_library)
