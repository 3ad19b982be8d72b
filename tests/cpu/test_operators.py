"""fallback_fwd and fallback_bwd as operators: opcheck, fakes, torch.compile, second derivative."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import flash_attn3

pytestmark = pytest.mark.cpu
fa3 = torch.ops.flash_attn3


def arguments(kind, grad=False):
    options = (0.25, True, -1, 0, 0, 0.0, False, 0)
    if kind == "dense":
        q, k, v = (torch.randn(2, 9, h, 16) for h in (4, 2, 2))
        lengths = (None, None, None, None, 9, 9)
    elif kind == "dims":
        q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 24)
        lengths = (None, None, None, None, 9, 5)
    else:
        cu = torch.tensor([0, 4, 9], dtype=torch.int32)
        q, k, v = (torch.randn(10, h, 16) for h in (4, 2, 2))
        used = torch.tensor([3, 5], dtype=torch.int32) if kind == "seqused" else None
        lengths = (cu, cu, used, used, 5, 5)
    return tuple(t.requires_grad_(grad) for t in (q, k, v)) + lengths + options


KINDS = ("dense", "dims", "ragged", "seqused")


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(kind):
    result = opcheck(fa3.fallback_fwd.default, arguments(kind, grad=True))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_backward(kind):
    args = arguments(kind)
    out, lse = fa3.fallback_fwd(*args)
    for dlse in (None, torch.randn_like(lse)):
        result = opcheck(fa3.fallback_bwd.default,
                         (torch.randn_like(out), dlse, *args[:3], out, lse, *args[3:]))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_have_the_real_shapes(kind):
    args = arguments(kind)
    real = fa3.fallback_fwd(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = fa3.fallback_fwd(
            *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    for r, f in zip(real, fake):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_compiled_without_a_graph_break():
    """C80, C84: fullgraph forward and backward; other max_seqlen values do not recompile."""
    def loss(q, k, v):
        return flash_attn3.flash_attn_func(q, k, v, causal=True, window_size=(3, 0)).square().sum()

    q, k, v = arguments("dims", grad=True)[:3]
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(q, k, v), (q, k, v))
    assert all(torch.allclose(a, b) for a, b in zip(got, want))
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def ragged(q, cu, longest):
        return flash_attn3.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest)

    q = torch.randn(12, 2, 16)
    for lengths in ((4, 8), (5, 7), (3, 9), (2, 10)):
        cu = torch.tensor([0, lengths[0], 12], dtype=torch.int32)
        out = ragged(q, cu, max(lengths))
        assert torch.allclose(
            out, flash_attn3.flash_attn_varlen_func(q, q, q, cu, cu, max(lengths), max(lengths)))
    assert count.frame_count <= 2


def test_second_derivative_raises():
    q, k, v = arguments("dense", grad=True)[:3]
    out = flash_attn3.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()
