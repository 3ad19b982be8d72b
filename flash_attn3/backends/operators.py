"""Operators flash_attn3::fallback_fwd and flash_attn3::fallback_bwd, wholly in Python.

They take the arguments of flash_attn3::fwd and flash_attn3::bwd, work on every device, and exist
whether or not the compiled part of the package does.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Optional

import torch
from torch import Tensor

from ..env import forced_backend
from . import flex, torch_attn
from .blockwise import blockwise_backward, blockwise_forward, blockwise_reasons
from .call import Call, empty_outputs, lse_shape, make_call

# Order of preference. "sm90" is not here: it is an operator of its own.
FORWARD = {
    "aten_flash": (torch_attn.cuda_flash_reasons, torch_attn.cuda_flash_forward),
    "aten_cpu_flash": (torch_attn.cpu_flash_reasons, torch_attn.cpu_flash_forward),
    "aten_efficient": (torch_attn.efficient_reasons, torch_attn.efficient_forward),
    "flex": (flex.flex_reasons, flex.flex_forward),
    "blockwise": (blockwise_reasons, None),
}
BACKWARD = {
    "aten_flash": (torch_attn.cuda_flash_backward_reasons, torch_attn.cuda_flash_backward),
    "aten_cpu_flash": (torch_attn.cpu_flash_reasons, torch_attn.cpu_flash_backward),
    "aten_efficient": (torch_attn.efficient_backward_reasons, torch_attn.efficient_backward),
    "blockwise": (blockwise_reasons, None),
}
NAMES = tuple(FORWARD)

_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, SymInt attention_chunk, float softcap, "
    "bool deterministic, SymInt sm_margin"
)


def choose(call: Call, forced: Optional[str] = None) -> tuple[str, dict[str, str]]:
    """The fallback backend of a forward call, and why each one before it can't run it.

    `forced` names the one to take; a ValueError gives the reason when it can't run the call.
    """
    reasons: dict[str, str] = {}
    for name, (why_not, _) in FORWARD.items():
        if forced is not None and name != forced:
            continue
        reason = why_not(call)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise ValueError(f"FLASH_ATTN3_BACKEND={forced} can't run this call: {reasons[forced]}")


def _choose_backward(call: Call) -> str:
    """Any backward continues any forward, so a forced backend without one is no obstacle."""
    forced = forced_backend()
    if forced in BACKWARD and BACKWARD[forced][0](call) is None:
        return forced
    return next(name for name, (why_not, _) in BACKWARD.items() if why_not(call) is None)


_warned = False


def _warn_once(call: Call, name: str) -> None:
    """One notice in the life of the process when a GPU call runs without this project's kernels."""
    global _warned
    if _warned or call.device.type != "cuda" or forced_backend() is not None:
        return
    _warned = True
    warnings.warn(
        f"flash_attn3: this call runs on PyTorch's kernels ({name}), not on flash_attn3's own; "
        "flash_attn3.backend_for(q, k, v, ...) says why. This notice appears once.",
        UserWarning,
        stacklevel=2,
    )


def _no_autocast(device: torch.device):
    """Tensors have their dtypes by design in here: the caller's autocast must not change them."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _fallback_fwd(q, k, v, *options) -> tuple[Tensor, Tensor]:
    call = make_call(q, k, v, *options[:-1])
    if call.empty:
        return empty_outputs(call, q)
    forced = forced_backend()
    name, _ = choose(call, forced if forced in FORWARD else None)
    _warn_once(call, name)
    with _no_autocast(q.device):
        if name == "blockwise":
            return blockwise_forward(q, k, v, *options)
        return FORWARD[name][1](call, q, k, v, *options[:4])


def _fallback_bwd(dout, dlse, q, k, v, out, lse, *options) -> tuple[Tensor, Tensor, Tensor]:
    call = make_call(q, k, v, *options[:-1])
    if call.empty:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # PyTorch's backward kernels take no gradient of the LSE.
    name = "blockwise" if dlse is not None else _choose_backward(call)
    with _no_autocast(q.device):
        if name == "blockwise":
            return blockwise_backward(dout, dlse, q, k, v, out, lse, *options)
        # They want one dtype, and the LSE in that of their sums; blockwise takes any, unrounded.
        return BACKWARD[name][1](call, dout.to(q.dtype), q, k, v, out.to(q.dtype),
                                 lse.to(call.acc_dtype), *options[:4])


def _fake_fwd(q, k, v, cu_seqlens_q=None, *options) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[:-1] + (v.shape[-1],))
    lse = q.new_empty(lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)
    return out, lse


def _fake_bwd(dout, dlse, q, k, v, out, lse, *options) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *rest = inputs
    out, lse = output
    ctx.set_materialize_grads(False)  # an unused lse must not cost a gradient of zeros
    ctx.save_for_backward(
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    ctx.rest = rest


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    none = (None,) * (4 + len(ctx.rest))
    if dout is None and dlse is None:
        return (None, None, None) + none
    if dout is None:
        dout = torch.zeros_like(out)
    rest = list(ctx.rest)
    rest[8] = bool(rest[8]) or torch.are_deterministic_algorithms_enabled()
    grads = torch.ops.flash_attn3.fallback_bwd(dout, dlse, q, k, v, out, lse, *lengths, *rest)
    return tuple(grads) + none


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "flash_attn3: second derivatives are not implemented; the backward of attention can't be "
        "differentiated (drop create_graph=True, or use explicit PyTorch attention for this term)")


# A fragment: the compiled part defines the other operators of this namespace, before or after.
_library = torch.library.Library("flash_attn3", "FRAGMENT")
_library.define(
    f"fallback_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "fallback_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("fallback_fwd", _fallback_fwd, "CompositeExplicitAutograd")
_library.impl("fallback_bwd", _fallback_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn3::fallback_fwd", _fake_fwd, lib=_library)
torch.library.register_fake("flash_attn3::fallback_bwd", _fake_bwd, lib=_library)
torch.library.register_autograd(
    "flash_attn3::fallback_fwd", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd(
    "flash_attn3::fallback_bwd", _no_second_derivative, lib=_library)
