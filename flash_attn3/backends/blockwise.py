"""Exact attention in plain PyTorch operations: block-wise online softmax, forward and backward.

Runs on every device and takes every option of the public functions. Scores exist for one block of
queries and keys at a time, so memory is linear in the sequence length; sums are kept in float32
(float64 for float64 inputs). On a CUDA device nothing is read back by the host.

The mask of every option is one interval of keys per query, with p = i + Sk - Sq:
    lo(i) = max(p - window_left, floor(p / chunk) * chunk)
    hi(i) = min(p + window_right, floor(p / chunk) * chunk + chunk - 1)
"""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

from .call import Call, lse_shape, make_call
from .sequences import Side, split

_NEG_INF = float("-inf")
_UNLIMITED = 1 << 40  # past every row index, and far from overflow when a row index is added

# Scores of one block, in elements: 64 MiB of float32 on the CPU, 256 MiB on a GPU, and a second
# tensor as large for the probabilities.
_SCORES_CPU = 1 << 22
_SCORES_GPU = 1 << 26

Offset = Union[int, Tensor]


def _sides(call: Call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    q_rows = q.shape[0] if call.ragged_q else q.shape[1]
    k_rows = k.shape[0] if call.ragged_k else k.shape[1]
    return (
        Side(cu_seqlens_q, seqused_q, call.batch, call.max_seqlen_q, q_rows),
        Side(cu_seqlens_k, seqused_k, call.batch, call.max_seqlen_k, k_rows),
    )


def _block_sizes(call: Call) -> tuple[int, int, int]:
    """Sequences of a part, query rows and key rows of a block."""
    gpu = call.device.type == "cuda"
    budget = _SCORES_GPU if gpu else _SCORES_CPU
    rows = max(1, min(1024 if gpu else 256, call.max_seqlen_q))
    keys = max(1, min(2048 if gpu else 512, call.max_seqlen_k))
    # Enough sequences to fill the budget with the smallest useful blocks; then blocks as large
    # as the budget allows.
    small = call.heads * min(rows, 64) * min(keys, 128)
    group = max(1, min(call.batch, budget // max(small, 1)))
    while group * call.heads * rows * keys > budget and keys > 128:
        keys = max(keys // 2, 128)
    while group * call.heads * rows * keys > budget and rows > 64:
        rows = max(rows // 2, 64)
    if rows < 64:  # decode: few queries, so longer runs of keys
        keys = max(keys, min(call.max_seqlen_k, budget // max(group * call.heads * rows, 1)))
    return group, rows, keys


def _by_kv_head(t: Tensor, heads_kv: int, dtype: torch.dtype) -> Tensor:
    """(b, s, H, d) -> (b, Hk, H/Hk * s, d): the query heads of one KV head behind one another."""
    b, s, h, d = t.shape
    t = t.reshape(b, s, heads_kv, h // heads_kv, d).permute(0, 2, 3, 1, 4)
    return t.to(dtype).reshape(b, heads_kv, (h // heads_kv) * s, d)


def _from_kv_head(t: Tensor, rows: int) -> Tensor:
    """(b, Hk, G * s, d) -> (b, s, H, d)."""
    b, hk, gs, d = t.shape
    group = gs // max(rows, 1)
    return t.reshape(b, hk, group, rows, d).permute(0, 3, 1, 2, 4).reshape(b, rows, hk * group, d)


class _Mask:
    """Visible keys of one part. Lengths and offset are ints, or tensors (b,) on the device."""

    def __init__(self, call: Call, q_len, k_len, q_size: int, k_size: int):
        self.call, self.q_len, self.k_len = call, q_len, k_len
        if q_len is None and k_len is None:
            self.offset: Offset = k_size - q_size
        elif call.same_seqlens:
            self.offset = 0
        else:
            self.offset = (k_size if k_len is None else k_len) - (
                q_size if q_len is None else q_len)
        self.k_size = k_size

    def _bounds(self, p):
        """First and last visible key of the query at position p (int or tensor)."""
        call = self.call
        lo = p - (call.window_left if call.window_left >= 0 else _UNLIMITED)
        hi = p + (call.window_right if call.window_right >= 0 else _UNLIMITED)
        if call.chunk > 0:
            if isinstance(p, Tensor):
                first = torch.div(p, call.chunk, rounding_mode="floor") * call.chunk
                return torch.maximum(lo, first), torch.minimum(hi, first + call.chunk - 1)
            first = p // call.chunk * call.chunk
            return max(lo, first), min(hi, first + call.chunk - 1)
        return lo, hi

    def key_range(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [j0, j1) outside of which no query of [i0, i1) sees anything."""
        if isinstance(self.offset, Tensor):
            return 0, self.k_size  # the offset is known on the device only
        j0 = self._bounds(i0 + self.offset)[0]
        j1 = self._bounds(i1 - 1 + self.offset)[1] + 1
        return max(0, min(j0, self.k_size)), max(0, min(j1, self.k_size))

    def visible(self, i0: int, i1: int, j0: int, j1: int, device) -> Optional[Tensor]:
        """None when all see all; otherwise bool, broadcastable to (b, i1 - i0, j1 - j0)."""
        ranged = not self.call.unmasked
        if ranged and not isinstance(self.offset, Tensor):
            first_hi = self._bounds(i0 + self.offset)[1]
            last_lo = self._bounds(i1 - 1 + self.offset)[0]
            ranged = not (last_lo <= j0 and j1 - 1 <= first_hi)
        if not ranged and self.q_len is None and self.k_len is None:
            return None
        i = torch.arange(i0, i1, device=device)
        j = torch.arange(j0, j1, device=device)
        vis = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        if ranged:
            p = i + (self.offset[:, None] if isinstance(self.offset, Tensor) else self.offset)
            lo, hi = self._bounds(p)  # (i,) or (b, i)
            vis = vis & (j >= lo[..., None]) & (j <= hi[..., None])
        if self.q_len is not None:
            vis = vis & (i < self.q_len[:, None])[:, :, None]
        if self.k_len is not None:
            vis = vis & (j < self.k_len[:, None])[:, None, :]
        return vis


def _scores(call: Call, qb: Tensor, kb: Tensor) -> Tensor:
    """Scaled and capped scores of (b, Hk, G*s, d) queries and (b, Hk, t, d) keys."""
    s = torch.matmul(qb, kb.transpose(-1, -2)).mul_(call.scale)
    if call.softcap > 0:
        s.div_(call.softcap).tanh_().mul_(call.softcap)
    return s


def _hide(s: Tensor, vis: Optional[Tensor], rows: int) -> Tensor:
    if vis is None:
        return s
    b, hk, gs, t = s.shape
    return s.view(b, hk, gs // rows, rows, t).masked_fill_(~vis[:, None, None], _NEG_INF).view(
        b, hk, gs, t)


def _forward_part(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: _Mask, rows: int, keys: int):
    """(b, s, H, *) in, out (b, s, H, Dv) and lse (b, s, H) in the accumulation type."""
    acc_t = call.acc_dtype
    b, sq, h, _ = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (b, Hk, t, d)
    out = torch.zeros(b, sq, h, call.head_dim_v, dtype=call.dtype, device=q.device)
    lse = torch.full((b, sq, h), _NEG_INF, dtype=acc_t, device=q.device)
    for i0 in range(0, sq, rows):
        i1 = min(i0 + rows, sq)
        first, last = mask.key_range(i0, i1)
        if first >= last:
            continue
        qb = _by_kv_head(q[:, i0:i1], call.heads_kv, acc_t)
        top = torch.full(qb.shape[:3] + (1,), _NEG_INF, dtype=acc_t, device=q.device)
        total = torch.zeros_like(top)
        acc = torch.zeros(qb.shape[:3] + (call.head_dim_v,), dtype=acc_t, device=q.device)
        for j0 in range(first, last, keys):
            j1 = min(j0 + keys, last)
            s = _scores(call, qb, k[:, :, j0:j1].to(acc_t))
            s = _hide(s, mask.visible(i0, i1, j0, j1, q.device), i1 - i0)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            # A row that has seen no key yet has a maximum of -inf; -inf - (-inf) would be NaN.
            finite_top = new_top.masked_fill(new_top == _NEG_INF, 0.0)
            p = s.sub_(finite_top).exp_()
            decay = torch.exp(top - finite_top)
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc.mul_(decay).add_(torch.matmul(p, v[:, :, j0:j1].to(acc_t)))
            top = new_top
        acc /= total.masked_fill(total == 0, 1.0)
        out[:, i0:i1] = _from_kv_head(acc, i1 - i0)
        lse[:, i0:i1] = _from_kv_head(top + total.log(), i1 - i0)[..., 0]
    return out, lse


def blockwise_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_q: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    """Forward of one call; arguments as `flash_attn3::fwd`.

    Returns out, like q with Dv in the last place and q's dtype, and lse in float32, (B, H, Sq) or
    (H, total_q). Rows outside of every sequence, and rows that see no key: out 0, lse -inf.
    """
    call = make_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_left, window_right, attention_chunk, softcap, deterministic)
    q_side, k_side = _sides(call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    lead = (q_side.buffer_rows,) if call.ragged_q else q.shape[:2]
    out = q.new_zeros(lead + (call.heads, call.head_dim_v))
    lse = torch.full(lead + (call.heads,), _NEG_INF, dtype=torch.float32, device=q.device)
    if not call.empty:
        group, rows, keys = _block_sizes(call)
        for q_rows, k_rows in split(q_side, k_side, q.device, group):
            qp, kp, vp = q_rows.load(q), k_rows.load(k), k_rows.load(v)
            mask = _Mask(call, q_rows.lengths, k_rows.lengths, qp.shape[1], kp.shape[1])
            out_p, lse_p = _forward_part(call, qp, kp, vp, mask, rows, keys)
            q_rows.store(out, out_p)
            q_rows.store(lse, lse_p)
    if call.ragged_q:
        return out[: q_side.total], lse[: q_side.total].t().contiguous()
    return out, lse.transpose(1, 2).contiguous()


def _backward_part(call: Call, dout, dlse, q, k, v, out, lse, mask: _Mask, rows: int, keys: int):
    """(b, s, H, D), (b, t, Hk, D), (b, t, Hk, Dv): gradients of one part, not yet rounded."""
    acc_t = call.acc_dtype
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    dq = torch.zeros(q.shape, dtype=acc_t, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc_t, device=q.device)
    dv = torch.zeros(v.shape, dtype=acc_t, device=q.device)
    for i0 in range(0, q.shape[1], rows):
        i1 = min(i0 + rows, q.shape[1])
        first, last = mask.key_range(i0, i1)
        if first >= last:
            continue
        qb = _by_kv_head(q[:, i0:i1], call.heads_kv, acc_t)
        dob = _by_kv_head(dout[:, i0:i1], call.heads_kv, acc_t)
        ob = _by_kv_head(out[:, i0:i1], call.heads_kv, acc_t)
        lb = _by_kv_head(lse[:, i0:i1, :, None], call.heads_kv, acc_t)
        # A row without a key (lse -inf; a caller's own lse may say +inf) has no probabilities:
        # exp(s - inf) is 0, and its dout and dlse must not turn that 0 into NaN.
        dead = torch.isinf(lb)
        lb = lb.masked_fill(dead, float("inf"))
        dob = dob.masked_fill(dead, 0.0)
        delta = (dob * ob.masked_fill(dead, 0.0)).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= _by_kv_head(dlse[:, i0:i1, :, None], call.heads_kv, acc_t).masked_fill(
                dead, 0.0)
        dqb = torch.zeros_like(qb)
        for j0 in range(first, last, keys):
            j1 = min(j0 + keys, last)
            kb, vb = k[:, :, j0:j1].to(acc_t), v[:, :, j0:j1].to(acc_t)
            s = _scores(call, qb, kb)
            slope = 1 - (s / call.softcap).square_() if call.softcap > 0 else None
            s = _hide(s, mask.visible(i0, i1, j0, j1, q.device), i1 - i0)
            p = s.sub_(lb).exp_()
            dv[:, :, j0:j1] += torch.matmul(p.transpose(-1, -2), dob)
            ds = torch.matmul(dob, vb.transpose(-1, -2)).sub_(delta).mul_(p)
            if slope is not None:
                ds *= slope
            dqb += torch.matmul(ds, kb)
            dk[:, :, j0:j1] += torch.matmul(ds.transpose(-1, -2), qb)
        dq[:, i0:i1] = _from_kv_head(dqb.mul_(call.scale), i1 - i0)
    return dq, dk.mul_(call.scale).transpose(1, 2), dv.transpose(1, 2)


def blockwise_backward(
    dout: Tensor,
    dlse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_q: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of one call; arguments as `flash_attn3::bwd`.

    `out` and `lse` may come from any forward of the same call (lse natural, -inf or +inf where a
    row sees no key). `dlse`, shaped like lse, is the gradient of lse or None. Returns dq, dk, dv,
    contiguous, in the dtypes of q, k, v; rows outside of every sequence are 0. The order of all
    sums is fixed, so that results are the same from run to run.
    """
    call = make_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_left, window_right, attention_chunk, softcap, deterministic)
    q_side, k_side = _sides(call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    q_lead = (q_side.buffer_rows,) if call.ragged_q else q.shape[:2]
    k_lead = (k_side.buffer_rows,) if call.ragged_k else k.shape[:2]
    dq = q.new_zeros(q_lead + q.shape[-2:])
    dk = k.new_zeros(k_lead + k.shape[-2:])
    dv = v.new_zeros(k_lead + v.shape[-2:])
    if not call.empty:
        lse_rows = lse.transpose(-1, -2)  # rows first, as everything else
        dlse_rows = None if dlse is None else dlse.transpose(-1, -2)
        group, rows, keys = _block_sizes(call)
        for q_rows, k_rows in split(q_side, k_side, q.device, group):
            qp, kp, vp = q_rows.load(q), k_rows.load(k), k_rows.load(v)
            mask = _Mask(call, q_rows.lengths, k_rows.lengths, qp.shape[1], kp.shape[1])
            grads = _backward_part(
                call, q_rows.load(dout), None if dlse_rows is None else q_rows.load(dlse_rows),
                qp, kp, vp, q_rows.load(out), q_rows.load(lse_rows), mask, rows, keys)
            q_rows.store(dq, grads[0])
            k_rows.store(dk, grads[1])
            k_rows.store(dv, grads[2])
    if call.ragged_q:
        dq = dq[: q_side.total]
    if call.ragged_k:
        dk, dv = dk[: k_side.total], dv[: k_side.total]
    return dq, dk, dv


def blockwise_reasons(call: Call) -> Optional[str]:
    """Why this backend can't run the call; it always can."""
    return None


__all__ = ["blockwise_forward", "blockwise_backward", "blockwise_reasons", "lse_shape"]
