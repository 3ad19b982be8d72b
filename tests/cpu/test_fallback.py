"""The fallback against float64: shapes, masks, heads, lengths, gradients, gradients of the LSE."""

import dataclasses

import pytest
import torch
from support.cases import MASKS, Case
from support.compare import check_case, check_close

import flash_attn3
import reference
from flash_attn3.backends import blockwise, blockwise_backward, blockwise_forward, flex, sequences
from flash_attn3.backends.call import make_call

pytestmark = pytest.mark.cpu
HEADS = ((2, 2), (6, 2), (5, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [(33, 47), (47, 33), (1, 40), (40, 40), (17, 1)], ids=str)
def test_dense_masks(mask, sizes):
    sq, sk = sizes
    check_case(Case((sq, sq), (sk, sk), 4, 2, **mask), with_dlse=True)
    check_case(Case((sq, sq), (sk, sk), 4, 2, **mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (72, 72), (192, 128), (64, 256)], ids=str)
def test_dtypes_heads_and_head_dims(dtype, heads, dims):
    for causal in (False, True):
        check_case(Case((29, 29), (50, 50), *heads, *dims, dtype=dtype, causal=causal))
        check_case(Case((40, 40), (40, 40), *heads, *dims, dtype=dtype, causal=causal))
        check_case(Case((9, 0, 31), (9, 0, 31), *heads, *dims, dtype=dtype, causal=causal,
                        ragged=True))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ragged(mask):
    case = Case((5, 0, 30, 1, 7), (9, 4, 21, 0, 7), 4, 2, ragged=True, tail=3, **mask)
    check_case(case, poison=True, with_dlse=True)
    check_case(case, poison=True)
    check_case(dataclasses.replace(case, used_q=(3, 0, 30, 0, 5), used_k=(9, 2, 11, 0, 0)),
               poison=True, with_dlse=True)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lengths_of_a_dense_batch(mask):
    check_case(Case((12,) * 3, (20,) * 3, 4, 2, used_q=(12, 5, 0), used_k=(7, 20, 3), **mask),
               poison=True, with_dlse=True)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_path_without_host_reads(mask, ragged, monkeypatch):
    """What a CUDA device takes: padded groups by device-side indices; here on the CPU."""
    def split(q_side, k_side, device, group):
        return list(zip(q_side.device_rows(group), k_side.device_rows(group)))

    monkeypatch.setattr(blockwise, "split", split)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(blockwise, "_block_sizes", lambda call: (2, 7, 11))
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", "blockwise")
    case = Case((5, 0, 30, 1, 7) if ragged else (30,) * 5,
                (9, 4, 21, 0, 7) if ragged else (21,) * 5, 4, 2, ragged=ragged,
                used_q=(3, 0, 30, 0, 5), used_k=(9, 2, 11, 0, 0), tail=3 if ragged else 0, **mask)
    check_case(case, poison=True, with_dlse=True)
    if ragged:
        check_case(dataclasses.replace(case, used_q=None, used_k=None), poison=True)


def test_blocks_of_every_size_agree(monkeypatch):
    q, k, v = Case((70,), (90,), 4, 2).make()
    lengths = (None,) * 4
    options = lengths + (70, 90, 0.2, True, 30, 0, 0, 0.0, False, 0)
    want = reference.attention(q, k, v, scale=0.2, causal=True, window=(30, 0))
    for sizes in ((1, 1, 1), (1, 16, 8), (1, 64, 128), (1, 7, 33)):
        monkeypatch.setattr(blockwise, "_block_sizes", lambda call, sizes=sizes: sizes)
        out, lse = blockwise_forward(q, k, v, *options)
        check_close("out", out, want[0], want[0], 2)
        grads = blockwise_backward(out, None, q, k, v, out, lse, *options)
        right = reference.gradients(out, None, q, k, v, scale=0.2, causal=True, window=(30, 0))
        for g, w in zip(grads, right):
            check_close("gradient", g, w, w, 3)


def test_memory_is_linear_in_the_length():
    """Blocks are bounded whatever the length, so no tensor of Sq * Sk scores exists."""
    for n in (1 << 10, 1 << 14, 1 << 20):
        q = torch.empty(1, n, 16, 64, device="meta")
        call = make_call(q, q, q, None, None, None, None, n, n, 1.0, False, -1, -1, 0, 0.0, False)
        group, rows, keys = blockwise._block_sizes(call)
        assert group * 16 * rows * keys <= 1 << 22


def test_wrong_lengths_never_leave_the_tensors():
    side = sequences.Side(torch.tensor([-5, 3, 2, 99], dtype=torch.int32),
                          torch.tensor([9, -2, 50], dtype=torch.int32), 3, 6, 10)
    for rows in side.host_rows():
        assert 0 <= rows.rows.start <= rows.rows.stop <= 10
    part = side.device_rows(3)[0]
    assert int(part.index.min()) >= 0 and int(part.index.max()) <= 10


@pytest.mark.parametrize("name", ["blockwise", "aten_cpu_flash"])
def test_each_backend_repeats_bitwise(name, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    case = Case((40, 40), (40, 40), 4, 2, causal=True, dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in case.make())
    runs = []
    for _ in range(3):
        out, lse = case.call(q, k, v, deterministic=True)
        runs.append((out, lse, *torch.autograd.grad(out.float().sum(), (q, k, v))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_scales_of_zero_and_below(mask, scale):
    """PyTorch's kernels scale after they mask, so they must not get these."""
    for sizes in (((20, 20), (20, 20)), ((20, 9), (11, 30))):
        check_case(Case(*sizes, 4, 2, ragged=sizes[0] != sizes[1], scale=scale, **mask),
                   with_dlse=True)


@pytest.mark.parametrize("name", ["blockwise", "aten_cpu_flash"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sentinel", [float("-inf"), float("inf")])
def test_rows_that_the_caller_rules_out_add_nothing(name, ragged, sentinel, monkeypatch):
    """C10: infinite lse in a row that sees keys, whatever its out and dout hold."""
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    case = Case((12, 9), (12, 9), 4, 2) if ragged else Case((12, 12), (12, 12), 4, 2)
    case = dataclasses.replace(case, ragged=ragged, causal=not ragged)
    q, k, v = case.make()
    cu = torch.tensor(case.cu(case.lengths_q), dtype=torch.int32) if ragged else None
    options = (cu, cu, None, None, 12, 12, 0.2, case.causal, -1, -1, 0, 0.0, False, 0)
    fa3 = torch.ops.flash_attn3
    out, lse = fa3.fallback_fwd(q, k, v, *options)
    dout = torch.randn_like(out)
    kept = dout.clone()
    for t, value in ((dout, float("nan")), (out, float("nan")), (kept, 0.0)):
        t.reshape(-1, 4, 32)[5, 1:3] = value  # row 5 of the first sequence, two of its heads
    (lse if ragged else lse[0])[1:3, 5] = sentinel
    got = fa3.fallback_bwd(dout, None, q, k, v, out, lse, *options)
    want = reference.gradients(
        kept, None, q, k, v, **{**case.reference_options(), "scale": 0.2})
    for grad, g, w in zip(("dq", "dk", "dv"), got, want):
        check_close(grad, g, w, w, 3)
    assert bool((got[0].reshape(-1, 4, 32)[5, 1:3] == 0).all())


@pytest.mark.parametrize("name", ["blockwise", "aten_cpu_flash"])
def test_autocast_of_the_caller_changes_nothing(name, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    case = Case((40, 40), (40, 40), 4, 2, causal=True)
    q, k, v = (t.requires_grad_() for t in case.make())
    dout = torch.randn_like(q)

    def run():
        out, lse = case.call(q, k, v)
        return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
        assert torch.is_autocast_enabled("cpu")
    assert all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want))


@pytest.mark.parametrize("name, case", [
    ("blockwise", Case((5,), (7,), 4, 2, 8, 16, causal=True, softcap=2.0)),
    ("aten_cpu_flash", Case((5,), (7,), 2, 2, 8)),
    ("aten_cpu_flash", Case((6,), (6,), 4, 2, 8, causal=True)),
    ("aten_cpu_flash", Case((5, 2), (5, 2), 4, 1, 8, ragged=True, causal=True))], ids=str)
def test_gradients_by_finite_differences(name, case, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    inputs = [t.double().requires_grad_() for t in case.make()]
    # Ragged lengths that are one tensor, which the causal mask of PyTorch's kernel needs.
    cu = torch.tensor(case.cu(case.lengths_q), dtype=torch.int32) if case.ragged else None
    options = dict(causal=case.causal, softcap=case.softcap)

    def attention(q, k, v):
        if case.ragged:
            return flash_attn3.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, **options)
        return flash_attn3.flash_attn_func(q, k, v, **options)

    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flex_masks(mask, monkeypatch):
    """The masks and the soft cap of FlexAttention, which compiles on a GPU and is eager here."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = Case((37,), (50,), 4, 2, 16, **mask)
    q, k, v = case.make()
    call = make_call(q, k, v, *(None,) * 4, 37, 50, 0.25, case.causal, *case.window, case.chunk,
                     case.softcap, False)
    got = flex.flex_forward(call, q, k, v, *(None,) * 4)
    want = reference.attention(q, k, v, **{**case.reference_options(), "scale": 0.25})
    flex._plan.cache_clear()
    for name, g, w in zip(("out", "lse"), got, want):
        check_close(name, g, w, w, 2)
