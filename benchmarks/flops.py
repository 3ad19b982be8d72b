"""Floating-point operations, visible blocks and bytes of one attention call."""

from __future__ import annotations

from collections.abc import Iterable

UNLIMITED = -1


def visible_range(
    row: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int]
) -> tuple[int, int]:
    """First and one past the last key that query `row` sees (bottom-right aligned)."""
    left, right = window
    position = row + seqlen_k - seqlen_q
    first = 0 if left == UNLIMITED else max(0, position - left)
    end = seqlen_k if right == UNLIMITED else min(seqlen_k, position + right + 1)
    return first, max(first, end)


def visible_pairs(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> int:
    """Number of (query, key) pairs that the mask leaves visible."""
    if window == (UNLIMITED, UNLIMITED):
        return seqlen_q * seqlen_k
    total = 0
    for row in range(seqlen_q):
        first, end = visible_range(row, seqlen_q, seqlen_k, window)
        total += end - first
    return total


def visible_blocks(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], block: int = 128
) -> int:
    """Number of block x block tiles of the score matrix that hold a visible pair."""
    total = 0
    for start in range(0, seqlen_q, block):
        last = min(start + block, seqlen_q) - 1
        # Both ends of the visible range move right with the row, so the union over the rows of
        # a tile spans from the first row's first key to the last row's last one.
        first, _ = visible_range(start, seqlen_q, seqlen_k, window)
        _, end = visible_range(last, seqlen_q, seqlen_k, window)
        if end > first:
            total += (end - 1) // block - first // block + 1
    return total


def forward_flops(
    lengths: Iterable[tuple[int, int]],
    heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
) -> int:
    """FLOPs over sequences of (seqlen_q, seqlen_k): 2*D for QK^T and 2*Dv for PV per pair.

    Causal without a window counts as half of all pairs, the convention of the published figures;
    a window counts the pairs that it leaves visible.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return _count(lengths, 2 * (head_dim + head_dim_v) * heads, causal, window)


def backward_flops(
    lengths: Iterable[tuple[int, int]],
    heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
) -> int:
    """As forward_flops: 2*D each for QK^T, dQ and dK, 2*Dv each for dO V^T and dV per pair."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return _count(lengths, 2 * (3 * head_dim + 2 * head_dim_v) * heads, causal, window)


def _count(
    lengths: Iterable[tuple[int, int]], per_pair: int, causal: bool, window: tuple[int, int]
) -> int:
    total = 0
    for seqlen_q, seqlen_k in lengths:
        if window == (UNLIMITED, UNLIMITED):
            total += seqlen_q * seqlen_k * per_pair // (2 if causal else 1)
        else:
            bounds = (window[0], 0) if causal else window
            total += visible_pairs(seqlen_q, seqlen_k, bounds) * per_pair
    return total


def tflops(flops: int, milliseconds: float) -> float:
    return flops / milliseconds / 1e9
