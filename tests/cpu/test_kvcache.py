"""KV cache on plain PyTorch: lengths, append, rotary, pages, padding, plans, combine, qv, e4m3."""

import math

import pytest
import torch

import flash_attn3
import reference
from flash_attn3.backends import kvcache

pytestmark = pytest.mark.cpu
CACHE = flash_attn3.flash_attn_with_kvcache


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(b=3, sq=2, slots=24, h=4, hk=2, d=16, dv=24):
    return torch.randn(b, sq, h, d), torch.randn(b, slots, hk, d), torch.randn(b, slots, hk, dv)


def rotated(x, cos, sin, position, interleaved):
    """x (heads, d) turned at one position, value by value."""
    x, r = x.clone(), cos.shape[1]
    for i in range(r):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + r)
        c, s = cos[position, i], sin[position, i]
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_slots_past_the_length_never_matter(causal, poison):
    """C05, C63, dense and paged; entries of the page table past the length are garbage."""
    q, k, v = make()
    lengths = [1, 24, 0]
    want = reference.attention(q, k, v, used_k=lengths, causal=causal)
    for b, n in enumerate(lengths):
        k[b, n:], v[b, n:] = poison, poison
    out, lse = CACHE(q, k, v, cache_seqlens=ints(*lengths), causal=causal, return_softmax_lse=True)
    assert torch.allclose(out.double(), want[0], atol=1e-5)
    assert torch.allclose(lse.double(), want[1], atol=1e-5)
    pages = [t.reshape(3 * 3, 8, 2, -1) for t in (k, v)]
    table = ints(*range(9)).reshape(3, 3)
    table[0, 1:], table[2] = 2147480000, -1
    assert torch.allclose(
        CACHE(q, *pages, cache_seqlens=ints(*lengths), page_table=table, causal=causal).double(),
        want[0], atol=1e-5)


@pytest.mark.parametrize("page", [1, 3, 8, 16, 40])
def test_pages_equal_the_gathered_cache(page):
    """C37, C67: every page size, Dv different from D, append into pages."""
    q, k, v = make()
    new_k, new_v = torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 24)
    lengths = ints(5, 22, 0)
    count = -(-24 // page)
    table = torch.randperm(3 * count).int().reshape(3, count)
    pages = []
    for t in (k, v):
        p = torch.full((3 * count, page, 2, t.shape[-1]), float("nan"))
        for b in range(3):
            for s in range(24):
                p[table[b, s // page], s % page] = t[b, s]
        pages.append(p)
    want = CACHE(q, k, v, new_k, new_v, cache_seqlens=lengths, causal=True)
    got = CACHE(q, *pages, new_k, new_v, cache_seqlens=lengths, causal=True, page_table=table)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.equal(pages[0][table[0, 6 // page], 6 % page], new_k[0, 1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_append_with_rotary(interleaved, causal, ragged):
    """C65: query t sees the cache and t + 1 new keys; positions go on where the cache ends."""
    q, k, v = make(sq=2)
    new_k, new_v = torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 24)
    angle = torch.rand(40, 6) * 6
    cos, sin = angle.cos(), angle.sin()
    lengths = [3, 0, 22]
    want_q, want_k, want_v = q.clone(), k.clone(), v.clone()
    for b, n in enumerate(lengths):
        for t in range(2):
            want_q[b, t] = rotated(q[b, t], cos, sin, n + (t if causal else 0), interleaved)
            want_k[b, n + t] = rotated(new_k[b, t], cos, sin, n + t, interleaved)
            want_v[b, n + t] = new_v[b, t]
    used = [n + 2 for n in lengths]
    want = reference.attention(want_q, want_k, want_v, used_k=used, causal=causal)
    more = {}
    if ragged:
        q, new_k, new_v = q.flatten(0, 1), new_k.flatten(0, 1), new_v.flatten(0, 1)
        offsets = ints(0, 2, 4, 6)
        more = dict(cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=2)
    out, lse = CACHE(q, k, v, new_k, new_v, rotary_cos=cos, rotary_sin=sin, causal=causal,
                     cache_seqlens=ints(*lengths), rotary_interleaved=interleaved,
                     return_softmax_lse=True, **more)
    assert torch.allclose(k, want_k, atol=1e-5) and torch.equal(v, want_v)
    assert torch.allclose(out.reshape(3, 2, 4, 24).double(), want[0], atol=1e-5)
    if ragged:
        lse = lse.reshape(4, 3, 2).transpose(0, 1)
    assert torch.allclose(lse.double(), want[1], atol=1e-5)


def test_append_changes_only_the_named_slots():
    """C46: rows of the cache chosen by cache_batch_idx; slots past the end are dropped."""
    q, _, _ = make(b=2)
    cache = torch.randn(5, 24, 2, 16)
    before = cache.clone()
    new = torch.randn(2, 2, 2, 16)
    CACHE(q, cache, cache.clone(), new, new, cache_seqlens=ints(4, 23), cache_batch_idx=ints(3, 1))
    before[3, 4:6], before[1, 23] = new[0], new[1, 0]
    assert torch.equal(cache, before)


def test_write_without_host_reads():
    """The GPU way of `Cache.write`, on CPU tensors that say they are elsewhere."""
    class Elsewhere:
        device = torch.device("cuda")

        def __init__(self, data):
            self.data = data

        def __getitem__(self, at):
            return self.data[at]

        def __setitem__(self, at, value):
            self.data[at] = value

    for valid in ([True, False, True], [False] * 3, [True] * 3, [False, False, True]):
        data = torch.randn(2, 4, 1, 8)
        want, rows = data.clone(), torch.randn(3, 1, 8)
        places = ((0, 1), (1, 3), (0, 3))
        for (b, s), ok, row in zip(places, valid, rows):
            if ok:
                want[b, s] = row
        kvcache.Cache(data, 2, None, None).write(
            Elsewhere(data), torch.tensor([0, 1, 0]), torch.tensor([1, 3, 3]), torch.tensor(valid),
            rows)
        assert torch.equal(data, want)


def test_left_padding_and_int_lengths():
    q, k, v = make()
    pad = [2, 0, 5]
    want = [reference.attention(q[b:b + 1], k[b:b + 1, p:20], v[b:b + 1, p:20], causal=True)[0]
            for b, p in enumerate(pad)]
    out = CACHE(q, k, v, cache_seqlens=20, cache_leftpad=ints(*pad), causal=True)
    assert torch.allclose(out.double(), torch.cat(want), atol=1e-5)


@pytest.mark.parametrize("splits", [0, 1, 8, 32, 128])
def test_splits_are_a_hint(splits):
    """C41, C52, C54."""
    q, k, v = make(sq=1)
    lengths = ints(1, 24, 7)
    want = CACHE(q, k, v, cache_seqlens=lengths, num_splits=1)
    plan = flash_attn3.get_scheduler_metadata(
        3, 1, 24, 4, 2, 16, lengths, headdim_v=24, num_splits=splits)
    got = CACHE(q, k, v, cache_seqlens=lengths, num_splits=splits, scheduler_metadata=plan)
    assert plan.dtype == torch.int32 and torch.allclose(got, want, atol=1e-6)


PLAN = dict(batch_size=3, max_seqlen_q=2, max_seqlen_k=24, num_heads_q=4, num_heads_kv=2,
            headdim=16, cache_seqlens=ints(1, 2, 3), headdim_v=24)


def test_plan_of_other_sizes_raises():
    """C76."""
    q, k, v = make()
    for change in (dict(batch_size=2, cache_seqlens=ints(1, 1)), dict(headdim=32),
                   dict(headdim_v=None), dict(num_heads_q=8), dict(num_heads_kv=1),
                   dict(page_size=16)):
        plan = flash_attn3.get_scheduler_metadata(**{**PLAN, **change})
        with pytest.raises(ValueError, match="scheduler_metadata"):
            CACHE(q, k, v, cache_seqlens=ints(1, 2, 3), scheduler_metadata=plan)


@pytest.mark.parametrize("change", [
    dict(max_seqlen_q=7), dict(max_seqlen_k=9999), dict(max_seqlen_k_new=3), dict(causal=True),
    dict(window_size=(3, 0)), dict(attention_chunk=4), dict(has_softcap=True), dict(sm_margin=8),
    dict(cache_seqlens=ints(24, 0, 9)), dict(qkv_dtype=torch.float16)], ids=str)
def test_plan_depends_on_no_lengths_or_options(change):
    q, k, v = make()
    plan = flash_attn3.get_scheduler_metadata(**PLAN)
    other = flash_attn3.get_scheduler_metadata(**{**PLAN, **change})
    assert torch.equal(plan, other)
    got = CACHE(q, k, v, cache_seqlens=ints(1, 2, 3), scheduler_metadata=other)
    assert torch.equal(got, CACHE(q, k, v, cache_seqlens=ints(1, 2, 3)))


@pytest.mark.parametrize("change, error, pattern", [
    (dict(headdim=63), ValueError, "^headdim is 63; expected a multiple of 8 from 8 to 256"),
    (dict(headdim=0), ValueError, "^headdim is 0"), (dict(headdim=264), ValueError, "^headdim is"),
    (dict(headdim_v=9999), ValueError, "^headdim_v is 9999; expected a multiple of 8 .* 256"),
    (dict(headdim_v=512), ValueError, "^headdim_v is 512"),
    (dict(headdim=24, qkv_dtype=torch.float8_e4m3fn), ValueError, "^headdim is 24.*of 16 from 16"),
    (dict(headdim=16.0), TypeError, "^headdim is 16.0"),
    (dict(headdim_v="a"), TypeError, "^headdim_v is 'a'"),
    (dict(num_heads_q=3), ValueError, "^num_heads_kv is 2"),
    (dict(cache_seqlens=ints(1, 2)), ValueError, "^cache_seqlens has shape"),
])
def test_plan_refuses_what_no_call_takes(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.get_scheduler_metadata(**{**PLAN, **change})
    for dv in (256, 512):  # of a call with qv
        plan = flash_attn3.get_scheduler_metadata(**{**PLAN, "headdim": 64, "headdim_v": dv})
        assert plan[4:6].tolist() == [64, dv]


@pytest.mark.parametrize("ragged", [False, True])
def test_combine_parts(ragged):
    """C04, C53: parts without a key weigh nothing, whatever they hold; one sign of infinity."""
    q, k, v = make(sq=5)
    whole, lse = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [flash_attn3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)
             for a, b in ((0, 7), (7, 7), (7, 24))]
    outs = torch.stack([p[0] for p in parts])
    lses = torch.stack([p[1].transpose(1, 2) for p in parts])
    outs[1] = float("nan")
    want_lse = lse.transpose(1, 2)
    if ragged:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
        whole, want_lse = whole.flatten(0, 1), want_lse.flatten(0, 1)
    out, merged = flash_attn3.flash_attn_combine(outs, lses)
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(merged, want_lse, atol=1e-6)
    given = torch.empty_like(whole, dtype=torch.bfloat16)
    assert flash_attn3.flash_attn_combine(outs, lses, out=given)[0] is given
    nothing = torch.full_like(lses, float("-inf"))
    out, merged = flash_attn3.flash_attn_combine(outs, nothing, out_dtype=torch.float16)
    assert out.dtype == torch.float16 and bool((out == 0).all()) and bool((merged < -1e30).all())


@pytest.mark.parametrize("change, error, pattern", [
    (dict(out_dtype="bf16"), TypeError, "^out_dtype is 'bf16'; expected a floating-point torch.dt"),
    (dict(out_dtype=torch.int32), TypeError, "^out_dtype is torch.int32; expected a floating-poin"),
    (dict(out_dtype=torch.complex64), TypeError, "^out_dtype is torch.complex64"),
    (dict(out_dtype=float), TypeError, "^out_dtype is <class 'float'>; expected .* or None"),
    (dict(out_dtype=False), TypeError, "^out_dtype is False"),
    (dict(out=torch.empty(2, 3, 8, dtype=torch.int32)), TypeError, "^out has dtype torch.int32"),
    (dict(out=torch.empty(2, 3, 8), out_dtype=torch.float16), TypeError, "^out_dtype is torch.fl"),
    (dict(out=torch.empty(2, 8)), ValueError, "^out has shape"),
    (dict(out_partial=torch.zeros(4, 2, 3, 8).int()), TypeError, "^out_partial has dtype torch.i"),
    (dict(lse_partial=torch.zeros(4, 2, 3).half()), TypeError, "^lse_partial has dtype torch.fl"),
])
def test_combine_names_the_wrong_argument(change, error, pattern):
    right = dict(out_partial=torch.zeros(4, 2, 3, 8), lse_partial=torch.zeros(4, 2, 3))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert flash_attn3.flash_attn_combine(**right, out_dtype=dtype)[0].dtype == dtype
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_combine(**{**right, **change})


@pytest.mark.parametrize("dv", [256, 512])
def test_qv_adds_to_the_scores(dv):
    q, k, v = torch.randn(2, 3, 4, 64), torch.randn(2, 9, 1, 64), torch.randn(2, 9, 1, dv)
    qv = torch.randn(2, 3, 4, dv, requires_grad=True)
    out = flash_attn3.flash_attn_func(q, k, v, qv=qv, causal=True)
    want, _ = reference.attention(
        torch.cat((q, qv.detach()), -1), torch.cat((k, v), -1), v, causal=True,
        scale=1 / math.sqrt(64 + dv))
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert torch.autograd.grad(out.sum(), qv)[0].abs().sum() > 0


@pytest.mark.parametrize("ragged", [False, True])
def test_e4m3_equals_the_dequantised_call(ragged):
    """C59, C60: descales (batch, KV heads), all different; D 192 with Dv 128."""
    q, k, v = ((torch.randn(2, n, h, d) * 0.5).to(torch.float8_e4m3fn)
               for n, h, d in ((5, 4, 192), (9, 2, 192), (9, 2, 128)))
    sq, sk, sv = (torch.rand(2, 2) + 0.5 for _ in range(3))
    want, _ = reference.attention(
        q.float() * sq.repeat_interleave(2, 1)[:, None, :, None],
        k.float() * sk[:, None, :, None], v.float() * sv[:, None, :, None], causal=True)
    options = dict(causal=True, q_descale=sq, k_descale=sk, v_descale=sv)
    if ragged:
        out = flash_attn3.flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in (q, k, v)), ints(0, 5, 10), ints(0, 9, 18), 5, 9,
            **options).reshape(2, 5, 4, 128)
    else:
        out = flash_attn3.flash_attn_func(q, k, v, **options)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), want, rtol=8e-3, atol=1e-3)
