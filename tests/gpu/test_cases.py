"""Rows of the list of reported faults on the forward kernel, by what each checks (ids in docs)."""

import math
import threading

import pytest
import torch
from support.cases import Case
from support.compare import check_forward
from support.graphs import capture

import flash_attn3
import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
HALF = (torch.bfloat16, torch.float16)
HEADS = ((2, 2), (6, 2), (5, 1))


def check(case, poison=False):
    q, k, v = case.make("cuda", poison)
    torch.full((4 << 20,), float("nan"), device="cuda")
    out, lse = case.call(q, k, v)
    check_forward(case, q, k, v, out, lse)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 0), (0, 64), (0, 0), (4, 2)], ids=str)
def test_no_keys_or_no_queries(sizes, heads, ragged):
    """C01, C04, C11."""
    for batch in (0, 1, 2):
        for causal in (False, True):
            check(Case((sizes[0],) * batch, (sizes[1],) * batch, *heads, 64, causal=causal,
                       ragged=ragged, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", [
    ((5, 5), (0, 7)), ((0, 0, 1023), (0, 1, 2045)), ((0, 0, 12), (3, 0, 9)),
    ((0, 12, 8, 0), (25, 17, 9, 30)), ((76, 34, 146), (1, 1, 1)), ((1743, 1559), (1743, 1559)),
    ((300, 20), (300, 20)), ((3,), (7,)), ((0, 0, 0), (5, 0, 6))], ids=str)
def test_empty_and_tiny_sequences_beside_others(lengths, dtype):
    """C02, C08, C09, C19, C28, C34."""
    for heads, d in (((2, 2), 64), ((4, 1), 256), ((16, 16), 192), ((2, 2), 32), ((4, 2), 128)):
        for causal in (False, True):
            check(Case(*lengths, *heads, d, ragged=True, causal=causal, dtype=dtype))


def test_rows_outside_of_sequences():
    """C06, C07: NaN there; out 0, lse -inf."""
    for d in (64, 128, 256):
        check(Case((4, 4), (4, 4), 2, 1, d, ragged=True, tail=2, dtype=torch.bfloat16), True)
        used = dict(used_q=(3, 8), used_k=(3, 8))
        check(Case((8, 8), (8, 8), 2, 1, d, dtype=torch.float16, **used), True)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_logits_far_below_zero(d):
    """C15, C16."""
    for s in (64, 191, 704):
        for level in (-120.0, -1880.0):
            q, k, v = (torch.randn(1, s, 1, d, device="cuda").to(torch.bfloat16) for _ in range(3))
            q[..., 0], k[..., 0] = 64.0, level
            out, lse = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
            check_forward(Case((s,), (s,), 1, 1, d, dtype=torch.bfloat16), q, k, v, out, lse)


@pytest.mark.parametrize("d", [64, 128])
def test_large_inputs(d):
    """C18, C19: no NaN, the reference's values."""
    check(Case((1024,), (1024,), 1, 1, d, causal=True, dtype=torch.float16, size=3.0))
    check(Case((300,), (500,), 2, 1, d, causal=True, dtype=torch.bfloat16, size=10.0))


def test_rounding_is_not_biased():
    """C22: 1,000 rows of their own, several equal largest keys in each, values of one sign."""
    q = torch.ones(1000, 1, 1, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1000, 96, 1, 128, device="cuda").to(torch.bfloat16)
    k[:, ::9] = 1.0
    v = torch.rand(1000, 96, 1, 128, device="cuda").to(torch.bfloat16)
    out = flash_attn3.flash_attn_func(q, k, v, softmax_scale=0.05)
    error = (out.double() - reference.attention(q, k, v, scale=0.05)[0]).mean(-1).flatten()
    assert abs(error.mean()) <= 3 * error.std() / 1000 ** 0.5


@pytest.mark.parametrize("sizes, seen", [((2, 5), [4, 5]), ((5, 2), [0, 0, 0, 1, 2])], ids=str)
def test_causal_aligns_to_the_bottom_right(sizes, seen):
    """C24."""
    q = torch.zeros(1, sizes[0], 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, sizes[1], 1, 64, device="cuda", dtype=torch.bfloat16)
    lse = flash_attn3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1]
    assert lse[0, 0].exp().round().tolist() == seen


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (0, -1), (1, 0), (32, 64)], ids=str)
def test_window_ends_are_included(window):
    """C25, C26, C29: the exact number of visible keys, and the values."""
    for sq, sk in ((4, 4), (129, 9), (300, 700)):
        q = torch.zeros(1, sq, 1, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, sk, 1, 64, device="cuda", dtype=torch.bfloat16)
        lse = flash_attn3.flash_attn_func(q, k, k, window_size=window, return_attn_probs=True)[1]
        seen = reference.visible_keys(sq, sk, window=window).sum(1)
        assert lse[0, 0].double().exp().round().tolist() == seen.tolist()
        check(Case((sq,), (sk,), 2, 1, 64, window=window, dtype=torch.bfloat16))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_softcap_and_chunk(ragged, causal):
    """C30, C32."""
    for more in (dict(softcap=10.0, size=3.0), dict(chunk=4), dict(chunk=4, softcap=5.0)):
        lengths = (64, 10) if ragged else (64, 64)
        check(Case(lengths, lengths, 2, 1, 128, ragged=ragged, causal=causal, dtype=torch.bfloat16,
                   **more))


def test_offsets_past_two_to_the_31():
    """C45: batch, row and head strides that reach past 2^31 elements; both ends right."""
    big = 2 ** 31 + 2 ** 20
    buffer = torch.zeros(big, dtype=torch.bfloat16, device="cuda")
    shapes = ((2, 100, 2, 128), (2 ** 31, 256, 128, 1)), ((1, 2, 2, 128), (8, 2 ** 31, 128, 1)), (
        (1, 100, 2, 128), (8, 128, 2 ** 31, 1))
    for shape, strides in shapes:
        q, k, v = (buffer.as_strided(shape, strides, at) for at in (0, 2 ** 17, 2 ** 18))
        for t in (q, k, v):
            t.copy_(torch.randn(shape, device="cuda"))
        out, lse = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
        case = Case((shape[1],) * shape[0], (shape[1],) * shape[0], 2, 2, 128, dtype=torch.bfloat16)
        check_forward(case, *(t.contiguous() for t in (q, k, v)), out, lse)


def test_long_output_and_ragged_rows_past_two_to_the_31():
    """C45: the last sequence of a ragged batch begins past 2^31 elements of q, k, v and out."""
    rows = 2 ** 31 // 256 + 300
    free, _ = torch.cuda.mem_get_info()
    assert free > 20 << 30
    q = torch.zeros(rows, 1, 256, dtype=torch.bfloat16, device="cuda")
    last = torch.randn(3, 200, 1, 256, device="cuda").to(torch.bfloat16)
    k, v = torch.zeros_like(q), torch.zeros_like(q)
    for t, x in zip((q, k, v), last):
        t[-200:] = x
    cu = torch.tensor([0, 100, rows - 200, rows - 200, rows], dtype=torch.int32, device="cuda")
    used = torch.tensor([100, 50, 0, 200], dtype=torch.int32, device="cuda")
    out, lse = flash_attn3.flash_attn_varlen_func(
        q, k, v, cu, cu, rows - 300, rows - 300, used, used, return_attn_probs=True)
    case = Case((200,), (200,), 1, 1, 256, dtype=torch.bfloat16)
    check_forward(case, *(x[None] for x in last), out[None, -200:], lse[None, :, -200:])
    assert bool((out[150:-200] == 0).all()) and bool(torch.isinf(lse[:, 150:-200]).all())


def test_many_batches():
    """C45: 65,536 and more batch times heads."""
    check(Case((1,) * 8300, (2,) * 8300, 16, 16, 64, dtype=torch.bfloat16, ragged=False,
               causal=True))


def test_custom_stream():
    """C74: ordered on the current stream, not on the default one."""
    case = Case((2000,), (2000,), 8, 8, 128, dtype=torch.bfloat16)
    q, k, v = case.make("cuda")
    want = case.call(q, k, v)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    late = torch.full_like(q, float("nan"))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = case.call(late, k, v)[0]
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("ragged", [False, True])
def test_graph_replay_with_other_values_and_lengths(ragged):
    """C76: nothing about lengths or values is frozen by the capture."""
    case = Case((100, 200), (100, 200), 4, 2, 128, dtype=torch.bfloat16, ragged=True, causal=True)
    if not ragged:
        case = Case((150,) * 2, (150,) * 2, 4, 2, 128, dtype=torch.bfloat16, causal=True)
    q, k, v = case.make("cuda")
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def call():
        if ragged:
            return flash_attn3.flash_attn_varlen_func(
                q, k, v, cu, cu, 300, 300, causal=True, return_attn_probs=True)
        return case.call(q, k, v)

    graph, (out, lse) = capture(call)
    for split in (100, 0, 300, 7):
        if ragged:
            cu[1] = split
            case = Case((split, 300 - split), (split, 300 - split), 4, 2, 128,
                        dtype=torch.bfloat16, ragged=True, causal=True)
        for t in (q, k, v):
            t.copy_(torch.randn(t.shape, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        check_forward(case, q, k, v, out, lse)


@pytest.mark.multigpu
def test_tensors_of_another_device():
    """C73: the current device stays 0; the tensors are on 1."""
    case = Case((200,) * 2, (300,) * 2, 4, 2, 128, dtype=torch.bfloat16, causal=True)
    q, k, v = case.make("cuda:1")
    out, lse = case.call(q, k, v)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    check_forward(case, q, k, v, out, lse)


def test_wrong_lengths_are_no_fault():
    """Values in device tensors are clamped: the device goes on working."""
    q = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
    for values in ([0, 50, 2 ** 30], [-7, 50, 100], [0, 90, 10], [2 ** 31 - 1, 0, -2 ** 31]):
        cu = torch.tensor(values, dtype=torch.int32, device="cuda")
        flash_attn3.flash_attn_varlen_func(q, q, q, cu, cu, 100, 100, causal=True)
        torch.cuda.synchronize()
    check(Case((64,), (64,), 2, 1, 64, dtype=torch.bfloat16))
    assert torch.cuda.is_available()


def test_a_thread_that_has_done_nothing_yet():
    """TMA descriptors are encoded by the driver, which wants a context in the calling thread."""
    q, k, v = (torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = flash_attn3.flash_attn_func(q, k, v)
    got = []
    thread = threading.Thread(target=lambda: got.append(flash_attn3.flash_attn_func(q, k, v)))
    thread.start()
    thread.join()
    assert len(got) == 1 and torch.equal(got[0], want)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("garbage", ["large", "nan"])
def test_unused_rows_of_q_change_no_bit_of_used_ones(d, garbage):
    """C07: rows of one warp share decisions, but not with unused rows."""
    used = torch.tensor([8], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1, s, 2, d, device="cuda", dtype=torch.bfloat16)
               for s in (16, 1024, 1024))
    cu_q = torch.tensor([0, 16], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 1024], dtype=torch.int32, device="cuda")
    results = []
    for fill in (0.0, 100.0 if garbage == "large" else math.nan):
        x = q.clone()
        x[:, 8:] *= fill
        results.append(flash_attn3.flash_attn_varlen_func(
            x[0], k[0], v[0], cu_q, cu_k, 16, 1024, seqused_q=used, return_attn_probs=True))
    (out, lse), (other_out, other_lse) = results
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    assert bool((out[8:] == 0).all()) and bool(torch.isfinite(out).all())


def test_a_chunk_as_large_as_an_int():
    """C32: a chunk of 2^31 - 1 is one chunk from position 0 on; earlier positions see nothing."""
    q, k, v = (torch.randn(1, s, 1, 64, device="cuda", dtype=torch.bfloat16) for s in (128, 64, 64))
    out = flash_attn3.flash_attn_func(q, k, v, attention_chunk=2 ** 31 - 1)
    assert bool((out[:, :64] == 0).all())
    want = flash_attn3.flash_attn_func(q[:, 64:], k, v)
    assert torch.allclose(out[:, 64:].float(), want.float(), atol=1e-2)


def test_runs_of_tiles_without_keys():
    """C02, C08: sequences without keys between others, more in a row than the kernel has slots."""
    lengths_q, lengths_k = (300,) + (200,) * 12 + (300,), (300,) + (0,) * 12 + (300,)
    for d in (64, 128, 256):
        check(Case(lengths_q, lengths_k, 2, 2, d, ragged=True, dtype=torch.bfloat16))
