"""Gradients by this project's own backward kernels, which the switch of this file chooses.

Values are judged against float64 (tests/support/compare.py); test_ops_gradients.py and
test_compile.py hold what is true of either backward, and run on the kernels too with
FLASH_ATTN3_BACKWARD=kernels.
"""

import dataclasses
import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from op_cases import check_against_reference, dense, int32
from support.cases import Case
from support.compare import check_case, check_close
from support.graphs import capture
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_attn3
import reference
from flash_attn3 import ops
from flash_attn3.functional import flash_attn_bwd, flash_attn_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BF16, FP16 = torch.bfloat16, torch.float16
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
RAGGED_Q, RAGGED_K = (64, 0, 333, 1, 7, 130), (64, 5, 333, 200, 0, 259)


@pytest.fixture(autouse=True)
def kernels():
    before = ops.use_backward("kernels")
    torch.cuda.synchronize()  # a fault of an earlier test would otherwise show in this one
    yield
    ops.use_backward(before)


def require_kernels(d, dv, dtype=BF16):
    """Everything here would also pass on PyTorch's backward."""
    name = "bf16" if dtype == BF16 else "fp16"
    assert ops._C.backward_refusal(name, d, dv, torch.cuda.current_device()) == ""


def check(case, **options):
    require_kernels(case.d, case.dv or case.d, case.dtype)
    torch.full((4 << 20,), float("nan"), device="cuda")  # what the allocator hands out next
    check_case(case, "cuda", **options)


def leaves_of(*shapes, dtype=BF16):
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def grads_of(leaves, dout, **options):
    out = flash_attn3.flash_attn_func(*leaves, **options)
    return torch.autograd.grad(out, leaves, dout)


def assert_same_bits(got, expected, what=""):
    for name, g, e in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert torch.equal(g, e), f"{name} differs {what}"


# ---- values --------------------------------------------------------------------------------------

GRID = (
    dict(), dict(causal=True), dict(heads=6, heads_kv=2, causal=True), dict(heads=5, heads_kv=1),
    dict(window=(100, 0)), dict(window=(30, 60), heads=4), dict(window=(0, 0)), dict(chunk=70),
    dict(chunk=96, causal=True), dict(softcap=10.0, causal=True, size=3.0),
    dict(lengths_q=(513,) * 2, lengths_k=(257,) * 2, causal=True),
    dict(lengths_q=(1,) * 2, lengths_k=(300,) * 2, causal=True),
    dict(lengths_q=(1,) * 2, lengths_k=(1,) * 2),
)


@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", GRID, ids=str)
def test_gradients_dense(d, dv, dtype, options):
    """C24, C25, C29, C30, C32, C42."""
    sizes = dict(lengths_q=(200, 200), lengths_k=(333, 333))
    check(Case(d=d, dv=dv, dtype=dtype, **{**sizes, **options}))


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(causal=True, heads=8), dict(heads=12, window=(60, 0)),
    dict(window=(40, 90)), dict(causal=True, chunk=96), dict(lengths_q=(333,) * 33, causal=True),
    dict(lengths_q=(1,) * 33), dict(lengths_k=(200,) * 33, causal=True)], ids=str)
def test_gradients_of_pairs_that_fill_the_sms(d, options):
    """C24, C25, C29: a CTA takes all keys of its pair, and dQ is reproducible without the flag."""
    sizes = dict(heads=4, heads_kv=4, lengths_q=(200,) * 33, lengths_k=(333,) * 33)
    case = Case(d=d, dtype=BF16, **{**sizes, **options})
    check(case)
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        return
    leaves = [t.requires_grad_() for t in case.make("cuda")]
    out, _ = case.call(*leaves)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for run in range(5):
        assert_same_bits(torch.autograd.grad(out, leaves, dout, retain_graph=True), first, run)


@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("options", [
    dict(), dict(causal=True, heads=4), dict(window=(50, 20), dtype=FP16), dict(chunk=64)], ids=str)
def test_gradients_ragged_with_poisoned_rows(d, dv, options):
    """C02, C06, C08, C09, C28: empty sequences, NaN behind the last one, no influence, zeros."""
    check(Case(RAGGED_Q, RAGGED_K, d=d, dv=dv, ragged=True, tail=5,
               **{"dtype": BF16, **options}), poison=True)


@pytest.mark.parametrize("d, dv", DIMS)
def test_gradients_where_rows_are_not_in_use(d, dv):
    """C07: seqused, ragged and dense, NaN in the rows past it."""
    used = dict(used_q=(3, 100, 0, 66), used_k=(130, 0, 50, 257))
    for causal in (False, True):
        check(Case((320,) * 4, (320,) * 4, d=d, dv=dv, dtype=BF16, causal=causal, **used),
              poison=True)
    tensors, o = dense(rows_q=80, rows_k=80, d=d, dv=dv, used_q=int32(3, 80),
                       used_k=int32(80, 9), scale=d**-0.5)
    _, _, (dq, dk, dv) = check_against_reference(tensors, o)
    assert (dq[0, 3:] == 0).all() and (dk[1, 9:] == 0).all() and (dv[1, 9:] == 0).all()


@pytest.mark.parametrize("d", [8, 24, 40, 72, 104, 120, 200, 248])
def test_gradients_of_head_dims_between_the_compiled_ones(d):
    """C35, C36: padded inside the kernel alone."""
    check(Case((200,) * 2, (300,) * 2, heads=8, heads_kv=4, d=d, dtype=BF16, causal=True))


@pytest.mark.parametrize("d, dv", [(128, 96), (64, 256), (40, 8), (192, 136)])
def test_gradients_where_the_head_dims_differ(d, dv):
    """C36, C37."""
    check(Case((200,) * 2, (150,) * 2, d=d, dv=dv, dtype=BF16))


@pytest.mark.parametrize("d, dv", DIMS)
def test_gradient_of_the_lse(d, dv):
    """C78: with that of out, and alone."""
    check(Case((300,) * 2, (300,) * 2, d=d, dv=dv, dtype=BF16, causal=True), with_dlse=True)
    q, k, v = leaves_of((2, 100, 2, d), (2, 100, 2, d), (2, 100, 2, dv))
    _, lse = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
    got = torch.autograd.grad(lse.mean(), (q, k))
    dlse = torch.full_like(lse, 1 / lse.numel())
    zeros = torch.zeros(2, 100, 2, dv, device="cuda")
    want = reference.gradients(zeros, dlse, q, k, v)
    plain = reference.gradients(zeros, dlse, q, k, v, dtype=BF16)
    for name, g, w, p in zip(("dq", "dk"), got, want, plain):
        check_close(name, g, w, p, 3.0)


def douts(shape):
    """C23: gradients of out in every layout that a graph hands on."""
    yield "sum", torch.ones((), device="cuda", dtype=BF16).expand(shape)
    yield "stride 0 along rows", torch.randn(shape, device="cuda", dtype=BF16)[:, :1].expand(shape)
    b, s, h, d = shape
    yield "transposed", torch.randn(b, h, s, d, device="cuda", dtype=BF16).transpose(1, 2)
    yield "misaligned", torch.randn(b * s * h * d + 1, device="cuda", dtype=BF16)[1:].view(shape)
    yield "float32", torch.randn(shape, device="cuda")


@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_out_in_any_layout(d):
    q, k, v = leaves_of(*((2, 130, 4, d),) * 3)
    for label, dout in douts(q.shape):
        expected = grads_of((q, k, v), dout.to(BF16).contiguous(), deterministic=True)
        out, lse = flash_attn_fwd(q.detach(), k.detach(), v.detach())
        got = flash_attn_bwd(dout, q.detach(), k.detach(), v.detach(), out, lse,
                             deterministic=True)
        assert_same_bits(got, expected, label)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_inputs_in_any_layout_and_gradients_in_theirs(d):
    """Transposes keep their layout, packed slices and the rest get contiguous gradients."""
    b, s, h = 2, 130, 4
    packed = torch.randn(b, s, 3, h, d, device="cuda", dtype=BF16)
    transposed = [torch.randn(b, h, s, d, device="cuda", dtype=BF16).transpose(1, 2)
                  for _ in range(3)]
    shifted = [torch.randn(b * s * h * d + 1, device="cuda", dtype=BF16)[1:].view(b, s, h, d)
               for _ in range(3)]
    expanded = [torch.randn(b, s, 1, d, device="cuda", dtype=BF16).expand(b, s, h, d)] * 3
    columns = [torch.randn(b, s, d, h, device="cuda", dtype=BF16).transpose(2, 3)] * 3
    dout = torch.randn(b, s, h, d, device="cuda", dtype=BF16)
    options = dict(causal=True, deterministic=True)
    for inputs in (packed.unbind(2), transposed, shifted, expanded, columns):
        leaves = [t.detach().requires_grad_() for t in inputs]
        plain = [t.detach().contiguous().clone().requires_grad_() for t in inputs]
        got = grads_of(leaves, dout, **options)
        assert_same_bits(got, grads_of(plain, dout, **options))
        for g, t in zip(got, inputs):
            assert g.stride() == t.stride() if inputs is transposed else g.is_contiguous()


def test_qkv_packed():
    """C77: one gradient for the packed tensor."""
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda", dtype=BF16, requires_grad=True)
    options = dict(causal=True, deterministic=True)
    flash_attn3.flash_attn_qkvpacked_func(qkv, **options).float().square().sum().backward()
    parts = [t.detach().clone().requires_grad_() for t in qkv.unbind(2)]
    out = flash_attn3.flash_attn_func(*parts, **options)
    out.float().square().sum().backward()
    assert torch.equal(qkv.grad, torch.stack([t.grad for t in parts], 2))


@pytest.mark.parametrize("sizes", [(64, 0), (0, 64), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_do(sizes, batch):
    """C01, C11: no keys, no queries, no sequences."""
    q, k, v = leaves_of((batch, sizes[0], 2, 64), (batch, sizes[1], 2, 64),
                        (batch, sizes[1], 2, 64))
    grads = grads_of((q, k, v), torch.randn_like(q))
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (q, k, v)))


@pytest.mark.parametrize("d, dv", DIMS)
def test_adversarial_values(d, dv):
    """C15, C16, C18: scores of -120 and -200 all over, outlier channels, values times 3."""
    one = Case((300,) * 2, (300,) * 2, d=d, dv=dv, dtype=BF16)
    check(dataclasses.replace(one, dtype=FP16, causal=True, size=3.0))
    q, k, v = (t.detach() for t in leaves_of((1, 704, 2, d), (1, 704, 2, d), (1, 704, 2, dv)))
    outlier = q.clone(), k.clone()
    outlier[0][..., 3] *= 30
    outlier[1][..., 3] *= 30
    far = []
    for score in (-120.0, -200.0):
        low_q, low_k = torch.zeros_like(q), torch.zeros_like(k)
        low_q[..., 0], low_k[..., 0] = 1.0, score * d**0.5
        far.append((low_q, low_k))
    for a, b in (*far, outlier):
        dout = torch.randn_like(v)
        leaves = [t.clone().requires_grad_() for t in (a, b, v)]
        got = grads_of(leaves, dout)
        want = reference.gradients(dout, None, a, b, v)
        plain = reference.gradients(dout, None, a, b, v, dtype=BF16)
        for name, g, w, p in zip(("dq", "dk", "dv"), got, want, plain):
            check_close(name, g, w, p, 3.0)


def test_gated_attention():
    """C23: dO is the product of a gate."""
    q, k, v = leaves_of((2, 150, 4, 192), (2, 150, 4, 192), (2, 150, 4, 128))
    gate = torch.randn(2, 4, 150, 128, device="cuda", dtype=BF16).transpose(1, 2)
    out = flash_attn3.flash_attn_func(q, k, v, causal=True)
    got = torch.autograd.grad((out * gate).sum(), (q, k, v))
    want = reference.gradients(gate, None, q, k, v, causal=True)
    plain = reference.gradients(gate, None, q, k, v, causal=True, dtype=BF16)
    for name, g, w, p in zip(("dq", "dk", "dv"), got, want, plain):
        check_close(name, g, w, p, 3.0)


# ---- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("options", [
    dict(causal=True), dict(heads=16, heads_kv=2), dict(window=(64, 0)), dict(sm_margin=100),
    dict(causal=True, chunk=200, sm_margin=131), dict(ragged=True, causal=True)], ids=str)
def test_fifty_deterministic_runs_are_equal_bit_by_bit(d, dv, options):
    """C68, C69, C70: and they end, with groups of heads, windows, ragged batches, one SM."""
    sizes = dict(lengths_q=(700,) * 2, lengths_k=(900,) * 2)
    if "ragged" in options:
        sizes = dict(lengths_q=(5, 300, 0, 640), lengths_k=(300, 5, 7, 640))
    case = Case(d=d, dv=dv, dtype=BF16, **sizes, **options)
    leaves = [t.requires_grad_() for t in case.make("cuda")]
    out, _ = case.call(*leaves, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for run in range(50):
        torch.full((8 << 20,), float("nan"), device="cuda")
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert_same_bits(again, first, f"in run {run}")


@pytest.mark.parametrize("cu", [(0, 1024, 0, 1024), (0, 256, 128, 384), (0, 700, 300, 1024)])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_calls_end_whatever_the_lengths_are(cu, causal):
    """Sequences that overlap give a wrong result; a turn that never comes would be a hang."""
    leaves = leaves_of(*[(cu[-1], 2, 128)] * 3)
    lengths = int32(*cu)
    out = flash_attn3.flash_attn_varlen_func(
        *leaves, lengths, lengths, 1024, 1024, causal=causal, deterministic=True)
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    torch.cuda.synchronize()
    assert [g.shape for g in grads] == [t.shape for t in leaves]


@pytest.mark.parametrize("d, dv", DIMS)
def test_soft_cap_of_scores_that_are_all_zero(d, dv):
    """A scale of 0: P is uniform, so dV is what it is without a soft cap, and dQ and dK are 0."""
    leaves = leaves_of((1, 80, 2, d), (1, 80, 2, d), (1, 80, 2, dv))
    dout = torch.randn(1, 80, 2, dv, device="cuda", dtype=BF16)
    capped = grads_of(leaves, dout, softmax_scale=0.0, softcap=10.0)
    plain = grads_of(leaves, dout, softmax_scale=0.0)
    assert not capped[0].any() and not capped[1].any()
    torch.testing.assert_close(capped[2], plain[2])


@pytest.mark.parametrize("d, dv", DIMS)
def test_torch_flag_makes_gradients_deterministic(d, dv):
    """And without either, dk and dv are equal bit by bit all the same."""
    leaves = leaves_of((2, 1000, 4, d), (2, 1000, 2, d), (2, 1000, 2, dv))
    dout = torch.randn(2, 1000, 4, dv, device="cuda", dtype=BF16)
    wanted = grads_of(leaves, dout, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            assert_same_bits(grads_of(leaves, dout, causal=True), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
    first = grads_of(leaves, dout, causal=True)
    for run in range(10):
        again = grads_of(leaves, dout, causal=True)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2]), f"run {run}"


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, dv", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory(d, dv, deterministic):
    """At most dQ in fp32, two fp32 a row and head, and the turns, beside inputs and outputs."""
    q, k, v = leaves_of((4, 2048, 8, d), (4, 2048, 2, d), (4, 2048, 2, dv))
    out, lse = flash_attn_fwd(q.detach(), k.detach(), v.detach(), causal=True)
    dout = torch.randn_like(out)
    inputs = (dout, q.detach(), k.detach(), v.detach(), out, lse)
    flash_attn_bwd(*inputs, causal=True, deterministic=deterministic)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def requested(which):  # as asked for, before the allocator's rounding
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    before = requested("current")
    grads = flash_attn_bwd(*inputs, causal=True, deterministic=deterministic)
    outputs = sum(g.numel() * g.element_size() for g in grads)
    rows = q.numel() // d
    assert requested("peak") - before <= outputs + 4 * q.numel() + 8 * rows + (1 << 16)
    assert requested("current") - before == outputs, "the workspace outlives the call"


# ---- autograd, checkpointing, compile, graphs ----------------------------------------------------


def test_output_used_twice_and_graph_kept():
    leaves = leaves_of((2, 100, 4, 128), (2, 100, 2, 128), (2, 100, 2, 128))
    out = flash_attn3.flash_attn_func(*leaves, causal=True, deterministic=True)
    loss = out.float().square().sum() + out.float().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, leaves), first)


def test_saved_output_changed_in_place_raises():
    """C23."""
    leaves = leaves_of(*((2, 100, 4, 128),) * 3)
    out = flash_attn3.flash_attn_func(*leaves)
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivative_raises_one_sentence():
    leaves = leaves_of(*((2, 100, 4, 128),) * 3)
    out = flash_attn3.flash_attn_func(*leaves)
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention"):
        dq.float().sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing(compiled):
    """The saved forward is not run again, and the gradients are the same bits."""
    leaves = leaves_of(*((2, 160, 4, 128),) * 3)
    dout = torch.randn_like(leaves[0])
    saved = torch.ops.flash_attn3.fwd.default

    def attend(q, k, v):
        return flash_attn3.flash_attn_func(q * 1, k, v, causal=True, deterministic=True).sin()

    def policy(ctx, op, *args, **kwargs):
        keep = op is saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpointed(*tensors):
        return checkpoint(attend, *tensors, use_reentrant=False, context_fn=contexts)

    function = torch.compile(checkpointed, backend="aot_eager") if compiled else checkpointed
    expected = torch.autograd.grad(attend(*leaves), leaves, dout)
    out = function(*leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
    assert_same_bits(got, expected)
    launched = [e.key for e in profile.key_averages()]
    assert any("bwd_kernel" in key for key in launched), launched
    assert not any("fwd_kernel" in key for key in launched), launched


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed"])
def test_compiled_gradients(backend, layout):
    """C80: real strides are those of the fakes, which inductor relies on."""
    torch._dynamo.reset()
    b, s, h, d = 2, 160, 4, 64

    def attend(x):
        if layout == "packed":
            q, k, v = x.view(b, s, 3, h, d).unbind(2)
        elif layout == "transposed":
            q, k, v = (t.transpose(1, 2) for t in x.view(3, b, h, s, d).unbind(0))
        else:
            q, k, v = x.view(3, b, s, h, d).unbind(0)
        out = flash_attn3.flash_attn_func(q * 2, k * 2, v, causal=True, deterministic=True)
        return out.float().square().sum()

    x = torch.randn(3 * b * s * h * d, device="cuda", dtype=BF16, requires_grad=True)
    (expected,) = torch.autograd.grad(attend(x), x)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_training_step_in_a_cuda_graph():
    """Forward, backward and the optimiser, replayed on new data."""
    b, s, h, d = 2, 128, 4, 64
    layer = torch.nn.Linear(h * d, 3 * h * d, device="cuda", dtype=BF16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    x = torch.randn(b, s, h * d, device="cuda", dtype=BF16)

    def step():
        optimizer.zero_grad(set_to_none=False)
        q, k, v = layer(x).view(b, s, 3, h, d).unbind(2)
        out = flash_attn3.flash_attn_func(q, k, v, causal=True, deterministic=True)
        out.float().square().mean().backward()
        optimizer.step()

    graph, _ = capture(step, warm_ups=3)
    start = {name: p.detach().clone() for name, p in layer.named_parameters()}
    batches = [torch.randn_like(x) for _ in range(4)]
    results = []
    for run in (graph.replay, step):
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.copy_(start[name])
        for batch in batches:
            x.copy_(batch)
            run()
        results.append([p.detach().clone() for p in layer.parameters()])
    for replayed, eager in zip(*results):  # the two may take other products from cuBLAS
        torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=1e-3)
    assert not torch.equal(results[0][0], start["weight"])


# ---- the operator's own checks -------------------------------------------------------------------


@pytest.mark.parametrize("name, change, words", [
    ("dout", lambda t: t[:, 1:], "dout has shape"),
    ("out", lambda t: t.cpu(), "out is on cpu"),
    ("lse", lambda t: t[:, 1:], "lse has shape"),
    ("dlse", lambda t: t.int(), "dlse has dtype"),
    ("dout", lambda t: t.int(), "dout has dtype"),
])
def test_wrong_input_is_named(name, change, words):
    q, k, v = (t.detach() for t in leaves_of(*((2, 100, 4, 64),) * 3))
    out, lse = flash_attn_fwd(q, k, v)
    given = dict(dout=torch.randn_like(out), dlse=torch.randn_like(lse), q=q, k=k, v=v, out=out,
                 lse=lse)
    given[name] = change(given[name])
    options = (None, None, None, None, 100, 100, 0.125, False, -1, -1, 0, 0.0, False, 0)
    with pytest.raises((ValueError, TypeError), match=words):
        torch.ops.flash_attn3.bwd(*given.values(), *options)
