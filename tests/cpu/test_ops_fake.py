"""The operators without a GPU: schemas, fakes, loading of the binding, the functional pair.

The autograd code of fwd and bwd (C++ where the binding is built, else Python) is run with the
block-wise kernel standing in for the CUDA one.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import ops
from flash_attn3.backends import blockwise_backward, blockwise_forward, operators, torch_attn
from flash_attn3.backends.call import make_call
from flash_attn3.functional import flash_attn_bwd, flash_attn_fwd

fa3 = torch.ops.flash_attn3
LIBRARY_CPP = Path(__file__).resolve().parents[2] / "csrc" / "api" / "library.cpp"


@pytest.fixture(scope="module", autouse=True)
def cpu_stand_in():
    """CPU kernels for the duration of this file: the operators themselves have CUDA ones alone."""
    def fwd_out(*args):
        *inputs, out, lse = args
        for target, value in zip((out, lse), blockwise_forward(*inputs)):
            target.copy_(value)

    library = torch.library.Library("flash_attn3", "IMPL")
    library.impl("fwd", blockwise_forward, "CPU")
    library.impl("bwd", blockwise_backward, "CPU")
    library.impl("fwd_out", fwd_out, "CPU")
    yield
    library._destroy()


def options(seqlen_q, seqlen_k, cu_q=None, cu_k=None, causal=True, window=(-1, -1)):
    return (cu_q, cu_k, None, None, seqlen_q, seqlen_k, 0.125, causal, *window, 0, 0.0, False, 0)


def qkv(*shape_q, heads_kv=2, head_dim_v=None, rows_k=None, dtype=torch.float32, device="cpu",
        requires_grad=False):
    rows = shape_q[:-2] if rows_k is None else (*shape_q[:-3], rows_k)
    d = shape_q[-1]

    def make(*shape):
        return torch.randn(*shape, dtype=dtype, device=device, requires_grad=requires_grad)

    return make(*shape_q), make(*rows, heads_kv, d), make(*rows, heads_kv, head_dim_v or d)


# ---- schemas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_schema_is_the_documented_one(name):
    """And declares what is written: out and lse of fwd_out, nothing else."""
    registered = getattr(fa3, name).default._schema
    expected = torch._C.parse_schema(f"flash_attn3::{ops.SCHEMAS[name]}")
    assert str(registered) == str(expected)
    written = [a.name for a in registered.arguments if a.alias_info and a.alias_info.is_write]
    assert written == (["out", "lse"] if name == "fwd_out" else [])
    assert torch.Tag.pt2_compliant_tag in getattr(fa3, name).default.tags


def test_schemas_in_cpp_and_python_are_the_same():
    """With and without the binding the operators must look alike to export and to fakes."""
    text = LIBRARY_CPP.read_text()
    body = text[text.index("TORCH_LIBRARY(flash_attn3, m)"):text.index("TORCH_LIBRARY_IMPL")]
    for name, schema in (("DENSE", ops.DENSE_SCHEMA), ("OPTION", ops.OPTIONS_SCHEMA)):
        macro = f"FLASH_ATTN3_{name}_SCHEMA"
        define = text[text.index(f"#define {macro}"):].partition("\n\n")[0]
        assert "".join(re.findall(r'"([^"]*)"', define)) == schema
        text, body = (t.replace(macro, f'"{schema}"') for t in (text, body))
    found = ["".join(re.findall(r'"([^"]*)"', d)) for d in body.split("m.def(")[1:]]
    assert found == list(ops.SCHEMAS.values())


# ---- fakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("head_dim_v", [64, 128])
def test_fake_dense_outputs_on_cuda(heads_kv, head_dim_v):
    with FakeTensorMode():
        q, k, v = qkv(2, 5, 4, 64, heads_kv=heads_kv, head_dim_v=head_dim_v, rows_k=7,
                      dtype=torch.bfloat16, device="cuda")
        out, lse = fa3.fwd(q, k, v, *options(5, 7))
        assert out.shape == (2, 5, 4, head_dim_v) and out.dtype == torch.bfloat16
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
        assert out.is_contiguous() and lse.is_contiguous()
        assert out.device == lse.device == q.device
        grads = fa3.bwd(torch.empty_like(out), None, q, k, v, out, lse, *options(5, 7))
        for grad, t in zip(grads, (q, k, v)):
            assert grad.shape == t.shape and grad.dtype == t.dtype and grad.is_contiguous()


def test_fake_ragged_outputs_on_cuda():
    with FakeTensorMode():
        q, k, v = qkv(10, 4, 64, rows_k=12, dtype=torch.float16, device="cuda")
        cu = torch.zeros(4, dtype=torch.int32, device="cuda")
        out, lse = fa3.fwd(q, k, v, *options(6, 8, cu, cu))
        assert out.shape == (10, 4, 64) and lse.shape == (4, 10)


def test_fakes_of_strided_inputs():
    """Outputs are contiguous whatever the layout of the inputs; gradients lie as their inputs do,
    where these have no holes and a unit last stride."""
    with FakeTensorMode():
        def empty(*shape):
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)

        q = empty(2, 4, 5, 64).transpose(1, 2)
        k, v, _ = empty(2, 5, 3, 4, 64).unbind(2)  # holes: slices of a packed tensor
        out, lse = fa3.fwd(q, k, v, *options(5, 5))
        assert out.is_contiguous() and lse.is_contiguous()
        dq, dk, dv = fa3.bwd(out, None, q, k, v, out, lse, *options(5, 5))
        assert dq.stride() == q.stride() and dk.is_contiguous() and dv.is_contiguous()
        k = empty(2, 5, 64, 4).transpose(2, 3)
        v = empty(2, 5, 1, 64).expand(2, 5, 4, 64)
        _, dk, dv = fa3.bwd(out, None, q, k, v, out, lse, *options(5, 5))
        assert dk.is_contiguous() and dv.is_contiguous()


def test_fake_forward_and_backward_trace_through_autograd():
    """Fakes of both directions. (The engine refuses CUDA tensors, fake ones too, without a GPU.)"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with FakeTensorMode():
        q, k, v = qkv(2, 5, 4, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        out, lse = fa3.fwd(q, k, v, *options(5, 5))
        (out.sum() + lse.sum()).backward()
        assert q.grad.shape == q.shape and k.grad.shape == k.shape and v.grad.shape == v.shape


# ---- opcheck -------------------------------------------------------------------------------------


def ragged_case():
    q, k, v = qkv(10, 4, 16, rows_k=12, dtype=torch.float32)
    cu_q = torch.tensor([0, 4, 10], dtype=torch.int32)
    cu_k = torch.tensor([0, 7, 12], dtype=torch.int32)
    return (q, k, v), options(6, 7, cu_q, cu_k)


def dense_case():
    return qkv(2, 5, 4, 16, head_dim_v=24, rows_k=7), options(5, 7)


CASES = {"dense": dense_case, "ragged": ragged_case}


@pytest.mark.parametrize("case", CASES)
def test_opcheck_fwd(case):
    """C83, C85: schema, autograd registration, fakes, AOT dispatch with dynamic shapes."""
    tensors, rest = CASES[case]()
    args = (*(t.requires_grad_() for t in tensors), *rest)
    result = opcheck(fa3.fwd.default, args)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_bwd(case, with_dlse):
    """C83."""
    tensors, rest = CASES[case]()
    out, lse = blockwise_forward(*tensors, *rest)
    dlse = torch.randn_like(lse) if with_dlse else None
    result = opcheck(fa3.bwd.default, (torch.randn_like(out), dlse, *tensors, out, lse, *rest))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
def test_opcheck_fwd_out(case):
    """The schema declares both writes, and nothing else is written."""
    tensors, rest = CASES[case]()
    out, lse = blockwise_forward(*tensors, *rest)
    result = opcheck(
        fa3.fwd_out.default, (*tensors, *rest, torch.empty_like(out), torch.empty_like(lse)))
    assert set(result.values()) == {"SUCCESS"}


# ---- autograd ------------------------------------------------------------------------------------


def test_gradients_match_finite_differences():
    q, k, v = qkv(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: fa3.fwd(*t, *options(4, 4))[0], (q, k, v), fast_mode=True, atol=1e-4)


def test_lse_has_a_gradient():
    """C78: a loss on the LSE alone."""
    q, k, v = qkv(1, 16, 2, 16, requires_grad=True)
    _, lse = fa3.fwd(q, k, v, *options(16, 16, causal=False))
    got = torch.autograd.grad(lse.mean(), (q, k), allow_unused=True)
    scores = 0.125 * torch.einsum("bihd,bjhd->bhij", q, k)
    expected = torch.autograd.grad(scores.logsumexp(-1).mean(), (q, k))
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e, atol=1e-6, rtol=1e-4)


def test_saved_output_changed_in_place_raises():
    """C23: the backward reads `out`; a changed one must not give wrong gradients."""
    q, k, v = qkv(1, 4, 2, 16, requires_grad=True)
    out, _ = fa3.fwd(q, k, v, *options(4, 4))
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.skipif(ops._C is None, reason="without the binding fwd_out has no kernel")
def test_fwd_out_counts_as_a_change_in_place():
    q, k, v = qkv(1, 4, 2, 16, requires_grad=True)
    out, lse = fa3.fwd(q, k, v, *options(4, 4))
    with torch.no_grad():
        fa3.fwd_out(q, k, v, *options(4, 4), out.detach(), lse.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.skipif(ops._C is None, reason="the autograd key of fwd_out is in the binding")
def test_fwd_out_refuses_a_gradient():
    q, k, v = qkv(1, 4, 2, 16, requires_grad=True)
    out, lse = torch.empty(1, 4, 2, 16), torch.empty(1, 2, 4)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        fa3.fwd_out(q, k, v, *options(4, 4), out, lse)


def test_second_derivative_raises_one_sentence():
    q, k, v = qkv(1, 4, 2, 16, requires_grad=True)
    out, _ = fa3.fwd(q, k, v, *options(4, 4))
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        dq.sum().backward()


def test_only_one_input_requires_grad():
    q, k, v = qkv(1, 4, 2, 16)
    v.requires_grad_()
    fa3.fwd(q, k, v, *options(4, 4))[0].sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None


def test_raw_operator_keeps_the_lengths_in_its_backward():
    """C85: the gradient of a ragged call differs from that of one long sequence."""
    tensors, rest = ragged_case()
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *rest)
    got = torch.autograd.grad(out.sum(), leaves)
    with torch.no_grad():
        expected = blockwise_backward(
            torch.ones_like(out), None, *leaves, out.detach(), lse.detach(), *rest)
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e)


# ---- torch.compile -------------------------------------------------------------------------------


def test_compiled_forward_and_backward_without_a_break():
    """C80."""
    def loss(q, k, v):
        out, lse = fa3.fwd(q, k, v, *options(q.shape[1], k.shape[1]))
        return out.square().sum() + lse.sum()

    torch._dynamo.reset()
    inputs = qkv(2, 5, 4, 16, requires_grad=True)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for g, e in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
        torch.testing.assert_close(g, e)


def test_no_recompilation_for_each_max_seqlen():
    """C84: the second value makes it a symbol, and that serves all others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def attend(q, cu, longest):
        return fa3.fwd(q, q, q, *options(longest, longest, cu, cu))[0]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    q = torch.randn(20, 2, 16, requires_grad=True)
    for longest in range(12, 19):
        cu = torch.tensor([0, longest, 20], dtype=torch.int32)
        compiled(q, cu, longest).sum().backward()
    assert counter.frame_count <= 2


# ---- loading the binding -------------------------------------------------------------------------


@pytest.mark.parametrize("built, running, fits", [
    ("2.14.1", "2.14.1+cu130", True),
    ("2.14.0", "2.14.1", True),
    ("2.11.0", "2.14.1+cu130", False),
    (None, "2.14.1", True),
])
def test_binding_of_another_torch_is_refused_with_the_cure(built, running, fits):
    refusal = ops.version_refusal(built, running)
    if fits:
        assert refusal is None
    else:
        assert built in refusal and running in refusal and "pip install" in refusal


def test_version_is_read_without_loading(tmp_path):
    module = tmp_path / "_C.so"
    module.write_bytes(b"\x7fELF\0..FLASH_ATTN3_BUILT_AGAINST_TORCH=2.11.0;\0..")
    assert ops._built_against(module) == "2.11.0"
    module.write_bytes(b"\x7fELF")
    assert ops._built_against(module) is None


def test_missing_kernels_have_a_reason():
    assert (ops._C is None) == (ops.load_error is not None)


@pytest.mark.skipif(ops._C is None, reason="needs the binding")
def test_fast_entries_leave_what_is_unusual_to_the_checked_path():
    q = torch.randn(1, 4, 2, 16)
    plain = (None, True, -1, -1, 0, 0.0, False, 0)
    assert ops._C.fwd_dense_fast(q, q, q, *plain) is None
    assert ops._C.fwd_dense_fast("q", q, q, *plain) is None
    assert ops._C.fwd_dense_fast(q, q, q, float("nan"), *plain[1:]) is None
    assert ops._C.fwd_dense_fast(q, q, q, *plain[:-1], 2**70) is None
    cu = torch.tensor([0, 4], dtype=torch.int32)
    assert ops._C.fwd_varlen_fast(q[0], q[0], q[0], cu, cu, 4, 4, None, None, *plain) is None
    with pytest.raises(TypeError, match="11 positional"):
        ops._C.fwd_dense_fast(q)


# ---- which backward ------------------------------------------------------------------------------


def backward_call(**changes):
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    call = make_call(q, q, q, *options(8, 8, causal=False)[:-1])
    return dataclasses.replace(call, **changes)


MORE_QUERIES = {"max_seqlen_q": 9, "same_seqlens": False}
RAGGED = {"ragged_q": True, "ragged_k": True}


@pytest.fixture
def flash_device(monkeypatch):
    monkeypatch.setattr(torch_attn, "_cuda_flash_device_reason", lambda call: None)


@pytest.mark.parametrize("changes, words", [
    ({}, None),
    ({"window_left": 4, "window_right": 0, "max_seqlen_q": 9}, None),
    ({"window_left": 4, "window_right": 4}, None),
    ({"window_left": 4, "window_right": 4, **MORE_QUERIES}, "window"),
    ({"window_left": 4, "window_right": -1, **MORE_QUERIES}, "window"),
    ({"window_right": 4, **RAGGED, "same_seqlens": False}, "window"),
    ({"window_right": 4, **RAGGED, "same_seqlens": True}, None),
    ({"scale": 0.0}, "softmax_scale"),
    ({"scale": -1.0}, "softmax_scale"),
    ({"batch": 70000}, "65535"),
    ({"heads": 2**18, "batch": 2**14}, "65535"),
])
def test_pytorch_kernel_is_taken_only_where_it_means_the_same(changes, words, flash_device):
    """In both directions: one rule."""
    call = backward_call(**changes)
    for refusal in (torch_attn.cuda_flash_reasons(call),
                    torch_attn.cuda_flash_backward_reasons(call)):
        assert refusal is None if words is None else words in refusal


def test_pytorch_backward_is_refused_where_its_offsets_overflow(flash_device):
    call = backward_call(rows_q=2**25)
    assert torch_attn.cuda_flash_reasons(call) is None
    assert "32-bit" in torch_attn.cuda_flash_backward_reasons(call)


@pytest.mark.parametrize("mode, kept", [("off", False), ("warn", False), ("strict", True)])
def test_deterministic_backward_goes_to_pytorch_only_under_its_strict_flag(mode, kept,
                                                                           flash_device):
    """With warn_only PyTorch's flash backward stays as it was: not reproducible."""
    call = backward_call(deterministic=True)
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn")
    try:
        assert operators._choose_backward(call) == ("aten_flash" if kept else "blockwise")
        assert operators._choose_backward(backward_call()) == "aten_flash"
    finally:
        torch.use_deterministic_algorithms(False)


class Aten:
    """Stands in for torch.ops.aten: keeps the arguments; gradients of one value like q, k, v."""

    fill = 0.0

    def __init__(self, first):
        self.first, self.calls = first, []

    def kernel(self, *args, **options):
        self.calls.append((args, options))
        return tuple(torch.full_like(t, self.fill) for t in args[self.first:self.first + 3])

    _flash_attention_backward = _efficient_attention_backward = kernel


@pytest.mark.parametrize("backend, at", [
    ("cuda_flash", dict(dout=0, out=4, lse=5)), ("efficient", dict(dout=0, out=5, lse=10))])
@pytest.mark.parametrize("sentinel", [float("-inf"), float("inf")])
def test_dead_rows_reach_no_pytorch_kernel(backend, at, sentinel, monkeypatch):
    """Rows of infinite lse, NaN in their dout and out: 0, 0 and +inf (exp(s - inf) = 0) instead."""
    stand_in = Aten(first=1)
    monkeypatch.setattr(torch_attn, "aten", stand_in)
    q, k, v = qkv(1, 8, 2, 64)
    dout, out, lse = torch.randn_like(q), torch.randn_like(q), torch.randn(1, 2, 8)
    want = [t.clone() for t in (dout, out, lse)]
    for t, w, head_axis, bad, good in ((dout, want[0], 2, float("nan"), 0.0),
                                       (out, want[1], 2, float("nan"), 0.0),
                                       (lse, want[2], 1, sentinel, float("inf"))):
        t.select(head_axis, 1).select(1, 3).fill_(bad)
        w.select(head_axis, 1).select(1, 3).fill_(good)
    getattr(torch_attn, f"{backend}_backward")(
        backward_call(), dout, q, k, v, out, lse, *(None,) * 4)
    (args, _), = stand_in.calls
    assert torch.equal(args[at["dout"]], want[0]) and torch.equal(args[at["out"]], want[1])
    assert torch.equal(args[at["lse"]][:, :, :8], want[2])


def test_rows_outside_of_ragged_sequences_reach_no_pytorch_kernel(monkeypatch):
    """Nor does what the kernel leaves in their gradients come back."""
    stand_in = Aten(first=1)
    stand_in.fill = float("nan")
    monkeypatch.setattr(torch_attn, "aten", stand_in)
    q, k, v = qkv(10, 2, 64)
    dout, out, lse = torch.randn_like(q), torch.randn_like(q), torch.randn(2, 10)
    for t in (dout[8:], out[8:], lse[:, 8:]):
        t.fill_(float("nan"))
    cu = torch.tensor([0, 5, 8], dtype=torch.int32)
    grads = torch_attn.cuda_flash_backward(
        backward_call(**RAGGED, batch=2), dout, q, k, v, out, lse, cu, cu, None, None)
    (args, _), = stand_in.calls
    assert bool(args[0].isfinite().all() and args[4].isfinite().all())
    assert torch.equal(args[5][:, :8], lse[:, :8]) and bool(args[5][:, 8:].isposinf().all())
    assert all(bool((g[8:] == 0).all() and g[:8].isnan().all()) for g in grads)


def test_windows_past_every_key_are_unlimited_to_pytorch():
    """It keeps windows in 32 bits."""
    def window(left, right):
        call = backward_call(window_left=left, window_right=right)
        return torch_attn._flash_args(call, None, None, None, None)[3]

    assert window(2**40, 3) == {"window_size_left": -1, "window_size_right": 3}
    assert window(7, 2**40 + 1) == {"window_size_left": 7, "window_size_right": -1}


def test_pytorch_backward_goes_by_head_groups_where_offsets_would_overflow(monkeypatch):
    """C45: the dQ accumulator of one call stays under 2^31 elements."""
    seen = []

    def kernel(call, dout, q, k, v, out, lse, *lengths):
        assert dout.shape == q.shape == out.shape and lse.shape[1] == q.shape[2] == call.heads
        seen.append(call.heads_kv)
        return q * 2, k * 3, v * 4

    monkeypatch.setattr(torch_attn, "_cuda_flash_backward_heads", kernel)
    monkeypatch.setattr(torch_attn, "_INT32_LIMIT", 2 * (8 + 128) * 2 * 64 + 1)
    q, k, v = qkv(1, 8, 6, 64, heads_kv=3)
    call = backward_call(heads=6, heads_kv=3)
    dq, dk, dv = torch_attn.cuda_flash_backward(
        call, q, q, k, v, q, torch.empty(1, 6, 8), *(None,) * 4)
    assert seen == [2, 1]
    assert torch.equal(dq, q * 2) and torch.equal(dk, k * 3) and torch.equal(dv, v * 4)


# ---- the functional pair -------------------------------------------------------------------------


def test_functional_pair_equals_autograd():
    q, k, v = qkv(2, 6, 4, 16, rows_k=9, requires_grad=True)
    out, lse = flash_attn_fwd(q, k, v, causal=True, window_size=(3, 0))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    got = flash_attn_bwd(dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(),
                         dlse=dlse, causal=True, window_size=(3, 0))
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)


def test_parts_of_the_keys_with_the_merged_lse_sum_to_the_whole():
    """C79: what a ring step does."""
    q, k, v = qkv(1, 5, 2, 16, rows_k=8)
    out, lse = flash_attn_fwd(q, k, v)
    dout = torch.randn_like(out)
    whole = flash_attn_bwd(dout, q, k, v, out, lse)
    parts = [flash_attn_bwd(dout, q, k[:, s], v[:, s], out, lse)
             for s in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], atol=1e-5, rtol=1e-4)
    for i in (1, 2):
        joined = torch.cat([p[i] for p in parts], dim=1)
        torch.testing.assert_close(joined, whole[i], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sentinel", [float("-inf"), float("inf")])
def test_row_with_an_infinite_lse_contributes_nothing(sentinel):
    """C10: a caller's padding, in either sign."""
    q, k, v = qkv(1, 65, 2, 16)
    out, lse = flash_attn_fwd(q, k, v)
    dout = torch.randn_like(out)
    padded = lse.clone()
    padded[:, :, 64] = sentinel
    got = flash_attn_bwd(dout, q, k, v, out, padded)
    expected = flash_attn_bwd(dout[:, :64], q[:, :64], k, v, out[:, :64],
                              lse[:, :, :64].contiguous())
    assert (got[0][:, 64] == 0).all()
    torch.testing.assert_close(got[0][:, :64], expected[0])
    for g, e in zip(got[1:], expected[1:]):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change, words", [
    ({"window_size": (-2, 0)}, "window_size"),
    ({"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen_q": 4}, "q has 4 dim"),
])
def test_functional_names_the_wrong_argument(change, words):
    q, k, v = qkv(1, 4, 2, 16)
    with pytest.raises(ValueError, match=words):
        flash_attn_fwd(q, k, v, **change)
    with pytest.raises(ValueError, match="lse has shape"):
        flash_attn_bwd(q, q, k, v, q, torch.empty(1, 4, 2))
