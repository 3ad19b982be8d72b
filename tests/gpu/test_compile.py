"""torch.compile, export, checkpointing and CUDA graphs over the compiled kernels, on a GPU.

Eager and compiled calls run the same operator, so forward results are compared bit by bit; where a
gradient is compared, `deterministic=True` makes it the same bits too.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from support.graphs import capture
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_attn3
from flash_attn3 import ops
from flash_attn3.functional import flash_attn_bwd, flash_attn_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def tensors(*shapes, dtype=torch.bfloat16, requires_grad=True):
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=requires_grad)
            for s in shapes]


def dense_inputs(batch=2, seqlen=160, heads=8, heads_kv=2, head_dim=64, requires_grad=True):
    kv = (batch, seqlen, heads_kv, head_dim)
    return tensors((batch, seqlen, heads, head_dim), kv, kv, requires_grad=requires_grad)


def ragged_inputs(lengths, heads=4, heads_kv=2, head_dim=64, requires_grad=True):
    total = sum(lengths)
    kv = (total, heads_kv, head_dim)
    q, k, v = tensors((total, heads, head_dim), kv, kv, requires_grad=requires_grad)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return q, k, v, ends.to(device="cuda", dtype=torch.int32)


def gradients(function, inputs):
    out = function(*inputs)
    return out, torch.autograd.grad(out.float().square().sum(), inputs)


def attend(q, k, v):
    return flash_attn3.flash_attn_func(q, k, v, causal=True, deterministic=True)


def assert_equal(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)


# ---- compile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_forward_and_backward_in_one_graph(backend):
    """C80."""
    inputs = dense_inputs()
    out, grads = gradients(attend, inputs)
    got, got_grads = gradients(torch.compile(attend, fullgraph=True, backend=backend), inputs)
    assert_equal([got, *got_grads], [out, *grads])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_forward_and_backward_in_one_graph(backend):
    """C80, C85: the lengths reach the backward."""
    q, k, v, cu = ragged_inputs([70, 1, 200, 0, 33])

    def ragged(q, k, v):
        return flash_attn3.flash_attn_varlen_func(
            q, k, v, cu, cu, 200, 200, causal=True, deterministic=True)

    out, grads = gradients(ragged, [q, k, v])
    got, got_grads = gradients(torch.compile(ragged, fullgraph=True, backend=backend), [q, k, v])
    assert_equal([got, *got_grads], [out, *grads])


@pytest.mark.parametrize("options", [
    {"window_size": (40, 8)}, {"softcap": 12.0}, {"attention_chunk": 48}, {"sm_margin": 4},
])
def test_options_in_one_graph(options):
    inputs = dense_inputs()

    def call(q, k, v):
        return flash_attn3.flash_attn_func(q, k, v, deterministic=True, **options)

    out, grads = gradients(call, inputs)
    got, got_grads = gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs)
    assert_equal([got, *got_grads], [out, *grads])


def test_lse_and_its_gradient_in_one_graph():
    """C78 under compile."""
    def loss(q, k, v):
        out, lse = flash_attn3.flash_attn_func(
            q, k, v, deterministic=True, return_attn_probs=True)
        return out.float().sum() + lse.square().sum()

    inputs = dense_inputs()
    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_equal(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_no_recompilation_for_each_max_seqlen():
    """C84: an int for the operator, a symbol for the compiler."""
    def ragged(q, k, v, cu, longest):
        return flash_attn3.flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ragged, fullgraph=True, backend=counter)
    for longest in range(130, 138):
        q, k, v, cu = ragged_inputs([longest, 300 - longest])
        compiled(q, k, v, cu, max(longest, 300 - longest)).float().sum().backward()
    assert counter.frame_count <= 2


def test_no_recompilation_for_each_sequence_length():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for seqlen in (130, 200, 257, 300, 411):
        inputs = dense_inputs(seqlen=seqlen)
        assert_equal([compiled(*inputs)], [attend(*inputs)])
    assert counter.frame_count <= 2


def test_output_used_twice_and_backward_run_twice():
    inputs = dense_inputs()

    def twice(q, k, v):
        out = attend(q, k, v)
        return out.float() * out.float().sum() + attend(out, k, v).float()

    expected = torch.autograd.grad(twice(*inputs).sum(), inputs)
    out = torch.compile(twice, fullgraph=True, backend="aot_eager")(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    assert_equal(first, second)
    for g, e in zip(first, expected):
        torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2 * e.abs().max().item())


def test_fwd_out_is_functionalised():
    """The declared writes survive a trace: a later reader sees the new value."""
    q, k, v = dense_inputs(requires_grad=False)
    options = (None, None, None, None, 160, 160, 0.125, True, -1, -1, 0, 0.0, False, 0)

    def into(q, k, v, out, lse):
        torch.ops.flash_attn3.fwd_out(q, k, v, *options, out, lse)
        return out + 1, lse * 2

    expected_out, expected_lse = torch.ops.flash_attn3.fwd(q, k, v, *options)
    out, lse = torch.full_like(expected_out, 7), torch.full_like(expected_lse, 7)
    got = torch.compile(into, fullgraph=True, backend="inductor")(q, k, v, out, lse)
    assert_equal([out, lse, *got],
                 [expected_out, expected_lse, expected_out + 1, expected_lse * 2])


def test_compiled_with_cuda_graphs():
    q, k, v = dense_inputs(requires_grad=False)
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    expected = attend(q, k, v)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal([compiled(q, k, v).clone()], [expected])


def test_functional_pair_in_one_graph():
    """C79 under compile: a caller's own step between forward and backward."""
    q, k, v = dense_inputs(requires_grad=False)
    dout = torch.randn_like(q)

    def step(q, k, v, dout):
        out, lse = flash_attn_fwd(q, k, v, causal=True)
        return flash_attn_bwd(dout, q, k, v, out, lse, causal=True, deterministic=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(q, k, v, dout), step(q, k, v, dout))


def test_compiled_autograd_looks_into_the_backward():
    inputs = dense_inputs()
    expected = gradients(attend, inputs)[1]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        attend(*inputs).float().square().sum().backward()
    assert_equal([t.grad for t in inputs], expected)


# ---- export, checkpointing -----------------------------------------------------------------------


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_attn3.flash_attn_func(q, k, v, causal=True)


def test_export_with_a_dynamic_length():
    """C83: the exported program holds the operator and runs at other lengths."""
    q, k, v = dense_inputs(requires_grad=False)
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shape = {1: seqlen}
    program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=(shape, shape, shape))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "flash_attn3.fwd.default" in names
    other = dense_inputs(seqlen=333, requires_grad=False)
    assert_equal([program.module()(*other)], [Attention()(*other)])


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(compiled):
    inputs = dense_inputs()
    expected = gradients(attend, inputs)[1]

    def checkpointed(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    function = checkpointed
    if compiled:
        function = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(function, inputs)[1], expected)


# ---- CUDA graphs ---------------------------------------------------------------------------------


def test_dense_call_replays_on_new_inputs():
    q, k, v = dense_inputs(requires_grad=False)
    graph, out = capture(lambda: attend(q, k, v))
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert_equal([out], [attend(q, k, v)])


def test_ragged_call_replays_on_new_lengths():
    """C76: the plan is made on the device, in the graph, from the lengths of the replay."""
    q, k, v, cu = ragged_inputs([100, 100, 100], requires_grad=False)

    def call():
        return flash_attn3.flash_attn_varlen_func(q, k, v, cu, cu, 300, 300, causal=True)

    graph, out = capture(call)
    for lengths in ([300, 0, 0], [1, 298, 1], [20, 30, 40]):
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device="cuda", dtype=torch.int32)
        cu.copy_(ends)
        out.fill_(float("nan"))
        graph.replay()
        assert_equal([out], [call()])


def test_forward_and_backward_captured_together():
    inputs = dense_inputs()
    dout = torch.randn_like(inputs[0])

    def both():
        return torch.autograd.grad(
            flash_attn3.flash_attn_func(*inputs, causal=True), inputs, dout)

    graph, grads = capture(both)
    with torch.no_grad():
        for t in inputs:
            t.normal_()
    graph.replay()
    replayed = [g.clone() for g in grads]
    # The order of atomic additions may differ between the two runs.
    for g, e in zip(replayed, both()):
        torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-3 * e.abs().max().item())


def test_kernels_are_there():
    """Everything above would also pass on the fallback: this file is about the kernels."""
    assert ops._C is not None, ops.load_error
    q, k, v = dense_inputs()
    assert flash_attn3.backend_for(q, k, v).name == "sm90"
