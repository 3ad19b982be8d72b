"""backend_for, FLASH_ATTN3_BACKEND, FLASH_ATTN3_CHECK."""

import dataclasses
import types

import pytest
import torch

import flash_attn3
from flash_attn3 import dispatch, env
from flash_attn3.backends.call import make_call

pytestmark = pytest.mark.cpu


def test_backends_on_the_cpu_and_their_reasons():
    q = torch.randn(1, 6, 2, 16)
    k = torch.randn(1, 8, 2, 16)
    assert flash_attn3.backend_for(q, k, k).name == "aten_cpu_flash"
    assert flash_attn3.backend_for(q, q, q, causal=True).name == "aten_cpu_flash"
    chosen = flash_attn3.backend_for(q, k, k, causal=True)
    assert chosen.name == "blockwise" and "top left" in chosen.reasons["aten_cpu_flash"]
    assert "sm90" in chosen.reasons and "top left" in str(chosen)
    for options in (dict(softcap=1.0), dict(attention_chunk=3), dict(window_size=(2, 2))):
        assert flash_attn3.backend_for(q, k, k, **options).name == "blockwise"


@pytest.mark.parametrize("name", ["blockwise", "aten_cpu_flash"])
def test_forced_backend_runs(name, monkeypatch):
    q = torch.randn(1, 6, 2, 16)
    want = flash_attn3.flash_attn_func(q, q, q)
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    assert flash_attn3.backend_for(q, q, q).name == name
    assert torch.allclose(flash_attn3.flash_attn_func(q, q, q), want, atol=1e-5)


@pytest.mark.parametrize("name, word", [
    ("sm90", "sm90"), ("aten_flash", "CUDA"), ("flex", "CUDA"), ("aten_cpu_flash", "softcap"),
    ("fast", "accepted")])
def test_forced_backend_that_cannot_run_says_why(name, word, monkeypatch):
    q = torch.randn(1, 6, 2, 16)
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", name)
    with pytest.raises(ValueError, match=word):
        flash_attn3.flash_attn_func(q, q, q, softcap=2.0)


@pytest.mark.parametrize("cu, used, word", [
    ([0, 5, 3], None, "cu_seqlens_q"), ([0, 5, 99], None, "cu_seqlens_q"),
    ([0, 2, 10], None, "max_seqlen_q"), ([0, 5, 10], [5, 6], "seqused_q")])
def test_values_are_checked_on_demand(cu, used, word, monkeypatch):
    q = torch.randn(10, 2, 16)
    cu = torch.tensor(cu, dtype=torch.int32)
    used = None if used is None else torch.tensor(used, dtype=torch.int32)
    out = flash_attn3.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, used)
    assert out.shape == q.shape and bool(out.isfinite().all())
    monkeypatch.setenv("FLASH_ATTN3_CHECK", "1")
    with pytest.raises(ValueError, match=word):
        flash_attn3.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, used)


@pytest.mark.parametrize("value", ["yes", "2", "true", " ", "01"])
def test_the_switch_is_0_or_1(value, monkeypatch):
    q = torch.randn(1, 6, 2, 16)
    for fine in ("", "0", "1"):
        monkeypatch.setenv("FLASH_ATTN3_CHECK", fine)
        assert env.check_values() == (fine == "1")
        assert flash_attn3.flash_attn_func(q, q, q).shape == q.shape
    monkeypatch.setenv("FLASH_ATTN3_CHECK", value)
    with pytest.raises(ValueError, match=f"^FLASH_ATTN3_CHECK is '{value}'; accepted: 0, 1, or un"):
        flash_attn3.flash_attn_func(q, q, q)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("ragged", [False, True])
def test_lengths_are_checked_where_nothing_needs_them(name, ragged):
    q = torch.randn(1, 6, 2, 16)
    options = {}
    if ragged:
        cu = torch.tensor([0, 6], dtype=torch.int32)
        q, options = q[0], dict(
            cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)
    for function in (flash_attn3.backend_for, flash_attn3.functional.flash_attn_fwd):
        function(q, q, q, **{**options, name: 6})
        with pytest.raises(ValueError, match=f"^{name} is -22; expected 0 or more"):
            function(q, q, q, **{**options, name: -22})
        with pytest.raises(TypeError, match=f"^{name} is 6.0, a float; expected an int"):
            function(q, q, q, **{**options, name: 6.0})


def kernel_call(**changes):
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    call = make_call(q, q, q, None, None, None, None, 8, 8, 0.125, False, -1, -1, 0, 0.0, False)
    return dataclasses.replace(call, device=torch.device("cuda", 1), **changes)


@pytest.fixture
def compiled(monkeypatch):
    """A compiled part for (64, 64) on cuda:1, which keeps what it was asked."""
    asked = []

    def compiled_for(*args):
        asked.append(args)
        return args[1:] == (64, 64, 1)

    part = types.SimpleNamespace(
        asked=asked, compiled_for=compiled_for,
        device_refusal=lambda index: "" if index == 1 else f"not cuda:{index}")
    monkeypatch.setattr(dispatch.ops, "_C", part)
    return part


def test_kernels_are_asked_about_the_device_of_the_call(compiled):
    assert dispatch.sm90_reason(kernel_call()) is None
    assert compiled.asked == [("bf16", 64, 64, 1)]
    assert dispatch.sm90_reason(kernel_call(dtype=torch.float16)) is None
    assert "no kernel" in dispatch.sm90_reason(kernel_call(head_dim=128))
    assert compiled.asked[1:] == [("fp16", 64, 64, 1), ("bf16", 128, 64, 1)]
    elsewhere = dataclasses.replace(kernel_call(), device=torch.device("cuda", 0))
    assert dispatch.sm90_reason(elsewhere) == "not cuda:0"


@pytest.mark.parametrize("scale", [0.0, -0.25, 1e-60])
def test_kernels_take_any_softmax_scale(scale, compiled):
    assert dispatch.select(kernel_call(scale=scale)).name == "sm90"
    assert dispatch.uses_kernels(kernel_call(scale=scale, softcap=3.0))


def test_forced_backend_keeps_the_kernels_out(compiled, monkeypatch):
    assert dispatch.uses_kernels(kernel_call())
    monkeypatch.setenv("FLASH_ATTN3_BACKEND", "blockwise")
    assert not dispatch.uses_kernels(kernel_call())
    assert dispatch.select(kernel_call()).name == "blockwise"
