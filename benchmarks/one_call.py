"""One call of a kernel library, for ncu and compute-sanitizer.

    python3 benchmarks/one_call.py LIB.so D S [causal] [backward | deterministic]

16,384 tokens in all, hidden 2048, bf16; `deterministic` is a deterministic backward.
"""

from __future__ import annotations

import sys

import torch
from ctypes_lib import KernelLibrary


def main() -> None:
    path, head_dim, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    shape = (16384 // length, length, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    words = sys.argv[4:]
    library, causal = KernelLibrary(path), "causal" in words
    if "backward" in words or "deterministic" in words:
        out, dout = torch.randn_like(q), torch.randn_like(q)
        lse = torch.full((shape[0], shape[2], length), 9.0, device="cuda")
        deterministic = "deterministic" in words
        library.prepare_backward(
            dout, q, k, v, out, lse, causal=causal, deterministic=deterministic
        )()
    else:
        library.prepare(q, k, v, causal=causal)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
