"""flash_attn3: exact attention for NVIDIA Hopper GPUs, and the same API everywhere else."""

import torch  # noqa: F401  before the compiled part, which needs its libraries

from . import functional, ops  # ops loads _C if there is one
from .dispatch import Backend
from .fp8 import flash_attn_fp8_func, flash_attn_fp8_varlen_func, quantize
from .interface import (
    backend_for,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from .quantized import Quantized, QuantizedQKV

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Quantized",
    "QuantizedQKV",
    "backend_for",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_fp8_varlen_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "functional",
    "get_scheduler_metadata",
    "ops",
    "quantize",
    "__version__",
]
