"""Which backward flash_attn3::bwd takes, without a GPU: switch, refusals, layouts, checkpointing.

The values that the kernels give are judged in tests/gpu/test_backward.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flash_attn3 import env, ops
from flash_attn3.backends import blockwise_backward, blockwise_forward

fa3 = torch.ops.flash_attn3
ROOT = Path(__file__).resolve().parents[2]
needs_binding = pytest.mark.skipif(ops._C is None, reason="needs the binding")


class StandIn:
    """CPU kernels in place of the CUDA ones; counts its calls by the operator's name."""

    def __init__(self):
        self.calls = []

    def fwd(self, *args):
        self.calls.append("fwd")
        return blockwise_forward(*args)

    def bwd(self, *args):
        self.calls.append("bwd")
        return self.gradients(*args)

    def bwd_torch(self, *args):
        self.calls.append("bwd_torch")
        return self.gradients(*args)

    @staticmethod
    def gradients(*args):
        return tuple(map(ops._laid_out_like, args[2:5], blockwise_backward(*args)))


@pytest.fixture
def stand_in():
    library, kernels = torch.library.Library("flash_attn3", "IMPL"), StandIn()
    for name in ("fwd", "bwd", "bwd_torch"):
        library.impl(name, getattr(kernels, name), "CPU")
    yield kernels
    library._destroy()


@pytest.fixture
def kernels_on():
    before = ops.use_backward("kernels")
    yield
    ops.use_backward(before)


def options(seqlen):
    return (None, None, None, None, seqlen, seqlen, 0.25, True, -1, -1, 0, 0.0, False, 0)


def backward_args(seqlen=6, requires_grad=False):
    q, k, v = (torch.randn(2, seqlen, 4, 16, requires_grad=requires_grad) for _ in range(3))
    out, lse = blockwise_forward(q, k, v, *options(seqlen))
    return torch.randn_like(out), None, q, k, v, out, lse, *options(seqlen)


# ---- the switch ----------------------------------------------------------------------------------


def test_values_of_the_switch(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN3_BACKWARD", raising=False)
    assert env.read_backward() == env.DEFAULT_BACKWARD
    for name in ("kernels", "torch"):
        monkeypatch.setenv("FLASH_ATTN3_BACKWARD", name)
        assert env.read_backward() == name
    monkeypatch.setenv("FLASH_ATTN3_BACKWARD", "cuda")
    with pytest.raises(ValueError, match="FLASH_ATTN3_BACKWARD is 'cuda'; accepted: kernels, "):
        env.read_backward()


def test_a_wrong_switch_is_refused_at_import():
    done = subprocess.run(
        [sys.executable, "-c", "import flash_attn3"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "FLASH_ATTN3_BACKWARD": "yes", "PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert "ValueError: FLASH_ATTN3_BACKWARD is 'yes'" in done.stderr


def test_the_readme_and_the_document_name_the_default():
    for name in ("README.md", "docs/backward.md"):
        text = (ROOT / name).read_text()
        found = re.search(r"`FLASH_ATTN3_BACKWARD`[^\n]*?\bdefault:? `?(\w+)", text)
        assert found and found[1] == env.DEFAULT_BACKWARD, name


def test_use_backward_returns_what_was_chosen_before():
    first = ops.use_backward("torch")
    try:
        assert ops.use_backward("kernels") == "torch"
        assert ops.use_backward("torch") == ("torch" if ops._C is None else "kernels")
        with pytest.raises(ValueError, match="name is 'fast'; expected one of kernels, torch"):
            ops.use_backward("fast")
    finally:
        ops.use_backward(first)


# ---- what the kernels cover ----------------------------------------------------------------------


@needs_binding
def test_the_switch_refuses_first():
    before = ops.use_backward("torch")
    try:
        assert "FLASH_ATTN3_BACKWARD" in ops._C.backward_refusal("bf16", 128, 128)
    finally:
        ops.use_backward(before)


@needs_binding
@pytest.mark.parametrize("dtype, d, dv, words", [
    ("fp32", 64, 64, "take float16 and bfloat16"),
    ("bf16", 60, 64, "no backward kernel"),
    ("fp16", 264, 264, "no backward kernel"),
    ("bf16", 64, 0, "no backward kernel"),
])
def test_refusals_have_a_reason(kernels_on, dtype, d, dv, words):
    assert words in ops._C.backward_refusal(dtype, d, dv)


@needs_binding
def test_head_dims_are_those_of_the_build(kernels_on):
    """Every pair that a compiled one holds, and no other; a build may hold none."""
    text = ops._C.build_info().partition("bwd:")[2]
    compiled = [(name, int(d), int(dv))
                for name, d, dv in re.findall(r"(bf16|fp16) \((\d+),(\d+)\)", text)]
    for dtype in ("bf16", "fp16"):
        for d in range(8, 257, 8):
            for dv in (8, 64, 72, 128, 136, 192, 256):
                held = any(name == dtype and d <= cd and dv <= cdv for name, cd, cdv in compiled)
                assert (ops._C.backward_refusal(dtype, d, dv) == "") == held, (dtype, d, dv)


@needs_binding
def test_wrong_arguments_of_the_module():
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        ops._C.backward_refusal("int8", 64, 64)


@needs_binding
@pytest.mark.parametrize("choice", ["kernels", "torch"])
def test_what_the_kernels_do_not_cover_goes_to_pytorch(stand_in, choice):
    """The function of the CUDA key, called on tensors that no kernel takes."""
    before = ops.use_backward(choice)
    try:
        args = backward_args()
        cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        got = fa3.bwd.default.redispatch(cuda, *args)
    finally:
        ops.use_backward(before)
    assert stand_in.calls == ["bwd_torch"]
    for g, e in zip(got, blockwise_backward(*args)):
        torch.testing.assert_close(g, e)


# ---- layouts of the gradients --------------------------------------------------------------------


def strided(kind, b=2, s=6, h=4, d=16):
    if kind == "transposed":
        return torch.randn(b, h, s, d).transpose(1, 2)
    if kind == "packed":
        return torch.randn(b, s, 3, h, d)[:, :, 1]
    if kind == "expanded":
        return torch.randn(b, s, 1, d).expand(b, s, h, d)
    if kind == "columns":
        return torch.randn(b, s, d, h).transpose(2, 3)
    if kind == "one row, odd strides":
        return torch.randn(b, 1, h, d).as_strided((b, 1, h, d), (h * d, 7, d, 1))
    return torch.randn(b, s, h, d)


@pytest.mark.parametrize("kind", [
    "contiguous", "transposed", "packed", "expanded", "columns", "one row, odd strides"])
def test_gradients_lie_as_their_inputs_where_the_kernel_can_write(kind):
    t = strided(kind)
    grad = torch.randn(t.shape)
    got = ops._laid_out_like(t, grad)
    assert torch.equal(got, grad)
    assert got.stride() == t.stride() if kind == "transposed" else got.is_contiguous()
    fake = ops._gradient_like(t)
    assert fake.shape == t.shape and fake.dtype == t.dtype
    assert fake.stride() == t.stride() if kind == "transposed" else fake.is_contiguous()


@pytest.mark.parametrize("kind", ["transposed", "packed"])
def test_opcheck_of_strided_inputs(stand_in, kind):
    """Fakes and results agree in their strides: compiled code relies on it."""
    q, k, v = (strided(kind) for _ in range(3))
    out, lse = blockwise_forward(q, k, v, *options(6))
    args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *options(6))
    assert set(opcheck(fa3.bwd.default, args).values()) == {"SUCCESS"}
    assert set(opcheck(fa3.bwd_torch.default, args, test_utils=(
        "test_schema", "test_faketensor")).values()) == {"SUCCESS"}


# ---- autograd ------------------------------------------------------------------------------------


def test_selective_checkpointing_does_not_run_the_saved_forward_again(stand_in):
    saved = fa3.fwd.default

    def attend(q, k, v):
        return fa3.fwd(q * 1, k, v, *options(6))[0].sin()

    def policy(ctx, op, *args, **kwargs):
        keep = op is saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [torch.randn(2, 6, 4, 16, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    stand_in.calls.clear()
    out = checkpoint(attend, *leaves, use_reentrant=False,
                     context_fn=lambda: create_selective_checkpoint_contexts(policy))
    got = torch.autograd.grad(out.sum(), leaves)
    assert stand_in.calls == ["fwd", "bwd"]
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("flag, asked", [(False, False), (True, False), (False, True)])
def test_torch_flag_reaches_the_backward(stand_in, monkeypatch, flag, asked):
    """deterministic is the last but one argument of the operator."""
    seen = []
    gradients = StandIn.gradients
    monkeypatch.setattr(StandIn, "gradients", staticmethod(
        lambda *args: seen.append(args[-2]) or gradients(*args)))
    q = torch.randn(2, 6, 4, 16, requires_grad=True)
    rest = list(options(6))
    rest[-2] = asked
    torch.use_deterministic_algorithms(flag)
    try:
        fa3.fwd(q, q, q, *rest)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [flag or asked]


def test_stride_zero_gradient_of_out_and_none_of_the_lse(stand_in):
    """sum() gives dO with strides of 0, and no gradient of the LSE is made up."""
    q = torch.randn(2, 6, 4, 16, requires_grad=True)
    out, _ = fa3.fwd(q, q, q, *options(6))
    (got,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (expected,) = torch.autograd.grad(out, q, torch.ones_like(out))
    torch.testing.assert_close(got, expected)
