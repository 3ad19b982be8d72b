"""Attention written plainly, one sequence after another; no kernel sees this file.

In float64 it is the truth; with `dtype` a kernel's own it is the explicit matmul, softmax, matmul,
rounded operation by operation, whose error the tolerances are measured in. Gradients by autograd.
"""

import math

import torch


def visible_keys(sq, sk, causal=False, window=(-1, -1), chunk=0, device="cpu"):
    """(sq, sk) bool: query i, at p = i + sk - sq, sees key j."""
    left, right = window
    p = torch.arange(sq, device=device)[:, None] + sk - sq
    j = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= p
    if left >= 0:
        seen &= j >= p - left
    if right >= 0 and not causal:
        seen &= j <= p + right
    if chunk > 0:
        seen &= torch.div(p, chunk, rounding_mode="floor") == j // chunk
    return seen


def rounded_to_e4m3(p):
    """Probabilities as an e4m3 kernel has them: rounded where the row's largest is 2^8."""
    top = p.amax(-1, keepdim=True).clamp_min(1e-300) / 2.0**8
    return (p / top).to(torch.float8_e4m3fn).to(p.dtype) * top


def one_sequence(q, k, v, scale, causal, window, chunk, softcap, dtype, e4m3_p=False):
    """q (sq, H, D), k (sk, Hk, D), v (sk, Hk, Dv) -> out (sq, H, Dv), lse (H, sq) in `dtype`."""
    sq, h, _ = q.shape
    sk, hk, _ = k.shape
    q, k, v = (t.to(dtype).transpose(0, 1) for t in (q, k, v))
    k, v = k.repeat_interleave(h // hk, 0), v.repeat_interleave(h // hk, 0)
    if sk == 0 or sq == 0:
        lse = torch.full((h, sq), float("-inf"), dtype=dtype, device=q.device)
        return q.new_zeros(sq, h, v.shape[-1]) + 0 * q.sum() + 0 * k.sum() + 0 * v.sum(), lse
    s = torch.matmul(q, k.transpose(1, 2)) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    seen = visible_keys(sq, sk, causal, window, chunk, q.device)
    some = seen.any(1)
    # Rows without keys get scores of 0, whose probabilities are then dropped: no NaN anywhere.
    s = s.masked_fill(~seen & some[:, None], float("-inf")).masked_fill(~some[:, None], 0.0)
    p = torch.softmax(s, -1) * some[:, None]
    p = rounded_to_e4m3(p) if e4m3_p else p
    lse = torch.logsumexp(s, -1).masked_fill(~some, float("-inf"))
    return torch.matmul(p, v).transpose(0, 1), lse


def attention(q, k, v, cu_q=None, cu_k=None, used_q=None, used_k=None, scale=None, causal=False,
              window=(-1, -1), chunk=0, softcap=0.0, dtype=torch.float64, e4m3_p=False):
    """Dense or ragged; lengths are lists of ints. Rows outside of sequences: out 0, lse -inf."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    batch = q.shape[0] if cu_q is None else len(cu_q) - 1
    out = torch.zeros(q.shape[:-1] + v.shape[-1:], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
    for b in range(batch):
        def rows(t, cu, used):
            start, stop = (0, t.shape[1]) if cu is None else (cu[b], cu[b + 1])
            if used is not None:
                stop = min(stop, start + used[b])
            return (b, slice(start, stop)) if cu is None else (slice(start, stop),)

        at_q, at_k = rows(q, cu_q, used_q), rows(k, cu_k, used_k)
        o, m = one_sequence(q[at_q], k[at_k], v[at_k], scale, causal, window, chunk, softcap, dtype,
                            e4m3_p)
        out[at_q] = o
        lse[at_q] = m.transpose(0, 1)
    return out, lse.transpose(-1, -2)


def gradients(dout, dlse, q, k, v, **options):
    """(dq, dk, dv) of attention(...), in options' dtype; dlse None or shaped like lse."""
    dtype = options.get("dtype", torch.float64)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, **options)
    loss = (out * dout.to(dtype)).sum()
    loss = loss + 0 * sum(t.sum() for t in leaves)  # batch 0 has a graph too
    if dlse is not None:
        seen = torch.isfinite(lse)
        loss = loss + (lse.masked_fill(~seen, 0) * dlse.to(dtype).masked_fill(~seen, 0)).sum()
    return torch.autograd.grad(loss, leaves)
