"""Calls as data: one dataclass describes a call, its inputs, and how the package is called."""

import dataclasses
import itertools

import torch

import flash_attn3


@dataclasses.dataclass(frozen=True)
class Case:
    """lengths are per sequence; dense when `ragged` is False (then all the same)."""

    lengths_q: tuple = (33, 33)
    lengths_k: tuple = (47, 47)
    heads: int = 2
    heads_kv: int = 2
    d: int = 32
    dv: int = 0  # 0: as d
    dtype: torch.dtype = torch.float32
    ragged: bool = False
    used_q: tuple = None
    used_k: tuple = None
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    scale: float = None
    tail: int = 0  # rows after the last sequence of a ragged tensor
    sm_margin: int = 0
    size: float = 1.0  # standard deviation of q and k

    def __str__(self):
        changed = (
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default)
        return "case(" + ",".join(changed).replace(" ", "") + ")"

    def make(self, device="cpu", poison=False):
        """q, k, v; with `poison`, NaN in every row that is not in use."""
        def tensor(lengths, used, heads, d, std):
            if self.ragged:
                t = torch.randn(sum(lengths) + self.tail, heads, d, device=device)
            else:
                t = torch.randn(len(lengths), max(lengths, default=0), heads, d, device=device)
            t = (t * std).to(self.dtype)
            if poison:
                kept = torch.zeros(t.shape[:-2], dtype=torch.bool, device=device)
                start = 0
                for b, n in enumerate(lengths):
                    m = n if used is None else min(n, used[b])
                    if self.ragged:
                        kept[start:start + m] = True
                        start += n
                    else:
                        kept[b, :m] = True
                t[~kept] = float("nan")
            return t

        return (
            tensor(self.lengths_q, self.used_q, self.heads, self.d, self.size),
            tensor(self.lengths_k, self.used_k, self.heads_kv, self.d, self.size),
            tensor(self.lengths_k, self.used_k, self.heads_kv, self.dv or self.d, 1.0))

    def cu(self, lengths):
        return [0, *itertools.accumulate(lengths)] if self.ragged else None

    def call(self, q, k, v, **more):
        """(out, lse) by the public functions."""
        def ints(values):
            return None if values is None else torch.tensor(
                values, dtype=torch.int32, device=q.data.device)  # a Quantized has data too

        options = dict(
            softmax_scale=self.scale, causal=self.causal, window_size=self.window,
            attention_chunk=self.chunk, softcap=self.softcap, sm_margin=self.sm_margin,
            return_attn_probs=True, **more)
        if not self.ragged and self.used_q is None and self.used_k is None:
            return flash_attn3.flash_attn_func(q, k, v, **options)
        if self.ragged:
            return flash_attn3.flash_attn_varlen_func(
                q, k, v, ints(self.cu(self.lengths_q)), ints(self.cu(self.lengths_k)),
                max(self.lengths_q, default=0), max(self.lengths_k, default=0), ints(self.used_q),
                ints(self.used_k), **options)
        # A dense batch with lengths is a ragged one of equal sequences.
        b, sq, sk = q.shape[0], q.shape[1], k.shape[1]
        out, lse = flash_attn3.flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            ints([i * sq for i in range(b + 1)]), ints([i * sk for i in range(b + 1)]), sq, sk,
            ints(self.used_q), ints(self.used_k), **options)
        return out.unflatten(0, (b, sq)), lse.unflatten(1, (b, sq)).transpose(0, 1)

    def reference_options(self):
        return dict(
            cu_q=self.cu(self.lengths_q), cu_k=self.cu(self.lengths_k), used_q=self.used_q,
            used_k=self.used_k, scale=self.scale, causal=self.causal, window=self.window,
            chunk=self.chunk, softcap=self.softcap)


MASKS = (
    dict(), dict(causal=True), dict(window=(5, 0)), dict(window=(7, 3)), dict(window=(-1, 4)),
    dict(window=(0, -1)), dict(window=(0, 0)), dict(chunk=8), dict(chunk=8, causal=True),
    dict(softcap=3.0), dict(softcap=3.0, causal=True, window=(20, 0)))
