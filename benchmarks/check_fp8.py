"""Correctness, then times, of the e4m3 forward and the quantise kernel, on the GPU.

    python benchmarks/check_fp8.py --lib LIB.so [--lib OTHER.so] [--quick] [--no-times]
        [--no-checks] [--dims 64,128,256]

Every case is announced before it runs, so that a hang shows where. The reference is float64 on the
dequantised inputs; a result may have 1.1 times the error of the same formula with P rounded to
e4m3, its worst element 2.5 times. Poisoned outputs; the table of times comes last.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from check import CheckCase, errors, lse_error, plain_attention, prefix_sums, visible_mask
from ctypes_fp8 import Fp8Library, Quantized
from timing import EventTimer, first_line

E4M3 = torch.float8_e4m3fn
DEVICE = "cuda"
TOP = 448.0
LARGEST = 2.0**50  # larger inputs count as this (quantize.h)
P_TOP = 2.0**8  # fp8_traits.h: kTopExponent


def say(text: str) -> None:
    print(text, flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# --- references ---------------------------------------------------------------------------------


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating; torch's own cast makes NaN of what is too large."""
    return x.float().clamp(-TOP, TOP).to(E4M3)


def rounded_attention(case: CheckCase, q, k, v) -> torch.Tensor:
    """The formula in float64 with P rounded to e4m3 relative to its row's maximum, out to bf16."""
    group = case.heads // case.heads_kv
    out = torch.zeros(q.shape[0], case.heads, v.shape[-1], dtype=torch.float64, device=q.device)
    if k.shape[0] == 0:
        return out
    k_t = k.double().repeat_interleave(group, 1).permute(1, 2, 0)
    v_t = v.double().repeat_interleave(group, 1).transpose(0, 1)
    for start in range(0, q.shape[0], 1024):
        rows = torch.arange(start, min(start + 1024, q.shape[0]), device=q.device)
        scores = q[rows].double().transpose(0, 1) @ k_t / math.sqrt(case.head_dim)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores.masked_fill_(~visible_mask(case, rows, q.shape[0], k.shape[0]), -math.inf)
        top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        p = torch.exp(scores - top) * P_TOP
        total = p.sum(-1, keepdim=True)
        product = to_e4m3(p).double() @ v_t
        out[rows] = torch.where(total > 0, product / total, 0.0).transpose(0, 1)
    return out.bfloat16().double()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] & -x.shape[-1]
    h = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (x.double().unflatten(-1, (-1, size)) @ h / math.sqrt(size)).flatten(-2)


def block_rows_of(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(S, H, D) -> (blocks, rows, H, D), filled up with zeros."""
    missing = -x.shape[0] % rows
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, rows))


def reference_quantize(x: torch.Tensor, rows: int):
    """e4m3 (S, H, D) and scales (H, blocks) of one sequence, as the kernel does it, in float32: the
    next power of two.

    Divided by a tensor: by a number, torch multiplies with its inverse on the GPU.
    """
    blocks = block_rows_of(x.float(), rows)
    top = blocks.abs().nan_to_num(nan=0.0).amax((1, 3)).clamp(max=LARGEST)  # (blocks, H)
    scale = torch.where(top == 0, 1.0, (top / torch.full_like(top, TOP)).clamp_min(2.0**-126))
    mantissa, exponent = torch.frexp(scale)
    scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    inverse = 1.0 / scale
    values = to_e4m3(blocks * inverse[:, None, :, None]).flatten(0, 1)[: x.shape[0]]
    return values, scale.T


def slot_keys(device) -> torch.Tensor:
    """Which key of a block a slot of a transposed tile holds (kernels/fp8/value_layout.h)."""
    s = torch.arange(128, device=device)
    return s // 16 * 16 + s // 2 % 2 * 8 + s // 4 % 4 * 2 + s % 2


def dequantized(x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """One sequence's (S, H, D) in float64 from scales (H, blocks)."""
    per_row = scale.double().T.repeat_interleave(rows, 0)[: x.shape[0], :, None]
    return x.double() * per_row


# --- the forward --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Case(CheckCase):
    scales: str = "head"  # none, head: (B, Hk) all different and strided; block: quantize()
    transposed: bool = False
    rotate: bool = False

    @property
    def label(self) -> str:
        parts = [super().label, self.scales]
        parts += ["V transposed"] if self.transposed else []
        parts += ["rotated"] if self.rotate else []
        return " ".join(parts)


def cases(dims: tuple[int, ...], quick: bool) -> Iterator[Fp8Case]:
    def case(d, lengths, **options):
        return Fp8Case(d, lengths, dtype="e4m3", **options)

    for d in dims:
        yield case(d, ((128, 128),), heads=1, heads_kv=1, scales="none")
        yield case(d, ((128, 256),), heads=1, heads_kv=1)
        yield case(d, ((300, 1000),) * 2, causal=True)
        yield case(d, ((300, 1000),) * 2, scales="block", transposed=True, causal=True)
        yield case(d, ((300, 1000),) * 2, scales="block", causal=True)
        if quick:
            continue
        for sq, sk in ((1, 1), (200, 333), (513, 257), (1, 700), (129, 127)):
            for causal in (False, True):
                yield case(d, ((sq, sk),) * 2, causal=causal)
                yield case(d, ((sq, sk),) * 2, causal=causal, scales="block", transposed=True)
        yield case(d, ((700, 700),), heads=6, heads_kv=2, causal=True, spread=8)
        yield case(d, ((4000, 4000),), heads=2, heads_kv=2, spread=8)
        yield case(d, ((600, 700),), window=(100, 0))
        yield case(d, ((600, 600),), window=(30, 60), heads_kv=1)
        yield case(d, ((500, 500),), chunk=96, causal=True)
        yield case(d, ((300, 300),), softcap=20.0, spread=8)
        yield case(d, ((300, 300),), scales="block", transposed=True, softcap=20.0, spread=8)
        ragged = ((64, 64), (0, 5), (333, 333), (1, 200), (7, 0), (450, 450))
        for causal in (False, True):
            yield case(d, ragged, causal=causal, ragged=True)
            yield case(d, ragged, causal=causal, ragged=True, scales="block")
            yield case(d, ragged, causal=causal, ragged=True, scales="block", transposed=True)
        yield case(d, ((2048, 2048),) * 2, scales="block", transposed=True, rotate=True)
        yield case(d, ((8192, 8192),), heads=2, heads_kv=2)
    if quick:
        return
    for d in (16, 48, 80, 112, 176, 240):
        yield case(d, ((200, 300),), causal=True)
        yield case(d, ((200, 300),), causal=True, scales="block", transposed=True)
    yield case(192, ((300, 400),), head_dim_v=128, causal=True)


def make_inputs(case: Fp8Case):
    dv = case.head_dim_v or case.head_dim
    if case.ragged:
        rows_q, rows_k = (sum(pair[i] for pair in case.lengths) + 3 for i in (0, 1))
        shapes = [(rows_q,), (rows_k,), (rows_k,)]
    else:
        sq, sk = case.lengths[0]
        shapes = [(len(case.lengths), s) for s in (sq, sk, sk)]
    heads = (case.heads, case.heads_kv, case.heads_kv)
    dims = (case.head_dim, case.head_dim, dv)
    made = [torch.randn(*shape, h, d, device=DEVICE) for shape, h, d in zip(shapes, heads, dims)]
    made[0] *= case.spread
    if case.ragged:
        for tensor in made:
            tensor[-3:] = math.nan
    return made


def run_case(library: Fp8Library, case: Fp8Case) -> tuple[bool | None, str]:
    torch.manual_seed(zlib.crc32(case.label.encode()))
    inputs = make_inputs(case)
    options = dict(causal=case.causal, window_size=case.window, attention_chunk=case.chunk,
                   softcap=case.softcap)
    cu = [None, None]
    if case.ragged:
        cu = [prefix_sums(case, which, DEVICE) for which in (0, 1)]
        options.update(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
                       max_seqlen_q=max(pair[0] for pair in case.lengths),
                       max_seqlen_k=max(pair[1] for pair in case.lengths))
    batch = len(case.lengths)
    factors = [None] * 3
    if case.scales == "block":
        made = []
        for which, x in enumerate(inputs):
            call = library.prepare_quantize(
                x.bfloat16(), cu_seqlens=cu[which > 0], block_rows=64 if which == 0 else 128,
                rotate=case.rotate and which < 2, transposed=case.transposed and which == 2,
            )
            call.poison()
            made.append(call())
    else:
        made = [to_e4m3(x / (1.0 if case.scales == "none" else 0.01)) for x in inputs]
        made = [torch.where(x.isnan(), math.nan, m.float()).to(E4M3) for x, m in zip(inputs, made)]
    if case.scales == "head":
        for which in range(3):  # all different, and strided
            wide = torch.rand(batch, 2 * case.heads_kv, device=DEVICE) * 0.01 + 0.005
            factors[which] = wide[:, ::2]
        options.update(q_descale=factors[0], k_descale=factors[1], v_descale=factors[2])
    try:
        call = library.prepare_fp8(*made, exact_lse=True, **options)
        call.poison()
        out = call()
        plain = library.prepare_fp8(*made, **options)
        plain.poison()
        same = torch.equal(plain().view(torch.int16), out.view(torch.int16))
        synchronize()
    except NotImplementedError as error:
        return None, first_line(error)
    except ValueError as error:
        return False, f"ValueError: {first_line(error)}"
    if not same:
        return False, "out with an exact LSE differs from out without"
    return compare(case, made, factors, inputs, out, call.lse)


def real_values(case, made, factors, inputs, which, index, begin, count):
    """One sequence's (S, heads, D) in float64, and which query heads' scales apply to q."""
    x = made[which]
    if isinstance(x, Quantized):
        rows, ragged = x.block_rows, case.ragged
        blocks = -(-count // rows)
        first = begin // rows + index if ragged else 0
        scale = (x.scale if ragged else x.scale[index])[:, first:first + blocks]
        if x.transposed:
            tile = first if ragged else index * (-(-inputs[which].shape[1] // 128))
            tiles = x.data.view(torch.uint8)[tile:tile + blocks]  # (blocks, H, D, 128)
            keys = torch.empty_like(tiles)
            keys[..., slot_keys(DEVICE)] = tiles
            data = keys.permute(0, 3, 1, 2).flatten(0, 1)[:count].view(E4M3)
        else:
            data = x.data[begin:begin + count] if ragged else x.data[index]
        return dequantized(data, scale, rows) if count else data.double()
    data = (x[begin:begin + count] if case.ragged else x[index]).double()
    if factors[which] is None:
        return data
    factor = factors[which][index].double()
    if which == 0:  # by the KV head
        factor = factor.repeat_interleave(case.heads // case.heads_kv)
    return data * factor[:, None]


def compare(case: Fp8Case, made, factors, inputs, out, lse) -> tuple[bool, str]:
    begins, parts, worst_lse, largest_lse = [0, 0], [], 0.0, 1.0
    for index, (sq, sk) in enumerate(case.lengths):
        q, k, v = (real_values(case, made, factors, inputs, which, index, begins[which > 0],
                               sk if which else sq) for which in range(3))
        rows = slice(begins[0], begins[0] + sq)
        got, got_lse = (out[rows], lse[:, rows]) if case.ragged else (out[index], lse[index])
        begins = [begins[0] + sq, begins[1] + sk]
        reference, reference_lse = plain_attention(case, q, k, v, torch.float64)
        native = rounded_attention(case, q, k, v)
        parts.append((got.flatten(), reference.flatten(), native.flatten()))
        worst_lse = max(worst_lse, lse_error(got_lse, reference_lse))
        finite = reference_lse[torch.isfinite(reference_lse)]
        largest_lse = max(largest_lse, float(finite.abs().max()) if finite.numel() else 0.0)
    got, reference, native = (torch.cat(list(column)) for column in zip(*parts))
    largest, relative = errors(got, reference)
    native_largest, native_relative = errors(native, reference)
    ratio = relative / max(native_relative, 1e-9)
    # Blocks are rounded relative to the maximum so far, so the largest error is another draw than
    # the formula's; and a P made by its code is off by 0.95 of a last place at most, not by 0.5.
    # The tensor unit's 13 bits show in the scores, and so in the LSE: by 0.04 at D 256 and an LSE
    # of 46, as in cuBLAS's sums.
    passed = (relative <= 1.1 * native_relative + 1e-5
              and largest <= 2.5 * native_largest + 1e-5
              and worst_lse <= 1e-3 + 1e-3 * largest_lse)
    return passed, (f"rel {relative:.2e} ({ratio:.2f} of plain)  max {largest:.2e} "
                    f"({largest / max(native_largest, 1e-9):.2f})  lse {worst_lse:.1e}")


# --- the quantise kernel ------------------------------------------------------------------------


def check_quantize(library: Fp8Library, d: int, dtype, rows: int, transposed: bool,
                   cu: tuple[int, ...] | None) -> tuple[bool, str]:
    torch.manual_seed(d + rows)
    heads, lengths = 3, [301, 301] if cu is None else [b - a for a, b in zip(cu, cu[1:])]
    shape = (2, 301) if cu is None else (cu[-1] + 2,)
    x = torch.randn(*shape, heads, d, device=DEVICE, dtype=dtype)
    x.view(-1)[::7] *= 300
    x[..., 0, :] = 0  # all-zero blocks
    flat = x.flatten(0, -3) if cu is None else x
    flat[5, 1, 3], flat[7, 2, 1] = math.nan, math.inf
    cu_tensor = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    call = library.prepare_quantize(x, block_rows=rows, transposed=transposed,
                            cu_seqlens=cu_tensor)
    call.poison()
    got = call()
    synchronize()
    for index, length in enumerate(lengths):
        begin = 0 if cu is None else cu[index]
        one = x[index] if cu is None else x[begin:begin + length]
        if length == 0:
            continue
        values, scale = reference_quantize(one, rows)
        first = 0 if cu is None else begin // rows + index
        blocks = -(-length // rows)
        got_scale = (got.scale[index] if cu is None else got.scale)[:, first:first + blocks]
        if not torch.equal(got_scale, scale):
            return False, f"scales of sequence {index} differ: {got_scale.flatten()[:4].tolist()}"
        if transposed:
            tile = index * blocks if cu is None else first
            expected = block_rows_of(values.view(torch.uint8), 128)
            expected = expected.permute(0, 2, 3, 1)[..., slot_keys(DEVICE)]
            data = got.data.view(torch.uint8)[tile:tile + blocks]
        else:
            expected = values.view(torch.uint8)
            data = (got.data[index] if cu is None else got.data[begin:begin + length])
            data = data.view(torch.uint8)
        nan = (expected & 0x7F) == 0x7F
        wrong = ((data != expected) & ~nan) | (nan & ((data & 0x7F) != 0x7F))
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            return False, f"{int(wrong.sum())} bytes differ, first at {at} of sequence {index}"
    return True, "equal bit by bit"


def check_rotation(library: Fp8Library, d: int) -> tuple[bool, str]:
    """Rotation and smoothing against float64: within the rounding of e4m3."""
    torch.manual_seed(d)
    x = (torch.randn(2, 300, 2, d, device=DEVICE) + 3).bfloat16()
    call = library.prepare_quantize(x, rotate=True, smooth=True)
    call.poison()
    got = call()
    synchronize()
    mean_error = float((got.mean - x.double().mean(1)).abs().max())
    worst = 0.0
    for index in range(2):
        real = hadamard(x[index].double() - x[index].double().mean(0))
        back = dequantized(got.data[index], got.scale[index], 128)
        worst = max(worst, float(((back - real).abs() / (real.abs() + 0.02)).max()))
    return worst < 0.07 and mean_error < 1e-4, f"relative {worst:.3f}, mean off by {mean_error:.1e}"


def check_everything(library: Fp8Library, dims, quick: bool) -> bool:
    failures = 0

    def run(label, work):
        nonlocal failures
        print(f"{label} ... ", end="", flush=True)
        passed, detail = work()
        failures += passed is False
        say(f"{'ok' if passed else 'not in this build' if passed is None else 'WRONG'}  {detail}")

    ragged = (0, 64, 64, 69, 402, 602, 1052)
    for d in dims if quick else sorted({*dims, 16, 48, 80, 96, 192}):
        for dtype in (torch.bfloat16, torch.float16):
            for rows, transposed in ((64, False), (128, False), (128, True)):
                for cu in (None, ragged):
                    label = (f"quantize D {d} {str(dtype)[6:]} rows {rows}"
                             f"{' transposed' * transposed}{' ragged' * (cu is not None)}")
                    run(label, lambda: check_quantize(library, d, dtype, rows, transposed, cu))
        run(f"rotation D {d}", lambda: check_rotation(library, d))
    for case in cases(dims, quick):
        run(case.label, lambda: run_case(library, case))
    say(f"{failures} wrong")
    return failures == 0


# --- times --------------------------------------------------------------------------------------


def candidates(libraries: dict[str, Fp8Library], d: int, s: int, causal: bool):
    """(column, call): V as rows with (B, Hk) descales, V transposed with scales a block, FA3."""
    batch, heads = 16384 // s, 2048 // d
    x = [torch.randn(batch, s, heads, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    plain = [to_e4m3(t) for t in x]
    names = ("q_descale", "k_descale", "v_descale")
    ones = {name: torch.ones(batch, heads, device=DEVICE) for name in names}
    for name, library in libraries.items():
        try:
            rows = library.prepare_fp8(*plain, causal=causal, **ones)
            rows.plan()
        except NotImplementedError:
            continue
        blocks = [library.quantize(t, transposed=i == 2) for i, t in enumerate(x)]
        yield f"{name} rows", rows
        yield f"{name} blocks", library.prepare_fp8(*blocks, causal=causal)
    try:
        import fa3_fwd_interface as fa3

        yield "fa3", lambda: fa3.flash_attn_func(*plain, causal=causal, **ones)
    except Exception as error:  # noqa: BLE001 - a broken wheel raises more than ImportError
        say(f"  fa3: {first_line(error)}")


def times(libraries: dict[str, Fp8Library], dims, rounds: int = 3) -> list[str]:
    columns = [f"{name} {kind}" for name in libraries for kind in ("rows", "blocks")] + ["fa3"]
    lines = ["TFLOP/s, median of rounds", "D    S      causal  " + "  ".join(columns)]
    for d in dims:
        for s in (1024, 16384):
            for causal in (False, True):
                print(f"timing D {d} S {s} causal {causal}", flush=True)
                timers = {name: EventTimer(call) for name, call in
                          candidates(libraries, d, s, causal)}
                for timer in timers.values():
                    timer.warm_up(100)
                results = {name: [] for name in timers}
                for _ in range(rounds):
                    for name, timer in timers.items():
                        results[name].append(timer.round())
                flops = 4 * 16384 * s * 2048 / (2 if causal else 1)
                speed = {name: flops / sorted(values)[len(values) // 2] / 1e9
                         for name, values in results.items()}
                cells = [f"{speed.get(name, math.nan):{len(name)}.0f}" for name in columns]
                lines.append(f"{d:<4} {s:<6} {causal!s:<6}  " + "  ".join(cells))
    library = next(iter(libraries.values()))
    for d in dims:
        x = torch.randn(1, 16384, 2048 // d, d, device=DEVICE, dtype=torch.bfloat16)
        for name, options in (("plain", {}), ("rotated", {"rotate": True}),
                              ("transposed", {"transposed": True})):
            timer = EventTimer(library.prepare_quantize(x, **options))
            timer.warm_up(20)
            milliseconds = timer.round()
            lines.append(f"quantize D {d} {name}: {x.numel() * 3 / milliseconds / 1e9:.2f} TB/s")
    size = 8192
    a = torch.randn(size, size, device=DEVICE).to(E4M3)
    one = torch.ones((), device=DEVICE)
    timer = EventTimer(lambda: torch._scaled_mm(a, a.T, one, one, out_dtype=torch.bfloat16,
                                                use_fast_accum=True))
    timer.warm_up(100)
    lines.append(f"cuBLAS e4m3 {size}: {2 * size**3 / timer.round() / 1e9:.0f} TFLOP/s")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lib", required=True, action="append", help="may come several times")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    arguments = parser.parse_args()
    dims = tuple(int(d) for d in arguments.dims.split(","))
    libraries = {Path(path).stem: Fp8Library(path) for path in arguments.lib}
    right = True
    for name, library in libraries.items():
        say(f"{name}: {library.build_info()}")
        if not arguments.no_checks:
            right &= check_everything(library, dims, arguments.quick)
    if not arguments.no_times:
        print("\n".join(times(libraries, dims)), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
