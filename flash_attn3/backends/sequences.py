"""Where the sequences of a call lie, and how rows are read and written sequence by sequence.

A side (queries or keys) is cut into parts that the block loops take one after another:

- off the GPU lengths are read on the host, a part is one sequence, and its rows are plain slices;
- on a CUDA device lengths stay there (a read would synchronise and break graph capture): a part is
  a group of sequences gathered into a padded block by index arithmetic on the device.

Everything taken from device memory is clamped to the tensors' bounds, so wrong lengths can give
wrong results but never an access outside of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


class DenseRows:
    """Sequences b0 to b1 of a dense tensor, every row in use."""

    lengths = None

    def __init__(self, b0: int, b1: int):
        self.span = slice(b0, b1)

    def load(self, t: Tensor) -> Tensor:
        return t[self.span]

    def store(self, dst: Tensor, value: Tensor) -> None:
        dst[self.span] = value


class SliceRows:
    """One sequence whose place is known on the host; `batch` is None in a ragged tensor."""

    lengths = None

    def __init__(self, batch: Optional[int], start: int, length: int):
        self.batch, self.rows = batch, slice(start, start + length)

    def _view(self, t: Tensor) -> Tensor:
        return t[None, self.rows] if self.batch is None else t[self.batch, self.rows][None]

    def load(self, t: Tensor) -> Tensor:
        return self._view(t)

    def store(self, dst: Tensor, value: Tensor) -> None:
        self._view(dst).copy_(value)


class PaddedRows:
    """Sequences b0 to b1 as a padded block; their lengths (b,) and places live on the device."""

    def __init__(self, starts: Optional[Tensor], lengths: Tensor, size: int, b0: int, b1: int,
                 total: int):
        self.lengths = lengths[b0:b1]
        self.span = slice(b0, b1)
        row = torch.arange(size, device=lengths.device)
        self.valid = row < self.lengths[:, None]  # (b, size)
        self.index = None
        if starts is not None:
            # Rows past a sequence's end point at row `total`: the buffers that `store` writes to
            # have this one row more, and it is dropped at the end.
            at = starts[b0:b1, None] + row
            self.index = torch.where(self.valid, at, total)
            self.safe_index = self.index.clamp(max=max(total - 1, 0))

    def load(self, t: Tensor) -> Tensor:
        """Rows not in use come back as 0, whatever lies there (NaN times 0 would be NaN)."""
        block = t[self.span] if self.index is None else t[self.safe_index]
        invalid = ~self.valid.reshape(self.valid.shape + (1,) * (block.dim() - 2))
        return block.masked_fill(invalid, 0)

    def store(self, dst: Tensor, value: Tensor) -> None:
        if self.index is None:
            dst[self.span] = value
        else:
            dst[self.index] = value.to(dst.dtype)


@dataclass
class Side:
    """One side of a call (queries, or keys and values)."""

    cu_seqlens: Optional[Tensor]  # (B + 1,) int32, or None when dense
    seqused: Optional[Tensor]  # (B,) int32 or None
    batch: int
    size: int  # longest sequence: dense S, ragged max_seqlen
    total: int  # rows of a ragged tensor; dense: S

    @property
    def plain(self) -> bool:
        """Every sequence is `size` rows long, known on the host."""
        return self.cu_seqlens is None and self.seqused is None

    @property
    def buffer_rows(self) -> int:
        """Rows of a ragged buffer that `store` of any part may write to."""
        return self.total + 1

    def _bounds(self) -> tuple[Optional[Tensor], Tensor]:
        """Clamped starts (None when dense) and lengths, int64, where the lengths live."""
        if self.cu_seqlens is None:
            return None, self.seqused.long().clamp(0, self.size)
        cu = self.cu_seqlens.long().clamp(0, self.total)
        starts = cu[:-1]
        lengths = (cu[1:] - starts).clamp(0, self.size)
        if self.seqused is not None:
            lengths = torch.minimum(lengths, self.seqused.long().clamp(min=0))
        return starts, lengths

    def host_rows(self) -> list[SliceRows]:
        """One part per sequence; reads the lengths."""
        if self.plain:
            return [SliceRows(b, 0, self.size) for b in range(self.batch)]
        starts, lengths = self._bounds()
        if starts is None:
            return [SliceRows(b, 0, n) for b, n in enumerate(lengths.tolist())]
        return [SliceRows(None, s, n) for s, n in zip(starts.tolist(), lengths.tolist())]

    def device_rows(self, group: int) -> list:
        """Parts of `group` sequences, without reading a length."""
        spans = [(b, min(b + group, self.batch)) for b in range(0, self.batch, group)]
        if self.plain:
            return [DenseRows(b0, b1) for b0, b1 in spans]
        starts, lengths = self._bounds()
        return [PaddedRows(starts, lengths, self.size, b0, b1, self.total) for b0, b1 in spans]


def split(q_side: Side, k_side: Side, device: torch.device, group: int) -> list[tuple]:
    """Pairs of query rows and key rows that belong together, `group` sequences in each."""
    if q_side.plain and k_side.plain:
        return list(zip(q_side.device_rows(group), k_side.device_rows(group)))
    if device.type == "cuda":
        return list(zip(q_side.device_rows(group), k_side.device_rows(group)))
    return list(zip(q_side.host_rows(), k_side.host_rows()))


def valid_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) bool: rows of a ragged tensor inside [cu_seqlens[0], cu_seqlens[-1])."""
    row = torch.arange(total, device=cu_seqlens.device)
    return (row >= cu_seqlens[0]) & (row < cu_seqlens[-1])
