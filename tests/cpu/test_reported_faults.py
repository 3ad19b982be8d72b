"""Reported faults that a CPU can show, by what each checks; ids in docstrings."""

import itertools

import pytest
import torch
from support.cases import Case
from support.compare import check_case, check_close

import flash_attn3
import reference
from flash_attn3.functional import flash_attn_bwd, flash_attn_fwd

pytestmark = pytest.mark.cpu
HALF = (torch.bfloat16, torch.float16)
HEADS = ((2, 2), (6, 2), (4, 1))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 0), (0, 64), (0, 0), (4, 2)], ids=str)
def test_no_keys_or_no_queries(sizes, heads, ragged):
    """C01, C04, C11: out 0, lse -inf, gradients 0."""
    for batch, causal in itertools.product((0, 1, 2), (False, True)):
        check_case(Case((sizes[0],) * batch, (sizes[1],) * batch, *heads, 64, causal=causal,
                        ragged=ragged, dtype=torch.bfloat16), with_dlse=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", [
    ((5, 5), (0, 7)), ((0, 0, 103), (0, 1, 205)), ((0, 0, 12), (3, 0, 9)),
    ((0, 12, 8, 0), (25, 17, 9, 30)), ((76, 34, 146), (1, 1, 1)), ((30, 20), (30, 20)),
    ((3,), (7,))], ids=str)
def test_empty_and_tiny_sequences_beside_others(lengths, dtype):
    """C02, C08, C09, C19, C28, C34."""
    for heads, d, causal in ((HEADS[0], 64, True), (HEADS[2], 256, True), (HEADS[1], 192, False)):
        check_case(Case(*lengths, *heads, d, ragged=True, causal=causal, dtype=dtype))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rows_outside_of_sequences(heads):
    """C06, C07: tail rows and padded rows hold NaN; their outputs and gradients are 0."""
    check_case(Case((4, 4), (4, 4), *heads, ragged=True, tail=2, dtype=torch.bfloat16), poison=True)
    check_case(Case((8, 8), (8, 8), *heads, used_q=(3, 8), used_k=(3, 8), causal=True), poison=True,
               with_dlse=True)


def test_padding_between_sequences():
    """C13: offsets of the padded layout with the lengths in use equal the packed call."""
    used, padded = [9, 8, 3], [0, 12, 20, 24]
    packed = [torch.randn(20, h, 32) for h in (4, 2, 2)]
    loose = [torch.full((24, t.shape[1], 32), float("nan")) for t in packed]
    at = torch.cat([torch.arange(p, p + n) for p, n in zip(padded, used)])
    for t, p in zip(loose, packed):
        t[at] = p
    cu, cu_padded, lengths = (torch.tensor(x, dtype=torch.int32) for x in (
        [0, 9, 17, 20], padded, used))
    want = flash_attn3.flash_attn_varlen_func(*packed, cu, cu, 9, 9, causal=True)
    got = flash_attn3.flash_attn_varlen_func(
        *loose, cu_padded, cu_padded, 12, 12, lengths, lengths, causal=True)
    rest = torch.ones(24, dtype=torch.bool)
    rest[at] = False
    assert torch.allclose(got[at], want, atol=1e-6) and bool((got[rest] == 0).all())


def test_lse_of_the_caller_with_excluded_rows():
    """C10, C79: a caller's own LSE; a row of -inf or +inf adds nothing and gets no gradient."""
    q, k, v = (torch.randn(1, 65, 2, 32) for _ in range(3))
    dout = torch.randn(1, 65, 2, 32)
    out, lse = flash_attn_fwd(q, k, v)
    for value in (float("-inf"), float("inf")):
        lse_given = lse.clone()
        lse_given[0, :, 7] = value
        dq, dk, dv = flash_attn_bwd(dout, q, k, v, out, lse_given)
        kept = dout.clone()
        kept[0, 7] = 0
        want = reference.gradients(kept, None, q, k, v)
        for name, g, w in zip(("dq", "dk", "dv"), (dq, dk, dv), want):
            check_close(name, g, w, w, 3)
        assert bool((dq[0, 7] == 0).all())


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(softcap=3.0)], ids=str)
@pytest.mark.parametrize("dtype", HALF + (torch.float32, torch.float64), ids=str)
def test_out_and_lse_of_a_caller_in_other_dtypes(dtype, options):
    """A ring step merges in float32 whatever the inputs are."""
    q, k, v = (torch.randn(1, 20, h, 32).to(dtype) for h in (4, 2, 2))
    out, lse = flash_attn_fwd(q, k, v, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for given in (None, dlse):
        want = flash_attn_bwd(dout, q, k, v, out, lse, dlse=given, **options)
        for of_out in HALF + (torch.float32, torch.float64):
            for of_lse in (torch.float32, torch.float64):
                got = flash_attn_bwd(
                    dout.to(of_out), q, k, v, out.to(of_out), lse.to(of_lse),
                    dlse=None if given is None else given.to(of_lse), **options)
                assert all(g.dtype == dtype for g in got)
                coarse = max(torch.finfo(dtype).eps, torch.finfo(of_out).eps)
                for g, w in zip(got, want):
                    assert (g - w).abs().max() <= max(8 * coarse, 1e-6) * w.abs().max()


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_tensors_of_a_backward_are_checked(name):
    q = torch.randn(1, 5, 2, 16)
    out, lse = flash_attn_fwd(q, q, q)
    right = dict(dout=out, q=q, k=q, v=q, out=out, lse=lse, dlse=lse)
    for wrong, error, words in (
            (right[name].int(), TypeError, "has dtype torch.int32; expected a floating-point"),
            (right[name].bool(), TypeError, "has dtype torch.bool; expected a floating-point"),
            (right[name].cfloat(), TypeError, "has dtype torch.complex64; expected a floating"),
            (right[name].to("meta"), ValueError, "is on meta; expected cpu"),
            (right[name][0], ValueError, "has shape"), (1.0, TypeError, "is a float"),
            (None, TypeError, "is a NoneType; expected a torch.Tensor")):
        if wrong is None and name == "dlse":
            continue
        with pytest.raises(error, match=f"^{name} {words}"):
            flash_attn_bwd(**{**right, name: wrong})


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("s", [64, 191, 192])
def test_large_negative_logits(dtype, s):
    """C15, C16: all logits far below 0, padded tiles must not win."""
    for level in (-120.0, -2.4e4):
        q, k, v = (torch.randn(1, s, 1, 64).to(dtype) * 0.01 for _ in range(3))
        q[..., 0], k[..., 0] = 8.0, level
        q.requires_grad_()
        out, lse = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
        (dq,) = torch.autograd.grad(out.sum(), q)
        want = reference.attention(q.detach(), k, v)
        assert torch.allclose(out.double(), want[0], atol=1e-3)
        assert torch.allclose(lse.double(), want[1], rtol=1e-5) and bool(dq.isfinite().all())


@pytest.mark.parametrize("size", [3.0, 10.0])
def test_large_inputs(size):
    """C18."""
    for s, d in ((200, 128), (65, 64)):
        check_case(Case((s,), (s,), 1, 1, d, causal=True, dtype=torch.float16, size=size))


def test_one_key_has_an_exact_reference():
    """C21: the error of the reference is 0, so the floor decides."""
    check_case(Case((257,), (1,), 2, 1, 128, dtype=torch.float16))


def test_rounding_is_not_biased():
    """C22: 1,000 rows of their own, several equal largest keys in each, values of one sign."""
    q = torch.ones(1000, 1, 1, 64, dtype=torch.bfloat16)
    k = torch.randn(1000, 96, 1, 64).to(torch.bfloat16)
    k[:, ::9] = 1.0
    v = torch.rand(1000, 96, 1, 64).to(torch.bfloat16)
    out = flash_attn3.flash_attn_func(q, k, v, softmax_scale=0.05)
    error = (out.double() - reference.attention(q, k, v, scale=0.05)[0]).mean(-1).flatten()
    assert abs(error.mean()) <= 3 * error.std() / 1000 ** 0.5


def test_gradient_of_a_gated_strided_output():
    """C23, C47: dout that is not contiguous, stride 0, or transposed; (192, 128)."""
    q, k, v = (t.requires_grad_() for t in Case((9,), (9,), 4, 2, 192, 128, causal=True).make())
    gate = torch.randn(1, 4, 9, 128).transpose(1, 2)
    out = flash_attn3.flash_attn_func(q, k, v, causal=True)
    for dout in (gate, torch.ones(()).expand(out.shape), torch.randn(1, 9, 4, 256)[..., ::2]):
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        want = reference.gradients(dout, None, q.detach(), k.detach(), v.detach(), causal=True)
        for g, w in zip(got, want):
            check_close("gradient", g, w, w, 3)
    with pytest.raises(RuntimeError, match="inplace"):
        out.mul_(2).sum().backward()


@pytest.mark.parametrize("sizes, seen", [((2, 5), [4, 5]), ((5, 2), [0, 0, 0, 1, 2])], ids=str)
def test_causal_aligns_to_the_bottom_right(sizes, seen):
    """C24: the number of keys each query sees, read from values that are all 1 and the LSE."""
    q, k = torch.zeros(1, sizes[0], 1, 16), torch.randn(1, sizes[1], 1, 16)
    out, lse = flash_attn3.flash_attn_func(q, k, torch.ones_like(k), causal=True,
                                           return_attn_probs=True)
    assert lse[0, 0].exp().round().tolist() == seen
    assert out[0, :, 0, 0].round().tolist() == [float(n > 0) for n in seen]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (0, -1), (1, 0), (32, 64)], ids=str)
def test_window_ends_are_included(window):
    """C25, C26, C29: the exact set of visible keys."""
    for sq, sk in ((4, 4), (129, 9), (5, 70)):
        mask = reference.visible_keys(sq, sk, window=window)
        q, k = torch.zeros(1, sq, 1, 16), torch.randn(1, sk, 1, 16)
        lse = flash_attn3.flash_attn_func(q, k, k, window_size=window, return_attn_probs=True)[1]
        assert lse[0, 0].exp().round().tolist() == mask.sum(1).tolist()
        check_case(Case((sq,), (sk,), 2, 1, window=window))
    assert reference.visible_keys(4, 4, window=(1, 0))[3].tolist() == [False, False, True, True]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_softcap_and_chunk(ragged, causal):
    """C30, C32: dense and ragged, with gradients."""
    for more in (dict(softcap=10.0, size=4.0), dict(chunk=4), dict(chunk=4, softcap=5.0)):
        check_case(Case((64, 10), (64, 10), 2, 1, 64, ragged=True, causal=causal, **more)
                   if ragged else Case((64,) * 2, (64,) * 2, 2, 1, 64, causal=causal, **more))


@pytest.mark.parametrize("dims", [
    (8, 8), (24, 24), (40, 40), (72, 72), (80, 80), (96, 96), (104, 104), (200, 200), (256, 256),
    (128, 96), (128, 8), (128, 120), (192, 128), (64, 256)], ids=str)
def test_every_multiple_of_eight(dims):
    """C35, C36, C37, C38, C39, C42: gradients right, dv included, dense and ragged, GQA."""
    check_case(Case((33,), (33,), 4, 2, *dims, causal=True, dtype=torch.bfloat16))
    check_case(Case((20, 13), (9, 24), 4, 1, *dims, ragged=True, dtype=torch.float16))


def layouts(t):
    """The values of t (B, S, H, D) in layouts that callers have."""
    yield "transposed", t.transpose(1, 2).contiguous().transpose(1, 2)
    yield "packed", torch.stack((t, t), 2)[:, :, 1]
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] * 2, dtype=t.dtype)
    wide[..., ::2] = t
    yield "stride 2", wide[..., ::2]
    flat = torch.empty(t.numel() + 4, dtype=t.dtype)
    flat[4:] = t.flatten()
    yield "offset", flat[4:].view(t.shape)
    yield "odd stride of one head", t[:, :, :1].contiguous().as_strided(
        t[:, :, :1].shape, (t.shape[1] * t.shape[3], t.shape[3], 7, 1))


def test_layouts():
    """C47, C49: equal to the contiguous call."""
    case = Case((9, 9), (12, 12), 4, 2, 32, causal=True)
    q, k, v = case.make()
    for (name, a), (_, b), (_, c) in zip(layouts(q), layouts(k), layouts(v)):
        want = flash_attn3.flash_attn_func(a.contiguous(), b.contiguous(), c.contiguous())
        assert torch.allclose(flash_attn3.flash_attn_func(a, b, c), want, atol=1e-6), name


@pytest.mark.parametrize("s", [1, 63, 65, 130, 1023])
def test_lengths_around_tiles(s):
    """C50."""
    check_case(Case((s,), (s,), 2, 1, 64, causal=True, dtype=torch.bfloat16))


def test_neighbours_do_not_change_a_sequence():
    """C55."""
    q, k, v = torch.randn(4, 1, 8, 32), torch.randn(4, 1000, 2, 32), torch.randn(4, 1000, 2, 32)
    lengths = torch.tensor([900, 1000, 120, 500], dtype=torch.int32)
    first = flash_attn3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    lengths[0] = 800
    second = flash_attn3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert torch.allclose(first[1:], second[1:], atol=1e-6)


@pytest.mark.parametrize("gqa", [False, True])
def test_packed_qkv(gqa):
    """C77."""
    qkv = torch.randn(2, 9, *((8, 32) if gqa else (3, 4, 32)), requires_grad=True)
    q, k, v = qkv.split([4, 2, 2], 2) if gqa else qkv.unbind(2)
    want = torch.autograd.grad(flash_attn3.flash_attn_func(q, k, v).square().sum(), qkv)[0]
    out = flash_attn3.flash_attn_qkvpacked_func(qkv, num_heads_q=4 if gqa else None)
    assert torch.allclose(torch.autograd.grad(out.square().sum(), qkv)[0], want)


def test_loss_on_the_lse_alone():
    """C78."""
    q, k, v = (t.requires_grad_() for t in Case((16,), (16,), 4, 2, causal=True).make())
    lse = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
    got = torch.autograd.grad(lse.mean(), (q, k, v), materialize_grads=True)
    want = reference.gradients(
        torch.zeros(1, 16, 4, 32), torch.full_like(lse, 1 / lse.numel()),
        *(t.detach() for t in (q, k, v)), causal=True)
    for g, w in zip(got, want):
        check_close("gradient", g, w, w, 3)
    assert got[0].abs().max() > 0
