"""Backward kernels of a library: correctness against float64 autograd, then a few timings.

    python3 benchmarks/check_bwd.py LIB.so [--dims 128,64] [--skip-time] [--skip-check]

A gradient is right if its error is at most three times that of the same formula computed operation
by operation in the kernel's dtype, by largest absolute error and by ||err|| / ||ref||, plus 1e-5.
Every case is announced before it runs, so that a hang can be located.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import reference  # noqa: E402
from ctypes_lib import KernelLibrary, PreparedBackward  # noqa: E402
from timing import first_line, interleave, make_timers  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # tests run parts of this without one
NAMES = ("dq", "dk", "dv")
FACTOR, FLOOR = 3.0, 1e-5


@dataclass(frozen=True)
class Case:
    d: int
    sq: int = 0
    sk: int = 0
    dv: int | None = None
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    spread: float = 1.0
    dlse: bool = False
    dout: str = "plain"  # or "sum" (all strides 0), "transposed", "row0" (stride 0 along rows)
    lengths: tuple[tuple[int, int], ...] = ()  # ragged: (used q, used k) of each sequence
    gap: int = 0  # rows of NaN before, between (by seqused) and behind the sequences
    used: tuple[tuple[int, int], ...] = ()  # dense: rows in use of each sequence
    deterministic: bool = False
    sm_margin: int = 0

    @property
    def label(self) -> str:
        default = Case(self.d)
        shown = [f"D {self.d}"] + ([f"Dv {self.dv}"] if self.dv else [])
        for name, value in self.__dict__.items():
            if name not in ("d", "dv") and value != getattr(default, name):
                shown.append(f"{name} {value}")
        return ", ".join(shown)


def cases_of(d: int, dv: int | None) -> list[Case]:
    one = Case(d, dv=dv)
    # As many pairs of batch and KV head as an H200 has SMs, for the schedule of whole pairs.
    many = replace(one, batch=33, heads=4, heads_kv=4, sq=300, sk=300)
    ragged = ((64, 64), (0, 5), (333, 333), (1, 200), (7, 0), (130, 259))
    found = [replace(one, sq=sq, sk=sk, causal=causal)
             for sq, sk in ((64, 64), (128, 128), (1, 1), (200, 333), (513, 257), (1, 300))
             for causal in (False, True)]
    found += [
        replace(one, sq=256, sk=256, dtype="fp16"),
        replace(one, sq=300, sk=300, dtype="fp16", causal=True, spread=3.0),
        replace(one, sq=384, sk=400, heads=6, heads_kv=2, causal=True),
        replace(one, sq=150, sk=190, heads=4, heads_kv=1, causal=False),
        replace(one, sq=500, sk=520, window=(100, 0)),
        replace(one, sq=400, sk=400, window=(30, 60), heads=4, heads_kv=2),
        replace(one, sq=300, sk=300, window=(0, 0)),
        replace(one, sq=400, sk=410, chunk=96, causal=True),
        replace(one, sq=400, sk=300, chunk=70),
        replace(one, sq=300, sk=300, softcap=10.0, spread=4.0, causal=True),
        replace(one, sq=300, sk=300, dlse=True, causal=True),
        replace(one, sq=128, sk=192, dout="sum"),
        replace(one, sq=128, sk=192, dout="row0"),
        replace(one, sq=192, sk=128, dout="transposed"),
        replace(one, sq=704, sk=704, spread=0.0),  # scores of -120 all over, see inputs()
        replace(one, sq=320, sk=320, used=((320, 320), (3, 130), (100, 0), (0, 50)), batch=4),
        replace(one, sq=320, sk=320, used=((65, 66), (319, 257)), causal=True, heads=4),
        replace(one, lengths=ragged, batch=len(ragged)),
        replace(one, lengths=ragged, batch=len(ragged), causal=True, gap=5, heads=4),
        replace(one, lengths=ragged, batch=len(ragged), window=(50, 20), gap=70, dtype="fp16"),
        replace(one, sq=1000, sk=1000, causal=True, deterministic=True),
        replace(one, sq=700, sk=900, deterministic=True, heads=4),
        replace(one, sq=700, sk=700, deterministic=True, window=(64, 0), sm_margin=1000),
        replace(one, sq=500, sk=640, deterministic=True, causal=True, sm_margin=128, chunk=100),
        replace(one, lengths=ragged, batch=len(ragged), causal=True, deterministic=True, gap=5),
    ]
    found += [
        replace(many, causal=True),
        replace(many, causal=True, deterministic=True),
        replace(many, sq=200, sk=450, heads=8, causal=True),
        replace(many, sq=200, sk=333, dlse=True),
        replace(many, sq=1, sk=300),
        replace(many, window=(100, 0)),
        replace(many, sq=260, chunk=96, heads=8),
        replace(many, sq=390, sk=390, causal=True, batch=66, dtype="fp16"),
    ]
    return found


def all_cases(dims: set[int]) -> list[Case]:
    pairs = [(128, None), (64, None), (256, None), (96, None), (192, None), (192, 128)]
    found = [case for d, dv in pairs if not dims or d in dims for case in cases_of(d, dv)]
    odd = [Case(d, sq=200, sk=300, causal=True) for d in (8, 40, 72, 120, 200, 248)]
    odd.append(Case(128, sq=200, sk=150, dv=96))
    odd.append(Case(64, sq=200, sk=150, dv=256))
    return found + (odd if not dims or 0 in dims else [])


class Inputs:
    """Tensors of a case: clean ones for the reference, with NaN in unused rows for the kernel."""

    def __init__(self, case: Case):
        self.case, dtype = case, DTYPES[case.dtype]
        dv = case.dv or case.d
        torch.manual_seed(sum(map(ord, case.label)))
        self.cu_q = self.cu_k = self.used_q = self.used_k = None
        if case.lengths:
            # A gap behind each sequence belongs to it, but is not in use.
            def prefix(i):
                at = [case.gap]
                for pair in case.lengths:
                    at.append(at[-1] + pair[i] + case.gap)
                return at

            self.cu_q, self.cu_k = prefix(0), prefix(1)
            rows_q, rows_k = self.cu_q[-1] + case.gap, self.cu_k[-1] + case.gap
            shape_q, shape_k = (max(rows_q, 1),), (max(rows_k, 1),)
            if case.gap:
                self.used_q, self.used_k = ([p[i] for p in case.lengths] for i in (0, 1))
        else:
            shape_q, shape_k = (case.batch, case.sq), (case.batch, case.sk)
            if case.used:
                self.used_q, self.used_k = ([p[i] for p in case.used] for i in (0, 1))

        def made(shape, heads, columns):
            return torch.randn(*shape, heads, columns, device=DEVICE, dtype=torch.float32)

        q = made(shape_q, case.heads, case.d)
        k, v = made(shape_k, case.heads_kv, case.d), made(shape_k, case.heads_kv, dv)
        if case.spread == 0.0:  # all scores are -120: exp(0 - LSE) of a padded key overflows
            q, k = torch.zeros_like(q), torch.zeros_like(k)
            q[..., 0], k[..., 0] = 1.0, -120.0 * case.d**0.5
        else:
            q *= case.spread
        self.q, self.k, self.v = q.to(dtype), k.to(dtype), v.to(dtype)
        dout = made(shape_q, case.heads, dv).to(dtype)
        if case.dout == "sum":
            dout = torch.ones((), device=DEVICE, dtype=dtype).expand(dout.shape)
        elif case.dout == "row0":
            dout = dout[:, :1].expand(dout.shape)
        elif case.dout == "transposed":
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        self.dout = dout
        self.options = dict(
            cu_q=self.cu_q, cu_k=self.cu_k, used_q=self.used_q, used_k=self.used_k,
            causal=case.causal, window=case.window, chunk=case.chunk, softcap=case.softcap,
        )
        out, lse = reference.attention(*(t.double() for t in (self.q, self.k, self.v)),
                                       **self.options)
        self.out, self.lse = out.to(dtype), lse.float().contiguous()
        self.dlse = torch.randn_like(self.lse) if case.dlse else None

    def unused(self, rows: torch.Size, cu, used) -> torch.Tensor:
        """Boolean over the rows of q or k: those that no sequence uses."""
        mask = torch.ones(rows, dtype=torch.bool, device=DEVICE)
        for b in range(self.case.batch):
            if cu is None:
                mask[b, : used[b] if used else None] = False
            else:
                mask[cu[b] : cu[b] + used[b] if used else cu[b + 1]] = False
        return mask

    def for_kernel(self):
        """dout, q, k, v, out with NaN where nothing may be read; and the masks of those rows."""
        idle_q = self.unused(self.q.shape[:-2], self.cu_q, self.used_q)
        idle_k = self.unused(self.k.shape[:-2], self.cu_k, self.used_k)
        tensors = []
        for tensor, idle in ((self.dout, idle_q), (self.q, idle_q), (self.k, idle_k),
                             (self.v, idle_k), (self.out, idle_q)):
            if bool(idle.any()):
                tensor = tensor.clone()
                tensor[idle] = float("nan")
            tensors.append(tensor)
        return tensors, idle_q, idle_k

    def call_options(self) -> dict:
        def tensor(values):
            return None if values is None else torch.tensor(values, dtype=torch.int32,
                                                            device=DEVICE)

        case = self.case
        options = dict(
            causal=case.causal, window_size=case.window, attention_chunk=case.chunk,
            softcap=case.softcap, deterministic=case.deterministic, sm_margin=case.sm_margin,
            dlse=self.dlse, seqused_q=tensor(self.used_q), seqused_k=tensor(self.used_k),
        )
        if case.lengths:
            options |= dict(
                cu_seqlens_q=tensor(self.cu_q), cu_seqlens_k=tensor(self.cu_k),
                max_seqlen_q=max(p[0] for p in case.lengths) + case.gap,
                max_seqlen_k=max(p[1] for p in case.lengths) + case.gap,
            )
        return options


def errors(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    difference = (got.double() - wanted).flatten()
    if not bool(torch.isfinite(difference).all()):
        return float("inf"), float("inf")
    norm = float(torch.linalg.vector_norm(wanted.flatten()))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm > 0 else 0.0
    return float(difference.abs().max()), relative


def run_case(library: KernelLibrary, case: Case) -> str:
    """Empty if right, else what is wrong."""
    inputs = Inputs(case)
    (dout, q, k, v, out), idle_q, idle_k = inputs.for_kernel()
    call = PreparedBackward(library, dout, q, k, v, out, inputs.lse, **inputs.call_options())
    call.poison()
    got = [t.clone() for t in call()]
    torch.cuda.synchronize()
    wrong = []
    for repeat in range(4 if case.deterministic else 1):
        call.poison()
        again = call()
        torch.cuda.synchronize()
        for name, a, b in zip(NAMES, got, again):
            if (case.deterministic or name != "dq") and not torch.equal(a.view(torch.int16),
                                                                       b.view(torch.int16)):
                wrong.append(f"{name} differs in repeat {repeat}")
    clean = inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v
    truth = reference.gradients(*clean, **inputs.options, dtype=torch.float64)
    plain = reference.gradients(*clean, **inputs.options, dtype=inputs.q.dtype)
    for name, a, b, p, idle in zip(NAMES, got, truth, plain, (idle_q, idle_k, idle_k)):
        if bool((a[idle] != 0).any()):
            wrong.append(f"{name} is not 0 in unused rows")
        largest, relative = errors(a, b)
        p_largest, p_relative = errors(p, b)
        if largest > FACTOR * p_largest + FLOOR or relative > FACTOR * p_relative + FLOOR:
            wrong.append(f"{name} max {largest:.2e} (plain {p_largest:.2e}) "
                         f"rel {relative:.2e} (plain {p_relative:.2e})")
    return "; ".join(wrong)


def check(library: KernelLibrary, dims: set[int]) -> bool:
    counts = {"right": 0, "wrong": 0, "not in this build": 0}
    for case in all_cases(dims):
        print(f"{case.label} ... ", end="", flush=True)
        try:
            wrong = run_case(library, case)
        except NotImplementedError:
            counts["not in this build"] += 1
            print("not in this build", flush=True)
            continue
        counts["wrong" if wrong else "right"] += 1
        print(f"WRONG: {wrong}" if wrong else "ok", flush=True)
    print("check:", ", ".join(f"{n} {what}" for what, n in counts.items()), flush=True)
    return counts["wrong"] == 0


def cudnn_backward(dout, q, k, v, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*leaves, is_causal=causal)
    grad = dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def time_point(library: KernelLibrary, d: int, s: int, causal: bool) -> str:
    shape = (16384 // s, s, 2048 // d, d)
    q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    forward = library.prepare(q, k, v, causal=causal)
    try:
        forward()
        out, lse = forward.out, forward.lse
    except NotImplementedError:  # only its time counts here
        out, lse = torch.randn_like(q), torch.full((shape[0], shape[2], s), 9.0, device=DEVICE)
    calls = {}
    for name, deterministic in (("ours", False), ("det", True)):
        calls[name] = library.prepare_backward(dout, q, k, v, out, lse, causal=causal,
                                               deterministic=deterministic)
    unable = {}
    try:
        calls["cudnn"] = cudnn_backward(dout, q, k, v, causal)
    except RuntimeError as error:
        unable["cudnn"] = first_line(error, 60)
    kind, timers, reasons = make_timers(calls, rep_ms=30.0)
    results = interleave(timers)
    flops = 10 * 16384 * s * 2048 / (2 if causal else 1)
    parts = [f"D {d:3} S {s:5} {'causal' if causal else '      '} {kind:5}"]
    for name in ("ours", "det", "cudnn"):
        parts.append(f"{name} {flops / results[name].median / 1e9:6.1f}" if name in results
                     else f"{name}: {(unable | reasons).get(name, '?')}")
    return "  ".join(parts)


def kernel_times(library: KernelLibrary, d: int, s: int) -> None:
    """Where the time of one call goes, by torch's profiler."""
    shape = (16384 // s, s, 2048 // d, d)
    q, k, v, dout, out = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
                          for _ in range(5))
    lse = torch.full((shape[0], shape[2], s), 9.0, device=DEVICE)
    call = library.prepare_backward(dout, q, k, v, out, lse)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        name = event.key.split("<")[0].split("::")[-1]
        print(f"  D {d} S {s} {name[:40]:40} {event.device_time_total:9.1f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--dims", default="", help="head dims, such as 64,128; 0: odd ones")
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-time", action="store_true")
    arguments = parser.parse_args()
    dims = {int(d) for d in arguments.dims.split(",") if d}
    torch.backends.cuda.matmul.allow_tf32 = False
    library = KernelLibrary(arguments.library)
    print(library.build_info(), flush=True)
    start = time.time()
    good = arguments.skip_check or check(library, dims)
    print(f"checks took {time.time() - start:.0f} s", flush=True)
    if arguments.skip_time:
        return 0 if good else 1
    lines = []
    for d in sorted(dims & {64, 96, 128, 192, 256} or {64, 128, 256}):
        for s in map(int, arguments.lengths.split(",")):
            for causal in (False, True):
                try:
                    lines.append(time_point(library, d, s, causal))
                except Exception as error:  # noqa: BLE001 - the other points still count
                    lines.append(f"D {d} S {s} {causal}: {type(error).__name__}: "
                                 f"{first_line(error)}")
                print(".", end="", flush=True)
    print(flush=True)
    try:
        for d in sorted(dims or {64, 128, 256}):
            kernel_times(library, d, 8192)
    except Exception as error:  # noqa: BLE001
        print(f"no profile: {first_line(error)}", flush=True)
    print("TFLOP/s, 16,384 tokens, hidden 2048, bf16")
    print("\n".join(lines), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
