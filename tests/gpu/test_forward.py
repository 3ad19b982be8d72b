"""The forward kernel against the reference: dtypes, head dims, heads, lengths, masks, layouts.

The kernel runs before the reference, and the allocator's free blocks hold NaN, so that a result
never written can't pass.
"""

import dataclasses

import pytest
import torch
from support.cases import MASKS, Case
from support.compare import check_forward

import flash_attn3

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
HALF = (torch.bfloat16, torch.float16)
SQUARE = (8, 16, 24, 32, 40, 56, 64, 72, 80, 96, 104, 120, 128, 136, 160, 184, 192, 200, 248, 256)
OBLONG = ((192, 128), (128, 64), (64, 128), (64, 256), (256, 64), (128, 96), (128, 8), (8, 128),
          (72, 40), (40, 200), (136, 128), (96, 192))


def poison_allocator(*tensors):
    """Free blocks of the sizes that the call will ask for, full of NaN."""
    for t in tensors:
        for _ in range(2):
            torch.full_like(t, float("nan"))
    torch.full((4 << 20,), float("nan"), device="cuda")


def check(case, poison=False, **more):
    q, k, v = case.make("cuda", poison)
    backend = None if case.ragged else flash_attn3.backend_for(q, k, v)
    assert backend is None or backend.name == "sm90", str(backend)
    poison_allocator(q, v)
    out, lse = case.call(q, k, v, **more)
    assert out.dtype == case.dtype
    check_forward(case, q, k, v, out, lse)
    return q, k, v, out, lse


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [(d, d) for d in SQUARE] + list(OBLONG), ids=str)
def test_head_dims(dims, dtype):
    check(Case((200, 200), (333, 333), 4, 2, *dims, dtype=dtype))
    check(Case((130, 130), (259, 259), 4, 2, *dims, dtype=dtype, causal=True))
    check(Case((65, 1, 300), (70, 129, 40), 3, 1, *dims, dtype=dtype, ragged=True, causal=True))


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 2), (6, 2), (5, 1), (7, 7), (16, 2), (12, 4), (9, 3)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_heads(heads, d):
    check(Case((100,) * 3, (150,) * 3, *heads, d, dtype=torch.bfloat16, causal=True))
    check(Case((1,) * 3, (515,) * 3, *heads, d, dtype=torch.float16))


@pytest.mark.parametrize("sizes", [
    (1, 1), (1, 63), (63, 1), (64, 64), (65, 63), (127, 129), (128, 128), (176, 176), (177, 353),
    (192, 192), (193, 385), (257, 1), (799, 3), (3, 799), (1023, 1024), (1024, 1023), (2048, 2048)],
    ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_lengths_around_tiles(sizes, d):
    """C21, C50."""
    for causal in (False, True):
        check(Case((sizes[0],), (sizes[1],), 2, 1, d, dtype=torch.bfloat16, causal=causal))


WIDE_MASKS = MASKS + (
    dict(window=(127, 0)), dict(window=(300, 5)), dict(window=(128, 128)), dict(window=(-1, 200)),
    dict(chunk=100), dict(chunk=128, causal=True), dict(chunk=1), dict(chunk=1000),
    dict(softcap=30.0, causal=True), dict(chunk=64, window=(20, 0)))


@pytest.mark.parametrize("mask", WIDE_MASKS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_masks(mask, d):
    for sq, sk in ((300, 300), (129, 400), (400, 129), (1, 300)):
        check(Case((sq, sq), (sk, sk), 4, 2, d, dtype=torch.bfloat16, **mask))
    check(Case((5, 0, 300, 1, 7), (9, 4, 210, 0, 170), 4, 2, d, dtype=torch.float16, ragged=True,
               tail=3, **mask), poison=True)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_in_use_and_nan_in_unused_rows(d, dtype, causal):
    check(Case((100, 300, 64, 1), (300, 20, 129, 64), 4, 2, d, dtype=dtype, ragged=True,
               used_q=(3, 300, 0, 1), used_k=(299, 0, 65, 1), causal=causal, tail=40), poison=True)
    check(Case((200,) * 3, (260,) * 3, 4, 2, d, dtype=dtype, used_q=(200, 70, 0),
               used_k=(129, 260, 10), causal=causal), poison=True)


def test_ragged_batches_of_many_sequences():
    lengths = tuple((i * 37) % 200 for i in range(300))
    check(Case(lengths, lengths[::-1], 2, 1, 128, dtype=torch.bfloat16, ragged=True, causal=True))
    check(Case((34,) * 500, (34,) * 500, 4, 4, 64, dtype=torch.bfloat16, ragged=True))


def layouts(t):
    """The values of t (B, S, H, D) in layouts that callers have; all but the last need no copy."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.stack((t, t, t), 2)[:, :, 1]
    yield torch.cat((t, t), 2)[:, :, : t.shape[2]]
    yield torch.cat((t, t), 3)[..., t.shape[3]:]
    yield t.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*t.shape[:-1], t.shape[-1] * 2), float("nan"), dtype=t.dtype, device="cuda")
    wide[..., ::2] = t
    yield wide[..., ::2]
    flat = torch.empty(t.numel() + 4, dtype=t.dtype, device="cuda")
    flat[4:] = t.flatten()
    yield flat[4:].view(t.shape)


@pytest.mark.parametrize("d", [64, 72, 128, 256])
def test_layouts(d):
    """C47, C49: bitwise the contiguous result."""
    case = Case((130, 130), (200, 200), 4, 2, d, dtype=torch.bfloat16, causal=True)
    q, k, v, out, lse = check(case)
    for i, (a, b, c) in enumerate(zip(layouts(q), layouts(k), layouts(v))):
        got = case.call(a, b, c)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse), f"layout {i}"


def test_broadcast_and_strange_strides():
    """C49: stride 0 in a dimension, and any stride in a dimension of size 1."""
    k = torch.randn(1, 200, 1, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(3, 100, 4, 128, device="cuda", dtype=torch.bfloat16)
    wide = k.expand(3, 200, 4, 128)
    want = flash_attn3.flash_attn_func(q, wide.contiguous(), wide.contiguous())
    assert torch.equal(flash_attn3.flash_attn_func(q, wide, wide), want)
    odd = k.as_strided(k.shape, (3, 128, 5, 1))
    assert torch.equal(
        flash_attn3.flash_attn_func(q[:1], odd, odd), flash_attn3.flash_attn_func(q[:1], k, k))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_fifty_repeats_are_bitwise_equal(d, dtype):
    """C72."""
    case = Case((700, 700), (900, 900), 8, 2, d, dtype=dtype, causal=True)
    q, k, v = case.make("cuda")
    out, lse = case.call(q, k, v)
    for _ in range(50):
        again = case.call(q, k, v)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def check_pairs(case, **more):
    """Pairs of CTAs take even numbers of tiles of 128 rows, or many (makes_pairs())."""
    tiles = -(-case.lengths_q[0] // 128)
    assert tiles % 2 == 0 or tiles >= 64
    check(case, **more)


@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256), (200, 120)], ids=str)
@pytest.mark.parametrize("more", [
    dict(), dict(causal=True), dict(softcap=15.0, size=4.0), dict(causal=True, size=8.0),
    dict(used_k=(1500, 2100)), dict(causal=True, used_k=(130, 2048)), dict(used_k=(0, 1)),
    dict(causal=True, used_k=(1, 0)), dict(scale=-0.1),
    dict(sm_margin=3), dict(causal=True, sm_margin=130), dict(causal=True, sm_margin=131)], ids=str)
def test_pairs(dims, more):
    case = Case((2178,) * 2, (2200,) * 2, 6, 2, *dims, dtype=torch.bfloat16)
    check_pairs(dataclasses.replace(case, **more), poison="used_k" in more)


@pytest.mark.parametrize("sizes", [(1024, 1024), (1200, 5000), (2300, 1030), (5000, 2048)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths_of_pairs(sizes, causal, dtype):
    check_pairs(Case((sizes[0],) * 3, (sizes[1],) * 3, 4, 4, 256, dtype=dtype, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_a_pair_with_one_tile_alone(causal):
    """65 tiles of 128 rows."""
    check_pairs(Case((8200,), (8200,), 2, 1, 256, dtype=torch.bfloat16, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_repeats_by_pairs_are_bitwise_equal(causal):
    case = Case((2048,) * 2, (2048,) * 2, 8, 8, 256, dtype=torch.bfloat16, causal=causal)
    q, k, v = case.make("cuda")
    out, lse = case.call(q, k, v)
    for _ in range(20):
        again = case.call(q, k, v)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    apart = dataclasses.replace(case, sm_margin=131).call(q, k, v)  # by single CTAs
    assert torch.equal(apart[0], out) and torch.equal(apart[1], lse)


@pytest.mark.parametrize("margin", [1, 8, 100, 131])
def test_sm_margin(margin):
    case = Case((500,) * 2, (500,) * 2, 8, 2, 128, dtype=torch.bfloat16, causal=True)
    q, k, v, out, lse = check(case)
    got = dataclasses.replace(case, sm_margin=margin).call(q, k, v)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_sm_margin_leaves_an_sm():
    case = Case((500,) * 2, (500,) * 2, 8, 2, 128, dtype=torch.bfloat16, sm_margin=500)
    with pytest.raises(ValueError, match="sm_margin is 500; expected less than"):
        case.call(*case.make("cuda"))


def test_gradients_reach_the_inputs():
    case = Case((100, 100), (130, 130), 4, 2, 64, dtype=torch.bfloat16, causal=True)
    q, k, v = (t.requires_grad_() for t in case.make("cuda"))
    out, _ = case.call(q, k, v)
    assert out.requires_grad
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) and bool(g.abs().max() > 0) for g in grads)


def test_streams_and_graphs_have_tile_counters_of_their_own():
    """Tiles of a causal call are claimed from a counter that a launch leaves as it found it."""
    case = Case((1024,) * 2, (1024,) * 2, 8, 8, 128, dtype=torch.bfloat16, causal=True)
    q, k, v = case.make("cuda")
    expected = case.call(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(case.call(q, k, v))
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [case.call(q, k, v) for _ in range(3)]
        graphs.append((graph, captured))
    for _ in range(5):
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, captured in graphs:
        results += captured
    for out, lse in results:
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
