"""One call of a kernel library, for ncu and compute-sanitizer.

    python3 benchmarks/one_call.py LIB.so D S [causal | window] [backward | deterministic | WAY]

16,384 tokens in all (or as many as TOKENS=n in the environment says), hidden 2048, bf16;
`window` is (1023, 0), `deterministic` a deterministic backward. Ways of e4m3: `rows` (V transposed
by the kernel), `ahead` (by a pass before it), `blocks` (all three quantised first, V transposed),
`rotated` (the same, rotated and less K's mean).
"""

from __future__ import annotations

import os
import sys

import torch
from ctypes_fp8 import Fp8Library

E4M3_WAYS = ("rows", "ahead", "blocks", "rotated")


def call_e4m3(library: Fp8Library, way: str, tensors, causal: bool) -> None:
    q, k, v = tensors
    if way in ("rows", "ahead"):
        room = None if way == "ahead" else 0
        operands = [t.to(torch.float8_e4m3fn) for t in tensors]
    else:
        room, rotate = 0, way == "rotated"
        operands = [
            library.quantize(q, rotate=rotate),
            library.quantize(k, rotate=rotate, smooth=rotate),
            library.quantize(v, transposed=True),
        ]
    library.prepare_fp8(*operands, causal=causal, ahead=room)()


def main() -> None:
    path, head_dim, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    batch = max(1, int(os.environ.get("TOKENS", 16384)) // length)
    shape = (batch, length, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    words = sys.argv[4:]
    library, causal = Fp8Library(path), "causal" in words
    e4m3 = [word for word in words if word in E4M3_WAYS]
    if "backward" in words or "deterministic" in words:
        out, dout = torch.randn_like(q), torch.randn_like(q)
        lse = torch.full((shape[0], shape[2], length), 9.0, device="cuda")
        deterministic = "deterministic" in words
        library.prepare_backward(
            dout, q, k, v, out, lse, causal=causal, deterministic=deterministic
        )()
    elif e4m3:
        call_e4m3(library, e4m3[0], (q, k, v), causal)
    else:
        window = (1023, 0) if "window" in words else (-1, -1)
        library.prepare(q, k, v, causal=causal, window_size=window)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
