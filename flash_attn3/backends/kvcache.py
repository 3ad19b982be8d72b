"""Attention to a KV cache, in plain PyTorch: append, rotary, pages, then one attention call.

Nothing is read back by the host. Slots and page-table entries past the lengths are clamped or
masked, so they may hold anything.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

import torch
from torch import Tensor

from .. import checks, env
from .sequences import Side

_PLAN_VERSION = 1
_PLAN_FIELDS = ("batch_size", "num_heads_q", "num_heads_kv", "headdim", "headdim_v", "page_size")


class Cache:
    """Where slot s of sequence b lies: a row of a dense cache, or a page and a row of it."""

    def __init__(self, k_cache: Tensor, batch: int, batch_idx: Optional[Tensor],
                 page_table: Optional[Tensor]):
        self.batch, self.device = batch, k_cache.device
        self.pages, self.page_table, self.batch_idx = k_cache.shape[0], page_table, batch_idx
        self.page_size = k_cache.shape[1]
        self.slots = k_cache.shape[1] if page_table is None else (
            page_table.shape[1] * self.page_size)

    def _place(self, sequence: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """(first index, second index) into the cache tensor; slot within [0, slots)."""
        if self.page_table is not None:
            page = self.page_table[sequence, slot // max(self.page_size, 1)].long()
            return page.clamp(0, self.pages - 1), slot % max(self.page_size, 1)
        if self.batch_idx is not None:
            sequence = self.batch_idx.long().clamp(0, self.pages - 1)[sequence]
        return sequence, slot

    def write(self, cache: Tensor, sequence: Tensor, slot: Tensor, valid: Tensor,
              rows: Tensor) -> None:
        """Puts rows (n, Hk, d) at the slots (n,) where valid; nothing else in the cache changes."""
        if rows.shape[0] == 0 or self.slots == 0 or self.pages == 0:
            return
        place = self._place(sequence, slot.clamp(0, self.slots - 1))
        if cache.device.type != "cuda":
            place = tuple(p[valid] for p in place)
            cache[place] = rows[valid]
            return
        # On a GPU the number of valid rows is not known here: a row that is not to be written
        # repeats the write of one that is (same place, same value); if there is none, all of them
        # write back what is there.
        n = rows.shape[0]
        order = torch.arange(n, device=rows.device)
        first = torch.where(valid, order, n).min().clamp(max=n - 1)
        source = torch.where(valid, order, first)
        place = tuple(p[source] for p in place)
        cache[place] = torch.where(valid[source][:, None, None], rows[source], cache[place])

    def gather(self, cache: Tensor, leftpad: Optional[Tensor]) -> Tensor:
        """(B, slots, Hk, d): slots of each sequence in order, from its first one in use."""
        if self.page_table is None and self.batch_idx is None and leftpad is None:
            return cache
        if 0 in (self.slots, self.pages):
            return cache.new_zeros((self.batch, self.slots) + tuple(cache.shape[2:]))
        sequence = torch.arange(self.batch, device=self.device)[:, None]
        slot = torch.arange(self.slots, device=self.device)[None, :]
        if leftpad is not None:
            slot = slot + leftpad.long()[:, None]
        place = self._place(*torch.broadcast_tensors(sequence, slot.clamp(0, self.slots - 1)))
        return cache[place]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Turns the first 2 * cos.shape[1] values of x (n, heads, d) by the angles of position (n,)."""
    half = cos.shape[1]
    if half == 0 or cos.shape[0] == 0:
        return x
    position = position.clamp(0, cos.shape[0] - 1)
    c, s = cos[position].float()[:, None], sin[position].float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _rows(t: Tensor, cu: Optional[Tensor], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a dense or ragged tensor: its sequence, its number in it, if it is in one."""
    if cu is None:
        n = t.shape[1]
        flat = torch.arange(batch * n, device=t.device)
        return flat // max(n, 1), flat % max(n, 1), torch.ones_like(flat, dtype=torch.bool)
    side = Side(cu, None, batch, t.shape[0], t.shape[0])
    starts, lengths = side._bounds()
    row = torch.arange(t.shape[0], device=t.device)
    if batch == 0:
        return row, row, torch.zeros_like(row, dtype=torch.bool)
    sequence = torch.searchsorted((starts + lengths).contiguous(), row, right=True)
    sequence = sequence.clamp(max=batch - 1)
    number = row - starts[sequence]
    return sequence, number, (number >= 0) & (number < lengths[sequence])


def _check(q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
           cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens):
    """Checks what is particular to the cache; returns the batch size."""
    checks.qkv(q, k_cache, v_cache, cu_seqlens_q is not None, False, qv is not None, "k_cache",
               "v_cache")
    if cu_seqlens_q is not None:
        checks.int_vector("cu_seqlens_q", cu_seqlens_q, None, q)
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q is None; expected an int, since cu_seqlens_q is given")
    if max_seqlen_q is not None:
        checks.integer("max_seqlen_q", max_seqlen_q, 0)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    for name, t in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad),
                    ("rotary_seqlens", rotary_seqlens)):
        if t is not None:
            checks.int_vector(name, t, batch, q, "one value per sequence")
    if isinstance(cache_seqlens, Tensor):
        checks.int_vector("cache_seqlens", cache_seqlens, batch, q, "one length per sequence")
    elif cache_seqlens is not None:
        checks.integer("cache_seqlens", cache_seqlens, 0, types="an int or an int32 tensor",
                       most=checks.INT32_MAX)
    if page_table is not None:
        checks.tensor("page_table", page_table, (2,))
        if page_table.dtype != torch.int32:
            raise TypeError(f"page_table has dtype {page_table.dtype}; expected torch.int32")
        checks.shape("page_table", page_table, (batch, page_table.shape[1]), "(batch, max_pages)")
        checks.on_device("page_table", page_table, q)
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is given with page_table; expected one of the two")
        if cache_leftpad is not None:
            raise ValueError("cache_leftpad is given with page_table; expected one of the two")
    elif cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)}; expected batch size {batch}, as q, without "
            "cache_batch_idx or page_table")
    if (k is None) != (v is None):
        raise ValueError("k and v: one is None; expected both new keys and values, or neither")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new is given without k and v; expected None")
    if k is not None:
        _check_new(q, k_cache, v_cache, k, v, cache_seqlens, cu_seqlens_k_new, batch)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: one is None; expected both or neither")
    if rotary_cos is not None:
        _check_rotary(q, k, rotary_cos, rotary_sin)
    needs_grad = [name for name, t in (
        ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("qv", qv))
        if t is not None and t.requires_grad]
    if needs_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{needs_grad[0]} requires a gradient; flash_attn_with_kvcache has none: call it under "
            "torch.no_grad()")
    return batch


def _check_new(q, k_cache, v_cache, k, v, cache_seqlens, cu_seqlens_k_new, batch) -> None:
    ragged = cu_seqlens_k_new is not None
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; expected the lengths before the append of k, v")
    if ragged:
        checks.int_vector("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, q, "batch + 1")
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        checks.tensor(name, t, (3,) if ragged else (4,))
        checks.same_dtype(name, t, q)
        checks.on_device(name, t, q)
        lead = (k.shape[0],) if ragged else (batch, k.shape[1])
        checks.shape(name, t, lead + tuple(cache.shape[2:]), "heads and head dim of the cache")


def _check_rotary(q, k, cos, sin) -> None:
    if k is None:
        raise ValueError("rotary_cos is given without k and v; expected new keys to turn, or None")
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.tensor(name, t, (2,))
        checks.on_device(name, t, q)
        checks.floating_point(name, t)
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)}; expected at most {q.shape[-1] // 2} "
            "columns, half the head dim")
    checks.shape("rotary_sin", sin, tuple(cos.shape), "the shape of rotary_cos")
    if q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("rotary_cos: rotary positions of float8_e4m3fn are not supported")


def attend(q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
           cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens,
           q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk,
           softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
           run: Callable) -> tuple[Tensor, Tensor]:
    """flash_attn_with_kvcache; `run` is the attention call of the interface."""
    batch = _check(q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens,
                   cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new,
                   max_seqlen_q, rotary_seqlens)
    checks.options(softmax_scale, causal, attention_chunk, softcap, num_splits, pack_gqa, False,
                   sm_margin)
    checks.boolean("rotary_interleaved", rotary_interleaved)
    left, right = checks.window(window_size)
    if qv is not None:
        checks.qv_tensor(qv, q, v_cache)
    for name, t in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        checks.descale(name, t, batch, k_cache.shape[-2], q)
    _check_plan(scheduler_metadata, q, {
        "batch_size": batch, "num_heads_q": q.shape[-2], "num_heads_kv": k_cache.shape[2],
        "headdim": q.shape[-1], "headdim_v": v_cache.shape[-1],
        "page_size": 0 if page_table is None else k_cache.shape[1]})
    cache = Cache(k_cache, batch, cache_batch_idx, page_table)
    if isinstance(cache_seqlens, Tensor):
        used = cache_seqlens
    else:
        used = torch.full((batch,), cache.slots if cache_seqlens is None else cache_seqlens,
                          dtype=torch.int32, device=q.device)
    if env.check_values():
        checks.lengths_values("cache_seqlens", used, [cache.slots] * batch)
        if cache_batch_idx is not None:
            checks.index_values("cache_batch_idx", cache_batch_idx, k_cache.shape[0])
    used = used.clamp(0, cache.slots)
    with torch.no_grad():
        turn_from = used if rotary_seqlens is None else rotary_seqlens
        if rotary_cos is not None:
            masked = causal or left >= 0 or right >= 0 or attention_chunk > 0
            sequence, number, _ = _rows(q, cu_seqlens_q, batch)
            position = turn_from.long()[sequence] + (number if masked else 0)
            q = _rotate(q.reshape((-1,) + q.shape[-2:]), rotary_cos, rotary_sin, position,
                        rotary_interleaved).reshape(q.shape)
        if k is not None:
            used = _append(cache, k_cache, v_cache, k, v, used, cu_seqlens_k_new, batch, turn_from,
                           rotary_cos, rotary_sin, rotary_interleaved)
        if cache_leftpad is not None:
            used = (used - cache_leftpad).clamp(min=0)
        keys, values = cache.gather(k_cache, cache_leftpad), cache.gather(v_cache, cache_leftpad)
        scale = softmax_scale
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1] + (0 if qv is None else qv.shape[-1]))
        options = (
            cu_seqlens_q, None, None, used.int(),
            q.shape[1] if cu_seqlens_q is None else max_seqlen_q, keys.shape[1], float(scale),
            bool(causal), left, 0 if causal else right, attention_chunk, float(softcap), False,
            sm_margin)
        return run(q, keys, values, qv, q_descale, k_descale, v_descale, options)


def _append(cache: Cache, k_cache, v_cache, k, v, used, cu_new, batch, turn_from, cos, sin,
            interleaved) -> Tensor:
    """Writes the new rows in place; returns the lengths after it, (B,)."""
    sequence, number, valid = _rows(k, cu_new, batch)
    slot = used.long()[sequence] + number
    valid = valid & (slot < cache.slots)
    k_rows = k.reshape((-1,) + k.shape[-2:])
    if cos is not None:
        position = turn_from.long()[sequence] + number
        k_rows = _rotate(k_rows, cos, sin, position, interleaved)
    cache.write(k_cache, sequence, slot, valid, k_rows)
    cache.write(v_cache, sequence, slot, valid, v.reshape((-1,) + v.shape[-2:]))
    new = k.shape[1] if cu_new is None else (cu_new[1:] - cu_new[:-1]).clamp(min=0)
    return (used + new).clamp(max=cache.slots)


def combine(out_partial, lse_partial, out, out_dtype) -> tuple[Tensor, Tensor]:
    """flash_attn_combine."""
    checks.tensor("out_partial", out_partial, (4, 5))
    checks.tensor("lse_partial", lse_partial, (out_partial.dim() - 1,))
    checks.floating_point("out_partial", out_partial)
    if lse_partial.dtype != torch.float32:
        raise TypeError(f"lse_partial has dtype {lse_partial.dtype}; expected torch.float32")
    checks.shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]),
                 "out_partial's without the head dim")
    if lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial is on {lse_partial.device}; expected {out_partial.device}, the device of "
            "out_partial")
    if out_dtype is not None:
        checks.floating_dtype("out_dtype", out_dtype)
    if out is not None:
        checks.tensor("out", out)
        checks.floating_point("out", out)
        checks.shape("out", out, tuple(out_partial.shape[1:]), "out_partial's without the splits")
        if out.device != out_partial.device:
            raise ValueError(f"out is on {out.device}; expected {out_partial.device}")
        if out_dtype is not None and out_dtype != out.dtype:
            raise TypeError(f"out_dtype is {out_dtype}; expected {out.dtype}, the dtype of out")
    dtype = out.dtype if out is not None else (out_dtype or out_partial.dtype)
    if out_partial.shape[0] == 0:
        merged = out_partial.new_zeros(out_partial.shape[1:])
        lse = lse_partial.new_full(lse_partial.shape[1:], float("-inf"))
    else:
        top = lse_partial.amax(0)
        top = top.masked_fill(torch.isinf(top), 0.0)  # no split saw a key: all weights are 0
        weight = torch.exp(lse_partial - top)
        total = weight.sum(0)
        lse = top + total.log()
        weight = weight / total.masked_fill(total == 0, 1.0)
        # The partial result of a split without a key has no weight, whatever it holds.
        rows = out_partial.float().masked_fill((weight == 0)[..., None], 0.0)
        merged = (rows * weight[..., None]).sum(0)
    if out is not None:
        out.copy_(merged)
        return out, lse
    return merged.to(dtype), lse


def scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
                       cache_seqlens, qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new,
                       cache_leftpad, page_size, max_seqlen_k_new, causal, window_size,
                       attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin) -> Tensor:
    """get_scheduler_metadata: the sizes of the plan, then one entry per sequence."""
    for name, value, least in (
            ("batch_size", batch_size, 0), ("max_seqlen_q", max_seqlen_q, 0),
            ("max_seqlen_k", max_seqlen_k, 0), ("num_heads_q", num_heads_q, 1),
            ("num_heads_kv", num_heads_kv, 1), ("headdim", headdim, 0),
            ("max_seqlen_k_new", max_seqlen_k_new, 0)):
        checks.integer(name, value, least, most=checks.INT32_MAX)
    if num_heads_q % num_heads_kv:
        raise ValueError(
            f"num_heads_kv is {num_heads_kv}; expected a divisor of num_heads_q, {num_heads_q}")
    if headdim_v is None:
        headdim_v = headdim
    checks.integer("headdim_v", headdim_v, 0)
    if page_size is not None:
        checks.integer("page_size", page_size, 1, most=checks.INT32_MAX)
    if qkv_dtype not in checks.DTYPES:
        raise TypeError(
            f"qkv_dtype is {qkv_dtype}; expected torch.float16, torch.bfloat16 or "
            "torch.float8_e4m3fn")
    if not checks.takes_qv(headdim, headdim_v):
        checks.head_dim("headdim", headdim, qkv_dtype, "is")
        checks.head_dim("headdim_v", headdim_v, qkv_dtype, "is")
    checks.options(None, causal, attention_chunk, 0.0, num_splits, pack_gqa, False, sm_margin)
    checks.boolean("has_softcap", has_softcap)
    checks.window(window_size)
    checks.tensor("cache_seqlens", cache_seqlens)
    checks.int_vector("cache_seqlens", cache_seqlens, batch_size, cache_seqlens, "batch_size")
    for name, t, length in (("cu_seqlens_q", cu_seqlens_q, batch_size + 1),
                            ("cu_seqlens_k_new", cu_seqlens_k_new, batch_size + 1),
                            ("cache_leftpad", cache_leftpad, batch_size)):
        if t is not None:
            checks.int_vector(name, t, length, cache_seqlens)
    sizes = dict(zip(_PLAN_FIELDS, (
        batch_size, num_heads_q, num_heads_kv, headdim, headdim_v, page_size or 0)))
    # Filled on the device value by value: a copy from the host could not be captured in a graph.
    plan = torch.empty(1 + len(sizes) + batch_size, dtype=torch.int32, device=cache_seqlens.device)
    plan[0].fill_(_PLAN_VERSION)
    for at, value in enumerate(sizes.values(), 1):
        plan[at].fill_(value)
    plan[1 + len(sizes):].fill_(max(num_splits, 1))
    plan.flash_attn3_sizes = sizes  # lets a later call compare without a synchronisation
    return plan


def _check_plan(plan, q: Tensor, sizes: dict[str, int]) -> None:
    """A plan must be for the sizes of the call that uses it."""
    if plan is None:
        return
    checks.tensor("scheduler_metadata", plan, (1,))
    if plan.dtype != torch.int32:
        raise TypeError(f"scheduler_metadata has dtype {plan.dtype}; expected torch.int32")
    checks.on_device("scheduler_metadata", plan, q)
    checks.shape("scheduler_metadata", plan, (1 + len(sizes) + sizes["batch_size"],),
                 "what get_scheduler_metadata gives for this batch size")
    planned = getattr(plan, "flash_attn3_sizes", None)
    if planned is None and env.check_values():
        planned = dict(zip(_PLAN_FIELDS, plan[1: 1 + len(sizes)].tolist()))
    for name, value in sizes.items():
        if planned is not None and planned[name] != value:
            raise ValueError(
                f"scheduler_metadata was made for {name} {planned[name]}; expected {value}, as in "
                "this call")
