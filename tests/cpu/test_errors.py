"""Wrong input is a ValueError or TypeError that names the argument."""

import pytest
import torch

import flash_attn3

pytestmark = pytest.mark.cpu


def x(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


Q, K = x(2, 4, 4, 16), x(2, 6, 2, 16)
DENSE = [
    (dict(q=3), TypeError, "^q "), (dict(k=None), TypeError, "^k "),
    (dict(q=x(4, 4, 16)), ValueError, "^q "),
    (dict(k=x(3, 6, 2, 16)), ValueError, "^v |^k "), (dict(k=x(2, 6, 2, 24)), ValueError, "^k "),
    (dict(v=x(2, 5, 2, 16)), ValueError, "^v "), (dict(v=x(2, 6, 2, 12)), ValueError, "^v .*12"),
    (dict(k=x(2, 6, 3, 16), v=x(2, 6, 3, 16)), ValueError, "^k .*3"),
    (dict(v=K.float()), TypeError, "^v "), (dict(q=Q.int()), TypeError, "^q "),
    (dict(v=x(2, 6, 2, 264)), ValueError, "^v .*264.*256"),
    (dict(softmax_scale="a"), TypeError, "softmax_scale"),
    (dict(softmax_scale=float("nan")), ValueError, "softmax_scale"),
    (dict(causal="yes"), TypeError, "causal"), (dict(window_size=3), TypeError, "window_size"),
    (dict(window_size=(1, 2, 3)), ValueError, "window_size"),
    (dict(window_size=(-2, 0)), ValueError, "window_size"),
    (dict(window_size=(1.5, 0)), TypeError, "window_size"),
    (dict(attention_chunk=-1), ValueError, "attention_chunk"),
    (dict(softcap=-1.0), ValueError, "softcap"), (dict(num_splits=-1), ValueError, "num_splits"),
    (dict(pack_gqa="x"), TypeError, "pack_gqa"), (dict(sm_margin=-3), ValueError, "sm_margin"),
    (dict(qv=x(2, 4, 4, 16)), ValueError, "^qv "),
    (dict(q_descale=x(2, 2)), TypeError, "q_descale"),
    (dict(k_descale=x(2, 4, dtype=torch.float32)), ValueError, "k_descale"),
    (dict(k=K.to("meta"), v=K), ValueError, "^k .*meta"),
]


@pytest.mark.parametrize("change, error, pattern", DENSE, ids=lambda p: None)
def test_dense(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_func(**{**dict(q=Q, k=K, v=K), **change})


@pytest.mark.parametrize("d", [4, 12, 100, 260, 264])
def test_head_dims_outside_of_the_kernels(d):
    """C39: an error that names the limit, never a wrong result."""
    with pytest.raises(ValueError, match=f"{d}.*multiple of 8.*256"):
        flash_attn3.flash_attn_func(x(1, 4, 2, d), x(1, 4, 2, d), x(1, 4, 2, d))


RAGGED = dict(q=x(10, 4, 16), k=x(12, 2, 16), v=x(12, 2, 16), cu_seqlens_q=ints(0, 4, 10),
              cu_seqlens_k=ints(0, 6, 12), max_seqlen_q=6, max_seqlen_k=6)


@pytest.mark.parametrize("change, error, pattern", [
    (dict(cu_seqlens_q=[0, 4]), TypeError, "cu_seqlens_q"),
    (dict(cu_seqlens_k=ints(0, 6, 12, dtype=torch.int64)), TypeError, "cu_seqlens_k.*int32"),
    (dict(cu_seqlens_k=ints(0, 12)), ValueError, "cu_seqlens_k"),
    (dict(cu_seqlens_q=ints()), ValueError, "cu_seqlens_q"),
    (dict(max_seqlen_q=6.0), TypeError, "max_seqlen_q"),
    (dict(max_seqlen_k=-1), ValueError, "max_seqlen_k"),
    (dict(seqused_k=ints(1)), ValueError, "seqused_k"),
    (dict(q=x(1, 10, 4, 16)), ValueError, "^q "),
])
def test_ragged(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_varlen_func(**{**RAGGED, **change})


@pytest.mark.parametrize("change, error, pattern", [
    (dict(k=x(2, 1, 2, 16)), ValueError, "k and v"),
    (dict(cache_seqlens=ints(1)), ValueError, "cache_seqlens"),
    (dict(cache_seqlens=2.5), TypeError, "cache_seqlens"),
    (dict(page_table=ints(0, 1)), ValueError, "page_table"),
    (dict(cache_batch_idx=ints(0, 1, 2)), ValueError, "cache_batch_idx"),
    (dict(k_cache=x(3, 6, 2, 16), v_cache=x(3, 6, 2, 16)), ValueError, "k_cache"),
    (dict(rotary_cos=x(9, 8)), ValueError, "rotary"),
    (dict(cu_seqlens_q=ints(0, 4, 8), q=x(8, 4, 16)), ValueError, "max_seqlen_q"),
    (dict(scheduler_metadata=ints(1, 2)), ValueError, "scheduler_metadata"),
    (dict(q=Q.clone().requires_grad_()), NotImplementedError, "^q "),
    (dict(k_cache=K.to(torch.float8_e4m3fn), v_cache=K.to(torch.float8_e4m3fn)), TypeError,
     "^k_cache has dtype torch.float8_e4m3fn"),
])
def test_cache(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_with_kvcache(**{**dict(q=Q, k_cache=K, v_cache=K), **change})


def test_packed():
    with pytest.raises(ValueError, match="num_heads_q"):
        flash_attn3.flash_attn_qkvpacked_func(x(1, 4, 6, 16))
    with pytest.raises(ValueError, match="num_heads_q"):
        flash_attn3.flash_attn_qkvpacked_func(x(1, 4, 6, 16), num_heads_q=3)
    with pytest.raises(ValueError, match="num_heads_q is 3; expected a multiple of 2"):
        flash_attn3.flash_attn_qkvpacked_func(x(1, 4, 7, 16), num_heads_q=3)
    with pytest.raises(ValueError, match="qkv"):
        flash_attn3.flash_attn_qkvpacked_func(x(1, 4, 2, 2, 16))


def test_gradient_of_e4m3_is_one_clear_error():
    """C61."""
    q = x(1, 4, 2, 16, dtype=torch.float32).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        flash_attn3.flash_attn_func(q, q, q)
