"""e4m3 on the kernels: results over the shape grid, the quantise kernel, operators, gradients."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from support.cases import MASKS
from support.fp8_cases import E4M3, Fp8Case, check_fp8
from support.graphs import capture
from torch.library import opcheck

import flash_attn3
import reference
from flash_attn3 import (
    accuracy,
    flash_attn_fp8_func,
    flash_attn_fp8_varlen_func,
    flash_attn_func,
    ops,
    quantize,
)
from flash_attn3.backends import e4m3

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
fa3 = torch.ops.flash_attn3


@pytest.fixture(autouse=True)
def needs_e4m3_kernels():
    if not ops._C.compiled_for("e4m3", 128, 128):
        pytest.skip("this build holds no e4m3 kernel")


def half(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def raw(t):
    return t.view(torch.uint8)


# ---- the forward ---------------------------------------------------------------------------------

SCALES = {
    "none": dict(scales="none"),
    "head": dict(scales="head"),
    "blocks": dict(scales="block", block=64),
    "transposed": dict(scales="block", transpose_v=True, rotate=True),
}
# (D, Dv): each compiled pair, and dims that are padded to it.
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (16, 16), (48, 80), (112, 64), (176, 240)]
RAGGED = dict(lengths_q=(64, 0, 333, 1, 7, 450), lengths_k=(64, 5, 333, 200, 0, 450), ragged=True,
              tail=3, heads=4, heads_kv=2)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("sq, sk", [(1, 1), (200, 333), (513, 257), (1, 700), (129, 1000)])
def test_lengths(d, dv, sq, sk, scales):
    for causal in (False, True):
        check_fp8(Fp8Case(lengths_q=(sq, sq), lengths_k=(sk, sk), d=d, dv=dv, causal=causal,
                          heads=4, heads_kv=2, **SCALES[scales]), "cuda")


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("mask", [*MASKS, dict(window=(100, 0)), dict(chunk=96, causal=True)],
                         ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_masks(d, mask, scales):
    check_fp8(Fp8Case(lengths_q=(300, 300), lengths_k=(400, 400), d=d, heads=6, heads_kv=2,
                      **mask, **SCALES[scales]), "cuda")


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("more", [
    dict(), dict(causal=True), dict(used_q=(60, 0, 100, 1, 7, 0), used_k=(64, 5, 0, 150, 0, 449))],
    ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_ragged(d, more, scales):
    check_fp8(Fp8Case(d=d, **RAGGED, **more, **SCALES[scales]), "cuda", poison=True)


@pytest.mark.parametrize("shape", [dict(lengths_q=(300,), lengths_k=(500,)), RAGGED], ids=str)
@pytest.mark.parametrize("more", [
    dict(scales="block", smooth_k=True, rotate=True, transpose_v=True),
    dict(scales="block", half_q=True, rotate=True), dict(half_q=True)], ids=str)
def test_smoothed_keys_and_queries_quantised_by_the_call(shape, more):
    check_fp8(Fp8Case(d=128, **shape, **more, causal=True), "cuda")


@pytest.mark.parametrize("heads, heads_kv", [(8, 1), (6, 2), (5, 5)])
def test_groups_and_peaked_rows(heads, heads_kv):
    for scales in SCALES.values():
        check_fp8(Fp8Case(lengths_q=(700,), lengths_k=(700,), heads=heads, heads_kv=heads_kv,
                          d=128, size=3.0, causal=True, sm_margin=8, **scales), "cuda")


# As many queries of one KV head as make the call transpose V before the attention kernel.
MANY_QUERIES = dict(heads=32, heads_kv=1)


@pytest.mark.parametrize("scales", ["none", "head", "blocks"])
@pytest.mark.parametrize("d, dv", DIMS)
def test_values_transposed_ahead(d, dv, scales):
    for causal in (False, True):
        check_fp8(Fp8Case(lengths_q=(450, 450), lengths_k=(333, 333), d=d, dv=dv, causal=causal,
                          **MANY_QUERIES, **SCALES[scales]), "cuda")


@pytest.mark.parametrize("used", [dict(), dict(used_q=(60, 0, 100, 1, 7, 0),
                                              used_k=(64, 5, 0, 150, 0, 449))], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_ragged_values_transposed_ahead(d, used):
    check_fp8(Fp8Case(d=d, **{**RAGGED, **MANY_QUERIES}, **used, **SCALES["head"]), "cuda",
              poison=True)


def test_values_of_any_layout_transposed_ahead():
    q, k, v = (half(2, 300, h, 64).to(E4M3) for h in (32, 1, 1))
    want = flash_attn_func(q, k, v)
    wide = torch.cat((v, v), dim=2)
    assert torch.equal(flash_attn_func(q, k, wide[:, :, 1:]), want)
    assert torch.equal(flash_attn_func(q, k, torch.cat((v, v), dim=3)[..., 64:]), want)
    assert torch.equal(flash_attn_func(q, k, torch.cat((v, v), dim=3)[..., 3:67]),
                       flash_attn_func(q, k, torch.cat((v, v), dim=3)[..., 3:67].contiguous()))
    one = v[:1].expand(2, 300, 1, 64)
    assert torch.equal(flash_attn_func(q, k, one), flash_attn_func(q, k, one.contiguous()))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads", [2, 32])
def test_bits_do_not_depend_on_where_values_are_transposed(d, heads):
    """By `quantize`; as rows by the kernel (2 heads) or ahead of it (32)."""
    q, k, v = half(2, 450, heads, d), half(2, 450, 1, d), half(2, 450, 1, d)
    tiles, rows = (quantize(q, k, v, transpose_v=there) for there in (True, False))
    out, of_rows = (flash_attn_func(*x, causal=True) for x in (tiles, rows))
    if d == 256 and heads == 2:  # another kernel, with other sums of rows
        assert relative(of_rows, out) < 0.03
    else:
        assert torch.equal(of_rows, out)


# Around the ends of six blocks, after which head dim 256 takes O into a mean, and of eight.
@pytest.mark.parametrize("keys", [1, 767, 768, 769, 1023, 1025, 1536, 1665, 3200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_sums_over_several_blocks(keys, causal, size):
    """Scales of V from 2^-3 to 2^3, another for each block, and peaked rows."""
    q, k, v = (size * half(2, 300, 8, 256), half(2, keys, 4, 256), half(2, keys, 4, 256))
    exponent = torch.arange(keys, device="cuda") // 128 * 5 % 7 - 3
    v *= torch.exp2(exponent.float())[:, None, None]
    given = quantize(q, k, v, transpose_v=True)
    case = Fp8Case(lengths_q=(300, 300), lengths_k=(keys, keys), heads=8, heads_kv=4, d=256,
                   causal=causal, scales="block", transpose_v=True)
    check_fp8(case, "cuda", given=given)


# Up to 1,024 keys, and more.
@pytest.mark.parametrize("keys", [1, 127, 128, 129, 640, 1000, 1023, 1024, 1025])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("spread", [0, 5])
def test_sums_over_all_blocks_of_short_calls(keys, causal, size, spread):
    """V as rows; scales of its blocks all alike, or from 2^-3 to 2^3; and peaked rows."""
    q, k, v = (size * half(2, 300, 8, 256), half(2, keys, 4, 256), half(2, keys, 4, 256))
    exponent = torch.arange(keys, device="cuda") // 128 * spread % 7 - (3 if spread else 0)
    v *= torch.exp2(exponent.float())[:, None, None]
    given = quantize(q, k, v, transpose_v=False)
    case = Fp8Case(lengths_q=(300, 300), lengths_k=(keys, keys), heads=8, heads_kv=4, d=256,
                   causal=causal, scales="block")
    check_fp8(case, "cuda", given=given)


@pytest.mark.parametrize("window", [(0, 0), (130, 0), (300, 200), (769, 0), (770, 0)], ids=str)
def test_windows_of_few_blocks_in_long_calls(window):
    """Up to eight blocks a tile, and nine; whether V is transposed ahead makes no difference."""
    check_fp8(Fp8Case(lengths_q=(2300,), lengths_k=(2300,), heads=2, heads_kv=2, d=256,
                      window=window, **SCALES["head"]), "cuda")


@pytest.mark.parametrize("keys, transpose_v", [(3000, True), (1000, False)])
def test_sums_over_several_blocks_are_the_same_from_run_to_run(keys, transpose_v):
    given = quantize(half(2, 1000, 4, 256), half(2, keys, 2, 256), half(2, keys, 2, 256),
                     transpose_v=transpose_v)
    first = flash_attn_func(*given, causal=True)
    for _ in range(5):
        assert torch.equal(flash_attn_func(*given, causal=True), first)


def test_many_short_sequences_and_a_long_one():
    """Blocks of their own would take many times the room of V: it is not transposed ahead."""
    lengths = (450,) + (3, 0, 1, 7) * 40
    check_fp8(Fp8Case(lengths_q=lengths, lengths_k=lengths, ragged=True, tail=5, d=128,
                      causal=True, **MANY_QUERIES), "cuda", poison=True)


def test_layouts_give_the_bits_of_the_contiguous_one():
    q, k, v = (half(2, 100, h, 64).to(E4M3) for h in (4, 2, 2))
    want = flash_attn_func(q, k, v, causal=True)

    def odd_address(t):
        room = torch.empty(t.numel() + 8, dtype=torch.uint8, device="cuda").view(E4M3)
        return room[8:].view(t.shape).copy_(t)

    for layout in (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), odd_address,
                   lambda t: torch.cat((t, t), dim=3)[..., :64]):
        assert torch.equal(flash_attn_func(*map(layout, (q, k, v)), causal=True), want)
    packed = torch.cat((q, k, v), dim=2)
    assert torch.equal(
        flash_attn3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4), want)


def test_expanded_descales_are_the_contiguous_ones():
    q, k, v = (half(3, 100, h, 64).to(E4M3) for h in (4, 2, 2))
    scale = torch.rand(3, 1, device="cuda") + 0.5
    names = ("q_descale", "k_descale", "v_descale")
    got = flash_attn_func(q, k, v, **dict.fromkeys(names, scale.expand(3, 2)))
    want = flash_attn_func(q, k, v, **dict.fromkeys(names, scale.repeat(1, 2)))
    assert torch.equal(got, want)


def test_results_are_the_same_from_run_to_run():
    for d in (64, 128, 256):
        parts = quantize(half(2, 700, 4, d), half(2, 900, 2, d), half(2, 900, 2, d), rotate=True)
        want = flash_attn_func(*parts, causal=True, return_attn_probs=True)
        for _ in range(50):
            got = flash_attn_func(*parts, causal=True, return_attn_probs=True)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("d, dv", DIMS[:4])
def test_out_does_not_depend_on_whether_an_lse_is_asked_for(d, dv, scales):
    given, descales = Fp8Case(lengths_q=(300,) * 2, lengths_k=(1000,) * 2, d=d, dv=dv, heads=4,
                              heads_kv=2, causal=True, **SCALES[scales]).operands("cuda")
    out, _ = flash_attn_func(*given, **descales, causal=True, return_attn_probs=True)
    assert torch.equal(flash_attn_func(*given, **descales, causal=True), out)


def test_lse_has_the_error_of_the_tensor_units_scores():
    """13 bits of a sum over 256 columns: at scores near 46 the LSE is off by 0.04. cuBLAS, which
    sums in the same unit, gives the same scores."""
    q, k, v = (half(1, 4000, 1, 256) for _ in range(3))
    q = q * 8
    q, k, v = (t.to(E4M3) for t in (q, k, v))
    _, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    one = torch.ones((), device="cuda")
    scores = torch._scaled_mm(q[0, :, 0], k[0, :, 0].T, one, one, out_dtype=torch.float32,
                              use_fast_accum=True)
    want = torch.logsumexp(scores.double() / 16, 1)
    assert float((lse[0, 0].double() - want).abs().max()) < 1e-4


def test_nan_and_infinities_of_a_query_stay_in_its_row():
    q, k, v = half(1, 300, 2, 128), half(1, 300, 2, 128), half(1, 300, 2, 128)
    q[0, 70, 1, 3], q[0, 200, 0, 4] = float("nan"), float("inf")
    for options in (dict(), dict(rotate=True), dict(block=64)):
        bad = flash_attn_func(*quantize(q, k, v, **options)).isnan().any(-1)
        assert bad[0, 70, 1]
        bad[0, 70, 1] = False
        assert not bad.any()


@pytest.mark.parametrize("options", [dict(), dict(rotate=True), dict(smooth_k=True)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_infinities_and_huge_values_saturate(which, options):
    tensors = [half(1, 300, 2, 128) for _ in range(3)]
    tensors[which][0, 20, 1, 3] = float("inf")
    tensors[which][0, 200, 0, 4] = -3.0e38
    out, lse = flash_attn_func(*quantize(*tensors, **options), return_attn_probs=True)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


@pytest.mark.parametrize("d", [64, 128, 256])
def test_scales_whose_product_is_zero(d):
    """A descale of 0, as of a tensor of zeros, and tiny ones: every visible key counts the same."""
    q, k, v = (half(2, 200, 2, d).to(E4M3) for _ in range(3))
    for scale in (0.0, 1e-38):
        tiny = torch.full((2, 2), scale, device="cuda")
        out, lse = flash_attn_func(q, k, v, causal=True, q_descale=tiny, k_descale=tiny,
                                   return_attn_probs=True)
        count = torch.arange(1, 201, device="cuda", dtype=torch.float32)
        torch.testing.assert_close(lse, count.log().expand(2, 2, 200), atol=1e-3, rtol=1e-3)
        mean = v.float().cumsum(1) / count[None, :, None, None]
        assert relative(out, mean) < 0.05


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("keys", [900, 1500])
@pytest.mark.parametrize("transpose_v", [False, True])
def test_rows_far_from_zero_share_their_largest_keys_evenly(d, keys, transpose_v):
    """Exponents up to 370,000, beside which codes of P would be off: V tells keys that could be
    made by codes from the others. Rows below 2^17 lie between."""
    q, k = torch.zeros(1, 300, 2, d, device="cuda"), torch.zeros(1, keys, 2, d, device="cuda")
    q[..., :7] = torch.randint(1, 17, (1, 300, 2, 7), device="cuda").float()
    key = torch.arange(keys, device="cuda")
    k[:, key, :, key % 7] = 16.0
    v = torch.where(key % 32 < 16, 1.0, -1.0)[None, :, None, None].expand(1, keys, 2, d)
    given = quantize(*(t.bfloat16() for t in (q, k, v)), transpose_v=transpose_v)
    out = flash_attn_func(*given, softmax_scale=1000.0)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 1000.0
    want = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v.double())
    assert float((out.double() - want).abs().max()) < 0.01


def test_no_step_at_the_edges_of_tiles():
    """One row against the last row of a prefill, and its error, for Sk from 88 to 256."""
    errors = []
    q, k, v = (half(1, 256, 16, 128).to(E4M3) for _ in range(3))
    for sk in range(88, 257):
        row = flash_attn_func(q[:, :1], k[:, :sk], v[:, :sk], causal=True)
        rows = torch.cat((q[:, 1:sk], q[:, :1]), dim=1)
        last = flash_attn_func(rows, k[:, :sk], v[:, :sk], causal=True)[:, -1:]
        torch.testing.assert_close(row, last, atol=1e-3, rtol=1e-2)
        want, _ = reference.attention(q[:, :1], k[:, :sk], v[:, :sk])
        errors.append(relative(row, want))
    errors = torch.tensor(errors)
    assert float(errors.max()) < 2 * float(errors.median())


@pytest.mark.slow
def test_accuracy_that_is_claimed():
    setting = accuracy.Setting(8, 8192, 128, (), True, "cuda")
    outlier, normal = (accuracy.rms_errors(setting, kind) for kind in ("outlier", "normal"))
    assert outlier[accuracy.ROTATED] * 2.0 < outlier["one scale"]
    assert normal[accuracy.ROTATED] < 1.05 * normal["one scale"]
    for positive in (False, True):
        short, long = (accuracy.relative_errors(setting, n, positive) for n in (1024, 131072))
        assert long[accuracy.ROTATED] <= 1.2 * short[accuracy.ROTATED]


# ---- the quantise kernel -------------------------------------------------------------------------


@pytest.mark.parametrize("d", [16, 48, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block, transposed", [(64, False), (128, False), (128, True)])
@pytest.mark.parametrize("ragged", [False, True])
def test_quantize_kernel_gives_the_bits_of_pytorch(d, dtype, block, transposed, ragged):
    x = half(*((1050,) if ragged else (2, 301)), 3, d, dtype=dtype)
    x.view(-1)[::7] *= 300
    x[..., 0, :] = 0
    x.view(-1)[d + 5], x.view(-1)[d * 7] = float("inf"), float("nan")
    cu = int32(0, 64, 64, 69, 402, 602, 1050) if ragged else None
    used = int32(60, 0, 5, 300, 0, 448) if ragged else int32(301, 77)
    got = fa3.quantize(x, None, cu, used, block, False, transposed)
    want = e4m3.quantize(x, None, cu, used, block, False, transposed)
    assert torch.equal(got[1], want[1])
    if transposed and ragged:  # tiles that no sequence has are not written
        covered = e4m3.find_rows((1050,), cu, None, 128, x.device).slot.unique()
        got, want = ((t[covered],) for t in (got[0], want[0]))
    nan = want[0].float().isnan()
    assert torch.equal(got[0].float().isnan(), nan)
    assert torch.equal(raw(got[0])[~nan], raw(want[0])[~nan])


@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("ragged", [False, True])
def test_rotation_and_mean_of_the_kernels(d, ragged):
    x = half(*((700,) if ragged else (2, 350)), 4, d) + 3
    cu = int32(0, 100, 100, 700) if ragged else None
    mean = fa3.row_mean(x, cu, None)
    want_mean = e4m3.row_mean(x, cu, None)
    torch.testing.assert_close(mean, want_mean, atol=1e-4, rtol=1e-4)
    got, scale = fa3.quantize(x, mean, cu, None, 128, True, False)
    want, want_scale = e4m3.quantize(x, mean, cu, None, 128, True, False)
    torch.testing.assert_close(scale, want_scale, atol=0, rtol=1e-5)
    # Sums in another order: a value at the middle of two may fall to the other side.
    assert float((raw(got) != raw(want)).float().mean()) < 1e-3
    torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=0.13)


@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_less_a_rotated_mean(d, dtype):
    """What is finite is nothing beside them, also where a mean was taken off it."""
    x = half(2, 300, 2, d, dtype=dtype) + 3
    mean = fa3.row_mean(x, None, None)
    x[0, 20, 1, 3] = float("inf")
    got, scale = fa3.quantize(x, mean, None, None, 128, True, False)
    want, want_scale = e4m3.quantize(x, mean, None, None, 128, True, False)
    torch.testing.assert_close(scale, want_scale, atol=0, rtol=1e-5)
    assert float((got.float() != want.float()).float().mean()) < 1e-3
    torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=0.13)


@pytest.mark.parametrize("options", [
    dict(), dict(block=64), dict(transposed=True), dict(mean=True)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_rotation_of_more_blocks_than_run_side_by_side(d, options):
    """A CTA of the rotating kernel goes from block to block."""
    x = half(3, 7000, 8, d)
    mean = fa3.row_mean(x, None, None) if options.get("mean") else None
    last = options.get("block", 128), True, options.get("transposed", False)
    got, scale = fa3.quantize(x, mean, None, None, *last)
    want, want_scale = e4m3.quantize(x, mean, None, None, *last)
    torch.testing.assert_close(scale, want_scale, atol=0, rtol=1e-5)
    assert float((raw(got) != raw(want)).float().mean()) < 1e-3


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_with_nan_and_infinities_leaves_others_alone(d, dtype):
    x = half(1, 128, 1, d, dtype=dtype)
    want, want_scale = fa3.quantize(x.index_fill(1, int32(20).long(), 0), None, None, None, 128,
                                    True, False)
    x[0, 20, 0, 3], x[0, 20, 0, 9] = float("nan"), float("inf")
    got, scale = fa3.quantize(x, None, None, None, 128, True, False)
    assert torch.equal(scale, want_scale) and bool(got[0, 20].float().isnan().all())
    others = torch.arange(128) != 20
    assert torch.equal(raw(got)[0, others], raw(want)[0, others])


def test_strided_inputs_are_quantised_where_they_lie():
    packed = half(2, 200, 3, 4, 64)
    for x in (*packed.unbind(2), half(2, 4, 200, 64).transpose(1, 2), half(2, 200, 4, 72)[..., :64],
              half(2, 200, 4, 128)[..., ::2]):
        got = fa3.quantize(x, None, None, None, 64, False, False)
        want = fa3.quantize(x.contiguous(), None, None, None, 64, False, False)
        assert torch.equal(raw(got[0]), raw(want[0])) and torch.equal(got[1], want[1])


# ---- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
def test_opcheck(ragged):
    """Ragged sequences cover every row and tile, so that all results are specified."""
    cu = int32(0, 128, 384) if ragged else None
    shapes = [(384,), (384,)] if ragged else [(2, 60), (2, 200)]
    q, k, v = half(*shapes[0], 4, 64), half(*shapes[1], 2, 64), half(*shapes[1], 2, 32)
    rest = (cu, cu, None, None, 256 if ragged else 60, 256 if ragged else 200, 0.25, True, -1, 0, 0,
            0.0, True, 0)
    success = {"SUCCESS"}
    assert set(opcheck(fa3.row_mean.default, (k, cu, None)).values()) == success
    mean = fa3.row_mean(k, cu, None)
    args = (k, mean, cu, None, 128, True, False)
    assert set(opcheck(fa3.quantize.default, args).values()) == success
    parts = quantize(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    args = (*(t.data for t in parts), *(t.scale for t in parts), *(t.block for t in parts),
            parts.v.transposed, True, *rest)
    # test_schema has no arithmetic for e4m3 inputs.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(opcheck(fa3.fwd_e4m3.default, args, test_utils=utils).values()) == success
    leaves = [t.requires_grad_() for t in (q, k, v)]
    args = (*leaves, 128, True, True, True, *rest)
    assert set(opcheck(fa3.fp8_fwd.default, args).values()) == success


@pytest.mark.parametrize("change, error, pattern", [
    (dict(q_scale=torch.ones(2, 4)), ValueError, "q_scale is on cpu"),
    (dict(k_block=64), ValueError, "k_block is 64"),
    (dict(k_block=128), ValueError, "k_scale is None"),
    (dict(v_transposed=True), ValueError, "v has shape"),
])
def test_direct_calls_with_wrong_arguments(change, error, pattern):
    q, k, v = (half(2, 60, 2, 64).to(E4M3) for _ in range(3))
    named = {**dict(q_scale=None, k_scale=None, v_scale=None, q_block=0, k_block=0, v_block=0,
                    v_transposed=False, exact_lse=True), **change}
    rest = (None, None, None, None, 60, 60, 0.25, True, -1, 0, 0, 0.0, False, 0)
    with pytest.raises(error, match=pattern):
        fa3.fwd_e4m3(q, k, v, *named.values(), *rest)
    with pytest.raises(TypeError, match="x has dtype"):
        fa3.quantize(q, None, None, None, 128, False, False)


def test_backend_is_the_kernels():
    q = half(1, 64, 2, 128)
    assert flash_attn3.backend_for(*quantize(q, q, q)).name == "sm90"
    assert quantize(q, q, q).v.transposed


# ---- gradients, torch.compile, graphs ------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_straight_through_gradient(d, smooth_k):
    leaves = [half(2, n, h, d).requires_grad_() for n, h in ((200, 4), (300, 2), (300, 2))]
    options = dict(causal=True, deterministic=True)
    out, lse = flash_attn_fp8_func(
        *leaves, smooth_k=smooth_k, rotate=True, return_attn_probs=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    with torch.no_grad():
        expected = flash_attn3.functional.flash_attn_bwd(dout, *leaves, out, lse, dlse=dlse,
                                                         **options)
    for g, e in zip(got, expected):
        assert torch.equal(g, e)
    want = reference.gradients(dout, dlse, *leaves, causal=True)
    for g, w in zip(got, want):
        assert relative(g, w) < 0.1


def test_ragged_gradient():
    cu = int32(0, 130, 130, 400)
    leaves = [half(400, h, 64).requires_grad_() for h in (4, 2, 2)]
    out = flash_attn_fp8_varlen_func(*leaves, cu, cu, 270, 270, causal=True, smooth_k=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    want = reference.gradients(dout, None, *leaves, cu_q=cu.tolist(), cu_k=cu.tolist(), causal=True)
    for g, w in zip(got, want):
        assert relative(g, w) < 0.1


def test_compiled_without_a_graph_break():
    def loss(q, k, v):
        out, lse = flash_attn_fp8_func(q, k, v, causal=True, rotate=True, return_attn_probs=True)
        return out.float().square().sum() + lse.sum()

    def attend(q, k, v):
        return flash_attn_func(*quantize(q, k, v, rotate=True, smooth_k=True), causal=True)

    torch._dynamo.reset()
    q, k, v = (half(2, 200, h, 64) for h in (4, 2, 2))
    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for g, w in zip(got, torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(g, w, atol=1e-2, rtol=1e-2)


def test_captured_in_a_graph():
    q, k, v = (half(2, 200, h, 64) for h in (4, 2, 2))
    cu = int32(0, 150, 400)
    flat = [t.flatten(0, 1) for t in (q, k, v)]

    def work():
        dense = flash_attn_fp8_func(q, k, v, causal=True, rotate=True, smooth_k=True,
                                    return_attn_probs=True)
        return *dense, flash_attn_fp8_varlen_func(*flat, cu, cu, 250, 250, block=64)

    graph, captured = capture(work)
    q.copy_(half(2, 200, 4, 64))
    graph.replay()
    for got, want in zip(captured, work()):
        assert torch.equal(got, want)


def test_empty_inputs():
    for b, sq, sk in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q, k = half(b, sq, 4, 64), half(b, sk, 2, 64)
        out, lse = flash_attn_fp8_func(q, k, k, smooth_k=True, rotate=True, return_attn_probs=True)
        assert out.shape == q.shape and not out.any() and bool((lse == float("-inf")).all())
