"""e4m3 calls where they might break: layouts, mixed operands, copies, symbols, infinities."""

import copy
import io

import pytest
import torch
from support.fp8_cases import E4M3
from torch.utils.checkpoint import checkpoint

import reference
from flash_attn3 import (
    QuantizedQKV,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    quantize,
)

pytestmark = pytest.mark.cpu


def half(*shape, requires_grad=False):
    return torch.randn(*shape).bfloat16().requires_grad_(requires_grad)


def lse_of(*parts):
    return flash_attn_func(*parts, return_attn_probs=True)[1]


def off(got, want):
    return float((got - want).abs().max())


# ---- layouts -------------------------------------------------------------------------------------


def transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(t):
    """Rows at odd addresses, with something between them."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=torch.uint8)
    wide[..., 1:-2] = t.view(torch.uint8)
    return wide.view(E4M3)[..., 1:-2]


def columns(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("layout", [transposed, misaligned, columns])
def test_layouts_of_e4m3(layout):
    q, k, v = (torch.randn(2, n, h, 32).to(E4M3) for n, h in ((17, 4), (130, 2), (130, 2)))
    descale = torch.rand(4, 3).t()[:2, ::2]  # (2, 2), strides of a transposed slice
    options = dict(q_descale=descale, v_descale=descale[:1, :1].expand(2, 2), causal=True)
    want = flash_attn_func(q, k, v, **options)
    assert torch.equal(flash_attn_func(*map(layout, (q, k, v)), **options), want)


def test_heads_that_are_one_in_memory():
    q, one = torch.randn(2, 9, 6, 48).to(E4M3), torch.randn(2, 70, 1, 48).to(E4M3)
    k = one.expand(2, 70, 3, 48)
    assert torch.equal(flash_attn_func(q, k, k), flash_attn_func(q, one, one))
    x = half(2, 70, 1, 48).expand(2, 70, 3, 48)
    for got, want in zip(quantize(x, x, x, smooth_k=True),
                         quantize(*[x.contiguous()] * 3, smooth_k=True)):
        assert torch.equal(got.data.float(), want.data.float())
        assert torch.equal(got.scale, want.scale)


def test_a_packed_tensor_that_is_a_slice():
    wide = torch.randn(2, 40, 5, 2, 32).to(E4M3)
    qkv = wide[:, ::2, 1:4]
    want = flash_attn_func(*(t.contiguous() for t in qkv.unbind(2)), causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), want)


# ---- operands from several calls, and copies -----------------------------------------------------


def test_a_query_with_the_keys_of_another_call():
    """q.shift belongs to one mean: with other keys the LSE comes from q's own values."""
    q, k, v = half(1, 50, 4, 32), half(1, 90, 2, 32), half(1, 90, 2, 32)
    above, below = (quantize(q, k + by, v, smooth_k=True) for by in (3, -3))
    want = reference.attention(q, k - 3, v)[1]
    assert off(lse_of(*below), want) < 0.1
    mixed = lse_of(above.q, below.k, below.v)
    assert off(mixed, want) < 0.6
    assert torch.equal(mixed, lse_of(below.q._replace(shift=None), below.k, below.v))
    plain = quantize(q, k, v)
    assert torch.equal(lse_of(above.q, plain.k, plain.v), lse_of(*plain))


def test_compiled_calls_tell_a_mixed_query_too():
    q, k, v = half(1, 50, 4, 32), half(1, 90, 2, 32), half(1, 90, 2, 32)
    above, below = (quantize(q, k + by, v, smooth_k=True) for by in (3, -3))
    torch._dynamo.reset()
    call = torch.compile(lambda parts: lse_of(*parts), fullgraph=True, backend="aot_eager")
    for parts in (below, QuantizedQKV(above.q, below.k, below.v), below):
        torch.testing.assert_close(call(parts), lse_of(*parts))
    parts = torch.compile(quantize, fullgraph=True, backend="aot_eager")(q, k, v, smooth_k=True)
    assert parts.q.mean is parts.k.mean


def test_copies_are_the_same():
    q, k, v = half(1, 50, 4, 32), half(1, 90, 2, 32) + 3, half(1, 90, 2, 32)
    parts = quantize(q, k, v, smooth_k=True, rotate=True, transpose_v=True)
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    for other in (copy.deepcopy(parts), torch.load(file, weights_only=False)):
        assert type(other) is QuantizedQKV and type(other.q) is type(parts.q)
        assert torch.equal(lse_of(*other), lse_of(*parts))


# ---- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 64, 128])
def test_an_infinite_query_has_a_finite_lse_where_its_scores_are(block):
    q, k, v = half(1, 100, 2, 32), half(1, 150, 2, 32), half(1, 150, 2, 32)
    q[0, 7, 1, 3], q[0, 8, 1, 3], q[0, 8, 1, 4] = (float(x) for x in ("inf", "-inf", "inf"))
    out, lse = flash_attn_fp8_func(
        q, k, v, block=block, rotate=True, smooth_k=True, return_attn_probs=True)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())


# ---- symbols, checkpoints ------------------------------------------------------------------------


def test_compiled_with_every_size_a_symbol():
    def attend(q, k, v):
        return flash_attn_func(*quantize(q, k, v, rotate=True, smooth_k=True, transpose_v=True))

    torch._dynamo.reset()
    call = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for sq, sk, d in ((40, 50, 48), (3, 200, 64)):
        inputs = half(2, sq, 4, d), half(2, sk, 2, d), half(2, sk, 2, 32)
        torch.testing.assert_close(call(*inputs), attend(*inputs), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradient(smooth_k, reentrant):
    inputs = [half(1, n, h, 32, requires_grad=True) for n, h in ((40, 4), (50, 2), (50, 2))]

    def loss(*tensors):
        return flash_attn_fp8_func(*tensors, causal=True, smooth_k=smooth_k).float().square().sum()

    want = torch.autograd.grad(loss(*inputs), inputs)
    checkpoint(loss, *inputs, use_reentrant=reentrant).backward()
    for t, w in zip(inputs, want):
        assert torch.equal(t.grad, w)


@pytest.mark.parametrize("options", [dict(), dict(rotate=True), dict(smooth_k=True)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_infinities_and_huge_values_saturate(which, options):
    tensors = [torch.randn(1, 150, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    tensors[which][0, 20, 1, 3] = float("inf")
    tensors[which][0, 130, 0, 4] = -3.0e38
    out, lse = flash_attn_func(*quantize(*tensors, **options), return_attn_probs=True)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
