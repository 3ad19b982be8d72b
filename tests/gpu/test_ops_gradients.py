"""Gradients of flash_attn3::fwd on a GPU, and the rules of autograd."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from op_cases import check_against_reference, dense, int32, plain_with_gradients, ragged

from flash_attn3.functional import flash_attn_bwd, flash_attn_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

fa3 = torch.ops.flash_attn3
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_dense(dtype, d, causal):
    check_against_reference(*dense(d=d, dtype=dtype, causal=causal, scale=d**-0.5))


@pytest.mark.parametrize("rows_q, rows_k", [(2, 5), (5, 2), (129, 64), (1, 300), (300, 1)])
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (0, 0), (7, 3), (-1, 3), (7, -1), (500, 500)])
def test_gradients_where_queries_and_keys_differ_in_number(rows_q, rows_k, window):
    """C24, C25, C29: bottom-right masks; a right window with more queries than keys."""
    check_against_reference(*dense(rows_q=rows_q, rows_k=rows_k, window=window))


@pytest.mark.parametrize("options", [
    {"softcap": 10.0, "causal": True}, {"chunk": 16}, {"chunk": 16, "causal": True},
    {"window": (20, 0)}, {"deterministic": True}, {"sm_margin": 8},
])
def test_gradients_with_options(options):
    """C30, C32."""
    check_against_reference(*dense(**options))
    check_against_reference(*ragged([40, 70], [55, 66], **options))


@pytest.mark.parametrize("heads, heads_kv", [(4, 4), (6, 2), (5, 1), (12, 4)])
def test_gradients_of_grouped_heads(heads, heads_kv):
    """C42: dk and dv are sums over the group, of any size."""
    check_against_reference(*dense(heads=heads, heads_kv=heads_kv, causal=True))


@pytest.mark.parametrize("d, dv", [(192, 128), (128, 96), (64, 256), (40, 8)])
def test_gradients_where_the_head_dims_differ(d, dv):
    """C36, C37."""
    check_against_reference(*dense(d=d, dv=dv, causal=True, scale=d**-0.5))


@pytest.mark.parametrize("lengths_q, lengths_k", [
    ([5, 5], [0, 7]), ([0, 0, 123], [0, 1, 245]), ([0, 0, 12], [0, 1, 12]),
    ([0, 12, 8, 0], [25, 17, 9, 30]), ([174, 155], [174, 155]), ([30, 2], [30, 2]),
])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_ragged(lengths_q, lengths_k, causal):
    """C02, C08, C09, C28: empty sequences of either side."""
    check_against_reference(*ragged(lengths_q, lengths_k, causal=causal))


def test_gradient_of_the_lse():
    """C78: alone, and together with that of out."""
    tensors, o = dense(causal=True)
    check_against_reference(tensors, o, with_dlse=True)
    leaves = [t.requires_grad_() for t in tensors]
    _, lse = fa3.fwd(*leaves, *o.args())
    dq, dk = torch.autograd.grad(lse.mean(), leaves[:2])
    assert dq.abs().max() > 0 and dk.abs().max() > 0


def test_rows_outside_of_the_sequences_are_zero_and_have_no_influence():
    """C06: NaN behind the last sequence, in every input."""
    tensors, o = ragged([4, 4], [4, 4], extra=2, heads_kv=4)
    for t in tensors:
        t[8:] = float("nan")
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *o.args())
    dout = torch.randn_like(out)
    dout[8:] = float("nan")
    grads = torch.autograd.grad(out, leaves, dout)
    assert (out[8:] == 0).all() and (lse[:, 8:] == float("-inf")).all()
    exact = plain_with_gradients(
        [t[:8].detach() for t in tensors], o, dout[:8], None, torch.float64)
    torch.testing.assert_close(out[:8].double(), exact[0], atol=2e-2, rtol=2e-2)
    for grad, e in zip(grads, exact[2:]):
        assert (grad[8:] == 0).all()
        torch.testing.assert_close(grad[:8].double(), e, atol=3e-2, rtol=3e-2)


def test_rows_past_seqused_are_zero():
    """C07."""
    tensors, o = dense(rows_q=8, rows_k=8, used_q=int32(3, 8), used_k=int32(3, 8))
    out, _, (dq, dk, dv) = check_against_reference(tensors, o)
    assert (out[0, 3:] == 0).all()
    assert all((g[0, 3:] == 0).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("sentinel", [float("-inf"), float("inf")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_row_with_an_infinite_lse_contributes_nothing(sentinel, deterministic):
    """C10: both backward paths, either sign of a caller's padding."""
    (q, k, v), _ = dense(batch=1, rows_q=65, rows_k=65)
    out, lse = flash_attn_fwd(q, k, v)
    dout = torch.randn_like(out)
    lse[:, :, 64] = sentinel
    dq, dk, dv = flash_attn_bwd(dout, q, k, v, out, lse, deterministic=deterministic)
    dout[:, 64] = 0  # what the row would add with an ordinary lse
    lse[:, :, 64] = 3.0
    expected = flash_attn_bwd(dout, q, k, v, out * (dout != 0), lse, deterministic=deterministic)
    assert (dq[:, 64] == 0).all()
    for got, e in zip((dq[:, :64], dk, dv), (expected[0][:, :64], *expected[1:])):
        torch.testing.assert_close(got, e, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_deterministic_gradients_are_equal_bit_by_bit(d):
    """C68, C69: at every head dim."""
    tensors, o = dense(rows_q=500, rows_k=500, d=d, causal=True, deterministic=True)
    leaves = [t.requires_grad_() for t in tensors]
    dout = None
    first = None
    for _ in range(10):
        out, _ = fa3.fwd(*leaves, *o.args())
        dout = torch.randn_like(out) if dout is None else dout
        grads = torch.autograd.grad(out, leaves, dout)
        first = first or grads
        assert all(torch.equal(g, f) for g, f in zip(grads, first))


@pytest.mark.slow
def test_gradients_where_32_bit_offsets_overflow():
    """C45: one row a sequence, so out = v, dv = dout, and dq = dk = 0."""
    tensors, o = dense(batch=8300, rows_q=1, rows_k=1, heads=16, heads_kv=16, d=128)
    leaves = [t.requires_grad_() for t in tensors]
    out, _ = fa3.fwd(*leaves, *o.args())
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(out, leaves[2]) and torch.equal(dv, dout)
    assert dq.abs().max() < 1e-1 and dk.abs().max() < 1e-1


# ---- autograd rules ------------------------------------------------------------------------------


def test_output_used_twice_and_graph_kept():
    tensors, o = dense(causal=True, deterministic=True)
    leaves = [t.requires_grad_() for t in tensors]
    out, _ = fa3.fwd(*leaves, *o.args())
    loss = out.float().square().sum() + out.float().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    expected = torch.autograd.grad(
        fa3.fwd(*leaves, *o.args())[0], leaves, (2 * out.float() + 1).to(out.dtype))
    for f, s, e in zip(first, second, expected):
        assert torch.equal(f, s)
        torch.testing.assert_close(f, e, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_saved_tensor_changed_in_place_raises(which):
    """C23."""
    tensors, o = dense()
    leaves = dict(zip("qkv", (t.requires_grad_() for t in tensors)))
    out, _ = fa3.fwd(*leaves.values(), *o.args())
    with torch.no_grad():
        (out.detach() if which == "out" else leaves[which]).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivative_raises_one_sentence():
    tensors, o = dense()
    leaves = [t.requires_grad_() for t in tensors]
    out, _ = fa3.fwd(*leaves, *o.args())
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        dq.float().sum().backward()


def test_autocast_leaves_the_dtype_alone():
    tensors, o = dense(deterministic=True)
    leaves = [t.requires_grad_() for t in tensors]
    expected, _ = fa3.fwd(*leaves, *o.args())
    grads = torch.autograd.grad(expected.float().square().sum(), leaves)
    with torch.autocast("cuda", dtype=torch.float16):
        out, _ = fa3.fwd(*leaves, *o.args())
        got = torch.autograd.grad(out.float().square().sum(), leaves)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert all(torch.equal(g, e) for g, e in zip(got, grads))
