"""Names, positions and defaults of the public functions, as promised."""

import inspect

import pytest
import torch

import flash_attn3

pytestmark = pytest.mark.cpu

P = inspect.Parameter

ATTENTION = ("qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
             "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
             "sm_margin=0, return_attn_probs=False")
QUANTISING = "block=128, rotate=False, smooth_k=False"
# What comes after a semicolon is keyword-only.
PROMISED = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, " + ATTENTION,
    "flash_attn_qkvpacked_func":
        "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func":
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        "seqused_k=None, softmax_scale=None, causal=False, " + ATTENTION,
    "flash_attn_with_kvcache":
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
    # This project's own: its options come last, by keyword.
    "quantize": "q, k, v; block=128, rotate=False, smooth_k=False, transpose_v=None, "
        "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None",
    "flash_attn_fp8_func":
        "q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, deterministic=False, sm_margin=0, return_attn_probs=False; " + QUANTISING,
    "flash_attn_fp8_varlen_func":
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        "seqused_k=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, sm_margin=0, "
        "return_attn_probs=False; " + QUANTISING,
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata":
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0",
}


@pytest.mark.parametrize("name", PROMISED)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn3, name)).parameters.values()
    by_kind = {kind: ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
        if p.kind is kind) for kind in (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)}
    got = "; ".join(filter(None, by_kind.values()))
    assert got == PROMISED[name]
    assert getattr(flash_attn3, name).__doc__


def test_return_type_follows_the_flag_alone():
    q = torch.randn(1, 4, 2, 16)
    assert isinstance(flash_attn3.flash_attn_func(q, q, q), torch.Tensor)
    assert len(flash_attn3.flash_attn_func(q, q, q, return_attn_probs=True)) == 2
    assert isinstance(flash_attn3.flash_attn_with_kvcache(q, q, q), torch.Tensor)
    assert len(flash_attn3.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)) == 2
