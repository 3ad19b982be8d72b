"""e4m3 and its scales in plain PyTorch: what the quantise kernel makes of a tensor, and back.

The same layouts and the same arithmetic as csrc/kernels/fp8/quantize.h, on every device and without
a look into device memory. Shapes: x (B, S, H, D), or (total, H, D) with cu_seqlens.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# Larger inputs, infinities too, count as this: products of two, summed over a head dim, are finite.
LARGEST_INPUT = 2.0**50
SMALLEST_SCALE = 2.0**-126  # its inverse is finite
VALUE_BLOCK = 128  # keys of a block of a transposed V


class Rows(NamedTuple):
    """Where the rows of a tensor, all behind one another, belong."""

    sequence: Tensor  # (rows,) int64
    number: Tensor  # (rows,) within the sequence
    in_use: Optional[Tensor]  # (rows,) bool; None: all
    slot: Tensor  # (rows,) which scale of a head; rows of no sequence: the last, `slots`
    slots: int


def block_count(ragged: bool, batch: int, rows: int, block: int) -> int:
    """Blocks of a dense sequence, or of all ragged ones: there sequence b's blocks start at
    cu_seqlens[b] // block + b, so that no two sequences share one."""
    return rows // block + batch if ragged else -(-rows // block)


def find_rows(lead: tuple, cu_seqlens: Optional[Tensor], seqused: Optional[Tensor], block: int,
              device: torch.device) -> Rows:
    """`lead`: (B, S), or (total,). block 0: a scale for all rows of a sequence."""
    if cu_seqlens is None:
        batch, rows = lead
        row = torch.arange(batch * rows, device=device)
        sequence = row // max(rows, 1)
        number = row - sequence * rows
        in_use = None if seqused is None else number < seqused.long()[sequence]
        if block == 0:
            return Rows(sequence, number, in_use, sequence, batch)
        blocks = block_count(False, batch, rows, block)
        return Rows(sequence, number, in_use, sequence * blocks + number // block, batch * blocks)
    (total,), batch = lead, cu_seqlens.shape[0] - 1
    slots = batch if block == 0 else block_count(True, batch, total, block)
    row = torch.arange(total, device=device)
    if batch == 0:
        zero = torch.zeros_like(row)
        return Rows(zero, zero, torch.zeros_like(row, dtype=torch.bool), zero + slots, slots)
    cu = cu_seqlens.long().clamp(0, total)
    ends = torch.maximum(cu[1:], cu[:-1])
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=batch - 1)
    start = cu[:-1][sequence]
    number = row - start
    inside = (number >= 0) & (row < ends[sequence])
    first = sequence if block == 0 else start // block + sequence + number // block
    in_use = inside if seqused is None else inside & (number < seqused.long()[sequence])
    return Rows(sequence, number, in_use, torch.where(inside, first, slots), slots)


def hadamard(x: Tensor) -> Tensor:
    """x times H along its last dimension, by the largest power of two that divides that: H[i][j] =
    (-1)^popcount(i & j) / sqrt(size), symmetric and orthogonal. q H (k H)^T = q k^T."""
    dim = len(range(x.shape[-1]))  # a number, where torch.compile has a symbol: those have no `&`
    size = dim & -dim
    stride = 1
    while stride < size:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return x * (1.0 / math.sqrt(size))


def slot_of_key(device: torch.device) -> Tensor:
    """(128,): the byte of a row of a transposed V at which each key of a block lies, so that the
    kernel's P needs no shuffle (csrc/kernels/fp8/value_layout.h)."""
    key = torch.arange(VALUE_BLOCK, device=device)
    return key // 16 * 16 + key // 2 % 4 * 4 + key // 8 % 2 * 2 + key % 2


def _flat(x: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    return x.flatten(0, 1) if cu_seqlens is None else x


def _unflat(x: Tensor, lead: tuple) -> Tensor:
    return x.reshape(tuple(lead) + tuple(x.shape[1:]))


def _masked(x: Tensor, in_use: Optional[Tensor]) -> Tensor:
    return x if in_use is None else x.masked_fill(~in_use[:, None, None], 0.0)


def row_mean(x: Tensor, cu_seqlens: Optional[Tensor], seqused: Optional[Tensor]) -> Tensor:
    """(B, H, D) float32: the mean of each sequence's rows in use; 0 where it is not finite."""
    lead = tuple(x.shape[:-2])
    rows = find_rows(lead, cu_seqlens, seqused, 0, x.device)
    values = _masked(_flat(x, cu_seqlens).float(), rows.in_use)
    # One more: rows of no sequence are added to it, and it is dropped.
    sums = values.new_zeros((rows.slots + 1,) + tuple(values.shape[1:]))
    sums = sums.index_add(0, rows.slot, values)[: rows.slots]
    ones = torch.ones_like(rows.slot) if rows.in_use is None else rows.in_use.long()
    counts = torch.zeros(rows.slots + 1, dtype=torch.int64, device=x.device)
    counts = counts.index_add(0, rows.slot, ones)[: rows.slots].clamp(min=1)
    mean = sums / counts[:, None, None]
    return torch.where(mean.abs() < LARGEST_INPUT, mean, 0.0)


def row_dot(x: Tensor, mean: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """x . mean of each row and head, shaped like an LSE: (B, H, S) or (H, total). mean: (B, Hk, D).

    In float32 without a matrix product: a rounding to TF32 would show in the LSE. Infinities
    saturate as where x is quantised.
    """
    mean = mean.repeat_interleave(x.shape[-2] // mean.shape[1], dim=1)
    if cu_seqlens is None:
        mean = mean[:, None]
    elif mean.shape[0] == 0:
        return x.new_zeros(x.shape[-2], x.shape[0], dtype=torch.float32)
    else:
        mean = mean[find_rows((x.shape[0],), cu_seqlens, None, 0, x.device).sequence]
    x = x.float().clamp(-LARGEST_INPUT, LARGEST_INPUT)
    return (x * mean).sum(-1).transpose(-1, -2)


def _scale_of(top: Tensor, power_of_two: bool) -> Tensor:
    # Divided by a tensor: by a number, torch multiplies with its inverse on a GPU.
    scale = top.clamp(max=LARGEST_INPUT) / torch.full_like(top, LARGEST)
    scale = torch.where(top == 0, 1.0, scale.clamp(min=SMALLEST_SCALE))
    if power_of_two:  # the next one up: by its bits, which torch.log2 would not give exactly
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return scale


def quantize(x: Tensor, mean: Optional[Tensor], cu_seqlens: Optional[Tensor],
             seqused: Optional[Tensor], block: int, rotate: bool, transposed: bool,
             group: int = 1) -> tuple[Tensor, Tensor]:
    """flash_attn3::quantize in PyTorch; rows of no sequence become 0.

    block 0, which the kernel does not know: a scale for all rows of a sequence and `group`
    neighbouring heads, (B, H / group).
    """
    lead, heads = tuple(x.shape[:-2]), x.shape[-2]
    rows = find_rows(lead, cu_seqlens, seqused, block, x.device)
    values = _flat(x, cu_seqlens).float()
    if mean is not None and mean.shape[0] > 0:
        values = values - mean[rows.sequence]
    values = _masked(values, rows.in_use)
    if rotate:
        values = hadamard(values.clamp(-LARGEST_INPUT, LARGEST_INPUT))
    top = values.abs().nan_to_num(nan=0.0, posinf=LARGEST_INPUT).amax(-1)  # (rows, H)
    if block == 0:
        top = top.unflatten(-1, (-1, group)).amax(-1)
    tops = top.new_zeros(rows.slots + 1, top.shape[1])
    tops = tops.scatter_reduce(0, rows.slot[:, None].expand(top.shape), top, "amax")
    # Neighbouring blocks of V mostly have the same scale then (fp8.md, "Sums").
    scales = _scale_of(tops, power_of_two=block != 0)
    inverse = (1.0 / scales)[rows.slot]
    if block == 0:
        inverse = inverse.repeat_interleave(group, dim=1)
    values = (values * inverse[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    scales = scales[: rows.slots]  # (slots, H)
    if block != 0:
        scales = scales.t() if cu_seqlens is not None else scales.reshape(
            lead[0], block_count(False, *lead, block), heads).transpose(1, 2)
    if transposed:
        return transpose(_unflat(values, lead), cu_seqlens), scales.contiguous()
    return _unflat(values, lead), scales.contiguous()


def transpose(values: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """e4m3 (B, S, H, D) or (total, H, D) -> (blocks, H, D, 128), as the kernel reads V at once."""
    rows = find_rows(tuple(values.shape[:-2]), cu_seqlens, None, VALUE_BLOCK, values.device)
    flat = _flat(values, cu_seqlens).view(torch.uint8)
    tiles = flat.new_zeros((rows.slots + 1,) + tuple(flat.shape[1:]) + (VALUE_BLOCK,))
    byte = slot_of_key(values.device)[rows.number % VALUE_BLOCK]
    # By slot and byte first, so that one index finds both.
    tiles = tiles.permute(0, 3, 1, 2).index_put((rows.slot, byte), flat)
    return tiles.permute(0, 2, 3, 1)[: rows.slots].contiguous().view(E4M3)


def _rows_of_transposed(tiles: Tensor, lead: tuple, cu_seqlens: Optional[Tensor]) -> Tensor:
    rows = find_rows(lead, cu_seqlens, None, VALUE_BLOCK, tiles.device)
    byte = slot_of_key(tiles.device)[rows.number % VALUE_BLOCK]
    if tiles.shape[0] == 0:
        return tiles.new_zeros((rows.slot.shape[0],) + tuple(tiles.shape[1:3]))
    by_byte = tiles.view(torch.uint8).permute(0, 3, 1, 2)
    return by_byte[rows.slot.clamp(max=tiles.shape[0] - 1), byte].view(E4M3)


def dequantize(data: Tensor, scale: Optional[Tensor], block: int, lead: tuple,
               cu_seqlens: Optional[Tensor], transposed: bool = False) -> Tensor:
    """float32 rows (B, S, H, D) or (total, H, D) of e4m3 data. `lead` is (B, S) or (total,); rows
    of no sequence hold anything."""
    flat = _rows_of_transposed(data, lead, cu_seqlens) if transposed else _flat(data, cu_seqlens)
    flat = flat.float()
    if scale is None or scale.numel() == 0:
        return _unflat(flat, lead)
    rows = find_rows(lead, cu_seqlens, None, block, data.device)
    if block == 0:  # (B, Hk): one for all heads of a group
        scales = scale.repeat_interleave(flat.shape[1] // scale.shape[1], dim=1)
    else:
        scales = scale.t() if cu_seqlens is not None else scale.transpose(1, 2).flatten(0, 1)
    return _unflat(flat * scales[rows.slot.clamp(max=rows.slots - 1)][..., None], lead)
