"""Wrong input is a ValueError or TypeError that names the argument."""

import numpy as np
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
    # Numbers that the operators' int64, or a kernel's float32, can't hold.
    (dict(window_size=(10**20, 0)), ValueError, r"^window_size\[0\] is 10+; expected at most 9223"),
    (dict(window_size=(0, 2**63)), ValueError, r"^window_size\[1\] is"),
    (dict(attention_chunk=10**30), ValueError, "^attention_chunk is 10+; expected at most 9223"),
    (dict(sm_margin=2**63), ValueError, "^sm_margin is"),
    (dict(num_splits=2**64), ValueError, "^num_splits is"),
    (dict(softcap=1e39), ValueError, r"^softcap is 1e\+39; expected .* float32 can hold"),
    (dict(softcap=1e300), ValueError, "^softcap is 1e.300; expected .* float32 can hold"),
    (dict(softcap=float("inf")), ValueError, "^softcap is inf; expected a finite number"),
    (dict(softcap=10**400), ValueError, "^softcap is 10+; expected .* float32 can hold"),
    (dict(softcap=1e-46), ValueError, "^softcap is 1e-46; expected 0.0 .off., or 1.2e-38"),
    (dict(softmax_scale=-1e300), ValueError, "^softmax_scale is -1e.300; expected .* float32 can"),
    (dict(softmax_scale=3.41e38), ValueError, "^softmax_scale is 3.41e.38; expected .* float32"),
    # Types that look like the right one are named with their module.
    (dict(causal=np.bool_(True)), TypeError, "^causal is .*, a numpy.bool_?; expected a bool"),
    (dict(pack_gqa=np.bool_(True)), TypeError, "a numpy.bool_?; expected a bool or None"),
    (dict(window_size=(np.int64(3), 0)), TypeError, "a numpy.int64; expected an int"),
    (dict(attention_chunk=np.int32(3)), TypeError, "a numpy.int32; expected an int"),
    (dict(softcap=np.float32(3)), TypeError, "a numpy.float32; expected a float"),
    (dict(softmax_scale=torch.ones(())), TypeError, "a torch.Tensor; expected a float"),
    (dict(q=flash_attn3.quantize(Q, K, K)), TypeError,
     r"^q is a QuantizedQKV; expected a torch.Tensor; .* flash_attn_func\(\*quantize\(q, k, v\)"),
    (dict(v=flash_attn3.quantize(Q, K, K)), TypeError, r"^v is a QuantizedQKV.*\*quantize"),
    (dict(q=(Q, K, K)), TypeError, "^q is a tuple; expected a torch.Tensor$"),
]


@pytest.mark.parametrize("change, error, pattern", DENSE, ids=lambda p: None)
def test_dense(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_func(**{**dict(q=Q, k=K, v=K), **change})


@pytest.mark.parametrize("options", [
    dict(window_size=(2**63 - 1, 0)), dict(softcap=3.4e38), dict(softcap=2.0**-126),
    dict(softmax_scale=-1e30), dict(softmax_scale=1e-300), dict(softcap=0),
    dict(softcap=np.float64(3.0))], ids=str)
def test_the_largest_and_smallest_numbers_run(options):
    out = flash_attn3.flash_attn_func(*(torch.randn(1, 5, 2, 16) for _ in range(3)), **options)
    assert bool(out.isfinite().all())


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
    (dict(max_seqlen_k=2**63), ValueError, "^max_seqlen_k is .*at most 9223"),
    (dict(max_seqlen_q=np.int64(6)), TypeError, "^max_seqlen_q .*a numpy.int64; expected an int"),
    (dict(seqused_k=ints(1)), ValueError, "seqused_k"),
    (dict(q=x(1, 10, 4, 16)), ValueError, "^q "),
])
def test_ragged(change, error, pattern):
    with pytest.raises(error, match=pattern):
        flash_attn3.flash_attn_varlen_func(**{**RAGGED, **change})


@pytest.mark.parametrize("change, error, pattern", [
    (dict(k=x(2, 1, 2, 16)), ValueError, "k and v"),
    (dict(cache_seqlens=ints(1)), ValueError, "cache_seqlens"),
    (dict(cache_seqlens=2.5), TypeError, "^cache_seqlens is 2.5.*an int or an int32 tensor"),
    (dict(cache_seqlens=[5, 6]), TypeError, r"^cache_seqlens is \[5, 6\], a list; expected an int "
     "or an int32 tensor"),
    (dict(cache_seqlens=2**31), ValueError, "^cache_seqlens is 2147483648; expected at most"),
    (dict(cache_seqlens=-1), ValueError, "^cache_seqlens is -1; expected 0 or more"),
    (dict(max_seqlen_q=-3), ValueError, "^max_seqlen_q is -3; expected 0 or more"),
    (dict(max_seqlen_q=4.0), TypeError, "^max_seqlen_q is 4.0, a float"),
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


@pytest.mark.parametrize("heads", [dict(), dict(num_heads_q=2)], ids=str)
def test_packed_errors_name_arguments_that_it_has(heads):
    shape = (1, 4, 4) if heads else (1, 4, 3, 2)
    e4m3 = x(*shape, 16).to(torch.float8_e4m3fn)
    for qkv, error, pattern in (
            (None, TypeError, "^qkv is a NoneType"), (x(4, 2), ValueError, "^qkv has 2 dim"),
            (x(*shape, 16).int(), TypeError, "^qkv has dtype torch.int32; expected torch.float16"),
            (x(*shape, 12), ValueError, "^qkv has head dim 12; expected a multiple of 8"),
            (x(*shape, 264), ValueError, "^qkv has head dim 264.*256"),
            (x(*shape, 24).to(e4m3.dtype), ValueError, "^qkv has head dim 24; .* of 16 from 16"),
            (x(*shape, 16).to_sparse(), TypeError, "^qkv has layout"),
            (e4m3.clone().requires_grad_(), NotImplementedError, "^qkv .*requires a gradient")):
        with pytest.raises(error, match=pattern):
            flash_attn3.flash_attn_qkvpacked_func(qkv, **heads)
    with pytest.raises(ValueError, match=r"^qkv has shape \(1, 4, 3, 0, 16\); expected .* a head"):
        flash_attn3.flash_attn_qkvpacked_func(x(1, 4, 3, 0, 16))


def test_gradient_of_e4m3_is_one_clear_error():
    """C61."""
    q = x(1, 4, 2, 16, dtype=torch.float32).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        flash_attn3.flash_attn_func(q, q, q)
