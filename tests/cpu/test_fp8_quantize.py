"""quantize in PyTorch: the kernel's layouts and values, bit by bit where they are exact."""

import sys
from pathlib import Path

import pytest
import torch
from support import fp8_model
from support.fp8_cases import E4M3, Fp8Case, untransposed

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import check_fp8  # noqa: E402

from flash_attn3 import quantize  # noqa: E402
from flash_attn3.backends import e4m3  # noqa: E402

pytestmark = pytest.mark.cpu

RAGGED = (0, 64, 64, 69, 402, 602, 1052)


def make(*shape, dtype=torch.bfloat16):
    x = torch.randn(*shape)
    x.view(-1)[::7] *= 300
    return x.to(dtype)


def raw(t):
    return t.view(torch.uint8)


@pytest.mark.parametrize("d", [16, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, transposed", [(64, False), (128, False), (128, True)])
@pytest.mark.parametrize("cu", [None, RAGGED], ids=["dense", "ragged"])
def test_values_and_scales_are_the_kernels(d, dtype, rows, transposed, cu):
    """Against the reference that the kernel is checked with (benchmarks/check_fp8.py)."""
    x = make(*((2, 301) if cu is None else (cu[-1] + 2,)), 3, d, dtype=dtype)
    x[..., 0, :] = 0
    cu_tensor = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    values, scale = e4m3.quantize(x, None, cu_tensor, None, rows, False, transposed)
    blocks = -(-301 // rows) if cu is None else (cu[-1] + 2) // rows + len(cu) - 1
    assert scale.shape == ((2, 3, blocks) if cu is None else (3, blocks))
    for b in range(2 if cu is None else len(cu) - 1):
        start, stop = (0, 301) if cu is None else cu[b:b + 2]
        one = x[b] if cu is None else x[start:stop]
        if one.shape[0] == 0:
            continue
        want, want_scale = check_fp8.reference_quantize(one, rows)
        first, count = (0, blocks) if cu is None else (start // rows + b, want_scale.shape[1])
        got_scale = scale[b] if cu is None else scale[:, first:first + count]
        assert torch.equal(got_scale, want_scale)
        if transposed:
            tile = b * blocks if cu is None else first
            got = untransposed(values[tile:tile + count])
            assert torch.equal(got[:one.shape[0]], want.double())
            assert not got[one.shape[0]:].any()
        else:
            assert torch.equal(raw(values[b] if cu is None else values[start:stop]), raw(want))


def test_a_block_of_zeros_has_scale_1():
    x = torch.zeros(1, 300, 2, 32, dtype=torch.bfloat16)
    x[0, 130, 1, 5] = 448
    parts = quantize(x, x, x, rotate=True)
    assert torch.equal(parts.v.scale, torch.ones(1, 2, 3))
    assert parts.q.scale[0, 0].tolist() == [1, 1, 1] and parts.q.scale[0, 1, 1] < 1
    assert not parts.q.data[0, :, 0].float().any()


@pytest.mark.parametrize("block", [64, 128, None])
def test_what_is_not_finite(block):
    """Infinities saturate; NaN is passed over by the scale and stays in its own row."""
    clean = make(1, 200, 2, 32)
    x = clean.clone()
    x[0, 5, 1, 3], x[0, 150, 0, 7], x[0, 151, 0, 8] = (
        float("nan"), float("inf"), float("-inf"))
    for rotate in (False, True):
        got = quantize(x, x, x, block=block, rotate=rotate).q
        bad = got.data.float().isnan()
        assert bad[0, 5, 1].any()
        bad[0, 5, 1] = False
        assert not bad.any()
        assert bool(torch.isfinite(got.scale).all()) and bool((got.scale > 0).all())
    plain = quantize(x, x, x, block=block).q.data.float()
    assert plain[0, 150, 0, 7] == 448 and plain[0, 151, 0, 8] == -448
    if block:  # blocks of other rows and heads know nothing of it
        want = quantize(clean, clean, clean, block=block).q
        assert torch.equal(raw(quantize(x, x, x, block=block).q.data)[0, 128:, 1],
                           raw(want.data)[0, 128:, 1])


def test_the_error_is_that_of_e4m3():
    x = make(2, 300, 4, 64)
    for options in (dict(), dict(block=64), dict(block=None), dict(rotate=True)):
        t = quantize(x, x, x, **options).q
        back = Fp8Case(lengths_q=(300, 300)).one(t, (300, 300), (2, 300))
        want = fp8_model.hadamard(x.double()) if t.rotated else x.double()
        step = t.scale.double().amax() * 2.0**-10  # half of the smallest one
        assert bool(((back - want).abs() <= want.abs() * 2.0**-4 * 1.001 + step).all())


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 192, 256])
def test_rotation_is_orthogonal_and_symmetric(dim):
    h = e4m3.hadamard(torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(h @ h.T, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(h, h.T)
    x = torch.randn(7, dim, dtype=torch.float64)
    assert torch.allclose(e4m3.hadamard(x), fp8_model.hadamard(x))


def test_sequences_share_no_scale():
    """Neighbours in one 128 rows, and rows that no sequence has."""
    cu = torch.tensor([3, 40, 40, 130], dtype=torch.int32)
    x = make(140, 2, 32)
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu)
    want = quantize(x, x, x, **options)
    changed = x.clone()
    changed[3:40] *= 100
    changed[:3] = changed[130:] = float("nan")
    got = quantize(changed, changed, changed, **options)
    for g, w in zip(got, want):
        assert torch.equal(g.scale[:, 1:], w.scale[:, 1:])
        assert not torch.equal(g.scale[:, :1], w.scale[:, :1])
        assert torch.equal(raw(g.data)[40:130], raw(w.data)[40:130])
    whole = quantize(x[None, 40:130], x[None, 40:130], x[None, 40:130])
    assert torch.equal(whole.q.scale[0, :, 0], want.q.scale[:, 2])


def test_rows_past_seqused_do_not_count():
    used = torch.tensor([100, 0], dtype=torch.int32)
    x = make(2, 150, 2, 32)
    poisoned = x.clone()
    poisoned[0, 100:] = poisoned[1] = float("inf")
    options = dict(seqused_q=used, seqused_k=used, smooth_k=True, rotate=True)
    got = quantize(poisoned, poisoned, poisoned, **options)
    want = quantize(x, x, x, **options)
    for g, w in zip(got, want):
        assert torch.equal(g.scale, w.scale)
        assert torch.equal(raw(g.data), raw(w.data))
    assert torch.equal(got.k.scale[1], torch.ones(2, 2))
    assert torch.equal(got.k.mean, want.k.mean) and not got.k.mean[1].any()


@pytest.mark.parametrize("ragged", [False, True])
def test_mean_and_shift(ragged):
    cu = torch.tensor([0, 50, 50, 120], dtype=torch.int32) if ragged else None
    q, k = make(*((125,) if ragged else (2, 60)), 4, 32), make(*((125,) if ragged else (2, 60)), 2,
                                                               32)
    parts = quantize(q, k, k, smooth_k=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    mean, shift = parts.k.mean, parts.q.shift
    for b in range(3 if ragged else 2):
        rows = slice(*cu[b:b + 2].tolist()) if ragged else (b,)
        if k[rows].shape[0] == 0:
            assert not mean[b].any()
            continue
        torch.testing.assert_close(mean[b].double(), k[rows].double().mean(0), atol=1e-3, rtol=1e-4)
        want = (q[rows].double() * mean[b].double().repeat_interleave(2, 0)).sum(-1).T
        got = shift[:, rows] if ragged else shift[b]
        torch.testing.assert_close(got.double(), want, atol=1e-1, rtol=1e-4)
    assert parts.q.mean is mean and parts.v.mean is None
    assert parts.k.shift is None and parts.v.shift is None


def test_one_scale_a_kv_head():
    q, k = make(2, 50, 6, 32), make(2, 60, 2, 32)
    parts = quantize(q, k, k, block=None)
    assert [t.block for t in parts] == [0, 0, 0]
    for t, x in ((parts.q, q), (parts.k, k)):
        top = x.float().abs().unflatten(2, (2, -1)).amax((1, 3, 4))
        torch.testing.assert_close(t.scale, top / 448)
        assert t.data.float().abs().max() == 448


def test_the_layout_that_is_asked_for():
    x = make(1, 200, 2, 48)
    parts = quantize(x, x, x)
    assert not parts.v.transposed and parts.v.data.shape == x.shape  # no kernel here to read it
    parts = quantize(x, x, x, transpose_v=True)
    assert parts.v.data.shape == (2, 2, 48, 128) and parts.v.data.dtype == E4M3
    assert parts.q.data.shape == x.shape and parts.k.data.is_contiguous()
