"""Environment switches, read at each call (a test or a user may change them while running).

Under torch.compile they are constants of the compiled code. FLASH_ATTN3_BACKWARD alone is read
once, when the package is imported: the C++ autograd node asks for it in every backward.
"""

from __future__ import annotations

import os
from typing import Optional

import torch

BACKENDS = ("sm90", "aten_flash", "aten_cpu_flash", "aten_efficient", "flex", "blockwise")

BACKWARDS = ("kernels", "torch")
DEFAULT_BACKWARD = "kernels"


def read_backward() -> str:
    """FLASH_ATTN3_BACKWARD: whose kernels compute gradients where this build has its own."""
    name = os.environ.get("FLASH_ATTN3_BACKWARD", "") or DEFAULT_BACKWARD
    if name not in BACKWARDS:
        raise ValueError(
            f"FLASH_ATTN3_BACKWARD is {name!r}; accepted: {', '.join(BACKWARDS)}, or unset")
    return name


def _read_forced_backend() -> Optional[str]:
    name = os.environ.get("FLASH_ATTN3_BACKEND", "")
    if name == "":
        return None
    if name not in BACKENDS:
        raise ValueError(
            f"FLASH_ATTN3_BACKEND is {name!r}; accepted: {', '.join(BACKENDS)}, or unset")
    return name


def _read_check_values() -> bool:
    value = os.environ.get("FLASH_ATTN3_CHECK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASH_ATTN3_CHECK is {value!r}; accepted: 0, 1, or unset")
    return value == "1"


_constant_forced_backend = torch.compiler.assume_constant_result(_read_forced_backend)
_constant_check_values = torch.compiler.assume_constant_result(_read_check_values)


def forced_backend() -> Optional[str]:
    """FLASH_ATTN3_BACKEND: the backend that must run, or None."""
    return _constant_forced_backend()


def check_values() -> bool:
    """FLASH_ATTN3_CHECK=1: also check values inside device tensors, at a synchronisation each."""
    return _constant_check_values()
