"""The operators fwd_e4m3, quantize, row_mean and fp8_fwd without a GPU, and the way to them.

The first three have CUDA kernels alone: here the same in PyTorch stands in for them.
"""

import pytest
import torch
from support.fp8_cases import E4M3, Fp8Case, check_fp8
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import flash_attn3
from flash_attn3 import dispatch, ops, quantize, quantized
from flash_attn3.backends import blockwise_forward, e4m3

pytestmark = pytest.mark.cpu
fa3 = torch.ops.flash_attn3


def fwd_e4m3(q, k, v, q_scale, k_scale, v_scale, q_block, k_block, v_block, v_transposed,
             exact_lse, *options):
    cu_q, cu_k = options[:2]
    lead_k = tuple(k.shape[:-2])
    out, lse = blockwise_forward(
        e4m3.dequantize(q, q_scale, q_block, tuple(q.shape[:-2]), cu_q),
        e4m3.dequantize(k, k_scale, k_block, lead_k, cu_k),
        e4m3.dequantize(v, v_scale, v_block, lead_k, cu_k, v_transposed), *options)
    return out.bfloat16(), lse


@pytest.fixture(scope="module", autouse=True)
def cpu_stand_in():
    library = torch.library.Library("flash_attn3", "IMPL")
    library.impl("fwd_e4m3", fwd_e4m3, "CPU")
    library.impl("quantize", e4m3.quantize, "CPU")
    library.impl("row_mean", e4m3.row_mean, "CPU")
    yield
    library._destroy()


@pytest.fixture
def kernels(monkeypatch):
    """Every e4m3 call takes the operators; counts them."""
    count = []
    monkeypatch.setattr(dispatch, "sm90_reason", lambda call: count.append(call) and None)
    monkeypatch.setattr(dispatch, "quantizes_by_kernel", lambda x: x.dtype == torch.bfloat16)
    return count


def options(sq, sk, cu_q=None, cu_k=None):
    return (cu_q, cu_k, None, None, sq, sk, 0.25, True, -1, 0, 0, 0.0, False, 0)


def ragged_lengths():
    return torch.tensor([0, 70, 200], dtype=torch.int32)


def inputs(kind, heads=(4, 2, 2), dv=32, dtype=torch.bfloat16, **more):
    """q, k, v and the options; "ragged" covers every row, so that all results are specified."""
    if kind == "dense":
        shapes = [(2, 60, heads[0], 16), (2, 200, heads[1], 16), (2, 200, heads[2], dv)]
        rest = options(60, 200)
    else:
        cu = ragged_lengths()
        shapes = [(200, heads[0], 16), (200, heads[1], 16), (200, heads[2], dv)]
        rest = options(130, 130, cu, cu)
    return [torch.randn(s).to(dtype) for s in shapes], rest


KINDS = ("dense", "ragged")

# test_schema, which asks whether inputs were written to, has no arithmetic for e4m3 inputs.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_fwd_e4m3(args):
    before = [t.clone() if isinstance(t, torch.Tensor) else t for t in args]
    result = opcheck(fa3.fwd_e4m3.default, args, test_utils=WITHOUT_SCHEMA)
    assert set(result.values()) == {"SUCCESS"}
    for t, b in zip(args, before):
        if isinstance(t, torch.Tensor):
            assert torch.equal(t.float(), b.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", ["none", "head", "block", "transposed"])
def test_opcheck_fwd_e4m3(kind, scales):
    (q, k, v), rest = inputs(kind)
    if scales in ("none", "head"):
        q, k, v = (t.to(E4M3) for t in (q, k, v))
        scale = torch.rand(2, 2) + 0.5 if scales == "head" else None
        args = (q, k, v, scale, scale, scale, 0, 0, 0, False, True)
    else:
        parts = quantize(q, k, v, block=64, cu_seqlens_q=rest[0], cu_seqlens_k=rest[1],
                         transpose_v=scales == "transposed")
        args = (*(t.data for t in parts), *(t.scale for t in parts), *(t.block for t in parts),
                parts.v.transposed, True)
    check_fwd_e4m3((*args, *rest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block, transposed", [(64, False), (128, False), (128, True)])
@pytest.mark.parametrize("smooth", [False, True])
def test_opcheck_quantize_and_row_mean(kind, block, transposed, smooth):
    (_, _, x), rest = inputs(kind)
    mean = None
    if smooth:
        assert set(opcheck(fa3.row_mean.default, (x, rest[1], None)).values()) == {"SUCCESS"}
        mean = fa3.row_mean(x, rest[1], None)
    result = opcheck(fa3.quantize.default, (x, mean, rest[1], None, block, True, transposed))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 64, 128])
def test_opcheck_fp8_fwd(kind, block):
    tensors, rest = inputs(kind)
    args = (*(t.requires_grad_() for t in tensors), block, True, True, True, *rest)
    assert set(opcheck(fa3.fp8_fwd.default, args).values()) == {"SUCCESS"}


def test_fakes_on_cuda():
    with FakeTensorMode():
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device="cuda")

        cu = empty(4, dtype=torch.int32)
        q, k, v = empty(300, 4, 64), empty(300, 2, 64), empty(300, 2, 32)
        values, scale = fa3.quantize(q, None, cu, None, 64, True, False)
        assert values.shape == q.shape and values.dtype == E4M3
        assert scale.shape == (4, 300 // 64 + 3)
        tiles, v_scale = fa3.quantize(v, None, cu, None, 128, False, True)
        assert tiles.shape == (5, 2, 32, 128) and v_scale.shape == (2, 5)
        mean = fa3.row_mean(k, cu, None)
        assert mean.shape == (3, 2, 64) and mean.dtype == torch.float32
        keys, k_scale = fa3.quantize(k, mean, cu, None, 128, True, False)
        out, lse = fa3.fwd_e4m3(values, keys, tiles, scale, k_scale, v_scale, 64, 128, 128, True,
                                False, *options(200, 200, cu, cu))
        assert out.shape == (300, 4, 32) and out.dtype == torch.bfloat16
        assert lse.shape == (4, 300) and lse.dtype == torch.float32
        values, scale = fa3.quantize(empty(2, 130, 4, 64), None, None, None, 128, False, True)
        assert values.shape == (4, 4, 64, 128) and scale.shape == (2, 4, 2)


@pytest.mark.skipif(ops._C is None, reason="the autograd keys are in the binding")
def test_the_operators_refuse_gradients():
    (q, k, v), rest = inputs("dense")
    x = q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="^x requires a gradient.*flash_attn_fp8_func"):
        fa3.quantize(x, None, None, None, 128, False, False)
    with pytest.raises(NotImplementedError, match="^x requires a gradient"):
        fa3.row_mean(x, None, None)
    q, k, v = (t.to(E4M3) for t in (q, k, v))
    scale = torch.ones(2, 2, requires_grad=True)
    for args in ((q.clone().requires_grad_(), k, v, None, None, None),
                 (q, k, v, None, scale, None)):
        with pytest.raises(NotImplementedError, match="^(q|k_scale) requires a gradient"):
            fa3.fwd_e4m3(*args, 0, 0, 0, False, True, *rest)
    with torch.no_grad():
        assert fa3.quantize(x, None, None, None, 128, False, False)[0].dtype == E4M3


# ---- calls that take the operators ---------------------------------------------------------------


SHAPES = {
    "dense": dict(lengths_q=(70, 70), lengths_k=(150, 150), heads=6, heads_kv=2),
    "ragged": dict(lengths_q=(33, 0, 150, 1), lengths_k=(140, 5, 150, 300), ragged=True, tail=3,
                   heads=4, heads_kv=2)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [
    dict(scales="none"), dict(scales="head"), dict(scales="head", half_q=True),
    dict(scales="block", block=64), dict(scales="block", transpose_v=True, rotate=True),
    dict(scales="block", half_q=True, rotate=True),
    dict(scales="block", smooth_k=True, transpose_v=True)], ids=str)
def test_results_by_the_operators(kernels, shape, more):
    check_fp8(Fp8Case(**SHAPES[shape], **more, causal=True), e4m3_p=False)
    assert kernels and {call.dtype for call in kernels} == {E4M3}


@pytest.mark.parametrize("options", [
    dict(), dict(block=64, rotate=True), dict(block=None), dict(smooth_k=True)], ids=str)
def test_quantising_calls_by_the_operators_give_the_fallbacks_results(options, kernels,
                                                                      monkeypatch):
    (q, k, v), _ = inputs("dense")
    got = flash_attn3.flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True, **options)
    assert quantize(q, k, v).v.transposed and not quantize(q, k, v, block=None).v.transposed
    assert kernels
    monkeypatch.undo()
    want = flash_attn3.flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True, **options)
    torch.testing.assert_close(got[0], want[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_call_by_the_operators(kernels, monkeypatch, ragged):
    q, k, v = (torch.randn(2, n, h, 32).to(E4M3) for n, h in ((3, 4), (200, 2), (200, 2)))
    used = torch.tensor([150, 7], dtype=torch.int32)
    k[0, 150:], v[1, 7:] = float("nan"), float("nan")
    options = dict(cache_seqlens=used, causal=True, return_softmax_lse=True,
                   k_descale=torch.rand(2, 2) + 0.5, q_descale=torch.rand(2, 2) + 0.5)
    if ragged:
        q = q.flatten(0, 1)[:5]
        options.update(cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32), max_seqlen_q=3)
    got = flash_attn3.flash_attn_with_kvcache(q, k, v, **options)
    assert [call.dtype for call in kernels] == [E4M3]
    monkeypatch.undo()
    for g, w in zip(got, flash_attn3.flash_attn_with_kvcache(q, k, v, **options)):
        torch.testing.assert_close(g, w, atol=1e-2, rtol=1e-2)


def test_direct_calls_of_fp8_fwd_are_checked():
    tensors, rest = inputs("dense")
    with pytest.raises(ValueError, match="^block is 32"):
        fa3.fp8_fwd(*tensors, 32, False, False, True, *rest)
    capped = (*rest[:-3], 5.0, *rest[-2:])
    with pytest.raises(ValueError, match="^smooth_k is True and softcap is 5.0"):
        fa3.fp8_fwd(*tensors, 128, False, True, True, *capped)
    q, k, v = tensors
    for wrong, error, pattern in (
            ([t.to(E4M3) for t in tensors], TypeError, "^q has dtype torch.float8_e4m3fn"),
            ((q, k.half(), v), TypeError, "^k has dtype torch.float16; expected torch.bfloat16"),
            ((q[0], k, v), ValueError, "^q has 3 dimensions")):
        with pytest.raises(error, match=pattern):
            fa3.fp8_fwd(*wrong, 128, False, False, True, *rest)


def test_the_mean_of_more_sequences_than_its_grid_has(kernels, monkeypatch):
    """The mean kernel's grid has 65535 sequences at most: more go to PyTorch."""
    (q, k, v), _ = inputs("dense")
    called = []
    monkeypatch.setattr(fa3, "row_mean", lambda *args: called.append(args) or e4m3.row_mean(*args))
    want = quantize(q, k, v, smooth_k=True)
    assert called
    called.clear()
    monkeypatch.setattr(quantized, "_MEAN_GRID", 1)
    got = quantize(q, k, v, smooth_k=True)
    assert not called and torch.equal(got.k.mean, want.k.mean)


def test_backend_of_e4m3_calls(kernels):
    (q, k, v), _ = inputs("dense")
    parts = quantize(q, k, v)
    assert flash_attn3.backend_for(*parts).name == "sm90"
    assert flash_attn3.backend_for(q, parts.k, parts.v).name == "sm90"
    with_qv = [torch.randn(1, 8, 2, d).to(E4M3) for d in (64, 64, 256, 256)]
    chosen = flash_attn3.backend_for(*with_qv[:3], qv=with_qv[3])
    assert chosen.name != "sm90" and "qv" in chosen.reasons["sm90"]


def test_a_forced_fallback_takes_no_operator(kernels, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", "blockwise")
    (q, k, v), _ = inputs("dense")
    parts = quantize(q, k, v)
    assert not parts.v.transposed
    flash_attn3.flash_attn_func(*parts)
    assert not kernels
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", "aten_cpu_flash")
    with pytest.raises(ValueError, match="aten_cpu_flash can't run this call"):
        flash_attn3.flash_attn_func(*parts)


@pytest.mark.skipif(ops._C is None, reason="needs the binding")
def test_the_compiled_module_knows_e4m3():
    with pytest.raises(ValueError, match="'bf16', 'fp16' or 'e4m3'"):
        ops._C.compiled_for("e5m2", 64, 64)
    assert not ops._C.compiled_for("e4m3", 72, 72)  # no multiple of 16: no device is asked
