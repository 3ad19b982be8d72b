"""One forward call of a kernel library, for ncu and compute-sanitizer.

    python3 benchmarks/one_call.py LIB.so D S [causal]     # 16,384 tokens in all, hidden 2048, bf16
"""

from __future__ import annotations

import sys

import torch
from ctypes_lib import KernelLibrary


def main() -> None:
    path, head_dim, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    shape = (16384 // length, length, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    KernelLibrary(path).prepare(q, k, v, causal="causal" in sys.argv[4:])()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
