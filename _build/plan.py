"""Decides what a build makes: kernels and binding, the binding alone, or the fallback alone."""

from __future__ import annotations

import enum
import os
import platform

from errors import BuildError
from toolchain import NVCC_WHEELS, find_toolkit


class BuildKind(enum.Enum):
    KERNELS = "kernels"  # compile the library and the binding
    PREBUILT = "prebuilt"  # FLASH_ATTN3_KERNELS: compile the binding only
    FALLBACK = "fallback"  # no compiled code


def _switch(environ, name: str) -> bool:
    value = environ.get(name, "").strip()
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise BuildError(f"{name}={value!r} is neither 0 nor 1.")


def fallback_reason(environ=os.environ) -> str | None:
    """Why this build holds no kernels; None if it does. FLASH_ATTN3_KERNELS needs no nvcc."""
    if _switch(environ, "FLASH_ATTN3_SKIP_CUDA"):
        return "FLASH_ATTN3_SKIP_CUDA=1 was set"
    if platform.system() != "Linux":
        return f"the kernels are built on Linux, and this is {platform.system()}"
    if environ.get("FLASH_ATTN3_KERNELS", "").strip():
        return None
    if find_toolkit(environ) is None:
        return f"there was no nvcc (CUDA_HOME, PATH, or {NVCC_WHEELS})"
    return None


def build_kind(environ=os.environ) -> BuildKind:
    if fallback_reason(environ) is not None:
        return BuildKind.FALLBACK
    if environ.get("FLASH_ATTN3_KERNELS", "").strip():
        return BuildKind.PREBUILT
    return BuildKind.KERNELS
