"""One description of an attention call, shared by every backend of this folder.

`Call` holds what is known on the host (sizes, options); nothing in it needs a look into device
memory, so a backend can be chosen without a synchronisation and under FakeTensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """Sizes and options of one call of `flash_attn3::fallback_fwd` or `fallback_bwd`."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    max_seqlen_q: int  # dense: Sq
    max_seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    ragged_q: bool
    ragged_k: bool
    has_seqused: bool
    rows_q: int  # query rows of all sequences together
    same_seqlens: bool  # query and key lengths are one and the same tensor: Sk - Sq is 0
    scale: float
    window_left: int  # -1: unlimited
    window_right: int
    chunk: int
    softcap: float
    deterministic: bool

    @property
    def acc_dtype(self) -> torch.dtype:
        """Accumulation type: float32, and float64 for float64 inputs (used by gradient checks)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def causal_only(self) -> bool:
        """The mask is the plain causal one: no left window, no chunk."""
        return self.window_left < 0 and self.window_right == 0 and self.chunk == 0

    @property
    def unmasked(self) -> bool:
        return self.window_left < 0 and self.window_right < 0 and self.chunk == 0

    @property
    def never_more_queries(self) -> bool:
        """In every sequence Sq <= Sk, as far as the host knows."""
        return self.same_seqlens or (
            not (self.ragged_q or self.ragged_k or self.has_seqused)
            and self.max_seqlen_q <= self.max_seqlen_k)

    @property
    def empty(self) -> bool:
        """No score at all: batch 0, or no query row, or no key row."""
        return 0 in (self.batch, self.max_seqlen_q, self.max_seqlen_k, self.heads)


def make_call(
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
) -> Call:
    """Describes a call from the operator's arguments (q, k, v already checked)."""
    if cu_seqlens_q is not None:
        batch = cu_seqlens_q.shape[0] - 1
    elif cu_seqlens_k is not None:
        batch = cu_seqlens_k.shape[0] - 1
    else:
        batch = q.shape[0]
    same = seqused_q is None and seqused_k is None and (
        q.shape[1] == k.shape[1] if cu_seqlens_q is None and cu_seqlens_k is None
        else cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    )
    return Call(
        device=q.device,
        dtype=q.dtype,
        batch=batch,
        max_seqlen_q=q.shape[1] if cu_seqlens_q is None else min(max_seqlen_q, q.shape[0]),
        max_seqlen_k=k.shape[1] if cu_seqlens_k is None else min(max_seqlen_k, k.shape[0]),
        heads=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        ragged_q=cu_seqlens_q is not None,
        ragged_k=cu_seqlens_k is not None,
        has_seqused=seqused_q is not None or seqused_k is not None,
        rows_q=q.shape[0] if cu_seqlens_q is not None else q.shape[0] * q.shape[1],
        same_seqlens=same,
        scale=softmax_scale,
        window_left=window_left,
        window_right=0 if causal else window_right,
        chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
    )


def empty_outputs(call: Call, q: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a call in which no query sees a key: out 0, lse -inf."""
    out = q.new_zeros(q.shape[:-1] + (call.head_dim_v,))
    lse = torch.full(
        lse_shape(q, call.ragged_q), float("-inf"), dtype=torch.float32, device=q.device
    )
    return out, lse


def unpacked(qkv: Tensor, num_heads_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v where they lie in one (checked) tensor: see flash_attn_qkvpacked_func."""
    if qkv.dim() == 5:
        return qkv.unbind(2)
    heads_kv = (qkv.shape[2] - num_heads_q) // 2
    return qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)


def lse_shape(q: Tensor, ragged: bool) -> tuple[int, ...]:
    """(B, H, Sq), or (H, total_q) of a ragged q."""
    if ragged:
        return (q.shape[1], q.shape[0])
    return (q.shape[0], q.shape[2], q.shape[1])
