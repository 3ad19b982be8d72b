"""Correctness of kernel libraries before they are timed, on the GPU, against plain attention.

The tolerance: by largest absolute error and by ||err|| / ||ref||, at most twice that of
matmul, softmax and matmul done one by one in the kernel's dtype, plus 1e-5.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from cases import DTYPES
from ctypes_lib import KernelLibrary
from timing import first_line

ROWS_AT_ONCE = 1024  # bounds the score matrix of a long sequence
FLOAT64_PAIRS = 2**25  # up to this many scores the reference is float64, above it float32


@dataclass(frozen=True)
class CheckCase:
    head_dim: int
    lengths: tuple[tuple[int, int], ...]  # (Sq, Sk); dense if all are equal
    heads: int = 4
    heads_kv: int = 4
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    ragged: bool = False
    dtype: str = "bf16"
    spread: float = 1.0  # standard deviation of q: large ones make peaked rows, the max moves often

    @property
    def label(self) -> str:
        dims = f"D {self.head_dim}"
        if self.head_dim_v not in (None, self.head_dim):
            dims += f"/{self.head_dim_v}"
        sq, sk = max(self.lengths)
        parts = [self.dtype, dims, f"B {len(self.lengths)} S {sq}x{sk}"]
        parts.append(f"H {self.heads}/{self.heads_kv}")
        parts += ["ragged"] if self.ragged else []
        parts += ["causal"] if self.causal else []
        parts += [f"window {self.window}"] if self.window != (-1, -1) else []
        parts += [f"chunk {self.chunk}"] if self.chunk else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += [f"q x{self.spread:g}"] if self.spread != 1 else []
        return " ".join(parts)


def small_cases(dtype: str) -> Iterator[CheckCase]:
    for d in (64, 128, 256, 96, 192):
        for sq, sk in ((1, 1), (128, 128), (200, 333), (513, 257), (1, 700)):
            for causal in (False, True):
                yield CheckCase(d, ((sq, sk),) * 2, causal=causal, dtype=dtype)
        yield CheckCase(d, ((700, 700),), heads=6, heads_kv=2, causal=True, dtype=dtype, spread=8)
        yield CheckCase(d, ((600, 700),), window=(100, 0), dtype=dtype)
        yield CheckCase(d, ((600, 600),), window=(30, 60), heads_kv=1, dtype=dtype)
        yield CheckCase(d, ((500, 500),), chunk=96, causal=True, dtype=dtype)
        yield CheckCase(d, ((300, 300),), softcap=20.0, dtype=dtype, spread=8)
        ragged = ((64, 64), (0, 5), (333, 333), (1, 200), (7, 0), (450, 450))
        for causal in (False, True):
            yield CheckCase(d, ragged, causal=causal, ragged=True, dtype=dtype)
    yield CheckCase(192, ((300, 400),), head_dim_v=128, causal=True, dtype=dtype)
    for d in (8, 40, 72, 120, 248):
        yield CheckCase(d, ((200, 300),), causal=True, dtype=dtype)


def large_cases(dtype: str) -> Iterator[CheckCase]:
    for d in (64, 128, 256):
        for causal in (False, True):
            heads = 2048 // d
            yield CheckCase(d, ((8192, 8192),), heads, heads, causal=causal, dtype=dtype)
            lengths = ((512, 512),) * 32
            yield CheckCase(d, lengths, heads, heads, causal=causal, dtype=dtype)


def visible_mask(case: CheckCase, rows: torch.Tensor, sq: int, sk: int) -> torch.Tensor:
    """(rows, Sk) boolean: which keys the given query rows see."""
    position = (rows + sk - sq)[:, None]
    key = torch.arange(sk, device=rows.device)[None, :]
    left, right = case.window
    right = 0 if case.causal else right
    visible = torch.ones(len(rows), sk, dtype=torch.bool, device=rows.device)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    if case.chunk:
        same = torch.div(key, case.chunk, rounding_mode="floor")
        visible &= same == torch.div(position, case.chunk, rounding_mode="floor")
    return visible


def plain_attention(case: CheckCase, q, k, v, dtype: torch.dtype):
    """Attention of one sequence, (S,H,D) tensors, every operation in `dtype`; (out, lse)."""
    sq, sk = q.shape[0], k.shape[0]
    group = case.heads // case.heads_kv
    out = torch.zeros(sq, case.heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((case.heads, sq), -math.inf, dtype=dtype, device=q.device)
    if sk == 0:
        return out, lse
    k_t = k.to(dtype).repeat_interleave(group, 1).permute(1, 2, 0)  # (H,D,Sk)
    v_t = v.to(dtype).repeat_interleave(group, 1).transpose(0, 1)  # (H,Sk,Dv)
    scale = 1 / math.sqrt(case.head_dim)
    for start in range(0, sq, ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + ROWS_AT_ONCE, sq), device=q.device)
        scores = q[rows].to(dtype).transpose(0, 1) @ k_t * scale  # (H,rows,Sk)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        visible = visible_mask(case, rows, sq, sk)
        scores.masked_fill_(~visible, -math.inf)
        probabilities = torch.softmax(scores, -1).nan_to_num_(0.0)  # rows that see no key: 0
        out[rows] = (probabilities @ v_t).transpose(0, 1)
        lse[:, rows] = torch.logsumexp(scores, -1)
    return out, lse


def errors(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(largest absolute error, ||err|| / ||ref||); NaN anywhere gives infinity."""
    difference = (out.to(reference.dtype) - reference).flatten()
    if difference.numel() == 0:
        return 0.0, 0.0
    if not bool(torch.isfinite(difference).all()):
        return math.inf, math.inf
    norm = float(torch.linalg.vector_norm(reference.flatten()))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm > 0 else 0.0
    return float(difference.abs().max()), relative


def lse_error(lse: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute error where finite; infinity if -inf stands in different places."""
    if not torch.equal(torch.isneginf(lse), torch.isneginf(reference)):
        return math.inf
    finite = ~torch.isneginf(reference)
    if not bool(finite.any()):
        return 0.0
    difference = (lse.to(reference.dtype) - reference)[finite].abs().max()
    return float(difference) if math.isfinite(float(difference)) else math.inf


@dataclass
class CheckResult:
    case: CheckCase
    passed: bool | None  # None: this build lacks the configuration
    detail: str


def make_tensors(case: CheckCase, device: str):
    dtype = DTYPES[case.dtype]
    dv = case.head_dim_v or case.head_dim
    if case.ragged:
        total_q, total_k = (sum(pair[i] for pair in case.lengths) for i in (0, 1))
        # Rows behind the last sequence may hold anything.
        shapes = [(total_q + 3,), (total_k + 3,), (total_k + 3,)]
    else:
        sq, sk = case.lengths[0]
        shapes = [(len(case.lengths), s) for s in (sq, sk, sk)]
    q = torch.randn(*shapes[0], case.heads, case.head_dim, device=device).mul_(case.spread)
    k = torch.randn(*shapes[1], case.heads_kv, case.head_dim, device=device)
    v = torch.randn(*shapes[2], case.heads_kv, dv, device=device)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if case.ragged:
        for tensor in (q, k, v):
            tensor[-3:] = math.nan
    return q, k, v


def prefix_sums(case: CheckCase, which: int, device: str) -> torch.Tensor:
    sums = [0]
    for pair in case.lengths:
        sums.append(sums[-1] + pair[which])
    return torch.tensor(sums, dtype=torch.int32, device=device)


def run_case(library: KernelLibrary, case: CheckCase, device: str = "cuda") -> CheckResult:
    torch.manual_seed(zlib.crc32(case.label.encode()))
    q, k, v = make_tensors(case, device)
    options = dict(
        causal=case.causal, window_size=case.window, attention_chunk=case.chunk,
        softcap=case.softcap,
    )  # fmt: skip
    if case.ragged:
        options.update(
            cu_seqlens_q=prefix_sums(case, 0, device),
            cu_seqlens_k=prefix_sums(case, 1, device),
            max_seqlen_q=max(pair[0] for pair in case.lengths),
            max_seqlen_k=max(pair[1] for pair in case.lengths),
        )
    try:
        call = library.prepare(q, k, v, **options)
        call.poison()
        out = call()  # before the reference, whose results the allocator could hand on
        torch.cuda.synchronize() if q.is_cuda else None
    except NotImplementedError as error:
        return CheckResult(case, None, first_line(error))
    except (RuntimeError, ValueError) as error:
        return CheckResult(case, False, f"{type(error).__name__}: {first_line(error)}")
    return compare(case, q, k, v, out, call.lse)


def compare(case: CheckCase, q, k, v, out, lse) -> CheckResult:
    pairs = sum(sq * sk for sq, sk in case.lengths) * case.heads
    high = torch.float64 if pairs <= FLOAT64_PAIRS else torch.float32
    parts: list[tuple[torch.Tensor, ...]] = []
    worst_lse = 0.0
    begin_q = begin_k = 0
    for index, (sq, sk) in enumerate(case.lengths):
        if case.ragged:
            rows_q, rows_k = slice(begin_q, begin_q + sq), slice(begin_k, begin_k + sk)
            one = q[rows_q], k[rows_k], v[rows_k]
            got, got_lse = out[rows_q], lse[:, rows_q]
        else:
            one = q[index], k[index], v[index]
            got, got_lse = out[index], lse[index]
        begin_q, begin_k = begin_q + sq, begin_k + sk
        reference, reference_lse = plain_attention(case, *one, high)
        native, _ = plain_attention(case, *one, q.dtype)
        parts.append((got.flatten(), reference.flatten(), native.flatten()))
        worst_lse = max(worst_lse, lse_error(got_lse, reference_lse))
    got, reference, native = (torch.cat(list(column)) for column in zip(*parts))
    largest, relative = errors(got, reference)
    native_largest, native_relative = errors(native, reference)
    passed = (
        largest <= 2 * native_largest + 1e-5
        and relative <= 2 * native_relative + 1e-5
        and worst_lse <= 1e-3
    )
    detail = (
        f"max {largest:.2e} (plain {native_largest:.2e})  "
        f"rel {relative:.2e} (plain {native_relative:.2e})  lse {worst_lse:.1e}"
    )
    return CheckResult(case, passed, detail)


def check_library(
    library: KernelLibrary, name: str, dtypes=("bf16", "fp16"), large: bool = True
) -> bool:
    """Runs all cases, prints the failures and a summary line; True if nothing failed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for dtype in dtypes:
        cases = list(small_cases(dtype)) + (list(large_cases(dtype)) if large else [])
        results += [run_case(library, case) for case in cases]
    failed = [r for r in results if r.passed is False]
    missing = [r for r in results if r.passed is None]
    for result in failed[:30]:
        print(f"  {name} WRONG  {result.case.label}: {result.detail}")
    if len(failed) > 30:
        print(f"  {name}: {len(failed) - 30} more wrong cases")
    for result in results:
        if result.passed and max(result.case.lengths)[0] >= 8192:
            print(f"  {name} ok     {result.case.label}: {result.detail}")
    print(
        f"{name}: {len(results) - len(failed) - len(missing)} cases right, {len(failed)} wrong, "
        f"{len(missing)} not in this build"
    )
    return not failed
