"""The operators flash_attn3::fwd, fwd_out, bwd, bwd_torch, fwd_qkvpacked, bwd_qkvpacked, fwd_e4m3,
quantize and row_mean: what C++ does not register of them.

- `_C` is the compiled module, or None; `load_error` then says why in one sentence, and the
  schemas are defined here instead, so that fake tensors and export work without it.
- Fakes of all.
- bwd_torch, the gradients by PyTorch's kernels: bwd calls it where this project's kernels don't
  cover a call, or FLASH_ATTN3_BACKWARD asks for it (`use_backward`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Optional

import torch
from torch import Tensor

from . import env
from .backends import blockwise_backward, e4m3, torch_attn
from .backends.call import lse_shape, make_call, unpacked

DENSE_SCHEMA = (
    "float softmax_scale, bool causal, SymInt window_left, SymInt window_right, "
    "SymInt attention_chunk, float softcap, bool deterministic, SymInt sm_margin"
)
OPTIONS_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {DENSE_SCHEMA}"
)
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS_SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv)"
)
# The same text as in csrc/api/library.cpp; tests/cpu/test_ops_fake.py compares the two.
SCHEMAS = {
    "fwd": f"fwd(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor out, Tensor lse)",
    "fwd_out": f"fwd_out(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}, "
               "Tensor(a!) out, Tensor(b!) lse) -> ()",
    "bwd": f"bwd{_BACKWARD_SCHEMA}",
    "bwd_torch": f"bwd_torch{_BACKWARD_SCHEMA}",
    "fwd_qkvpacked": f"fwd_qkvpacked(Tensor qkv, SymInt num_heads_q, {DENSE_SCHEMA}) "
                     "-> (Tensor out, Tensor lse)",
    "bwd_qkvpacked": "bwd_qkvpacked(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
                     f"SymInt num_heads_q, {DENSE_SCHEMA}) -> Tensor",
    "fwd_e4m3": "fwd_e4m3(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, "
                "Tensor? v_scale, SymInt q_block, SymInt k_block, SymInt v_block, "
                f"bool v_transposed, bool exact_lse, {OPTIONS_SCHEMA}) "
                "-> (Tensor out, Tensor lse)",
    "quantize": "quantize(Tensor x, Tensor? mean, Tensor? cu_seqlens, Tensor? seqused, "
                "SymInt block, bool rotate, bool transposed) -> (Tensor values, Tensor scale)",
    "row_mean": "row_mean(Tensor x, Tensor? cu_seqlens, Tensor? seqused) -> Tensor",
}

# ---- the compiled module -------------------------------------------------------------------------

REBUILD = "rebuild it with `pip install --no-build-isolation .` in a clone of flash_attn3"
_MARKER = re.compile(rb"FLASH_ATTN3_BUILT_AGAINST_TORCH=([^;\x00]+);")


def _series(version: str) -> tuple[str, ...]:
    """(major, minor): within it torch keeps the C++ interface that the binding uses."""
    return tuple(version.split("+")[0].split(".")[:2])


def version_refusal(built_against: Optional[str], running: str) -> Optional[str]:
    """Why a binding built against one torch can't serve another; None if it can."""
    if built_against is None or _series(built_against) == _series(running):
        return None
    return (
        f"flash_attn3 was built against torch {built_against} and this is torch {running}: "
        f"{REBUILD}"
    )


def _built_against(path: Path) -> Optional[str]:
    """The torch that the module at `path` was compiled with, read without loading it.

    Loading comes second since a module of another torch may crash instead of failing to load.
    """
    found = _MARKER.search(path.read_bytes())
    return found.group(1).decode() if found else None


def _load() -> tuple[Optional[ModuleType], Optional[str]]:
    name = f"{__package__}._C"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        try:
            reason = importlib.import_module(f"{__package__}._build_info").NO_KERNELS_REASON
        except (ImportError, AttributeError):
            reason = None
        return None, f"flash_attn3 was installed without its kernels ({reason or 'not compiled'})"
    reason = version_refusal(_built_against(Path(spec.origin)), torch.__version__)
    if reason is None:
        try:
            return importlib.import_module(name), None
        except (ImportError, OSError) as error:
            reason = f"flash_attn3 could not load its compiled part ({error}): {REBUILD}"
    # The package still works, by PyTorch's kernels; but kernels were installed, so say it.
    warnings.warn(f"{reason}. Until then it runs on PyTorch's kernels.", RuntimeWarning,
                  stacklevel=2)
    return None, reason


_C, load_error = _load()


def use_backward(name: str) -> str:
    """Choose whose kernels compute gradients, "kernels" or "torch"; returns what was chosen before.

    Overrides FLASH_ATTN3_BACKWARD in this process. Without compiled kernels it is "torch" always.
    """
    if name not in env.BACKWARDS:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(env.BACKWARDS)}")
    if _C is None:
        return "torch"
    return "kernels" if _C.use_backward_kernels(name == "kernels") else "torch"


use_backward(env.read_backward())

# A fragment: C++ defines the operators when it is there, backends/operators.py the fallback ones.
_library = torch.library.Library("flash_attn3", "FRAGMENT")


# ---- fakes ---------------------------------------------------------------------------------------


def _fake_fwd(q, k, v, cu_seqlens_q, *options) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)


def _fake_fwd_out(q, k, v, *rest) -> None:
    return None


def _fake_fwd_e4m3(q, k, v, q_scale, k_scale, v_scale, q_block, k_block, v_block, v_transposed,
                   exact_lse, cu_seqlens_q, *options) -> tuple[Tensor, Tensor]:
    head_dim_v = v.shape[2] if v_transposed else v.shape[-1]
    out = q.new_empty((*q.shape[:-1], head_dim_v), dtype=torch.bfloat16)
    return out, q.new_empty(lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)


def _fake_quantize(x, mean, cu_seqlens, seqused, block, rotate, transposed):
    ragged = cu_seqlens is not None
    batch = cu_seqlens.shape[0] - 1 if ragged else x.shape[0]
    heads, dim = x.shape[-2:]
    blocks = e4m3.block_count(ragged, batch, x.shape[0 if ragged else 1], block)
    values = x.new_empty(
        (blocks if ragged else batch * blocks, heads, dim, e4m3.VALUE_BLOCK) if transposed
        else x.shape, dtype=torch.float8_e4m3fn)
    scale = (heads, blocks) if ragged else (batch, heads, blocks)
    return values, x.new_empty(scale, dtype=torch.float32)


def _fake_row_mean(x, cu_seqlens, seqused) -> Tensor:
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((batch, *x.shape[-2:]), dtype=torch.float32)


def _keeps_layout(t: Tensor) -> bool:
    """Whether the gradient of t lies as t does: no holes, a unit last stride. Else contiguous.

    The rule of csrc/api/bwd.cpp: there the kernel can write, and no copy follows in the backward
    of a transpose.
    """
    if t.is_contiguous() or t.stride(-1) != 1:
        return False
    dense = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != dense:
            return False
        dense *= size
    return True


def _gradient_like(t: Tensor) -> Tensor:
    if _keeps_layout(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return t.new_empty(t.shape)


def _fake_bwd(dout, dlse, q, k, v, out, lse, *options) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient_like(q), _gradient_like(k), _gradient_like(v)


def _fake_fwd_qkvpacked(qkv, num_heads_q, *options) -> tuple[Tensor, Tensor]:
    return _fake_fwd(*unpacked(qkv, num_heads_q), None)


def _fake_bwd_qkvpacked(dout, dlse, qkv, out, lse, num_heads_q, *options) -> Tensor:
    return _gradient_like(qkv)


# ---- backward on CUDA, by PyTorch's kernels ------------------------------------------------------


def _check_shape(t: Tensor, name: str, expected: tuple, device: torch.device) -> None:
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(t.shape)}; expected {tuple(expected)}")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}; expected {device}, where q is")


def _bwd_torch(dout, dlse, q, k, v, out, lse, *options):
    """flash_attn3::bwd_torch: dq, dk, dv; zero in rows outside of every sequence."""
    grads = _bwd_by_torch(dout, dlse, q, k, v, out, lse, *options)
    return tuple(_laid_out_like(t, grad) for t, grad in zip((q, k, v), grads))


def _laid_out_like(t: Tensor, grad: Tensor) -> Tensor:
    if not _keeps_layout(t):
        return grad.contiguous()
    return grad if grad.stride() == t.stride() else _gradient_like(t).copy_(grad)


def _bwd_by_torch(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                  max_seqlen_q, max_seqlen_k, *rest):
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = (*lengths, max_seqlen_q, max_seqlen_k, *rest)
    out_shape = (*q.shape[:-1], v.shape[-1])
    _check_shape(out, "out", out_shape, q.device)
    _check_shape(dout, "dout", out_shape, q.device)
    of_lse = lse_shape(q, cu_seqlens_q is not None)
    _check_shape(lse, "lse", of_lse, q.device)
    if dlse is not None:
        _check_shape(dlse, "dlse", of_lse, q.device)
    dout = dout.to(q.dtype)
    out = out.to(q.dtype)
    lse = lse.float()

    call = make_call(q, k, v, *options[:-1])
    if call.empty:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # Tensors have their dtypes by design here: an autocast of the caller's must not change them.
    # The guard: some of PyTorch's kernels launch on the current device, not on that of q.
    with torch.autocast("cuda", enabled=False), torch.cuda.device(q.device):
        # PyTorch's kernels take no gradient of the LSE; folding it into `out` would cost its bits.
        if dlse is None and torch_attn.cuda_flash_backward_reasons(call) is None:
            return torch_attn.cuda_flash_backward(call, dout, q, k, v, out, lse, *lengths)
        return blockwise_backward(dout, dlse, q, k, v, out, lse, *options)


# ---- autograd where C++ does not bring it --------------------------------------------------------


def _setup_context(ctx, inputs, output) -> None:
    *tensors, max_seqlen_q, max_seqlen_k = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (max_seqlen_q, max_seqlen_k, *inputs[9:])


def _options_of_backward(ctx) -> list:
    options = list(ctx.options)
    options[-2] = options[-2] or torch.are_deterministic_algorithms_enabled()
    return options


def _backward(ctx, dout, dlse):
    q, k, v, *lengths, out, lse = ctx.saved_tensors
    nothing = (None,) * (len(lengths) + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.flash_attn3.bwd(
        dout, dlse, q, k, v, out, lse, *lengths, *_options_of_backward(ctx))
    return (*grads, *nothing)


def _setup_context_qkvpacked(ctx, inputs, output) -> None:
    qkv, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output)


def _backward_qkvpacked(ctx, dout, dlse):
    qkv, out, lse = ctx.saved_tensors
    nothing = (None,) * len(ctx.options)
    if dout is None and dlse is None:
        return (None, *nothing)
    if dout is None:
        dout = torch.zeros_like(out)
    dqkv = torch.ops.flash_attn3.bwd_qkvpacked(
        dout, dlse, qkv, out, lse, *_options_of_backward(ctx))
    return dqkv, *nothing


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "flash_attn3 has no second derivative of attention: differentiate its gradients with "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) "
        "instead, or call backward without create_graph")


def _register() -> None:
    if _C is None:
        for schema in SCHEMAS.values():
            _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake("flash_attn3::fwd", _fake_fwd, lib=_library)
    torch.library.register_fake("flash_attn3::fwd_out", _fake_fwd_out, lib=_library)
    torch.library.register_fake("flash_attn3::bwd", _fake_bwd, lib=_library)
    torch.library.register_fake("flash_attn3::bwd_torch", _fake_bwd, lib=_library)
    torch.library.register_fake(
        "flash_attn3::fwd_qkvpacked", _fake_fwd_qkvpacked, lib=_library)
    torch.library.register_fake(
        "flash_attn3::bwd_qkvpacked", _fake_bwd_qkvpacked, lib=_library)
    torch.library.register_fake("flash_attn3::fwd_e4m3", _fake_fwd_e4m3, lib=_library)
    torch.library.register_fake("flash_attn3::quantize", _fake_quantize, lib=_library)
    torch.library.register_fake("flash_attn3::row_mean", _fake_row_mean, lib=_library)
    if _C is None:
        torch.library.register_autograd(
            "flash_attn3::fwd", _backward, setup_context=_setup_context, lib=_library)
        torch.library.register_autograd(
            "flash_attn3::fwd_qkvpacked", _backward_qkvpacked,
            setup_context=_setup_context_qkvpacked, lib=_library)
        for name in ("bwd", "bwd_qkvpacked"):
            torch.library.register_autograd(
                f"flash_attn3::{name}", _no_second_derivative, lib=_library)
    else:
        _library.impl("bwd_torch", _bwd_torch, "CUDA")


_register()
