"""FlexAttention: masks and soft cap compiled into one Triton kernel, for long calls on a GPU."""

from __future__ import annotations

import functools
from typing import Optional

import torch

from .call import Call

# Below this many scores per head the block-wise backend answers before flex has compiled.
_MIN_SCORES = 1 << 22


def flex_reasons(call: Call) -> Optional[str]:
    if call.device.type != "cuda":
        return f"used on CUDA devices only, not on {call.device.type}"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"needs float16, bfloat16 or float32, got {call.dtype}"
    if call.ragged_q or call.ragged_k or call.has_seqused:
        return "ragged calls and seqused are left to the other backends"
    if call.head_dim not in (16, 32, 64, 128, 256) or call.head_dim_v not in (16, 32, 64, 128, 256):
        return f"needs head dims 16, 32, 64, 128 or 256, got {call.head_dim}, {call.head_dim_v}"
    if call.heads != call.heads_kv and (call.heads // call.heads_kv) & (
            call.heads // call.heads_kv - 1):
        return "needs a power of two of query heads per KV head"
    if torch.cuda.get_device_capability(call.device)[0] < 8:
        return "needs compute capability 8.0 or newer"
    if call.max_seqlen_q * call.max_seqlen_k < _MIN_SCORES:
        return "the call is too short to pay for its compilation"
    if torch.cuda.is_current_stream_capturing():
        return "it can't compile inside a CUDA graph capture"
    if not _triton():
        return "Triton is not installed"
    return None


@functools.lru_cache(maxsize=1)
def _triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


def mask_mod(call: Call):
    """The visible keys of `call` as a FlexAttention mask, or None when all are visible."""
    if call.unmasked:
        return None
    offset = call.max_seqlen_k - call.max_seqlen_q
    left, right, chunk = call.window_left, call.window_right, call.chunk

    def visible(b, h, i, j):
        p = i + offset
        seen = j >= 0
        if left >= 0:
            seen = seen & (j >= p - left)
        if right >= 0:
            seen = seen & (j <= p + right)
        if chunk > 0:
            first = torch.div(p, chunk, rounding_mode="floor") * chunk
            seen = seen & (j >= first) & (j < first + chunk)
        return seen

    return visible


def score_mod(call: Call):
    """The soft cap as a FlexAttention score function, or None."""
    if call.softcap <= 0:
        return None
    cap = call.softcap

    def capped(score, b, h, i, j):
        return cap * torch.tanh(score / cap)

    return capped


@functools.lru_cache(maxsize=64)
def _plan(call: Call):
    """Compiled function and block mask of one geometry; kept, since both cost seconds."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = mask_mod(call)
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(
            mask, None, None, call.max_seqlen_q, call.max_seqlen_k, device=call.device)
    return torch.compile(flex_attention, dynamic=False), block_mask, score_mod(call)


def flex_forward(call: Call, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    from torch.nn.attention.flex_attention import AuxRequest

    run, block_mask, cap = _plan(call)
    with torch.no_grad():
        out, aux = run(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=cap,
            block_mask=block_mask, scale=call.scale, enable_gqa=call.heads != call.heads_kv,
            return_aux=AuxRequest(lse=True))
    return out.transpose(1, 2).contiguous(), aux.lse.float().contiguous()
