"""Which backend runs a call, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Optional

import torch
from torch import Tensor

from . import env, ops
from .backends import operators
from .backends.call import Call


E4M3 = torch.float8_e4m3fn
# As flash_attn3._C names the dtypes that it has kernels for.
KERNEL_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "e4m3"}


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
    if call.dtype not in KERNEL_DTYPES:
        return f"needs float16, bfloat16 or float8_e4m3fn, got {call.dtype}"
    if call.head_dim > 256 or call.head_dim_v > 256:
        return f"needs head dims up to 256, got {call.head_dim} and {call.head_dim_v}"
    return _kernel_reason(
        _index(call.device), KERNEL_DTYPES[call.dtype], call.head_dim, call.head_dim_v) or None


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@torch.compiler.assume_constant_result
def _device_refusal(index: int) -> str:
    return _compiled_part().device_refusal(index)


def quantizes_by_kernel(x: Tensor) -> bool:
    """Whether x goes to flash_attn3::quantize; else to the same in PyTorch."""
    if _compiled_part() is None or x.device.type != "cuda":
        return False
    if x.dtype not in (torch.float16, torch.bfloat16) or env.forced_backend() not in (None, "sm90"):
        return False
    return not _device_refusal(_index(x.device))


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
    if call.dtype == E4M3:  # what the fallback makes of it
        call = replace(call, dtype=torch.float32)
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


def described(call: Call, k_dtype: torch.dtype, has_qv: bool,
              has_descales: bool) -> tuple[Call, Optional[str]]:
    """The call as `select` takes it, and why the kernels are out of the question, if they are.

    q of a call is quantised to the e4m3 of its k; on the fallback qv and descales are folded into
    q, k, v.
    """
    why = None
    if k_dtype == E4M3:
        call = replace(call, dtype=E4M3)
    elif has_descales:
        call = replace(call, dtype=torch.float32)
        why = "descales of other than float8 inputs run on the fallback"
    if has_qv:
        call = replace(call, head_dim=call.head_dim + call.head_dim_v)
        why = "qv runs on the fallback"
    return call, why
