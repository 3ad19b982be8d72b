"""Packed QKV on a GPU: the kernels write the gradient where q, k, v lie in one tensor.

What is right is what the unpacked call gives, which test_backward.py judges: `deterministic=True`
makes it the same bits.
"""

import gc
import re

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from support.graphs import capture
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import flash_attn3
from flash_attn3 import ops
from flash_attn3.backends.call import unpacked

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

fa3 = torch.ops.flash_attn3
BF16, FP16 = torch.bfloat16, torch.float16
JOINS = re.compile(r"stack|CatArray|_cat_")  # kernels that copy parts into one tensor


@pytest.fixture(autouse=True)
def kernels():
    before = ops.use_backward("kernels")
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    ops.use_backward(before)


def packed(d=64, rows=200, heads=4, heads_kv=None, batch=2, dtype=BF16):
    """qkv of five dimensions, or with heads_kv of four."""
    shape = (3, heads, d) if heads_kv is None else (heads + 2 * heads_kv, d)
    return torch.randn(batch, rows, *shape, device="cuda", dtype=dtype, requires_grad=True)


def attend(qkv, heads=4, **options):
    options = {"causal": True, "deterministic": True, **options}
    return flash_attn3.flash_attn_qkvpacked_func(
        qkv, num_heads_q=heads if qkv.dim() == 4 else None, return_attn_probs=True, **options)


def attend_unpacked(qkv, heads=4, **options):
    options = {"causal": True, "deterministic": True, **options}
    return flash_attn3.flash_attn_func(*unpacked(qkv, heads), return_attn_probs=True, **options)


def results(function, qkv, dout, dlse=None, **options):
    """out, lse, dqkv; what the allocator hands out for the gradient is full of NaN."""
    out, lse = function(qkv, **options)
    poison = torch.full((qkv.numel() + (4 << 20),), float("nan"), device="cuda")
    del poison
    outputs, weights = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return out, lse, *torch.autograd.grad(outputs, qkv, weights)


def check_same_bits(qkv, with_dlse=False, **options):
    heads = options.get("heads", 4)
    assert ops._C.backward_refusal(
        "bf16" if qkv.dtype == BF16 else "fp16", qkv.shape[-1], qkv.shape[-1], 0) == ""
    b, s, d = qkv.shape[0], qkv.shape[1], qkv.shape[-1]
    dout = torch.randn(b, s, heads, d, device="cuda", dtype=qkv.dtype)
    dlse = torch.randn(b, heads, s, device="cuda") if with_dlse else None
    got = results(attend, qkv, dout, dlse, **options)
    want = results(attend_unpacked, qkv, dout, dlse, **options)
    for name, g, w in zip(("out", "lse", "dqkv"), got, want, strict=True):
        assert torch.isfinite(g).all(), name
        assert torch.equal(g, w), name
    return got


def launched(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [e.key for e in profile.key_averages()]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256, 8, 40, 72, 200])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads_kv", [None, 4, 2, 1])
def test_gradient_has_the_bits_of_the_unpacked_call(d, dtype, heads_kv):
    """C42, C77."""
    check_same_bits(packed(d=d, dtype=dtype, heads_kv=heads_kv))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [
    dict(causal=False), dict(window_size=(40, 0)), dict(window_size=(30, 60), causal=False),
    dict(attention_chunk=70), dict(softcap=10.0), dict(softmax_scale=0.3), dict(sm_margin=8)],
    ids=str)
def test_options(d, options):
    check_same_bits(packed(d=d, heads_kv=2), **options)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 63, 129, 513])
def test_rows_that_fill_no_tile(d, rows):
    check_same_bits(packed(d=d, rows=rows))
    check_same_bits(packed(d=d, rows=rows, heads_kv=2))


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_that_fill_the_sms(d, causal):
    """The backward in which a CTA takes all keys of its pair."""
    check_same_bits(packed(d=d, batch=33), causal=causal)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads_kv", [None, 2])
def test_gradient_of_the_lse(d, heads_kv):
    """C78."""
    qkv = packed(d=d, heads_kv=heads_kv)
    check_same_bits(qkv, with_dlse=True)
    (dqkv,) = torch.autograd.grad(attend(qkv)[1].mean(), qkv)
    dq, dk, dv = unpacked(dqkv, 4)
    assert dq.abs().max() > 0 and dk.abs().max() > 0 and not dv.any()


@pytest.mark.parametrize("batch, rows", [(0, 16), (2, 0), (0, 0)])
@pytest.mark.parametrize("heads_kv", [None, 2])
def test_sizes_of_zero(batch, rows, heads_kv):
    """C01, C04."""
    qkv = packed(batch=batch, rows=rows, heads_kv=heads_kv)
    out, lse = attend(qkv)
    (dqkv,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (batch, rows, 4, 64) and lse.shape == (batch, 4, rows)
    assert dqkv.shape == qkv.shape


def test_without_the_deterministic_flag():
    qkv = packed(d=128, rows=1000, heads_kv=2)
    dout = torch.randn(2, 1000, 4, 128, device="cuda", dtype=BF16)
    *_, got = results(attend, qkv, dout, deterministic=False)
    *_, want = results(attend, qkv, dout)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3 * want.abs().max().item())


def test_torch_flag_makes_the_gradient_deterministic():
    qkv = packed(d=128, rows=1000, heads_kv=2)
    dout = torch.randn(2, 1000, 4, 128, device="cuda", dtype=BF16)
    *_, want = results(attend, qkv, dout)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        *_, got = results(attend, qkv, dout, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got, want)


def test_backward_of_pytorch():
    """FLASH_ATTN3_BACKWARD=torch: parts of its own, copied together."""
    for heads_kv in (None, 2):
        qkv = packed(heads_kv=heads_kv)
        dout = torch.randn(2, 200, 4, 64, device="cuda", dtype=BF16)
        *_, want = results(attend, qkv, dout)
        ops.use_backward("torch")
        *_, got = results(attend, qkv, dout, deterministic=False)
        ops.use_backward("kernels")
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2 * want.abs().max().item())


# ---- layouts -------------------------------------------------------------------------------------


def head_after_head(t):
    order = (0, 2, 3, 1, 4) if t.dim() == 5 else (0, 2, 1, 3)
    back = (0, 3, 1, 2, 4) if t.dim() == 5 else (0, 2, 1, 3)
    return t.permute(order).contiguous().permute(back)


def rows_with_holes(t):
    return torch.nn.functional.pad(t, (0, 8))[..., :t.shape[-1]]


def rows_off_by_eight_bytes(t):
    return torch.nn.functional.pad(t, (0, 4))[..., :t.shape[-1]]


def start_off_by_eight_bytes(t):
    return torch.nn.functional.pad(t.flatten(), (4, 0))[4:].view(t.shape)


def last_stride_two(t):
    return t.unsqueeze(-1).repeat(*(1,) * t.dim(), 2)[..., 0]


@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("layout", [
    head_after_head, rows_with_holes, rows_off_by_eight_bytes, start_off_by_eight_bytes,
    last_stride_two])
def test_every_layout_gives_the_bits_of_the_contiguous_one(layout, heads_kv):
    """C47, C49: what TMA can't read is copied; the gradient has a layout that it can write."""
    qkv = packed(d=72, heads_kv=heads_kv)
    dout = torch.randn(2, 200, 4, 72, device="cuda", dtype=BF16)
    want = results(attend, qkv, dout)
    moved = layout(qkv.detach()).requires_grad_()
    got = results(attend, moved, dout)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    if layout is head_after_head:
        assert got[-1].stride() == moved.stride()
    else:
        assert got[-1].is_contiguous()


# ---- no copy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory(d, heads_kv, deterministic):
    """At most dQ in fp32, two fp32 a row and head, and the turns, beside inputs and dqkv."""
    qkv = packed(d=d, rows=2048, heads=8, heads_kv=heads_kv, batch=4)
    out, _ = attend(qkv, heads=8, deterministic=deterministic)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, qkv, dout, retain_graph=True)
    torch.cuda.synchronize()
    gc.collect()  # what another test left in a cycle would be freed in between
    torch.cuda.reset_peak_memory_stats()

    def requested(which):  # as asked for, before the allocator's rounding
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    before = requested("current")
    (dqkv,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    rows = out.numel() // d
    assert requested("peak") - before <= dqkv.nbytes + 4 * out.numel() + 8 * rows + (1 << 16)
    assert requested("current") - before == dqkv.nbytes, "the workspace outlives the call"


@pytest.mark.parametrize("heads_kv", [None, 2])
def test_backward_launches_its_kernels_alone(heads_kv):
    qkv = packed(d=128, rows=1024, heads_kv=heads_kv)
    found = {}
    for function in (attend, attend_unpacked):
        out, _ = function(qkv)
        dout = torch.randn_like(out)
        found[function] = launched(lambda: torch.autograd.grad(out, qkv, dout))  # noqa: B023
    assert any("bwd_kernel" in name for name in found[attend]), found[attend]
    others = [name for name in found[attend] if re.search(r"at::native|elementwise|Memcpy", name)]
    assert not others, others
    assert any("at::native" in name for name in found[attend_unpacked]), found[attend_unpacked]


@pytest.mark.parametrize("heads_kv", [None, 2])
def test_compiled_step_has_no_kernel_that_joins_the_parts(heads_kv):
    """From a projection on, as a model has it; with unbind there is one."""
    shape = packed(d=128, rows=256, heads_kv=heads_kv).shape
    x = torch.randn(shape[0], shape[1], 512, device="cuda", dtype=BF16)
    layer = torch.nn.Linear(512, shape[2:].numel(), bias=False, device="cuda", dtype=BF16)
    found, grads = {}, []
    for function in (attend, attend_unpacked):
        def loss(x, function=function):
            return function(layer(x).view(shape))[0].float().square().mean()

        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True)
        torch.autograd.grad(compiled(x), layer.weight)
        total = compiled(x)
        found[function] = launched(lambda: torch.autograd.grad(total, layer.weight))  # noqa: B023
        grads += torch.autograd.grad(compiled(x), layer.weight)
    assert any("bwd_kernel" in name for name in found[attend]), found[attend]
    assert not any(JOINS.search(name) for name in found[attend]), found[attend]
    assert any(JOINS.search(name) for name in found[attend_unpacked]), found[attend_unpacked]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-2 * grads[1].abs().max().item())


# ---- operators, compile, checkpointing, graphs ---------------------------------------------------

OPTIONS = (0.125, True, -1, 0, 0, 0.0, True, 0)


@pytest.mark.parametrize("layout", [lambda t: t, head_after_head, rows_with_holes])
@pytest.mark.parametrize("heads_kv", [None, 2])
def test_opcheck(layout, heads_kv):
    """C83, C85."""
    qkv = layout(packed(rows=40, heads_kv=heads_kv).detach()).requires_grad_()
    args = qkv, 4, *OPTIONS
    assert set(opcheck(fa3.fwd_qkvpacked.default, args).values()) == {"SUCCESS"}
    qkv = qkv.detach()
    out, lse = fa3.fwd_qkvpacked(qkv, 4, *OPTIONS)
    for dlse in (None, torch.randn_like(lse)):
        args = torch.randn_like(out), dlse, qkv, out, lse, 4, *OPTIONS
        assert set(opcheck(fa3.bwd_qkvpacked.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("heads_kv", [None, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_and_checkpointed(backend, heads_kv, checkpointed):
    """C80: the bits of the eager call, with a gradient of the LSE too."""
    qkv = packed(heads_kv=heads_kv)
    dout = torch.randn(2, 200, 4, 64, device="cuda", dtype=BF16)
    dlse = torch.randn(2, 4, 200, device="cuda")
    want = results(attend, qkv, dout, dlse)

    def function(t):
        return checkpoint(attend, t, use_reentrant=False) if checkpointed else attend(t)

    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        got = results(run, qkv, dout, dlse)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_fast_entry_equals_the_operator():
    for heads_kv, heads in ((None, None), (None, 4), (2, 4)):
        qkv = packed(heads_kv=heads_kv)
        fast = ops._C.fwd_qkvpacked_fast(qkv, heads, None, True, -1, 0, 0, 0.0, True, 0)
        want = fa3.fwd_qkvpacked(qkv, 4, *OPTIONS)
        assert all(torch.equal(f, w) for f, w in zip(fast, want, strict=True))
        assert fast[0].grad_fn is not None and fast[1].grad_fn is not None
    for wrong in ((packed(), 3), (packed(), 0), (packed().float(), None), (packed(d=60), None),
                  (packed(heads_kv=2), None), (packed(heads_kv=2), 3), (packed(heads_kv=3), 4)):
        assert ops._C.fwd_qkvpacked_fast(*wrong, None, True, -1, 0, 0, 0.0, True, 0) is None


def test_autograd_rules():
    """C23, and the sentence on second derivatives."""
    qkv = packed()
    for changed in (0, 1):
        out, _ = attend(qkv)
        with torch.no_grad():
            (qkv, out.detach())[changed].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    (dqkv,) = torch.autograd.grad(attend(qkv)[0].float().square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        dqkv.float().sum().backward()


def test_forward_and_backward_captured_together():
    qkv = packed(heads_kv=2)
    dout = torch.randn(2, 200, 4, 64, device="cuda", dtype=BF16)

    def both():
        return torch.autograd.grad(attend(qkv)[0], qkv, dout)[0]

    graph, captured = capture(both)
    for _ in range(3):
        with torch.no_grad():
            qkv.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, both())
