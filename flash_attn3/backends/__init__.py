"""Attention on hardware without this project's kernels, with the same meanings.

`operators` registers flash_attn3::fallback_fwd and flash_attn3::fallback_bwd, which choose for each
call among PyTorch's kernels (`torch_attn`, `flex`) and the block-wise one (`blockwise`).
"""

from . import blockwise, operators
from .blockwise import blockwise_backward, blockwise_forward

__all__ = ["blockwise", "blockwise_backward", "blockwise_forward", "operators"]
