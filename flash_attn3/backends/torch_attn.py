"""PyTorch's own attention kernels that return the LSE, behind the arguments of `flash_attn3::fwd`.

Each backend is three functions: `NAME_reasons(call)` (None, or why it can't run the call),
`NAME_forward` and `NAME_backward`. Their results are brought to this project's conventions: lse
natural and -inf for a row without keys, zeros in rows outside of every sequence.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Optional

import torch
from torch import Tensor

from .call import Call
from .sequences import Side, valid_rows

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_INF = float("inf")
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_GRID_LIMIT = 65535  # of a CUDA grid's second and third dimension
_INT32_LIMIT = 2**31


def _feature_reason(call: Call) -> Optional[str]:
    """Options that none of PyTorch's kernels has together with an LSE."""
    # They mask a score with -inf first and scale it then: 0 * -inf is NaN, and -1 * -inf wins.
    if call.scale < _LEAST_SCALE:
        return f"needs a softmax_scale above 0, got {call.scale}"
    if call.chunk > 0:
        return "attention_chunk is not supported"
    if call.softcap > 0:
        return "softcap is not supported"
    return None


def _unit_last(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _aligned(t: Tensor) -> Tensor:
    """A layout that the CUDA kernels read with 16-byte loads: copied only when it is not one."""
    item = t.element_size()
    fine = t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(
        s * item % 16 == 0 for s in t.stride()[:-1])
    return t if fine else t.contiguous()


def _without_dead_rows(dout, out, lse, also_dead: Optional[Tensor] = None):
    """dout, out and lse in which rows of infinite lse add nothing to any gradient.

    Such a row sees no key, or its caller rules it out (a part of a context-parallel step, padding),
    with any value in dout and out. exp(s - inf) is 0; and 0 times NaN must not come up.
    `also_dead` (rows,) marks more rows of ragged tensors.
    """
    dead = torch.isinf(lse)
    if also_dead is not None:
        dead = dead | also_dead
    rows = dead.transpose(-1, -2)[..., None]
    return dout.masked_fill(rows, 0.0), out.masked_fill(rows, 0.0), lse.masked_fill(dead, _INF)


# ---- CPU flash ---------------------------------------------------------------------------------


def cpu_flash_reasons(call: Call) -> Optional[str]:
    if call.device.type != "cpu":
        return f"runs on the CPU, not on {call.device.type}"
    if call.head_dim != call.head_dim_v:
        return f"needs equal head dims, got D {call.head_dim} and Dv {call.head_dim_v}"
    reason = _feature_reason(call)
    if reason is not None:
        return reason
    if call.unmasked:
        return None
    # Its causal mask aligns to the top left: the same only where Sq = Sk.
    if call.causal_only and call.same_seqlens:
        return None
    if call.causal_only and not (call.ragged_q or call.ragged_k or call.has_seqused):
        return "its causal mask aligns to the top left, and Sq differs from Sk"
    return "no window, and no causal mask where Sq may differ from Sk"


def _cpu_pairs(call: Call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """The parts one kernel call handles: whole dense tensors, or one sequence each."""
    q_side = Side(cu_seqlens_q, seqused_q, call.batch, call.max_seqlen_q,
                  q.shape[0] if call.ragged_q else q.shape[1])
    k_side = Side(cu_seqlens_k, seqused_k, call.batch, call.max_seqlen_k,
                  k.shape[0] if call.ragged_k else k.shape[1])
    if q_side.plain and k_side.plain:
        return list(zip(q_side.device_rows(call.batch), k_side.device_rows(call.batch)))
    return list(zip(q_side.host_rows(), k_side.host_rows()))


def _group_view(t: Tensor, call: Call, g: int) -> Tensor:
    """Query head g of each group: (b, s, H, d) -> (b, Hk, s, d), no copy; KV needs no repeat."""
    return t[:, :, g :: call.heads // call.heads_kv].transpose(1, 2)


def cpu_flash_forward(call: Call, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    rows = q.shape[:-2]
    out = q.new_zeros(q.shape)
    lse = torch.full(rows + (call.heads,), -_INF, dtype=torch.float32)
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    causal = call.window_right == 0
    for q_rows, k_rows in _cpu_pairs(
            call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        qp, kp, vp = q_rows.load(q), k_rows.load(k), k_rows.load(v)
        if qp.numel() == 0 or kp.numel() == 0:
            continue
        out_p = torch.empty(qp.shape, dtype=q.dtype)
        lse_p = torch.empty(qp.shape[:-1], dtype=torch.float32)
        for g in range(call.heads // call.heads_kv):
            o, m = aten._scaled_dot_product_flash_attention_for_cpu(
                _group_view(qp, call, g), kp.transpose(1, 2), vp.transpose(1, 2), 0.0, causal,
                scale=call.scale)
            _group_view(out_p, call, g).copy_(o)
            _group_view(lse_p[..., None], call, g).copy_(m[..., None])
        q_rows.store(out, out_p)
        q_rows.store(lse, lse_p)
    return out, lse.transpose(-1, -2).contiguous()


def cpu_flash_backward(call: Call, dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q,
                       seqused_k):
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dout, out, lse = _without_dead_rows(dout, out, lse)
    q, k, v, dout, out = (_unit_last(t) for t in (q, k, v, dout, out))
    lse_rows = lse.transpose(-1, -2)
    causal = call.window_right == 0
    groups = call.heads // call.heads_kv
    for q_rows, k_rows in _cpu_pairs(
            call, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        qp, kp, vp = q_rows.load(q), k_rows.load(k), k_rows.load(v)
        if qp.numel() == 0 or kp.numel() == 0:
            continue
        do_p, out_p, lse_p = q_rows.load(dout), q_rows.load(out), q_rows.load(lse_rows)[..., None]
        dq_p = torch.empty(qp.shape, dtype=q.dtype)
        sums = None
        for g in range(groups):
            dq_g, dk_g, dv_g = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _group_view(do_p, call, g), _group_view(qp, call, g), kp.transpose(1, 2),
                vp.transpose(1, 2), _group_view(out_p, call, g),
                _group_view(lse_p, call, g)[..., 0], 0.0, causal, scale=call.scale)
            _group_view(dq_p, call, g).copy_(dq_g)
            if groups == 1:
                sums = (dk_g, dv_g)
            elif sums is None:
                sums = (dk_g.to(call.acc_dtype), dv_g.to(call.acc_dtype))
            else:
                sums = (sums[0] + dk_g, sums[1] + dv_g)
        q_rows.store(dq, dq_p)
        k_rows.store(dk, sums[0].transpose(1, 2))
        k_rows.store(dv, sums[1].transpose(1, 2))
    return dq, dk, dv


# ---- CUDA flash (FlashAttention-2 inside PyTorch) ------------------------------------------------


_running = threading.local()


def _cuda_flash_device_reason(call: Call) -> Optional[str]:
    if call.device.type != "cuda":
        return f"runs on CUDA devices, not on {call.device.type}"
    if torch.cuda.get_device_capability(call.device)[0] < 8:
        return "needs compute capability 8.0 or newer"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without its flash attention"
    return None


def cuda_flash_reasons(call: Call) -> Optional[str]:
    reason = _cuda_flash_device_reason(call)
    if reason is not None:
        return reason
    if call.dtype not in _HALF:
        return f"needs float16 or bfloat16, got {call.dtype}"
    if call.head_dim != call.head_dim_v:
        return f"needs equal head dims, got D {call.head_dim} and Dv {call.head_dim_v}"
    if call.head_dim % 8 or call.head_dim > 256:
        return f"needs a head dim that is a multiple of 8 up to 256, got {call.head_dim}"
    if call.has_seqused:
        return "seqused_q and seqused_k are not supported"
    if call.ragged_q != call.ragged_k:
        return "q and k must both be ragged or both be dense"
    if max(call.batch, call.heads) > _GRID_LIMIT:
        return f"its grid holds at most {_GRID_LIMIT} sequences and heads"
    # It turns -1 and what reaches past the longest sequence of keys into "Sk keys to the right",
    # which is not unlimited where there are more queries than keys: p = i + Sk - Sq is negative.
    right_edge = call.window_right > 0 or (call.window_right < 0 and call.window_left >= 0)
    if right_edge and not call.never_more_queries:
        return "it reads a right window wrongly where there are more queries than keys"
    return _feature_reason(call)


def _flash_args(call: Call, cu_seqlens_q, cu_seqlens_k, q, k):
    """Arguments shared by the forward and the backward; offsets forced into the tensors."""
    if call.ragged_q:
        cu_seqlens_q = cu_seqlens_q.clamp(0, q.shape[0]).cummax(0).values.int()
        cu_seqlens_k = cu_seqlens_k.clamp(0, k.shape[0]).cummax(0).values.int()
    window = {}
    if not (call.unmasked or call.causal_only):
        # As 32-bit ints there: what reaches past every key is unlimited, and said so by -1.
        left, right = (
            -1 if w >= call.max_seqlen_k else w for w in (call.window_left, call.window_right))
        window = {"window_size_left": left, "window_size_right": right}
    return cu_seqlens_q, cu_seqlens_k, call.causal_only, window


def cuda_flash_forward(call: Call, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    cu_q, cu_k, causal, window = _flash_args(call, cu_seqlens_q, cu_seqlens_k, q, k)
    out, lse = aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, call.max_seqlen_q, call.max_seqlen_k, 0.0, causal, False,
        scale=call.scale, **window)[:2]
    lse = lse.masked_fill(lse == _INF, -_INF)  # its sign for a row without keys is +inf
    if call.ragged_q:
        outside = ~valid_rows(cu_q, q.shape[0])
        out = out.masked_fill(outside[:, None, None], 0.0)
        lse = lse.masked_fill(outside, -_INF)
    return out.contiguous(), lse.contiguous()


def _strictly_deterministic() -> bool:
    return (torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled())


def _elements_per_kv_head(call: Call) -> int:
    """Of the dQ accumulator in PyTorch's flash backward, whose offsets are 32-bit products."""
    head_dim = 256 if call.head_dim > 192 else -(-call.head_dim // 32) * 32
    return (call.rows_q + 128 * call.batch) * (call.heads // call.heads_kv) * head_dim


def cuda_flash_backward_reasons(call: Call) -> Optional[str]:
    """Also for a forward that another kernel ran: out and lse have one meaning here."""
    reason = cuda_flash_reasons(call)
    if reason is not None:
        return reason
    if call.head_dim > 192:
        major, minor = torch.cuda.get_device_capability(call.device)
        if minor != 0 or major == 12:
            return "its backward at head dims above 192 needs an A100 or H100 class device"
    # The flag of the process decides its determinism. Switching that for the length of a call
    # would make operators of other threads raise; and with warn_only it changes nothing.
    if call.deterministic and not _strictly_deterministic():
        return "it is deterministic only under torch.use_deterministic_algorithms(True)"
    if _elements_per_kv_head(call) >= _INT32_LIMIT:
        return "its 32-bit offsets would overflow"
    if getattr(_running, "flash", False):
        return "PyTorch's flash backward is replaced by this project's"
    return None


def cuda_flash_backward(call: Call, dout, q, k, v, out, lse, *lengths):
    """In groups of KV heads that the kernel's 32-bit offsets can address."""
    at_once = (_INT32_LIMIT - 1) // max(1, _elements_per_kv_head(call))
    _running.flash = True  # an integration may have put this project under the aten operator
    try:
        if at_once >= call.heads_kv:
            return _cuda_flash_backward_heads(call, dout, q, k, v, out, lse, *lengths)
        group = call.heads // call.heads_kv
        head_axis = 0 if call.ragged_q else 1  # of lse
        parts = []
        for first in range(0, call.heads_kv, at_once):
            count = min(at_once, call.heads_kv - first)
            of_q, of_kv = (first * group, count * group), (first, count)
            parts.append(_cuda_flash_backward_heads(
                dataclasses.replace(call, heads=count * group, heads_kv=count),
                dout.narrow(-2, *of_q), q.narrow(-2, *of_q), k.narrow(-2, *of_kv),
                v.narrow(-2, *of_kv), out.narrow(-2, *of_q), lse.narrow(head_axis, *of_q),
                *lengths))
        return tuple(torch.cat(grads, dim=-2) for grads in zip(*parts))
    finally:
        _running.flash = False


def _cuda_flash_backward_heads(call: Call, dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
                               seqused_q, seqused_k):
    cu_q, cu_k, causal, window = _flash_args(call, cu_seqlens_q, cu_seqlens_k, q, k)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # dropout state; p is 0
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    outside_q = outside_k = None
    if call.ragged_q:  # rows outside of the sequences may hold anything and are not written
        outside_q, outside_k = ~valid_rows(cu_q, q.shape[0]), ~valid_rows(cu_k, k.shape[0])
    dout, out, lse = _without_dead_rows(dout, out, lse, outside_q)
    dout, q, k, v, out = (_aligned(t) for t in (dout, q, k, v, out))
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), cu_q, cu_k, call.max_seqlen_q, call.max_seqlen_k,
        0.0, causal, state, unused, scale=call.scale, **window)
    if call.ragged_q:
        dq = dq.masked_fill(outside_q[:, None, None], 0.0)
        dk, dv = (g.masked_fill(outside_k[:, None, None], 0.0) for g in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# ---- CUDA memory-efficient kernel ----------------------------------------------------------------


def efficient_reasons(call: Call) -> Optional[str]:
    if call.device.type != "cuda":
        return f"runs on CUDA devices, not on {call.device.type}"
    if call.dtype not in _HALF + (torch.float32,):
        return f"needs float16, bfloat16 or float32, got {call.dtype}"
    if call.dtype == torch.bfloat16 and torch.cuda.get_device_capability(call.device)[0] < 8:
        return "bfloat16 needs compute capability 8.0 or newer"
    if call.ragged_q or call.ragged_k or call.has_seqused:
        return "ragged calls and seqused are left to the other backends"
    if max(call.batch, call.heads) > _GRID_LIMIT:
        return f"its grid holds at most {_GRID_LIMIT} sequences and heads"
    if call.head_dim % 8 or call.head_dim_v % 8:
        return f"needs multiples of 8, got D {call.head_dim} and Dv {call.head_dim_v}"
    if not (call.unmasked or call.causal_only):
        return "no window other than causal"
    if call.causal_only and call.max_seqlen_q > call.max_seqlen_k:
        return "causal with more queries than keys leaves rows without keys"
    return _feature_reason(call)


def _repeated(t: Tensor, call: Call) -> Tensor:
    """KV heads repeated for the kernel, which knows no groups; one copy, on this path alone."""
    groups = call.heads // call.heads_kv
    return _aligned(t if groups == 1 else t.repeat_interleave(groups, dim=2))


def efficient_forward(call: Call, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    out, lse = aten._efficient_attention_forward(
        _aligned(q), _repeated(k, call), _repeated(v, call), None, None, None, None, None, 0.0,
        2 if call.causal_only else 0,  # 2: causal, aligned to the bottom right
        True, scale=call.scale)[:2]
    return out.contiguous(), lse[:, :, : call.max_seqlen_q].contiguous()  # lse comes padded


def efficient_backward(call: Call, dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q,
                       seqused_k):
    padded = (call.max_seqlen_q + 31) // 32 * 32
    dout, out, lse = _without_dead_rows(dout, out, lse)
    lse = torch.nn.functional.pad(lse, (0, padded - call.max_seqlen_q), value=_INF)
    state = torch.zeros((), dtype=torch.int64)  # dropout state; p is 0
    dq, dk, dv = aten._efficient_attention_backward(
        _aligned(dout), _aligned(q), _repeated(k, call), _repeated(v, call), None, _aligned(out),
        None, None, call.max_seqlen_q, call.max_seqlen_k, lse, 0.0, state, state,
        2 if call.causal_only else 0, False, scale=call.scale)[:3]
    if call.heads != call.heads_kv:
        shape = (call.batch, call.max_seqlen_k, call.heads_kv, -1)
        dk, dv = (
            g.reshape(shape + (g.shape[-1],)).sum(3, dtype=torch.float32).to(g.dtype)
            for g in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def efficient_backward_reasons(call: Call) -> Optional[str]:
    if call.deterministic:
        return "its backward is not deterministic"
    return efficient_reasons(call)
