"""Packed QKV without a GPU: flash_attn3::fwd_qkvpacked and bwd_qkvpacked, and the way to them.

The autograd code (C++ where the binding is built, else Python) is run with the block-wise kernel
standing in for the CUDA one; tests/gpu/test_packed_gradients.py has the kernels themselves.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flash_attn3
from flash_attn3 import dispatch, ops
from flash_attn3.backends import blockwise_backward, blockwise_forward
from flash_attn3.backends.call import unpacked

pytestmark = pytest.mark.cpu
fa3 = torch.ops.flash_attn3
needs_binding = pytest.mark.skipif(ops._C is None, reason="needs the binding")
B, S, H, HK, D = 2, 6, 4, 2, 16


class StandIn:
    """CPU kernels in place of the CUDA ones; keeps the operators' names and options."""

    def __init__(self):
        self.calls = []

    def fwd_qkvpacked(self, qkv, num_heads_q, *options):
        self.calls.append(("fwd_qkvpacked", options))
        return blockwise_forward(*unpacked(qkv, num_heads_q), *self.lengths(qkv), *options)

    def bwd_qkvpacked(self, dout, dlse, qkv, out, lse, num_heads_q, *options):
        self.calls.append(("bwd_qkvpacked", options))
        grads = blockwise_backward(dout, dlse, *unpacked(qkv, num_heads_q), out, lse,
                                   *self.lengths(qkv), *options)
        dqkv = ops._gradient_like(qkv)
        for target, grad in zip(unpacked(dqkv, num_heads_q), grads):
            target.copy_(grad)
        return dqkv

    def bwd_torch(self, *args):
        self.calls.append(("bwd_torch", args[11:]))
        return blockwise_backward(*args)

    @staticmethod
    def lengths(qkv):
        return None, None, None, None, qkv.shape[1], qkv.shape[1]

    @property
    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def stand_in(monkeypatch):
    library, kernels = torch.library.Library("flash_attn3", "IMPL"), StandIn()
    for name in ("fwd_qkvpacked", "bwd_qkvpacked", "bwd_torch"):
        library.impl(name, getattr(kernels, name), "CPU")
    monkeypatch.setattr(dispatch, "uses_kernels", lambda call, why=None: True)
    yield kernels
    library._destroy()


OPTIONS = (0.25, True, -1, 0, 0, 0.0, False, 0)


def packed(kind, requires_grad=False, **options):
    """qkv of a layout, and the heads of its q."""
    if kind == "gqa":
        qkv = torch.randn(B, S, H + 2 * HK, D, **options)
    elif kind == "gqa, head after head":  # no holes, rows not behind one another
        qkv = torch.randn(B, H + 2 * HK, S, D, **options).transpose(1, 2)
    elif kind == "head after head":
        qkv = torch.randn(B, 3, H, S, D, **options).permute(0, 3, 1, 2, 4)
    elif kind == "holes":
        qkv = torch.randn(B, S, 3, H, 2 * D, **options)[..., :D]
    else:
        qkv = torch.randn(B, S, 3, H, D, **options)
    return qkv.requires_grad_(requires_grad), H


KINDS = ("plain", "gqa", "gqa, head after head", "head after head", "holes")


def attend(qkv, **options):
    heads = {"num_heads_q": H} if qkv.dim() == 4 else {}
    return flash_attn3.flash_attn_qkvpacked_func(
        qkv, causal=True, return_attn_probs=True, **heads, **options)


def attend_unpacked(qkv, **options):
    """By the fallback, and with one gradient for each of q, k, v."""
    args = *unpacked(qkv, H), *StandIn.lengths(qkv), D**-0.5, True, -1, 0, 0, 0.0, False, 0
    return fa3.fallback_fwd(*args, **options)


def loss(out, lse, use_lse=True):
    return out.square().sum() + (lse.sin().sum() if use_lse else 0.0)


def gradient(function, qkv, use_lse=True):
    return torch.autograd.grad(loss(*function(qkv), use_lse), qkv)[0]


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def copies(names):
    return [name for name in names if name.split(".")[0] in ("stack", "cat", "copy_", "clone")]


# ---- the public function -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_lse", [False, True])
def test_gradient_is_that_of_the_unpacked_call(stand_in, kind, use_lse):
    """C77."""
    qkv, _ = packed(kind, requires_grad=True)
    for got, want in zip(attend(qkv), attend_unpacked(qkv)):
        torch.testing.assert_close(got, want)
    got, want = (gradient(f, qkv, use_lse) for f in (attend, attend_unpacked))
    torch.testing.assert_close(got, want)
    assert got.stride() == qkv.stride() if kind != "holes" else got.is_contiguous()
    assert stand_in.names == ["fwd_qkvpacked"] * 2 + ["bwd_qkvpacked"]


def test_backward_copies_nothing(stand_in):
    """One operator makes the gradient of qkv; what unbind and split add to it is a copy of all."""
    for kind in ("plain", "gqa"):
        qkv, _ = packed(kind, requires_grad=True)
        found = {}
        for function in (attend, attend_unpacked):
            total = loss(*function(qkv), use_lse=False)
            with Recorded() as recorded:
                torch.autograd.grad(total, qkv)
            found[function] = recorded.names
        assert "bwd_qkvpacked.default" in found[attend] and not copies(found[attend])
        assert copies(found[attend_unpacked])


def test_options_reach_the_operators(stand_in):
    qkv, _ = packed("gqa", requires_grad=True)
    out = flash_attn3.flash_attn_qkvpacked_func(
        qkv, 0.5, window_size=(4, 3), attention_chunk=5, softcap=2.0, deterministic=True,
        num_heads_q=H, sm_margin=6)
    out.sum().backward()
    assert stand_in.calls == [
        (name, (0.5, False, 4, 3, 5, 2.0, True, 6)) for name in ("fwd_qkvpacked", "bwd_qkvpacked")]


@pytest.mark.parametrize("kind", ["plain", "gqa"])
def test_fallback_takes_its_own_operators(kind):
    """Without this project's kernels: those of flash_attn_func, compiled too."""
    qkv, _ = packed(kind, requires_grad=True)
    with Recorded() as recorded:
        got = gradient(attend, qkv)
    assert "fallback_fwd.default" in recorded.names
    assert "fwd_qkvpacked.default" not in recorded.names
    torch.testing.assert_close(got, gradient(attend_unpacked, qkv))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, qkv), got)


def test_descales_and_wrong_heads_do_not_reach_the_operator(stand_in, monkeypatch):
    monkeypatch.undo()  # the real dispatch
    qkv, _ = packed("plain")
    flash_attn3.flash_attn_qkvpacked_func(qkv, q_descale=torch.ones(B, H))
    with pytest.raises(ValueError, match="num_heads_q is 3"):
        flash_attn3.flash_attn_qkvpacked_func(qkv, num_heads_q=3)
    with pytest.raises(ValueError, match="num_heads_q is 0"):
        flash_attn3.flash_attn_qkvpacked_func(qkv, num_heads_q=0)
    assert not stand_in.calls


# ---- opcheck and fakes ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_fwd(stand_in, kind):
    """C83, C85."""
    qkv, heads = packed(kind, requires_grad=True)
    result = opcheck(fa3.fwd_qkvpacked.default, (qkv, heads, *OPTIONS))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_bwd(stand_in, kind, with_dlse):
    """C83; fakes and results agree in their strides."""
    qkv, heads = packed(kind)
    out, lse = fa3.fwd_qkvpacked(qkv, heads, *OPTIONS)
    dlse = torch.randn_like(lse) if with_dlse else None
    args = torch.randn_like(out), dlse, qkv, out, lse, heads, *OPTIONS
    assert set(opcheck(fa3.bwd_qkvpacked.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
def test_fake_outputs_on_cuda(kind):
    with FakeTensorMode():
        qkv, heads = packed(kind, dtype=torch.bfloat16, device="cuda")
        out, lse = fa3.fwd_qkvpacked(qkv, heads, *OPTIONS)
        assert out.shape == (B, S, H, D) and out.dtype == qkv.dtype and out.is_contiguous()
        assert lse.shape == (B, H, S) and lse.dtype == torch.float32 and lse.is_contiguous()
        dqkv = fa3.bwd_qkvpacked(out, None, qkv, out, lse, heads, *OPTIONS)
        assert dqkv.shape == qkv.shape and dqkv.dtype == qkv.dtype and dqkv.device == qkv.device
        assert dqkv.stride() == qkv.stride() if kind != "holes" else dqkv.is_contiguous()


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["qkv", "out"])
def test_saved_tensor_changed_in_place_raises(stand_in, which):
    """C23."""
    qkv, _ = packed("plain", requires_grad=True)
    out, _ = attend(qkv)
    with torch.no_grad():
        (out.detach() if which == "out" else qkv).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivative_raises_one_sentence(stand_in):
    qkv, _ = packed("plain", requires_grad=True)
    (dqkv,) = torch.autograd.grad(loss(*attend(qkv)), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        dqkv.sum().backward()


def test_loss_of_the_lse_alone_and_of_neither(stand_in):
    """C78."""
    qkv, _ = packed("plain", requires_grad=True)
    (got,) = torch.autograd.grad(attend(qkv)[1].mean(), qkv)
    (want,) = torch.autograd.grad(attend_unpacked(qkv)[1].mean(), qkv)
    torch.testing.assert_close(got, want)
    assert bool((got[:, :, 2] == 0).all()) and bool((got[:, :, :2] != 0).any())
    out, lse = attend(qkv.detach())
    assert out.grad_fn is None and lse.grad_fn is None


def test_torch_flag_reaches_the_backward(stand_in):
    qkv, _ = packed("plain", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        loss(*attend(qkv)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [options[-2] for _, options in stand_in.calls] == [False, True]


def test_activation_checkpointing(stand_in):
    qkv, _ = packed("plain", requires_grad=True)
    want = gradient(attend, qkv)
    stand_in.calls.clear()
    got = gradient(lambda t: checkpoint(attend, t, use_reentrant=False), qkv)
    assert torch.equal(got, want)
    assert stand_in.names == ["fwd_qkvpacked", "fwd_qkvpacked", "bwd_qkvpacked"]


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "gqa"])
@pytest.mark.parametrize("use_lse", [False, True])
def test_compiled_in_one_graph_without_a_copy(stand_in, kind, use_lse):
    """C80: from a projection's output on, as a model has it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    targets = []

    def keep(graph, example_inputs):
        targets.append([getattr(n.target, "__name__", n.target) for n in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    shape = packed(kind)[0].shape

    def step(x, weight):
        return loss(*attend((x @ weight).view(shape)), use_lse)

    x = torch.randn(B * S, 8)
    weight = torch.randn(8, shape[2:].numel(), requires_grad=True)
    (want,) = torch.autograd.grad(step(x, weight), weight)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    (got,) = torch.autograd.grad(
        torch.compile(step, fullgraph=True, backend=backend)(x, weight), weight)
    torch.testing.assert_close(got, want)
    forward, backward = targets
    assert "fwd_qkvpacked.default" in forward and "bwd_qkvpacked.default" in backward
    assert not copies(backward)


def test_compiled_checkpoint(stand_in):
    qkv, _ = packed("plain", requires_grad=True)

    def function(t):
        return checkpoint(attend, t, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, qkv), gradient(attend, qkv))


def test_no_recompilation_for_each_length(stand_in):
    """C84."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for rows in (5, 7, 9, 12):
        qkv = torch.randn(B, rows, 3, H, D, requires_grad=True)
        torch.testing.assert_close(gradient(compiled, qkv), gradient(attend_unpacked, qkv))
    assert counter.frame_count <= 2


def test_compiled_autograd_looks_into_the_backward(stand_in):
    qkv, _ = packed("gqa", requires_grad=True)
    want = gradient(attend, qkv)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss(*attend(qkv)).backward()
    torch.testing.assert_close(qkv.grad, want)


# ---- the binding ---------------------------------------------------------------------------------


@needs_binding
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernels_do_not_cover_goes_to_pytorch(stand_in, kind):
    """The function of the CUDA key, called on tensors that no kernel takes."""
    qkv, heads = packed(kind)
    out, lse = fa3.fwd_qkvpacked(qkv, heads, *OPTIONS)
    args = torch.randn_like(out), torch.randn_like(lse), qkv, out, lse, heads, *OPTIONS
    want = stand_in.bwd_qkvpacked(*args)
    stand_in.calls.clear()
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    got = fa3.bwd_qkvpacked.default.redispatch(cuda, *args)
    assert stand_in.names == ["bwd_torch"]
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


@needs_binding
@pytest.mark.parametrize("shape, heads, words", [
    ((2, 6, 64), 2, "qkv has 3 dimensions"),
    ((2, 6, 2, 4, 16), 4, "qkv has shape"),
    ((2, 6, 3, 4, 16), 2, "num_heads_q is 2; expected 4"),
    ((2, 6, 8, 16), 0, "num_heads_q is 0"),
    ((2, 6, 8, 16), 3, "num_heads_q is 3"),
    ((2, 6, 8, 16), 8, "num_heads_q is 8"),
    ((2, 6, 7, 16), 3, "num_heads_q is 3; expected a multiple of 2"),
])
def test_operator_names_the_wrong_argument(shape, heads, words):
    """In a direct call; those of the public function are in test_errors.py."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(ValueError, match=words):
        fa3.fwd_qkvpacked.default.redispatch(cuda, torch.randn(shape), heads, *OPTIONS)


@needs_binding
def test_fast_entry_leaves_what_is_unusual_to_the_checked_path():
    qkv, _ = packed("plain")
    plain = (None, True, -1, -1, 0, 0.0, False, 0)
    for first in ((qkv, None), (qkv, H), (qkv, 0), (qkv, "4"), ("qkv", None), (qkv[0, 0], None)):
        assert ops._C.fwd_qkvpacked_fast(*first, *plain) is None
    with pytest.raises(TypeError, match="10 positional"):
        ops._C.fwd_qkvpacked_fast(qkv)
