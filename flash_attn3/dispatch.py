"""Which backend runs a call, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Optional

import torch
from torch import Tensor

from . import env, ops
from .backends import operators
from .backends.call import Call


@dataclass(frozen=True)
class Backend:
    """The backend of one call: `name`, and for each preferred one why it can't run the call."""

    name: str
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.reasons:
            return self.name
        why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.name} ({why})"


def _compiled_part():
    """The module _C, or None where the package was installed without it."""
    return getattr(ops, "_C", None)


@torch.compiler.assume_constant_result
def _kernel_reason(index: int, dtype: str, head_dim: int, head_dim_v: int) -> str:
    """Why the compiled kernels can't take these on this device; empty if they can."""
    compiled = _compiled_part()
    refusal = compiled.device_refusal(index)
    if refusal:
        return refusal
    if not compiled.compiled_for(dtype, head_dim, head_dim_v, index):
        return f"this build holds no kernel for {dtype} with head dims ({head_dim}, {head_dim_v})"
    return ""


def sm90_reason(call: Call) -> Optional[str]:
    """Why this project's own kernels can't run the call, or None if they can."""
    if _compiled_part() is None:
        return getattr(ops, "load_error", None) or "the package was installed without its kernels"
    if call.device.type != "cuda":
        return f"needs a CUDA device, got {call.device.type}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, got {call.dtype}"
    if call.head_dim > 256 or call.head_dim_v > 256:
        return f"needs head dims up to 256, got {call.head_dim} and {call.head_dim_v}"
    index = call.device.index if call.device.index is not None else torch.cuda.current_device()
    dtype = "bf16" if call.dtype == torch.bfloat16 else "fp16"
    return _kernel_reason(index, dtype, call.head_dim, call.head_dim_v) or None


def select(call: Call, fallback_only: Optional[str] = None) -> Backend:
    """The backend for a call. `fallback_only` is a reason for which sm90 is out of the question.

    A backend forced by FLASH_ATTN3_BACKEND that can't run the call is a ValueError with the reason.
    """
    forced = env.forced_backend()
    reasons: dict[str, str] = {}
    if forced is None or forced == "sm90":
        reason = fallback_only or sm90_reason(call)
        if reason is None:
            return Backend("sm90")
        if forced == "sm90":
            raise ValueError(f"FLASH_ATTN3_BACKEND=sm90 can't run this call: {reason}")
        reasons["sm90"] = reason
    name, others = operators.choose(call, forced)
    return Backend(name, {**reasons, **others})


def uses_kernels(call: Call, fallback_only: Optional[str] = None) -> bool:
    """Whether the call goes to flash_attn3::fwd; else to flash_attn3::fallback_fwd.

    Cheaper than `select` under torch.compile: the fallback operator makes its own choice when it
    runs, outside of the traced code.
    """
    forced = env.forced_backend()
    if forced is not None and forced != "sm90":
        return False
    reason = fallback_only or sm90_reason(call)
    if reason is not None and forced == "sm90":
        raise ValueError(f"FLASH_ATTN3_BACKEND=sm90 can't run this call: {reason}")
    return reason is None


def described_after(call: Call, has_qv: bool, dequantised: bool) -> tuple[Call, Optional[str]]:
    """The call as the fallback sees it once qv and descales are folded into q, k, v."""
    why = None
    if has_qv:
        call = replace(call, head_dim=call.head_dim + call.head_dim_v)
        why = "qv runs on the fallback"
    if dequantised:
        call = replace(call, dtype=torch.float32)
        why = "float8 inputs and descales run on the fallback"
    return call, why


def is_float8(t: Tensor) -> bool:
    return t.dtype == torch.float8_e4m3fn
