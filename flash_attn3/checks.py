"""Validation of what callers pass, the same for every backend.

Every error is a ValueError or TypeError that names the argument, what it was, and what is accepted.
Values inside device tensors are looked at only with FLASH_ATTN3_CHECK=1, since that synchronises.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
# float32 and float64 run on the fallback alone.
DTYPES = HALF_DTYPES + (torch.float32, torch.float64, torch.float8_e4m3fn)
_INT_TYPES = (int, torch.SymInt)
# What the operators' schemas and an int32 tensor hold.
INT64_MAX, INT32_MAX = 2**63 - 1, 2**31 - 1


def _type_name(value) -> str:
    """With its module where that is not Python's own: a numpy.bool is no bool."""
    of = type(value)
    return of.__name__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__name__}"


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))


def tensor(name: str, t, dims: tuple[int, ...] = ()) -> None:
    if not isinstance(t, Tensor):
        from .quantized import QuantizedQKV  # which imports this module

        parts = isinstance(t, QuantizedQKV)
        hint = "; its parts go to flash_attn_func(*quantize(q, k, v), ...)" if parts else ""
        raise TypeError(f"{name} is a {type(t).__name__}; expected a torch.Tensor{hint}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} has layout {t.layout}; expected a strided tensor")
    if dims and t.dim() not in dims:
        wanted = " or ".join(str(d) for d in dims)
        raise ValueError(
            f"{name} has {t.dim()} dimensions, shape {_shape(t)}; expected {wanted} dimensions")


def on_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}; expected {q.device}, the device of q")


def shape(name: str, t: Tensor, expected: tuple, meaning: str = "") -> None:
    if tuple(t.shape) != tuple(expected):
        wanted = str(tuple(expected)) + (f", {meaning}" if meaning else "")
        raise ValueError(f"{name} has shape {_shape(t)}; expected {wanted}")


def same_dtype(name: str, t: Tensor, q: Tensor) -> None:
    if t.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}; expected {q.dtype}, the dtype of q")


def floating_point(name: str, t: Tensor) -> None:
    if not t.is_floating_point():
        raise TypeError(f"{name} has dtype {t.dtype}; expected a floating-point dtype")


def floating_dtype(name: str, value) -> None:
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(
            f"{name} is {value!r}; expected a floating-point torch.dtype, as torch.bfloat16, or "
            "None")


def integer(name: str, value, least: int, accepted: str = "", types: str = "an int",
            most: int = INT64_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, _INT_TYPES):
        raise TypeError(f"{name} is {value!r}, a {_type_name(value)}; expected {types}")
    if not least <= value <= most:
        wanted = f"at most {most}" if value > most else accepted or f"{least} or more"
        raise ValueError(f"{name} is {value}; expected {wanted}")


def boolean(name: str, value, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, (bool, int)):
        extra = " or None" if optional else ""
        raise TypeError(f"{name} is {value!r}, a {_type_name(value)}; expected a bool{extra}")


def real(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} is {value!r}, a {_type_name(value)}; expected a float")
    # Kernels take it in float32. math.isfinite can't be traced with a symbolic float.
    largest = 2.0**128 - 2.0**104
    if not -largest <= value <= largest:
        raise ValueError(
            f"{name} is {value}; expected a finite number that float32 can hold, at most 3.4e38 in "
            "magnitude")


def window(window_size) -> tuple[int, int]:
    """(left, right) of window_size, -1 unlimited."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"window_size is {window_size!r}; expected a pair of ints (left, right), -1 unlimited")
    if len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}; expected two ints (left, right), -1 unlimited")
    left, right = window_size
    integer("window_size[0]", left, -1, "-1 (unlimited), 0 or more")
    integer("window_size[1]", right, -1, "-1 (unlimited), 0 or more")
    return left, right


def options(softmax_scale, causal, attention_chunk, softcap, num_splits, pack_gqa, deterministic,
            sm_margin) -> None:
    """The scalar options that all public functions share."""
    if softmax_scale is not None:
        real("softmax_scale", softmax_scale)
    boolean("causal", causal)
    integer("attention_chunk", attention_chunk, 0, "0 (off) or more")
    real("softcap", softcap)
    if softcap != 0 and softcap < 2.0**-126:  # float32 may round what is smaller to 0
        raise ValueError(f"softcap is {softcap}; expected 0.0 (off), or 1.2e-38 (2^-126) or more")
    integer("num_splits", num_splits, 0, "0 (choose) or more")
    boolean("pack_gqa", pack_gqa, optional=True)
    boolean("deterministic", deterministic)
    integer("sm_margin", sm_margin, 0)


def head_dim(name: str, value: int, dtype: torch.dtype, verb: str = "has head dim") -> None:
    step = 16 if dtype == torch.float8_e4m3fn else 8
    if value < step or value > 256 or value % step:
        raise ValueError(
            f"{name} {verb} {value}; expected a multiple of {step} from {step} to 256 for {dtype}")


def takes_qv(d: int, dv: int) -> bool:
    return d == 64 and dv in (256, 512)


def _head_dims(q: Tensor, v: Tensor, v_name: str, has_qv: bool) -> None:
    d, dv = q.shape[-1], v.shape[-1]
    if not has_qv:
        head_dim("q", d, v.dtype)
        head_dim(v_name, dv, v.dtype)
    elif not takes_qv(d, dv):
        raise ValueError(
            f"qv is given with head dims D {d} of q and Dv {dv} of {v_name}; expected D 64 and "
            "Dv 256 or 512")


def dtype(name: str, t: Tensor) -> None:
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {t.dtype}; expected torch.float16, torch.bfloat16 or "
            "torch.float8_e4m3fn (on the fallback also torch.float32 and torch.float64)")


def qkv(q, k, v, ragged_q: bool, ragged_k: bool, has_qv: bool = False, k_name: str = "k",
        v_name: str = "v", quantises_q: bool = False) -> None:
    """Types, devices, ranks and shapes of q, k, v; batch sizes are the caller's to compare.

    quantises_q: float16 and bfloat16 queries of e4m3 keys and values are accepted.
    """
    tensor("q", q, (3,) if ragged_q else (4,))
    tensor(k_name, k, (3,) if ragged_k else (4,))
    tensor(v_name, v, (3,) if ragged_k else (4,))
    dtype("q", q)
    on_the_fly = quantises_q and q.dtype in HALF_DTYPES and k.dtype == torch.float8_e4m3fn
    if on_the_fly and v.dtype != k.dtype:
        raise TypeError(
            f"{v_name} has dtype {v.dtype}; expected {k.dtype}, the dtype of {k_name}")
    for name, t in ((k_name, k), (v_name, v)):
        if not on_the_fly:
            same_dtype(name, t, q)
        on_device(name, t, q)
    h, hk = q.shape[-2], k.shape[-2]
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{k_name} has head dim {k.shape[-1]}, shape {_shape(k)}; expected {q.shape[-1]}, the "
            f"head dim of q {_shape(q)}")
    if hk < 1 or h < 1 or h % hk:
        raise ValueError(
            f"{k_name} has {hk} heads; expected a divisor of q's {h} heads (q has shape "
            f"{_shape(q)})")
    shape(v_name, v, tuple(k.shape[:-1]) + (v.shape[-1],), f"as {k_name} but for the head dim")
    _head_dims(q, v, v_name, has_qv)


def int_vector(name: str, t, length: Optional[int], q: Tensor, meaning: str = "") -> None:
    """A 1-D int32 tensor on q's device; `length` None accepts any of at least one element."""
    tensor(name, t)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {t.dtype}; expected torch.int32")
    if t.dim() != 1 or (length is None and t.shape[0] < 1):
        raise ValueError(
            f"{name} has shape {_shape(t)}; expected one dimension, batch + 1 elements")
    if length is not None:
        shape(name, t, (length,), meaning)
    on_device(name, t, q)


def qv_tensor(qv, q: Tensor, v: Tensor) -> None:
    tensor("qv", qv)
    shape("qv", qv, tuple(q.shape[:-1]) + (v.shape[-1],), "as q but with v's head dim")
    same_dtype("qv", qv, q)
    on_device("qv", qv, q)


def scale(name: str, t, expected: tuple, q: Tensor, meaning: str = "") -> None:
    """A float32 tensor of that shape on q's device, of any strides."""
    tensor(name, t)
    if t.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {t.dtype}; expected torch.float32")
    shape(name, t, expected, meaning)
    on_device(name, t, q)


def descale(name: str, t, batch: int, heads_kv: int, q: Tensor) -> None:
    if t is not None:
        scale(name, t, (batch, heads_kv), q, "(batch, KV heads)")


def no_gradient_of_e4m3(inputs) -> None:
    """`inputs`: pairs of a name and a tensor or None, of a call with e4m3 among them."""
    if not torch.is_grad_enabled():
        return
    for name, t in inputs:
        if t is not None and t.requires_grad:
            raise NotImplementedError(
                f"{name} ({t.dtype}) requires a gradient, and a call with float8_e4m3fn inputs has "
                "none: pass float16 or bfloat16 to flash_attn_fp8_func, which has one, or call "
                "under torch.no_grad()")


# ---- values inside device tensors, only with FLASH_ATTN3_CHECK=1 ---------------------------------


def offsets_values(name: str, cu: Tensor, total: int, max_seqlen: int, max_name: str,
                   rows_of: str) -> list[int]:
    """Checks the values of a cu_seqlens tensor; returns the lengths of the sequences."""
    at = cu.tolist()
    lengths = [b - a for a, b in zip(at, at[1:])]
    if at[0] < 0 or any(n < 0 for n in lengths):
        raise ValueError(f"{name} is {at}; expected offsets from 0 up that never decrease")
    if at[-1] > total:
        raise ValueError(
            f"{name} ends at {at[-1]}; expected at most {total}, the rows of {rows_of}")
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(
            f"{max_name} is {max_seqlen}; expected at least {max(lengths)}, the longest sequence "
            f"of {name}")
    return lengths


def lengths_values(name: str, used: Tensor, limits: list[int]) -> None:
    values = used.tolist()
    for b, (n, limit) in enumerate(zip(values, limits)):
        if n < 0 or n > limit:
            raise ValueError(f"{name}[{b}] is {n}; expected 0 to {limit}, the rows of sequence {b}")


def index_values(name: str, index: Tensor, limit: int) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
        raise ValueError(f"{name} holds {index.tolist()}; expected values from 0 to {limit - 1}")
