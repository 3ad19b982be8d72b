"""What the numerics of the e4m3 forward rest on, simulated (tests/support/fp8_model.py)."""

import math
import re
from pathlib import Path

import pytest
import torch
from flash_attn3 import accuracy
from support import fp8_model
from support.fp8_model import (
    attention_exact,
    attention_model,
    carried_model,
    hadamard,
    quantize_blocks,
    to_e4m3,
)

HEADER = Path(__file__).parents[2] / "csrc" / "kernels" / "fp8" / "fp8_traits.h"


def relative(got, reference):
    return float((got - reference).norm() / reference.norm())


def e4m3_inputs(seed, keys, spread=1.0, rows=64, dim=128):
    torch.manual_seed(seed)
    q = to_e4m3(torch.randn(rows, dim).double() * spread)
    k, v = (to_e4m3(torch.randn(keys, dim).double()) for _ in range(2))
    return q, k, v


def test_the_model_has_the_kernels_constants():
    found = re.search(r"kTopExponent = (\d+);", HEADER.read_text())
    assert int(found[1]) == fp8_model.TOP_EXPONENT


@pytest.mark.parametrize("positive", [False, True])
def test_error_is_flat_in_length_with_each_block_promoted(positive):
    errors = {}
    for keys in (1024, 32768):
        q, k, v = e4m3_inputs(0, keys)
        v = to_e4m3(v.abs() + 0.5) if positive else v
        reference, _ = attention_exact(q, k, v)
        errors[keys] = relative(attention_model(q, k, v)[0], reference)
        never = relative(attention_model(q, k, v, promote_every=10**9)[0], reference)
    assert errors[32768] <= 1.2 * errors[1024]
    assert never > (5 if positive else 1.2) * errors[32768]  # why there is a promotion at all


def blocks_a_sum(kind="Carried"):
    return int(re.search(rf"k{kind}Blocks = (\d+);", HEADER.read_text())[1])


def formula(q, k, v):
    """With P rounded to e4m3, as benchmarks/check_fp8.py judges by."""
    scores = q.double() @ k.double().T / math.sqrt(q.shape[1])
    p = torch.exp(scores - scores.amax(1, keepdim=True)) * 2.0**fp8_model.TOP_EXPONENT
    return to_e4m3(p) @ v.double() / p.sum(1, keepdim=True)


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_carried_sums_are_within_the_tolerance(spread):
    """More blocks a sum are not, where a few keys of a row are much larger than the others."""
    q, k, v = e4m3_inputs(7, 2048, spread, rows=32, dim=64)
    reference, _ = attention_exact(q, k, v)
    allowed = relative(formula(q, k, v), reference)
    assert relative(carried_model(q, k, v, blocks_a_sum()), reference) <= 1.05 * allowed


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0, 8.0])
def test_sums_of_short_calls_are_within_the_tolerance(spread):
    """With half of P by its code, and rows' sums in two halves: with one they are not."""
    blocks = blocks_a_sum("Short")
    q, k, v = e4m3_inputs(0, blocks * fp8_model.KEYS, spread, dim=256)
    v = v[:, :24]  # the model takes its time
    reference, _ = attention_exact(q, k, v)
    allowed = 1.1 * relative(formula(q, k, v), reference)
    error, of_one = (relative(carried_model(q, k, v, blocks, split=split, coded=accuracy.by_code),
                              reference) for split in (True, False))
    assert error <= allowed
    assert spread != 2.0 or of_one > allowed


def test_sums_of_short_calls_where_values_have_one_sign():
    """The tensor unit cuts O off at most a few times as much as e4m3 does."""
    blocks = blocks_a_sum("Short")
    q, k, v = e4m3_inputs(6, blocks * fp8_model.KEYS, rows=32, dim=64)
    v = to_e4m3(v[:, :24].abs())
    reference, _ = attention_exact(q, k, v)
    model = carried_model(q, k, v, blocks, split=True, coded=accuracy.by_code)
    assert relative(model, reference) < 0.016


def test_carried_sums_have_a_flat_error():
    errors = {}
    for keys in (1536, 12288):
        q, k, v = e4m3_inputs(6, keys, rows=8, dim=32)
        v = to_e4m3(v.abs() + 0.5)
        reference, _ = attention_exact(q, k, v)
        errors[keys] = relative(carried_model(q, k, v, blocks_a_sum()), reference)
    assert errors[12288] <= 1.2 * errors[1536]
    assert errors[12288] < 0.01


def one_large_scale(exponent):
    """Errors of what the other blocks add to columns in which the block of the large scale is 0:
    of the carried sums, and of the formula. It comes into a sum after the first mean."""
    q, k, v = e4m3_inputs(8, 2048, rows=16, dim=32)
    v = to_e4m3(64 * v)  # as a block's scale leaves it
    v_scale = torch.ones(16)
    v_scale[7], v[7 * 128:8 * 128] = 2.0**exponent, 0.0
    v[7 * 128 + 5, 3] = 400.0
    real = v.double() * v_scale.double().repeat_interleave(128)[:, None]
    columns = torch.arange(32) != 3
    reference = attention_exact(q, k, real)[0][:, columns]
    carried = carried_model(q, k, v, blocks_a_sum(), v_scale=v_scale)[:, columns]
    return relative(carried, reference), relative(formula(q, k, real)[:, columns], reference)


def test_range_of_the_mean_in_fp16():
    """docs/fp8.md: scales of V that are up to 2^20 apart cost nothing; at 2^30 fp16 has lost what
    the smaller ones had."""
    for exponent in (0, 10, 20):
        got, allowed = one_large_scale(exponent)
        assert got <= 1.1 * allowed
    assert one_large_scale(30)[0] > 0.2


def test_lse_and_out_follow_the_exact_ones():
    q, k, v = e4m3_inputs(1, 1000)
    scales = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0, 1.0, 3.0, 0.125])
    per_key = scales.double().repeat_interleave(128)[:1000, None]
    out, lse = attention_model(q, k, v, k_scale=scales, v_scale=scales)
    reference, reference_lse = attention_exact(q, k * per_key, v * per_key)
    assert relative(out, reference) < 0.05
    assert float((lse - reference_lse).abs().max()) < 1e-6


def test_sums_of_rounded_probabilities_suit_out_but_not_the_lse():
    q, k, v = e4m3_inputs(2, 512, 3.0, rows=256)
    v = to_e4m3(v.abs() + 0.5)
    reference, reference_lse = attention_exact(q, k, v)
    exact, lse = attention_model(q, k, v)
    rounded, rounded_lse = attention_model(q, k, v, rounded_sums=True)
    assert relative(rounded, reference) < relative(exact, reference)
    assert float((lse - reference_lse).abs().max()) < 1e-6
    assert float((rounded_lse - reference_lse).abs().max()) > 5e-3


def test_blocks_and_rotation_on_outliers():
    def draw(keys):
        rare = torch.rand(keys, 128) < 0.001
        return (torch.randn(keys, 128) + 10 * torch.randn(keys, 128) * rare).bfloat16().double()

    keys, rows = 4096, 256
    squares = {"tensor": 0.0, "rotated blocks": 0.0}
    for seed in range(12):
        torch.manual_seed(seed)
        q, k, v = (draw(keys) for _ in range(3))
        reference, _ = attention_exact(q[:rows], k, v)
        for name in squares:
            block = 128 if name == "rotated blocks" else None
            turn = hadamard if block else (lambda x: x)
            (qv, qs), (kv, ks), (vv, vs) = (
                quantize_blocks(x, block) for x in (turn(q), turn(k), v))
            if block:
                per_row = qs.repeat_interleave(128)[:rows, None].double()
            else:
                per_row, ks, vs = float(qs), ks.expand(keys // 128), vs.expand(keys // 128)
            out, _ = attention_model(qv[:rows], kv, vv, q_scale=per_row, k_scale=ks, v_scale=vs)
            squares[name] += float(((out - reference) ** 2).sum())
    assert math.sqrt(squares["tensor"] / squares["rotated blocks"]) > 2.0


def test_rotation_keeps_scores():
    torch.manual_seed(3)
    for dim in (64, 80, 128, 192, 256):
        q, k = torch.randn(2, 7, dim).double()
        assert torch.allclose(hadamard(q) @ hadamard(k).T, q @ k.T)


def units(scales):
    """Fp8Producer::next_value_scale(): carry, weight and unit of one block after the other."""
    before = None
    for scale in scales:
        unit = min(max(scale, 2.0**-40), 2.0**40)
        yield (1.0 if before is None else before / unit), scale / unit, unit
        before = unit


def test_sums_in_units_of_the_last_scale_are_those_of_scaled_blocks():
    generator = torch.Generator().manual_seed(4)
    for spread in (1, 30, 55):
        scales = (2.0 ** (spread * (2 * torch.rand(64, generator=generator) - 1))).tolist()
        partial = torch.randn(64, 100, generator=generator)
        out = torch.zeros(100)
        for block, (carry, weight, _) in zip(partial, units(scales)):
            out = out * carry + block * weight
        *_, (_, _, unit) = units(scales)
        exact = (partial.double() * torch.tensor(scales, dtype=torch.float64)[:, None]).sum(0)
        assert relative(out.double() * unit, exact) < 1e-6


def test_the_largest_integer_is_the_largest_float_unless_all_are_negative():
    """row_tops.h: a wrong answer must show as a negative one."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(2000, 4, generator=generator)
    scores[0], scores[1, 1:] = -math.inf, -math.inf
    top = scores.view(torch.int32).amax(1).view(torch.float32)
    right = top == scores.amax(1)
    assert bool((right | (top.view(torch.int32) < 0)).all())
    assert bool(right[(scores > 0).any(1)].all())


# ---- P by its code (fp8_codes.h) -----------------------------------------------------------------

CODES = HEADER.with_name("fp8_codes.h")


def test_the_emulated_codes_have_the_kernels_constants():
    text = CODES.read_text()
    octave, one = (float(re.search(rf"{name} = ([\d.]+)f;", text)[1])
                   for name in ("kOctave", "kOne"))
    x = torch.arange(-20, 8.01, 1 / 64)
    codes = torch.round((octave * x + one).clamp(min=0)).to(torch.uint8)
    assert (accuracy.by_code(x).to(torch.float8_e4m3fn).view(torch.uint8) - codes).abs().max() <= 1
    assert (accuracy.by_code(x) == codes.view(torch.float8_e4m3fn).float()).float().mean() > 0.99


def test_codes_are_powers_of_two_but_for_less_than_a_last_place():
    x = torch.arange(-6, 8, 1 / 512)
    got, want = accuracy.by_code(x).double(), torch.exp2(x.double())
    last_place = torch.exp2(torch.floor(x.double()) - 3)
    off = (got - want) / last_place
    assert float(off.abs().max()) < 1.0
    assert 0.3 < float(off.square().mean().sqrt()) < 0.4  # rounding alone: 0.29
    assert abs(float(((got - want) / want).mean())) < 2e-3  # no bias
    tops = torch.arange(-6.0, 9.0)
    assert torch.equal(accuracy.by_code(tops), torch.exp2(tops))  # a row's largest has no error
    assert torch.equal(accuracy.by_code(torch.tensor([-7.1, -1e4, -math.inf])), torch.zeros(3))


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_half_of_p_by_code_costs_a_tenth_of_the_error_of_p(spread):
    q, k, v = e4m3_inputs(4, 4096, spread)
    reference, _ = attention_exact(q, k, v)
    rounded, _ = attention_model(q, k, v, rounded_sums=True)
    coded, _ = attention_model(q, k, v, rounded_sums=True, coded=accuracy.by_code)
    assert relative(rounded, reference) < relative(coded, reference) or spread > 1
    assert relative(coded, reference) < 1.15 * relative(rounded, reference)
