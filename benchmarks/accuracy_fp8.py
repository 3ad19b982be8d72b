"""The errors of `python -m flash_attn3.accuracy`, as a results file.

    python benchmarks/accuracy_fp8.py [--heads 32] [--keys 8192] [--dim 128] [--output PATH]

`ours` is blocks with rotation, `peers.fa3` FlashAttention-3's e4m3 call with one scale a tensor,
and `schemes` all that the module measures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import results

from flash_attn3 import accuracy


def row(config: dict, errors: dict[str, float]) -> dict:
    schemes = {name: value for name, value in errors.items() if name != "fa3"}
    return {"config": config, "ours": errors[accuracy.ROTATED],
            "peers": {"fa3": errors.get("fa3")}, "schemes": schemes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int)
    parser.add_argument("--keys", type=int)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    setting = accuracy.default_setting(args.heads, args.keys, args.dim)
    head = results.header("fp8_accuracy", unit="error")
    if not setting.by_kernel:
        head["emulated"] = True
    path = args.output or results.default_path("fp8_accuracy", head["device"])
    file = results.ResultsFile(path, head)
    for config, errors in accuracy.table(setting):
        file.put(row(config, errors))
        print(config, {name: f"{value:.3e}" for name, value in errors.items()}, flush=True)


if __name__ == "__main__":
    main()
