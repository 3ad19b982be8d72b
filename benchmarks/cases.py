"""The configurations whose figures the forward issue asks for, and the tensors for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import flops
import torch

TOKENS = 16384
HIDDEN = 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
RAGGED_LENGTHS = (
    64, 4096, 333, 2048, 1024, 3777, 128, 512, 2900, 1536, 700, 3072, 96, 2222, 1800, 450,
)  # fmt: skip
SHORT_BATCH, SHORT_LENGTH = 8192, 34
LONG_SEQLEN = 131072
WINDOW = (1023, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One row: self-attention over sequences of the given lengths, `heads` heads on both sides.

    Dense when all lengths are equal and ragged is False; then (B, S, H, D), else (total, H, D)
    with cu_seqlens.
    """

    section: str
    head_dim: int
    causal: bool
    lengths: tuple[int, ...]
    heads: int
    ragged: bool = False
    window: tuple[int, int] = (-1, -1)
    dtype: str = "bf16"

    @property
    def flops(self) -> int:
        pairs = ((length, length) for length in self.lengths)
        return flops.forward_flops(
            pairs, self.heads, self.head_dim, causal=self.causal, window=self.window
        )

    @property
    def config(self) -> dict:
        """The row's "config" of the results file, less the timing."""
        config: dict = {"D": self.head_dim, "causal": self.causal}
        if len(set(self.lengths)) == 1:
            config["S"] = self.lengths[0]
        else:
            config["lengths"] = list(self.lengths)
        config["dtype"] = self.dtype
        config["case"] = self.section
        if self.section != "dense":
            config["B"] = len(self.lengths)
            config["ragged"] = self.ragged
        if self.window != (-1, -1):
            config["window"] = list(self.window)
        return config

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.window != (-1, -1):
            mask = f"window {self.window}"
        if len(set(self.lengths)) > 1:
            shape = f"{len(self.lengths)} lengths"
        else:
            shape = f"S {self.lengths[0]}"
        kind = " ragged" if self.ragged and self.section == "short" else ""
        return f"{self.section:6} D {self.head_dim:3} {mask:6} {shape:>10}{kind}"

    def with_dtype(self, dtype: str) -> Case:
        return replace(self, dtype=dtype)


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor | None
    max_seqlen: int

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(
            self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.cu_seqlens, self.max_seqlen
        )


def make_inputs(case: Case, device: str | torch.device = "cuda", seed: int = 0) -> Inputs:
    """Random normal data: zeros run faster than real numbers do."""
    torch.manual_seed(seed)
    if case.ragged:
        shape = (sum(case.lengths), case.heads, case.head_dim)
        bounds = [0]
        for length in case.lengths:
            bounds.append(bounds[-1] + length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    else:
        shape = (len(case.lengths), case.lengths[0], case.heads, case.head_dim)
        cu_seqlens = None
    dtype = DTYPES[case.dtype]
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    return Inputs(q, k, v, cu_seqlens, max(case.lengths))


def dense_cases() -> list[Case]:
    """36 points: 16,384 tokens in all, hidden 2048. Grouped so that FA4 compiles each D once."""
    return [
        Case("dense", d, causal, (s,) * (TOKENS // s), HIDDEN // d)
        for d in HEAD_DIMS
        for causal in (False, True)
        for s in SEQLENS
    ]


def long_cases() -> list[Case]:
    """128k tokens in one sequence, and the 16k that its rate is compared with."""
    return [
        Case("long", 128, True, (s,), HIDDEN // 128) for s in (TOKENS, LONG_SEQLEN)
    ]


def ragged_cases() -> list[Case]:
    return [
        Case("ragged", d, causal, RAGGED_LENGTHS, HIDDEN // d, ragged=True)
        for d in (64, 128)
        for causal in (False, True)
    ]


def short_cases() -> list[Case]:
    """8,192 sequences of 34 tokens, ragged and as a dense batch."""
    lengths = (SHORT_LENGTH,) * SHORT_BATCH
    return [Case("short", 128, False, lengths, 16, ragged=ragged) for ragged in (False, True)]


def window_cases() -> list[Case]:
    dense = Case("window", 128, False, (TOKENS,), HIDDEN // 128)
    return [dense, replace(dense, window=WINDOW)]


SECTIONS = {
    "dense": dense_cases,
    "long": long_cases,
    "ragged": ragged_cases,
    "short": short_cases,
    "window": window_cases,
}


def select_dense(spec: str, points: list[Case]) -> list[Case]:
    """Filter by `D:MASK:S` items separated by commas; MASK is full or causal, * matches all."""
    wanted = []
    for item in spec.split(","):
        parts = item.strip().split(":")
        if len(parts) != 3 or parts[1] not in ("full", "causal", "*"):
            raise ValueError(f"--points takes D:full|causal|*:S items, got {item!r}")
        wanted.append(parts)

    def matches(case: Case) -> bool:
        mask = "causal" if case.causal else "full"
        return any(
            d in ("*", str(case.head_dim)) and m in ("*", mask) and s in ("*", str(case.lengths[0]))
            for d, m, s in wanted
        )

    chosen = [case for case in points if matches(case)]
    if not chosen:
        raise ValueError(f"--points {spec} matches none of the {len(points)} dense points")
    return chosen
