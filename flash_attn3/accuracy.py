"""Errors of e4m3 attention against float64: `python -m flash_attn3.accuracy`.

RMS error over all heads for Q, K and V from N(0,1), and from N(0,1) + N(0,100) * Bernoulli(0.001)
(the second of variance 100; the distribution of FlashAttention-3's paper, section 4.3), with one
scale a tensor and with this package's scales a block, rotation and smoothing; beside
FlashAttention-3's own e4m3 call where its wheel fa3-fwd is installed. Then the relative error
||err|| / ||ref|| as keys get more.

On a Hopper GPU the kernels run. Elsewhere the same inputs, quantised in the same way, go through
`emulated`, which rounds P as the kernels do, at smaller sizes; sums are then exact.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .backends import e4m3
from .fp8 import quantize
from .interface import backend_for, flash_attn_func
from .quantized import Quantized, QuantizedQKV

ROWS = 1024  # queries of a head that are compared at a time
P_TOP = 2.0**8  # what the kernel's largest probability of a row becomes in e4m3
KEYS = e4m3.VALUE_BLOCK
SHORT_KEYS = 8 * KEYS  # kShortBlocks of fp8_traits.h

Scheme = Callable[[Tensor, Tensor, Tensor], QuantizedQKV]


def one_scale(q: Tensor, k: Tensor, v: Tensor) -> QuantizedQKV:
    """One scale a tensor, as FP8 attention is usually called; (B, H or Hk) all the same."""
    def whole(x: Tensor) -> Quantized:
        scale = (x.float().abs().max() / e4m3.LARGEST).clamp(min=e4m3.SMALLEST_SCALE)
        data = (x.float() / scale).clamp(-e4m3.LARGEST, e4m3.LARGEST).to(e4m3.E4M3)
        return Quantized(data, scale.expand(x.shape[0], k.shape[2]).contiguous())

    return QuantizedQKV(whole(q), whole(k), whole(v))


ROTATED = "blocks, rotated"
SCHEMES: dict[str, Scheme] = {
    "one scale": one_scale,
    "blocks": lambda q, k, v: quantize(q, k, v, block=64),
    ROTATED: lambda q, k, v: quantize(q, k, v, block=64, rotate=True),
    "rotated, K centred": lambda q, k, v: quantize(
        q, k, v, block=64, rotate=True, smooth_k=True),
}


def is_coded(parts: QuantizedQKV) -> bool:
    """Whether the kernel of these head dims makes half of P by its code (fp8_codes.h): where the
    tensor unit adds up P, as fp8_config.h says. V with scales of blocks comes to it transposed; V
    as rows of few keys has a kernel of its own."""
    q, k, v = parts
    d, dv = q.data.shape[-1], v.data.shape[2 if v.transposed else -1]
    transposed = v.transposed or v.block != 0
    short = k.data.shape[1] <= SHORT_KEYS
    return max(d, dv) <= 128 or (transposed or short) and (d > 192 or dv > 128)


def by_code(exponents: Tensor) -> Tensor:
    """2^x in e4m3 by its code, which is nearly linear in x: as fp8_codes.h has it. float32."""
    codes = (8 * exponents.float() + 55.548).clamp(min=0).half() + 1024
    return (codes - 1024).to(torch.uint8).view(e4m3.E4M3).float()


def emulated(parts: QuantizedQKV, scale: Optional[float] = None) -> Tensor:
    """The kernel's arithmetic on the scores of quantised q, k, v, dense and without a mask: blocks
    of 128 keys from the last on, P rounded to e4m3 relative to its row's maximum so far, and
    where the kernel does so (is_coded) half of it by its code in all blocks but the first.
    bfloat16.
    """
    q, k, v = parts
    lead_q, lead_k = q.data.shape[:2], k.data.shape[:2]
    qf = e4m3.dequantize(q.data, q.scale, q.block, tuple(lead_q), None).transpose(1, 2)
    kf = e4m3.dequantize(k.data, k.scale, k.block, tuple(lead_k), None).transpose(1, 2)
    vf = e4m3.dequantize(
        v.data, v.scale, v.block, tuple(lead_k), None, v.transposed).transpose(1, 2)
    group = qf.shape[1] // kf.shape[1]
    kf, vf = (t.repeat_interleave(group, dim=1) for t in (kf, vf))
    scale = 1.0 / math.sqrt(qf.shape[-1]) if scale is None else scale
    coded_half = is_coded(parts)
    top = qf.new_full(qf.shape[:-1] + (1,), -math.inf)
    total, out = torch.zeros_like(top), qf.new_zeros(qf.shape[:-1] + (vf.shape[-1],))
    for start in range((kf.shape[2] - 1) // KEYS * KEYS, -1, -KEYS):
        keys = slice(start, start + KEYS)
        scores = qf @ kf[:, :, keys].transpose(-1, -2) * scale
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        decay = torch.exp(top - new_top)
        p = torch.exp(scores - new_top) * P_TOP
        rounded = p.to(e4m3.E4M3).float()
        if coded_half:
            if not top.isneginf().all():
                coded = torch.arange(p.shape[-1], device=p.device) % 32 >= 16
                rounded = torch.where(coded, by_code(p.log2()), rounded)
            p = rounded  # the tensor unit's sums
        total = total * decay + p.sum(-1, keepdim=True)
        out = out * decay + rounded @ vf[:, :, keys]
        top = new_top
    return (out / total).transpose(1, 2).bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, head: int, rows: slice) -> Tensor:
    """float64 attention of some rows of a head of the first sequence."""
    scores = q[0, rows, head].double() @ k[0, :, head].double().T / math.sqrt(q.shape[-1])
    return torch.softmax(scores, -1) @ v[0, :, head].double()


def draw(kind: str, rows: int, heads: int, dim: int, device: str) -> Tensor:
    """(1, rows, heads, dim) bfloat16 of "normal" or "outlier"."""
    x = torch.randn(1, rows, heads, dim, device=device)
    if kind == "outlier":
        x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)
    return x.bfloat16()


def _fa3_call() -> tuple[Optional[Callable], str]:
    try:
        import fa3_fwd_interface
    except Exception as error:  # noqa: BLE001 - a broken wheel raises more than ImportError
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return fa3_fwd_interface.flash_attn_func, ""


def outputs(q: Tensor, k: Tensor, v: Tensor, by_kernel: bool) -> dict[str, Tensor]:
    """The outputs of every scheme, and of FlashAttention-3 ("fa3") where it can run."""
    found = {}
    for name, scheme in SCHEMES.items():
        parts = scheme(q, k, v)
        found[name] = flash_attn_func(*parts) if by_kernel else emulated(parts)
    fa3, _ = _fa3_call()
    if by_kernel and fa3 is not None:
        parts = one_scale(q, k, v)
        out = fa3(*(t.data for t in parts), **{
            f"{name}_descale": t.scale for name, t in zip("qkv", parts)})
        found["fa3"] = out[0] if isinstance(out, tuple) else out
    return found


class Setting(NamedTuple):
    heads: int
    keys: int
    dim: int
    lengths: tuple[int, ...]
    by_kernel: bool
    device: str


def rms_errors(setting: Setting, kind: str) -> dict[str, float]:
    """RMS error of each scheme over all heads; a quarter of the rows is compared."""
    torch.manual_seed(7)
    s = setting
    q, k, v = (draw(kind, s.keys, s.heads, s.dim, s.device) for _ in range(3))
    if not s.by_kernel:
        q = q[:, : min(s.keys, ROWS)]
    found = outputs(q, k, v, s.by_kernel)
    squares, count = dict.fromkeys(found, 0.0), 0
    for head in range(s.heads):
        for start in range(0, q.shape[1], 4 * ROWS):
            rows = slice(start, min(start + ROWS, q.shape[1]))
            truth = exact(q, k, v, head, rows)
            count += truth.numel()
            for name, out in found.items():
                squares[name] += float((out[0, rows, head].double() - truth).square().sum())
    return {name: math.sqrt(value / count) for name, value in squares.items()}


def relative_errors(setting: Setting, keys: int, positive: bool, heads: int = 2
                    ) -> dict[str, float]:
    """||err|| / ||ref|| of each scheme with so many keys; V normal, or of constant sign."""
    torch.manual_seed(8)
    s = setting
    rows = ROWS if s.by_kernel else ROWS // 4
    q, k, v = (draw("normal", n, heads, s.dim, s.device) for n in (rows, keys, keys))
    v = v.abs() + 0.5 if positive else v
    found = outputs(q, k, v, s.by_kernel)
    truth = torch.stack([exact(q, k, v, head, slice(0, rows)) for head in range(heads)], dim=1)
    return {name: float((out[0].double() - truth).norm() / truth.norm())
            for name, out in found.items()}


def table(setting: Setting) -> Iterator[tuple[dict, dict[str, float]]]:
    """(config, errors by scheme), row by row; what config names as "error" is measured."""
    for kind in ("outlier", "normal"):
        config = {"input": kind, "S": setting.keys, "D": setting.dim, "error": "rms"}
        yield config, rms_errors(setting, kind)
    for positive in (False, True):
        for keys in setting.lengths:
            config = {"input": "V positive" if positive else "normal", "S": keys,
                      "D": setting.dim, "error": "relative"}
            yield config, relative_errors(setting, keys, positive)


def default_setting(heads: Optional[int] = None, keys: Optional[int] = None,
                    dim: int = 128) -> Setting:
    """The sizes that are asked for where the kernels run, smaller ones elsewhere."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(1, 1, 1, dim, device=device).to(e4m3.E4M3)
    if backend_for(x, x, x).name == "sm90":
        return Setting(heads or 32, keys or 8192, dim, (1024, 8192, 32768, 131072), True, device)
    return Setting(heads or 4, keys or 2048, dim, (1024, 4096, 16384), False, device)


def _print_row(config: dict, errors: dict[str, float]) -> None:
    base_name = "fa3" if "fa3" in errors else "one scale"
    print(f"{config['error']} error, {config['input']}, S {config['S']}, D {config['D']}")
    for name, value in errors.items():
        print(f"  {name:20} {value:.3e}   {errors[base_name] / value:5.2f} times less than "
              f"{base_name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn3.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int,
                        help="of the rms rows (default: 32 on the kernels, 4 emulated)")
    parser.add_argument("--keys", type=int,
                        help="of the rms rows (default: 8192 on the kernels, 2048 emulated)")
    parser.add_argument("--dim", type=int, default=128, help="head dim (default: 128)")
    args = parser.parse_args()
    setting = default_setting(args.heads, args.keys, args.dim)
    if setting.by_kernel:
        print(f"{torch.cuda.get_device_name()}, {setting.heads} heads")
        _, reason = _fa3_call()
        if reason:
            print(f"fa3: {reason}")
    else:
        print(f"No Hopper kernels here: emulated on {setting.device} at smaller sizes, "
              f"{setting.heads} heads; sums are exact.")
    for config, errors in table(setting):
        _print_row(config, errors)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
