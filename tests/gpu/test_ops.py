"""The operators on a GPU: opcheck, layouts, streams, devices, errors, the compiled module."""

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from op_cases import Options, dense, int32, ragged, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode

from flash_attn3 import ops

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

fa3 = torch.ops.flash_attn3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- opcheck -------------------------------------------------------------------------------------


def opcheck_cases():
    yield "dense", lambda: dense(causal=True)
    yield "ragged", lambda: ragged([5, 0, 90], [70, 3, 90], causal=True)
    yield "gqa", lambda: dense(heads=6, heads_kv=1)
    yield "dims", lambda: dense(d=72, dv=40)
    yield "seqused", lambda: dense(used_q=int32(3, 100), used_k=int32(150, 9))


CASES = dict(opcheck_cases())


@pytest.mark.parametrize("case", CASES)
def test_opcheck_fwd(case):
    """C83, C85."""
    tensors, o = CASES[case]()
    o.deterministic = True  # opcheck compares two runs
    args = (*(t.requires_grad_() for t in tensors), *o.args())
    assert set(opcheck(fa3.fwd.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
def test_opcheck_bwd(case):
    """C83."""
    tensors, o = CASES[case]()
    o.deterministic = True
    out, lse = fa3.fwd(*tensors, *o.args())
    args = (torch.randn_like(out), None, *tensors, out, lse, *o.args())
    assert set(opcheck(fa3.bwd.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
def test_opcheck_fwd_out(case):
    tensors, o = CASES[case]()
    out, lse = fa3.fwd(*tensors, *o.args())
    args = (*tensors, *o.args(), torch.empty_like(out), torch.empty_like(lse))
    assert set(opcheck(fa3.fwd_out.default, args).values()) == {"SUCCESS"}


# ---- layouts -------------------------------------------------------------------------------------


def transposed(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(t):
    """A slice of a wider, packed tensor."""
    wide = t.new_full((*t.shape[:2], 3 * t.shape[2], t.shape[3]), float("nan"))
    wide[:, :, t.shape[2]:2 * t.shape[2]] = t
    return wide[:, :, t.shape[2]:2 * t.shape[2]]


def last_stride_two(t):
    wide = t.new_full((*t.shape[:3], 2 * t.shape[3]), float("nan"))
    wide[..., ::2] = t
    return wide[..., ::2]


def offset_by_eight_bytes(t):
    flat = t.new_empty(t.numel() + 4)
    flat[4:] = t.flatten()
    return flat[4:].view(t.shape)


def odd_row_stride(t):
    wide = t.new_full((*t.shape[:3], t.shape[3] + 4), float("nan"))
    wide[..., :t.shape[3]] = t
    return wide[..., :t.shape[3]]


WITHOUT_COPY = [transposed, sliced]
WITH_COPY = [last_stride_two, offset_by_eight_bytes, odd_row_stride]


@pytest.mark.parametrize("layout", WITHOUT_COPY + WITH_COPY)
def test_every_layout_gives_the_bits_of_the_contiguous_one(layout):
    """C47, C49."""
    (q, k, v), o = dense(causal=True, deterministic=True)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = fa3.fwd(*leaves, *o.args())
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    moved = [layout(t.detach()).requires_grad_() for t in (q, k, v)]
    got, got_lse = fa3.fwd(*moved, *o.args())
    assert got.is_contiguous()
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    for strided in (layout(dout), dout):
        for g, e in zip(torch.autograd.grad(got, moved, strided, retain_graph=True), grads):
            torch.testing.assert_close(g, e, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", WITHOUT_COPY)
def test_layouts_that_tma_takes_cost_no_copy(layout):
    (q, k, v), o = dense(rows_q=2048, rows_k=2048, heads=16, heads_kv=16)
    moved = [layout(t) for t in (q, k, v)]
    fa3.fwd(*moved, *o.args())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = fa3.fwd(*moved, *o.args())
    torch.cuda.synchronize()
    outputs = out.nbytes + lse.nbytes
    assert torch.cuda.max_memory_allocated() - before < outputs + q.nbytes // 2


def test_expanded_heads_and_expanded_gradient():
    """C47: stride 0 in k and v, and in dO as out.sum() gives it."""
    (q, _, _), o = dense(deterministic=True)
    one = randn(2, 150, 1, 64)
    kv = one.expand(-1, -1, 4, -1)
    leaves = [q.requires_grad_(), kv.detach().contiguous().requires_grad_()]
    expected, _ = fa3.fwd(leaves[0], leaves[1], leaves[1], *o.args())
    out, _ = fa3.fwd(q, kv, kv, *o.args())
    assert torch.equal(out, expected)
    summed = torch.autograd.grad(expected.sum(), leaves, retain_graph=True)
    ones = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
    for s, e in zip(summed, ones):
        torch.testing.assert_close(s, e, atol=1e-2, rtol=1e-2)


def test_strides_of_size_one_dimensions_are_ignored():
    """C49: one KV head, one sequence, one row, each with a stride that means nothing."""
    for shape in ((1, 40, 1, 64), (1, 1, 4, 64), (1, 1, 1, 64)):
        t = randn(*shape)
        strides = [7 if n == 1 else s for n, s in zip(t.shape[:3], t.stride())] + [1]
        odd = t.as_strided(t.shape, strides)
        o = Options(shape[1], shape[1])
        out, lse = fa3.fwd(odd, odd, odd, *o.args())
        expected, expected_lse = fa3.fwd(t, t, t, *o.args())
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


# ---- fwd_out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [lambda t: t, *WITHOUT_COPY, *WITH_COPY])
def test_fwd_out_writes_into_any_layout(layout):
    tensors, o = dense(causal=True)
    out, lse = fa3.fwd(*tensors, *o.args())
    into = layout(torch.full_like(out, float("nan")))
    into_lse = torch.full_like(lse, float("nan")).transpose(1, 2).contiguous().transpose(1, 2)
    version = into._version
    fa3.fwd_out(*tensors, *o.args(), into, into_lse)
    assert torch.equal(into, out) and torch.equal(into_lse, lse)
    assert into._version > version


def test_fwd_out_refuses_what_it_can_not_do():
    (q, k, v), o = dense(rows_q=150)
    out, lse = fa3.fwd(q, k, v, *o.args())
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        fa3.fwd_out(q.requires_grad_(), k, v, *o.args(), out, lse)
    q = q.detach()
    with pytest.raises(RuntimeError, match="unsupported operation|overlap"):
        fa3.fwd_out(q, k, v, *o.args(), q, lse)
    with pytest.raises(ValueError, match="out has shape"):
        fa3.fwd_out(q, k, v, *o.args(), out[:, 1:], lse)
    with pytest.raises(TypeError, match="lse has dtype"):
        fa3.fwd_out(q, k, v, *o.args(), out, lse.half())


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, error, words", [
    (lambda q, k, v, o: (q.float(), k, v, o), TypeError, "q has dtype"),
    (lambda q, k, v, o: (q, k.half(), v, o), TypeError, "k has dtype"),
    (lambda q, k, v, o: (q, k.cpu(), v, o), ValueError, "k is on cpu"),
    (lambda q, k, v, o: (q[..., :60], k[..., :60], v, o), ValueError, "q has head dim 60"),
    (lambda q, k, v, o: (q[0], k, v, o), ValueError, "q has shape"),
    (lambda q, k, v, o: (q, k[:1], v, o), ValueError, "k has shape"),
    (lambda q, k, v, o: (q, k, v[:, :9], o), ValueError, "v has shape"),
    (lambda q, k, v, o: (q[:, :, :3], k, v, o), ValueError, "q has 3 heads"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, window=(-2, 0))), ValueError,
     "window_left is -2"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, chunk=-1)), ValueError,
     "attention_chunk is -1"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, sm_margin=4000)), ValueError,
     "sm_margin is 4000"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, softcap=float("nan"))), ValueError,
     "softcap is nan"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, used_k=int32(1))), ValueError,
     "seqused_k has shape"),
    (lambda q, k, v, o: (q, k, v, dataclasses.replace(o, used_k=int32(1, 2).long())), TypeError,
     "seqused_k has dtype"),
])
def test_operator_names_the_wrong_argument(change, error, words):
    tensors, o = dense()
    *tensors, o = change(*tensors, o)
    with pytest.raises(error, match=words):
        fa3.fwd(*tensors, *o.args())


# ---- sizes of zero -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, rows_q, rows_k", [(0, 16, 16), (2, 0, 16), (1, 64, 0), (0, 0, 0)])
def test_dense_sizes_of_zero(batch, rows_q, rows_k):
    """C01, C04, C11."""
    tensors, o = dense(batch=batch, rows_q=rows_q, rows_k=rows_k)
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *o.args())
    assert out.shape == (batch, rows_q, 4, 64) and lse.shape == (batch, 4, rows_q)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for grad, t in zip(torch.autograd.grad(out.sum(), leaves), leaves):
        assert grad.shape == t.shape and (grad == 0).all()


@pytest.mark.parametrize("lengths_q, lengths_k", [([0, 0], [4, 5]), ([3, 4], [0, 0]), ([0], [0])])
def test_ragged_totals_of_zero(lengths_q, lengths_k):
    """C01, C11."""
    tensors, o = ragged(lengths_q, lengths_k)
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *o.args())
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


def test_ragged_batch_of_zero_sequences():
    q = randn(5, 4, 64)
    cu = int32(0)
    out, lse = fa3.fwd(q, q, q, *Options(5, 5, cu, cu).args())
    assert (out == 0).all() and (lse == float("-inf")).all()


# ---- streams and devices -------------------------------------------------------------------------


def test_call_is_ordered_on_the_current_stream():
    """C74: inputs that are still being written on that stream are waited for."""
    tensors, o = dense(causal=True)
    expected, _ = fa3.fwd(*tensors, *o.args())
    buffers = [torch.full_like(t, float("nan")) for t in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for buffer, t in zip(buffers, tensors):
            buffer.copy_(t)
        out, _ = fa3.fwd(*buffers, *o.args())
    stream.synchronize()
    assert torch.equal(out, expected)


def test_call_does_not_wait_for_the_device():
    """Meaning 11: the host returns while the stream still sleeps; ragged calls too."""
    for tensors, o in (dense(causal=True), ragged([30, 50], [30, 50])):
        fa3.fwd(*tensors, *o.args())
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        fa3.fwd(*tensors, *o.args())
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one():
    """C73."""
    tensors, o = dense(causal=True, deterministic=True)
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *o.args())
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    assert torch.cuda.current_device() == 0
    moved = [t.detach().to("cuda:1").requires_grad_() for t in tensors]
    got, got_lse = fa3.fwd(*moved, *o.args())
    got_grads = torch.autograd.grad(got.float().square().sum(), moved)
    assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    assert torch.equal(got.cpu(), out.cpu()) and torch.equal(got_lse.cpu(), lse.cpu())
    for g, e in zip(got_grads, grads):
        torch.testing.assert_close(g.cpu(), e.cpu(), atol=1e-2, rtol=1e-2)


# ---- the compiled module -------------------------------------------------------------------------


def test_fast_entry_equals_the_operator():
    (q, k, v), o = dense(causal=True)
    fast = ops._C.fwd_dense_fast(q, k, v, 0.125, True, -1, -1, 0, 0.0, False, 0)
    assert all(torch.equal(f, e) for f, e in zip(fast, fa3.fwd(q, k, v, *o.args())))
    recorded = ops._C.fwd_dense_fast(
        q.requires_grad_(), k, v, None, True, -1, -1, 0, 0.0, False, 0)
    assert recorded[0].grad_fn is not None and recorded[1].grad_fn is not None


def test_fast_ragged_entry_equals_the_operator():
    (q, k, v), o = ragged([5, 90], [70, 90], causal=True)
    fast = ops._C.fwd_varlen_fast(q, k, v, o.cu_q, o.cu_k, 90, 90, None, None, 0.125, True, -1, -1,
                                  0, 0.0, False, 0)
    assert all(torch.equal(f, e) for f, e in zip(fast, fa3.fwd(q, k, v, *o.args())))


def test_fast_entry_leaves_what_is_unusual_to_the_checked_path(monkeypatch):
    (q, k, v), _ = dense()
    options = (None, True, -1, -1, 0, 0.0, False, 0)

    def is_left(*args):
        return ops._C.fwd_dense_fast(*args) is None

    assert not is_left(q, k, v, *options)
    assert is_left(q, k.float(), v, *options)
    assert is_left(q[0], k, v, *options)
    assert is_left(q, k[:1], v, *options)
    assert is_left(q, k, v, -1.0, *options[1:])
    assert is_left(q, k, v, *options[:-1], -1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert is_left(q, k, v, *options)
    with TorchFunctionMode():
        assert is_left(q, k, v, *options)
    for variable, value in (("FLASH_ATTN3_BACKEND", "blockwise"), ("FLASH_ATTN3_CHECK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert is_left(q, k, v, *options)
    assert not is_left(q, k, v, *options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_plan_describes_a_kernel_without_spills(dtype):
    plan = ops._C.fwd_plan(128, 128, dtype)
    assert plan["head_dim"] == plan["head_dim_v"] == 128 and plan["local_bytes"] == 0
    assert 0 < plan["registers"] <= 240 and plan["threads"] % 128 == 0
    assert ops._C.fwd_plan(40, 24, dtype)["head_dim"] >= 40
    assert ops._C.device_refusal(0) == "" and ops._C.compiled_for(dtype, 40, 24)
    with pytest.raises(ValueError, match="fp8"):
        ops._C.fwd_plan(128, 128, "fp8")
