"""e4m3 calls as data: a Case, how its inputs get their scales, and how a result is judged.

The reference is float64 attention of the dequantised inputs; a result may have 1.1 times the error
of the same formula with P rounded to e4m3.
"""

import dataclasses

import torch
from support.cases import Case

import flash_attn3
import reference
from flash_attn3 import Quantized

E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Fp8Case(Case):
    """scales: none; head ((B, Hk), all different, strided); or block (by quantize)."""

    dtype: torch.dtype = torch.bfloat16
    d: int = 64
    scales: str = "head"
    block: int = 128
    rotate: bool = False
    smooth_k: bool = False
    transpose_v: bool = False
    half_q: bool = False  # q stays in bfloat16: the call quantises it

    __str__ = Case.__str__

    @property
    def batch(self):
        return len(self.lengths_q)

    def ints(self, values, device):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    def operands(self, device="cpu", poison=False):
        """(given q, k, v; descales as keywords) for Case.call."""
        q, k, v = self.make(device, poison)
        if self.scales == "block":
            cu_q, cu_k = (self.ints(self.cu(n), device) for n in (self.lengths_q, self.lengths_k))
            parts = flash_attn3.quantize(
                q, k, v, block=self.block, rotate=self.rotate, smooth_k=self.smooth_k,
                transpose_v=self.transpose_v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                seqused_q=self.ints(self.used_q, device), seqused_k=self.ints(self.used_k, device))
            return (q if self.half_q else parts.q, parts.k, parts.v), {}
        given, descales = [], {}
        for name, t in zip("qkv", (q, k, v)):
            if self.half_q and name == "q":
                given.append(t)
                continue
            size = 1.0 if self.scales == "none" else 0.02
            given.append((t.float() / size).clamp(-448, 448).to(E4M3))
            if self.scales == "head":
                wide = (torch.rand(self.batch, 2 * self.heads_kv, device=device) + 0.5) * size
                descales[f"{name}_descale"] = wide[:, ::2]
        return tuple(given), descales

    def real(self, given, descales, device="cpu"):
        """float64 values of the rows that a call sees; k without its mean where it is smoothed."""
        found = []
        for name, t in zip("qkv", given):
            lengths = self.lengths_q if name == "q" else self.lengths_k
            rows = (sum(lengths) + self.tail,) if self.ragged else (self.batch, max(lengths))
            if not isinstance(t, Quantized):
                if t.dtype != E4M3:
                    used = self.ints(self.used_q, device)
                    t = flash_attn3.quantize(
                        t, t, t, rotate=given[1].rotated if isinstance(given[1], Quantized) else
                        False, transpose_v=False, cu_seqlens_q=self.ints(self.cu(lengths), device),
                        cu_seqlens_k=self.ints(self.cu(lengths), device), seqused_q=used,
                        seqused_k=used).q
                else:
                    t = Quantized(t, descales.get(f"{name}_descale"))
            found.append(self.one(t, lengths, rows))
        return found

    def one(self, t, lengths, rows):
        """Dequantised, sequence by sequence, independently of the package's own way back."""
        heads = t.data.shape[1] if t.transposed else t.data.shape[-2]
        dim = t.data.shape[2] if t.transposed else t.data.shape[-1]
        out = torch.zeros(rows + (heads, dim), dtype=torch.float64, device=t.data.device)
        start = tile = 0
        for b, n in enumerate(lengths):
            if not self.ragged:
                n = rows[1]
            block = t.block or 128
            first = start // block + b if self.ragged else 0
            blocks = -(-n // block)
            if t.transposed:
                at = start // 128 + b if self.ragged else tile
                data = untransposed(t.data[at:at + blocks])[:n]
                tile += blocks
            else:
                data = (t.data[start:start + n] if self.ragged else t.data[b]).double()
            if t.block:
                scale = (t.scale if self.ragged else t.scale[b])[:, first:first + blocks].double()
                data = data * scale.T.repeat_interleave(block, 0)[:n, :, None]
            elif t.scale is not None:
                data = data * t.scale[b].double().repeat_interleave(
                    heads // t.scale.shape[1])[:, None]
            if self.ragged:
                out[start:start + n] = data
                start += n
            else:
                out[b] = data
        return out


def untransposed(tiles):
    """(blocks, H, D, 128) -> (blocks * 128, H, D) float64, by value_layout.h's key of each slot."""
    s = torch.arange(128, device=tiles.device)
    key = s // 16 * 16 + s // 2 % 2 * 8 + s // 4 % 4 * 2 + s % 2
    rows = torch.empty_like(tiles.view(torch.uint8))
    rows[..., key] = tiles.view(torch.uint8)
    return rows.permute(0, 3, 1, 2).flatten(0, 1).view(E4M3).double()


def check_fp8(case, device="cpu", poison=False, e4m3_p=True, given=None):
    """One call, on fresh inputs or given ones without descales. e4m3_p False: judged by bfloat16's
    rounding of the result alone, as the fallback computes it."""
    given, descales = case.operands(device, poison) if given is None else (given, {})
    out, lse = case.call(*given, **descales)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    q, k, v = (t.nan_to_num(nan=0.0) for t in case.real(given, descales, device))
    options = case.reference_options()
    want, want_lse = reference.attention(q, k, v, **options)
    plain, _ = reference.attention(q, k, v, e4m3_p=e4m3_p, **options)
    plain = plain.bfloat16().double()
    assert out.shape == want.shape and lse.shape == want_lse.shape
    assert bool(torch.isfinite(out).all()), "out is not finite"
    norm = max(float(want.norm()), 1e-30)
    error, allowed = (float((t.double() - want).norm()) / norm for t in (out, plain))
    # Blocks are rounded relative to the maximum so far: another draw than the formula's, which
    # shows in the largest error, and in all of it where there are few rows (eight: up to 1.35 of it
    # in 60 draws, 1.02 to 1.05 on average).
    factor = 1.1 if out.shape[:-1].numel() >= 64 else 1.5
    assert error <= factor * allowed + 1e-4, f"relative error {error:.3e}, plain {allowed:.3e}"
    largest, limit = (float((t.double() - want).abs().amax()) if want.numel() else 0.0
                      for t in (out, plain))
    assert largest <= 2.5 * limit + 1e-4, f"largest error {largest:.3e}, plain {limit:.3e}"
    if isinstance(given[0], Quantized) and given[0].shift is not None:
        scale = case.scale or case.d**-0.5
        want_lse = want_lse + scale * given[0].shift.double()
    finite = torch.isfinite(want_lse)
    assert torch.equal(lse.double()[~finite], want_lse[~finite])
    top = float(want_lse[finite].abs().max()) if bool(finite.any()) else 0.0
    # The tensor unit's 13 bits show in the scores, and so in the LSE.
    assert float((lse.double() - want_lse)[finite].abs().max() if bool(finite.any()) else 0.0) <= (
        1e-3 + 1e-3 * top)
    return out, lse
