"""Attention on e4m3 values: the object that carries them with their scales, the check of it, and
the call by kernel or fallback."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import checks, dispatch
from .backends import e4m3
from .backends.call import make_call

E4M3 = torch.float8_e4m3fn


class Quantized(NamedTuple):
    """One of q, k, v in e4m3, as `quantize` makes it; `flash_attn_func` and
    `flash_attn_varlen_func` take it where they take a tensor.

    A NamedTuple, so that it goes through torch.compile, export and pytrees as it is.
    """

    data: Tensor  # (B, S, H, D) or (total, H, D); transposed: (blocks, Hk, Dv, 128)
    scale: Optional[Tensor] = None  # float32: (B, H, blocks), ragged (H, blocks); block 0: (B, Hk)
    block: int = 0  # rows that share a scale: 64 (q alone), 128; 0: all rows of a KV head
    rotated: bool = False  # q and k: multiplied by a Hadamard matrix along D
    transposed: bool = False  # v: a block is [column][key], in the kernel's order of keys
    # k: (B, Hk, D) float32, taken off its rows. q: the same tensor of the k that it was quantised
    # with, which says whose shift it has.
    mean: Optional[Tensor] = None
    # q: (B, H, S), ragged (H, total), float32: its products with `mean`, which the LSE needs. With
    # a k of another mean, or None: found from q's own values.
    shift: Optional[Tensor] = None


class QuantizedQKV(NamedTuple):
    """What `quantize` returns: `flash_attn_func(*quantize(q, k, v), causal=True)`."""

    q: Quantized
    k: Quantized
    v: Quantized


Operand = Union[Tensor, Quantized]


def plain(q: Operand, k: Operand, v: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors with the shapes, dtypes and devices of the rows of q, k, v, for checks and Call."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Quantized):
            checks.tensor(f"{name}.data", t.data, (3, 4))
            if t.data.dtype != E4M3:
                raise TypeError(f"{name}.data has dtype {t.data.dtype}; expected {E4M3}")
            checks.boolean(f"{name}.rotated", t.rotated)
            checks.boolean(f"{name}.transposed", t.transposed)
    q, k = (t.data if isinstance(t, Quantized) else t for t in (q, k))
    if not isinstance(v, Quantized):
        return q, k, v
    if not v.transposed:
        return q, k, v.data
    checks.tensor("v.data", v.data, (4,))
    checks.tensor("k", k, (3, 4))
    heads_kv, dim = k.shape[-2], v.data.shape[2]
    checks.shape("v.data", v.data, (v.data.shape[0], heads_kv, dim, e4m3.VALUE_BLOCK),
                 "(blocks, KV heads, Dv, 128), since v.transposed is True")
    # Nothing reads the values of this view.
    rows = v.data.new_empty(()).expand(tuple(k.shape[:-2]) + (heads_kv, dim))
    return q, k, rows


def _tensors(name: str, t: Operand) -> list[tuple[str, Optional[Tensor]]]:
    if not isinstance(t, Quantized):
        return [(name, t)]
    return [(name, t.data)] + [
        (f"{name}.{field}", getattr(t, field)) for field in ("scale", "mean", "shift")]


def is_e4m3_call(q: Operand, k: Operand, v: Operand) -> bool:
    return any(isinstance(t, Quantized) or t.dtype == E4M3 for t in (q, k, v))


def check(given: tuple, descales: tuple, q: Tensor, k: Tensor, v: Tensor, batch: int,
          cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], softcap: float,
          qv: Optional[Tensor]) -> None:
    """Scales and layouts of a call whose plain tensors q, k, v are right."""
    hk = k.shape[-2]
    for name, t, rows, descale, cu in zip(
            "qkv", given, (q, k, v), descales, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)):
        if isinstance(t, Quantized):
            _check_one(name, t, rows, descale, batch, hk, cu)
        else:
            checks.descale(f"{name}_descale", descale, batch, hk, q)
    if not is_e4m3_call(*given):
        return
    checks.no_gradient_of_e4m3(
        [pair for name, t in zip("qkv", given) for pair in _tensors(name, t)]
        + [("qv", qv)] + [(f"{name}_descale", t) for name, t in zip("qkv", descales)])
    on_the_fly = q.dtype != E4M3
    if on_the_fly and descales[0] is not None:
        raise ValueError(
            f"q_descale is given and q has dtype {q.dtype}; expected None, since this call "
            "quantises q to the e4m3 of k itself")
    rotated = [isinstance(t, Quantized) and bool(t.rotated) for t in given[:2]]
    if rotated[0] != rotated[1] and not on_the_fly:
        raise ValueError(
            f"q is {'' if rotated[0] else 'not '}rotated and k is {'' if rotated[1] else 'not '}"
            "rotated; expected both or neither (quantize(..., rotate=...) does both)")
    if qv is not None and (on_the_fly or any(isinstance(t, Quantized) for t in given)):
        raise ValueError(
            "qv is given with q, k or v from quantize, or with q that this call quantises; "
            "expected None, or plain e4m3 tensors with descales")
    if softcap > 0 and isinstance(given[1], Quantized) and given[1].mean is not None:
        raise ValueError(
            f"softcap is {softcap} and k was quantised with smooth_k=True; expected softcap 0.0, "
            "since a soft cap does not pass over what smooth_k takes off the scores")


def _check_one(name: str, t: Quantized, rows: Tensor, descale: Optional[Tensor], batch: int,
               heads_kv: int, cu_seqlens: Optional[Tensor]) -> None:
    if descale is not None:
        raise ValueError(
            f"{name}_descale is given and {name} is a Quantized, which has its scale; expected "
            "None")
    accepted = (0, 64, 128) if name == "q" else (0, 128)
    checks.integer(f"{name}.block", t.block, 0)
    if t.block not in accepted:
        raise ValueError(f"{name}.block is {t.block}; expected one of {accepted}")
    if t.transposed and name != "v":
        raise ValueError(f"{name}.transposed is True; expected False: v alone can be transposed")
    if t.rotated and name == "v":
        raise ValueError("v.rotated is True; expected False: q and k alone can be rotated")
    ragged = cu_seqlens is not None
    length, heads = rows.shape[0 if ragged else 1], rows.shape[-2]
    if t.transposed:
        tiles = e4m3.block_count(ragged, batch, length, e4m3.VALUE_BLOCK) * (
            1 if ragged else batch)
        checks.shape("v.data", t.data, (tiles, heads_kv, rows.shape[-1], e4m3.VALUE_BLOCK),
                     "(blocks, KV heads, Dv, 128)")
    if t.block == 0:
        checks.descale(f"{name}.scale", t.scale, batch, heads_kv, rows)
    else:
        checks.tensor(f"{name}.scale", t.scale)
        blocks = e4m3.block_count(ragged, batch, length, t.block)
        expected = (heads, blocks) if ragged else (batch, heads, blocks)
        checks.scale(f"{name}.scale", t.scale, expected, rows, "one for each block of a head")
    if t.mean is not None:
        if name == "v":
            raise ValueError("v.mean is given; expected None: q and k alone have a mean")
        checks.scale(f"{name}.mean", t.mean, (batch, heads_kv, rows.shape[-1]), rows)
    if t.shift is not None:
        if name != "q":
            raise ValueError(f"{name}.shift is given; expected None: q alone has a shift")
        expected = (heads, length) if ragged else (batch, heads, length)
        checks.scale("q.shift", t.shift, expected, rows)


# ---- quantising ----------------------------------------------------------------------------------


# Sequences, and heads, that flash_attn3::row_mean takes at most: a grid's second and third size.
_MEAN_GRID = 65535


def quantize_one(x: Tensor, mean: Optional[Tensor], cu_seqlens: Optional[Tensor],
                 seqused: Optional[Tensor], block: int, rotate: bool, transposed: bool,
                 group: int = 1) -> tuple[Tensor, Tensor]:
    """(values, scale), by the kernel where it runs."""
    if block != 0 and dispatch.quantizes_by_kernel(x):
        return torch.ops.flash_attn3.quantize(
            x, mean, cu_seqlens, seqused, block, rotate, transposed)
    return e4m3.quantize(x, mean, cu_seqlens, seqused, block, rotate, transposed, group)


def mean_of_rows(x: Tensor, cu_seqlens: Optional[Tensor], seqused: Optional[Tensor]) -> Tensor:
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if dispatch.quantizes_by_kernel(x) and max(batch, x.shape[-2]) <= _MEAN_GRID:
        return torch.ops.flash_attn3.row_mean(x, cu_seqlens, seqused)
    return e4m3.row_mean(x, cu_seqlens, seqused)


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor, block: int, rotate: bool, smooth_k: bool,
                 transpose_v: bool, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                 with_shift: bool = True) -> QuantizedQKV:
    """`quantize` of checked arguments; block 0 is one scale a KV head. Without with_shift the LSE
    of a smoothed call has to be done without."""
    kv_block = 0 if block == 0 else e4m3.VALUE_BLOCK
    mean = mean_of_rows(k, cu_seqlens_k, seqused_k) if smooth_k else None
    shift = e4m3.row_dot(q, mean, cu_seqlens_q) if smooth_k and with_shift else None
    q8, q_scale = quantize_one(q, None, cu_seqlens_q, seqused_q, block, rotate, False,
                               q.shape[-2] // k.shape[-2])
    k8, k_scale = quantize_one(k, mean, cu_seqlens_k, seqused_k, kv_block, rotate, False)
    v8, v_scale = quantize_one(v, None, cu_seqlens_k, seqused_k, kv_block, False, transpose_v)
    return QuantizedQKV(
        Quantized(q8, q_scale, block, rotate, mean=None if shift is None else mean, shift=shift),
        Quantized(k8, k_scale, kv_block, rotate, mean=mean),
        Quantized(v8, v_scale, kv_block, transposed=transpose_v))


# ---- attention -----------------------------------------------------------------------------------


def _quantized(t: Operand, descale: Optional[Tensor]) -> Quantized:
    return t if isinstance(t, Quantized) else Quantized(t, descale)


def _score_shift(q: Operand, q8: Quantized, k: Quantized, cu_seqlens_q) -> Tensor:
    """What smooth_k took off the scores of each row, before the softmax scale."""
    if q8.shift is not None and q8.mean is k.mean:
        return q8.shift
    if not isinstance(q, Quantized) and q.dtype != E4M3:
        return e4m3.row_dot(q, k.mean, cu_seqlens_q)
    rows = e4m3.dequantize(q8.data, q8.scale, q8.block, tuple(q8.data.shape[:-2]), cu_seqlens_q)
    # Both rotated: (q H) . (mean H) = q . mean.
    mean = e4m3.hadamard(k.mean) if k.rotated else k.mean
    return e4m3.row_dot(rows, mean, cu_seqlens_q)


def attend(q: Operand, k: Operand, v: Operand, qv: Optional[Tensor], descales: tuple,
           options: tuple, with_lse: bool) -> tuple[Tensor, Tensor]:
    """(out in bfloat16, lse) of a checked call whose k and v are e4m3.

    with_lse False: the LSE may be that of probabilities rounded to e4m3 (docs/fp8.md), and of a
    call with smooth_k may lack what was taken off the scores.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_q = options[:3]
    scale = options[6]
    rows = plain(q, k, v)
    call, why = dispatch.described(
        make_call(*rows, *options[:-1]), E4M3, qv is not None, has_descales=False)
    by_kernel = dispatch.uses_kernels(call, why)
    k8, v8 = _quantized(k, descales[1]), _quantized(v, descales[2])
    if isinstance(q, Quantized) or q.dtype == E4M3:
        q8 = _quantized(q, descales[0])
    else:
        values, q_scale = quantize_one(
            q, None, cu_seqlens_q, seqused_q, e4m3.VALUE_BLOCK, k8.rotated, False)
        q8 = Quantized(values, q_scale, e4m3.VALUE_BLOCK, k8.rotated)
    if by_kernel:
        out, lse = torch.ops.flash_attn3.fwd_e4m3(
            q8.data, k8.data, v8.data, q8.scale, k8.scale, v8.scale, q8.block, k8.block, v8.block,
            v8.transposed, with_lse, *options)
    else:
        lead_q, lead_k = (tuple(t.shape[:-2]) for t in rows[:2])
        qf = e4m3.dequantize(q8.data, q8.scale, q8.block, lead_q, cu_seqlens_q)
        kf = e4m3.dequantize(k8.data, k8.scale, k8.block, lead_k, cu_seqlens_k)
        vf = e4m3.dequantize(v8.data, v8.scale, v8.block, lead_k, cu_seqlens_k, v8.transposed)
        if qv is not None:
            # softmax(q k^T + qv v^T) is attention of (q, qv) to (k, v) joined along the head dim.
            qf = torch.cat((qf, e4m3.dequantize(qv, descales[0], 0, lead_q, cu_seqlens_q)), dim=-1)
            kf = torch.cat((kf, vf), dim=-1)
        out, lse = torch.ops.flash_attn3.fallback_fwd(qf, kf, vf, *options)
        out = out.to(torch.bfloat16)
    if with_lse and k8.mean is not None:
        shift = _score_shift(q, q8, k8, cu_seqlens_q) * scale
        lse = torch.where(torch.isinf(lse), lse, lse + shift)
    return out, lse
