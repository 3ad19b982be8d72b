"""e4m3 calls off the GPU: results, errors, gradients, torch.compile."""

import pytest
import torch
from support.cases import MASKS
from support.fp8_cases import E4M3, Fp8Case, check_fp8

import flash_attn3
import reference
from flash_attn3 import (
    Quantized,
    flash_attn_fp8_func,
    flash_attn_fp8_varlen_func,
    flash_attn_func,
    flash_attn_varlen_func,
    quantize,
)

pytestmark = pytest.mark.cpu


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def half(*shape, requires_grad=False, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype).requires_grad_(requires_grad)


GQA = dict(lengths_q=(70, 70), lengths_k=(150, 150), heads=6, heads_kv=2)
RAGGED = dict(lengths_q=(33, 0, 150, 1), lengths_k=(140, 5, 150, 300), ragged=True, tail=3,
              heads=4, heads_kv=2)


@pytest.mark.parametrize("scales", ["none", "head", "block"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask, scales):
    check_fp8(Fp8Case(**GQA, **mask, scales=scales), e4m3_p=False)


@pytest.mark.parametrize("scales", ["none", "head", "block"])
@pytest.mark.parametrize("more", [dict(), dict(causal=True),
                                  dict(used_q=(20, 0, 150, 1), used_k=(100, 5, 0, 299))], ids=str)
def test_ragged(more, scales):
    check_fp8(Fp8Case(**RAGGED, **more, scales=scales), poison=True, e4m3_p=False)


@pytest.mark.parametrize("shape", [GQA, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("more", [
    dict(block=64), dict(rotate=True), dict(transpose_v=True), dict(smooth_k=True),
    dict(rotate=True, smooth_k=True, transpose_v=True), dict(half_q=True, rotate=True),
    dict(half_q=True), dict(half_q=True, scales="head")], ids=str)
def test_scales_a_block(shape, more):
    """With smooth_k, out and the LSE are those of k with its mean."""
    check_fp8(Fp8Case(**{**shape, "scales": "block", "causal": True, **more}), e4m3_p=False)


@pytest.mark.parametrize("d, dv", [(16, 16), (48, 80), (112, 112), (192, 128), (256, 256)])
def test_head_dims(d, dv):
    for scales in ("head", "block"):
        check_fp8(Fp8Case(d=d, dv=dv, scales=scales, rotate=True), e4m3_p=False)


def test_packed_and_expanded_descales():
    qkv = torch.randn(2, 40, 8, 32).to(E4M3)
    descale = torch.tensor([[0.5], [2.0]]).expand(2, 2)
    out = flash_attn3.flash_attn_qkvpacked_func(
        qkv, q_descale=descale, k_descale=None, v_descale=descale, num_heads_q=4)
    q, k, v = (t.double() for t in qkv.split([4, 2, 2], dim=2))
    factor = descale[:, :1, None, None].double()
    want, _ = reference.attention(q * factor, k, v * factor)
    assert out.dtype == torch.bfloat16 and relative(out, want) < 4e-3


def test_quantising_call_is_near_exact_attention():
    q, k, v = half(2, 200, 4, 64), half(2, 300, 2, 64) + 4, half(2, 300, 2, 64)
    want, want_lse = reference.attention(q, k, v, causal=True)
    errors = {}
    for smooth_k in (False, True):
        out, lse = flash_attn_fp8_func(
            q, k, v, causal=True, rotate=True, smooth_k=smooth_k, return_attn_probs=True)
        assert out.dtype == q.dtype
        errors[smooth_k] = relative(out, want), float((lse - want_lse).abs().max())
    # A common offset of the keys costs e4m3 its bits; without it neither out nor LSE suffers.
    assert errors[True][0] < 0.06 < errors[False][0]
    assert errors[True][1] < 0.06 < errors[False][1]


def test_the_lse_of_smoothed_keys_without_the_shift_of_quantize():
    """q from elsewhere: what was taken off the scores comes from its own values."""
    q, k, v = half(1, 50, 2, 32), half(1, 60, 2, 32) + 2, half(1, 60, 2, 32)
    for rotate in (False, True):
        parts = quantize(q, k, v, rotate=rotate, smooth_k=True)
        want = flash_attn_func(*parts, return_attn_probs=True)[1]
        other = flash_attn_func(
            parts.q._replace(shift=None), parts.k, parts.v, return_attn_probs=True)[1]
        assert float((other - want).abs().max()) < 0.3  # of e4m3 q, times a mean of 2
        assert float((other - want).abs().mean()) < 0.1
        on_the_fly = flash_attn_func(q, parts.k, parts.v, return_attn_probs=True)[1]
        torch.testing.assert_close(on_the_fly, want)


def test_fp16_and_fp32_give_their_own_dtype():
    for dtype in (torch.float16, torch.float32):
        q = half(1, 40, 2, 32, dtype=dtype)
        out = flash_attn_fp8_func(q, q, q)
        assert out.dtype == dtype
        assert relative(out, reference.attention(q, q, q)[0]) < 0.06


def test_ragged_quantising_call_equals_its_sequences():
    cu = torch.tensor([0, 130, 150, 400], dtype=torch.int32)
    q, k, v = half(400, 4, 32), half(400, 2, 32), half(400, 2, 32)
    options = dict(causal=True, rotate=True, smooth_k=True, block=64, return_attn_probs=True)
    out, lse = flash_attn_fp8_varlen_func(q, k, v, cu, cu, 250, 250, **options)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        one, one_lse = flash_attn_fp8_func(q[None, a:b], k[None, a:b], v[None, a:b], **options)
        torch.testing.assert_close(out[a:b], one[0], atol=4e-3, rtol=1e-2)
        torch.testing.assert_close(lse[:, a:b], one_lse[0], atol=1e-5, rtol=1e-5)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth_k", [False, True])
def test_gradient_is_that_of_the_exact_call_from_this_forwards_out_and_lse(smooth_k):
    q, k, v = (half(2, n, h, 32, requires_grad=True) for n, h in ((40, 4), (50, 2), (50, 2)))
    out, lse = flash_attn_fp8_func(
        q, k, v, causal=True, smooth_k=smooth_k, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    expected = flash_attn3.functional.flash_attn_bwd(
        dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), dlse=dlse,
        causal=True)
    for g, e in zip(got, expected):
        assert torch.equal(g, e)
    want = reference.gradients(dout, dlse, q, k, v, causal=True)
    for g, w in zip(got, want):
        assert relative(g, w) < 0.1
    (only_v,) = torch.autograd.grad(out, v, dout)
    assert relative(only_v, reference.gradients(dout, None, q, k, v, causal=True)[2]) < 0.1


def test_gradient_without_asking_for_the_lse_knows_the_mean():
    """The backward needs the LSE of the scores with k's mean, asked for or not."""
    q, k, v = (half(1, 60, 2, 32, requires_grad=True) for _ in range(3))
    out = flash_attn_fp8_func(q, k + 3, v, smooth_k=True)
    got = torch.autograd.grad(out.float().sum(), (q, k, v))
    want = reference.gradients(torch.ones_like(out), None, q, k + 3, v)
    for g, w in zip(got[2:], want[2:]):
        assert relative(g, w) < 0.1


def test_a_second_derivative_raises():
    q = half(1, 20, 2, 32, requires_grad=True)
    (dq,) = torch.autograd.grad(flash_attn_fp8_func(q, q, q).float().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.float().sum().backward()


# ---- errors --------------------------------------------------------------------------------------


def e4m3(*shape):
    return torch.randn(*shape).to(E4M3)


Q, K = e4m3(2, 40, 4, 32), e4m3(2, 50, 2, 32)
PARTS = quantize(half(2, 40, 4, 32), half(2, 50, 2, 32), half(2, 50, 2, 32), rotate=True)
ONES = torch.ones(2, 2)


@pytest.mark.parametrize("change, error, pattern", [
    (dict(k=half(2, 50, 2, 32)), TypeError, "^k has dtype torch.bfloat16; expected torch.float8"),
    (dict(q=half(2, 40, 4, 32), v=half(2, 50, 2, 32)), TypeError, "^v has dtype torch.bfloat16"),
    (dict(q=Q.float()), TypeError, "^k has dtype torch.float8_e4m3fn; expected torch.float32"),
    (dict(q=Q.to(torch.float8_e5m2)), TypeError, "^q has dtype torch.float8_e5m2"),
    (dict(q=e4m3(2, 40, 4, 24), k=e4m3(2, 50, 2, 24)), ValueError, "^q has head dim 24.*16"),
    (dict(v=e4m3(2, 50, 2, 40)), ValueError, "^v has head dim 40.*16"),
    (dict(q_descale=torch.ones(2, 4)), ValueError, r"^q_descale has shape \(2, 4\).*\(2, 2\)"),
    (dict(k_descale=torch.ones(2, 2, 1)), ValueError, "^k_descale has shape"),
    (dict(v_descale=ONES.half()), TypeError, "^v_descale has dtype torch.float16.*float32"),
    (dict(v_descale=ONES.to("meta")), ValueError, "^v_descale is on meta"),
    (dict(v_descale=2.0), TypeError, "^v_descale is a float"),
    (dict(q=half(2, 40, 4, 32), q_descale=ONES), ValueError, "^q_descale is given"),
    (dict(k=PARTS.k), ValueError, "^q is not rotated and k is rotated"),
    (dict(q=PARTS.q, k=PARTS.k, k_descale=ONES), ValueError, "^k_descale is given and k is a"),
    (dict(v=PARTS.v._replace(scale=ONES)), ValueError, "^v.scale has 2 dim|^v.scale has shape"),
    (dict(v=PARTS.v._replace(block=64)), ValueError, "^v.block is 64"),
    (dict(v=PARTS.v._replace(rotated=True)), ValueError, "^v.rotated"),
    (dict(v=PARTS.v._replace(data=half(2, 50, 2, 32))), TypeError, "^v.data has dtype"),
    (dict(v=PARTS.v._replace(scale=PARTS.v.scale.double())), TypeError, "^v.scale has dtype"),
    (dict(v=PARTS.v._replace(data=e4m3(3, 2, 32, 128), transposed=True)), ValueError, "^v.data"),
    (dict(q=PARTS.q, k=PARTS.k._replace(transposed=True)), ValueError, "^k.transposed"),
    (dict(q=PARTS.q._replace(mean=ONES), k=PARTS.k), ValueError, "^q.mean has shape"),
    (dict(v=PARTS.v._replace(mean=ONES)), ValueError, "^v.mean is given"),
    (dict(v=PARTS.v._replace(shift=ONES)), ValueError, "^v.shift is given"),
    (dict(q=PARTS.q._replace(rotated="yes"), k=PARTS.k), TypeError, "^q.rotated is 'yes'"),
    (dict(v=PARTS.v._replace(transposed="no")), TypeError, "^v.transposed is 'no'"),
    (dict(v=PARTS.v._replace(transposed=True)), ValueError,
     r"^v.data has shape \(2, 50, 2, 32\); expected \(2, 2, 2, 128\).*v.transposed is True"),
    (dict(v=Quantized(e4m3(2, 4, 32, 128), transposed=True)), ValueError,
     r"^v.data has shape \(2, 4, 32, 128\); expected \(2, 2, 32, 128\)"),
    (dict(q=PARTS.q, k=PARTS.k._replace(mean=torch.zeros(2, 2, 32)), softcap=2.0), ValueError,
     "^softcap is 2.0 and k"),
])
def test_wrong_arguments_are_named(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn_func(**{**dict(q=Q, k=K, v=K), **change})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_e4m3_calls_that_would_need_a_gradient_raise_at_the_forward(name):
    given = dict(q=Q, k=K, v=K)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name} .*float8_e4m3fn.*gradient"):
        flash_attn_func(**given)
    with torch.no_grad():
        assert not flash_attn_func(**given).requires_grad


def test_other_gradients_that_raise():
    q = half(2, 40, 4, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^q .*bfloat16.*gradient"):
        flash_attn_func(q, K, K)
    with pytest.raises(NotImplementedError, match="^v_descale .*gradient"):
        flash_attn_func(Q, K, K, v_descale=ONES.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match="^k requires a gradient.*flash_attn_fp8_func"):
        quantize(q.detach(), q, q.detach())
    smoothed = quantize(*(half(2, n, h, 32) for n, h in ((40, 4), (50, 2), (50, 2))), smooth_k=True)
    for name, field in (("q", "scale"), ("k", "scale"), ("k", "mean"), ("q", "shift")):
        part = getattr(smoothed, name)
        part = part._replace(**{field: getattr(part, field).clone().requires_grad_()})
        with pytest.raises(NotImplementedError, match=f"^{name}.{field} .*gradient"):
            flash_attn_func(*smoothed._replace(**{name: part}))
    x = e4m3(1, 4, 1, 64)
    wide = e4m3(1, 4, 1, 256)
    with pytest.raises(NotImplementedError, match="^qv .*gradient"):
        flash_attn_func(x, x, wide, qv=wide.clone().requires_grad_())
    cu = torch.tensor([0, 40], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^q "):
        flash_attn_varlen_func(q[0], K[0, :40], K[0, :40], cu, cu, 40, 40)
    with pytest.raises(TypeError, match="float8_e4m3fn; expected a dtype that has gradients"):
        flash_attn3.functional.flash_attn_bwd(Q, Q, K, K, Q, torch.zeros(2, 4, 40))


@pytest.mark.parametrize("change, error, pattern", [
    (dict(q=Q), TypeError, "^q has dtype torch.float8_e4m3fn"),
    (dict(k=half(2, 50, 2, 24)), ValueError, "^k has head dim 24"),
    (dict(v=half(2, 50, 2, 24)), ValueError, "^v has head dim 24.*16"),
    (dict(block=32), ValueError, "^block is 32; expected 64, 128 or None"),
    (dict(block=1.5), TypeError, "^block is 1.5, a float; expected 64, 128 or None"),
    (dict(block=128.0), TypeError, "^block is 128.0, a float; expected 64, 128 or None"),
    (dict(block="x"), TypeError, "^block is 'x', a str; expected 64, 128 or None"),
    (dict(block=True), TypeError, "^block is True, a bool; expected 64, 128 or None"),
    (dict(block=-1), ValueError, "^block is -1; expected 64, 128 or None"),
    (dict(rotate="yes"), TypeError, "^rotate is 'yes'"),
    (dict(smooth_k="yes"), TypeError, "^smooth_k is 'yes'"),
    (dict(q=None), TypeError, "^q is a NoneType"),
])
def test_wrong_arguments_of_quantising_calls_are_named(change, error, pattern):
    arguments = {**dict(q=half(2, 40, 4, 32), k=half(2, 50, 2, 32), v=half(2, 50, 2, 32)), **change}
    for function in (quantize, flash_attn_fp8_func):
        with pytest.raises(error, match=pattern):
            function(**arguments)


def test_smoothing_and_a_soft_cap_exclude_each_other():
    q = half(1, 20, 2, 32)
    with pytest.raises(ValueError, match="^smooth_k is True and softcap is 3.0"):
        flash_attn_fp8_func(q, q, q, softcap=3.0, smooth_k=True)
    with pytest.raises(ValueError, match="^qv is given"):
        x = half(1, 20, 2, 64)
        flash_attn_func(*quantize(x, x, half(1, 20, 2, 256)), qv=e4m3(1, 20, 2, 256))


def test_why_a_call_is_not_on_the_kernels():
    for arguments in ((Q, K, K), tuple(PARTS), (half(2, 40, 4, 32), K, K)):
        chosen = flash_attn3.backend_for(*arguments)
        assert chosen.name != "sm90" and chosen.reasons["sm90"]


# ---- empty inputs, torch.compile -----------------------------------------------------------------


def test_empty_inputs():
    for b, sq, sk in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q, k = half(b, sq, 4, 32), half(b, sk, 2, 32)
        out, lse = flash_attn_fp8_func(q, k, k, smooth_k=True, rotate=True, return_attn_probs=True)
        assert out.shape == q.shape and not out.any() and bool((lse == float("-inf")).all())
        parts = quantize(q, k, k, transpose_v=True, smooth_k=True)
        assert torch.equal(flash_attn_func(*parts), out)
    cu = torch.zeros(1, dtype=torch.int32)
    x = half(7, 2, 32)
    out = flash_attn_fp8_varlen_func(x, x, x, cu, cu, 0, 0, smooth_k=True, rotate=True)
    assert out.shape == x.shape and not out.any()


def test_compiled_without_a_graph_break():
    def attend(q, k, v):
        parts = quantize(q, k, v, rotate=True, smooth_k=True, transpose_v=True)
        return flash_attn_func(*parts, causal=True, return_attn_probs=True)

    q, k, v = half(2, 40, 4, 32), half(2, 50, 2, 32), half(2, 50, 2, 32)
    torch._dynamo.reset()
    for got, want in zip(
            torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)):
        torch.testing.assert_close(got, want)
    # The object goes into a compiled function, and out of one.
    parts = torch.compile(quantize, fullgraph=True, backend="aot_eager")(q, k, v)
    assert isinstance(parts, flash_attn3.QuantizedQKV) and isinstance(parts.q, Quantized)
    call = torch.compile(lambda p: flash_attn_func(*p), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(parts), flash_attn_func(*parts))


def test_compiled_gradient():
    def loss(q, k, v):
        out, lse = flash_attn_fp8_func(q, k, v, causal=True, rotate=True, return_attn_probs=True)
        return out.float().square().sum() + lse.sum()

    inputs = [half(2, 40, h, 32, requires_grad=True) for h in (4, 2, 2)]
    torch._dynamo.reset()
    got = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for g, w in zip(got, torch.autograd.grad(loss(*inputs), inputs)):
        torch.testing.assert_close(g, w)
