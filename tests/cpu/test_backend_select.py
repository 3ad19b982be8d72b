"""backend_for, FLASH_ATTN3_BACKEND, FLASH_ATTN3_CHECK."""

import pytest
import torch

import flash_attn3

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
