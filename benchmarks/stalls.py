"""Where a kernel's warps wait: ncu's samples by instruction, summed between branches.

On the GPU machine, one launch of a kernel library (benchmarks/one_call.py makes it):

    ncu --clock-control none --section SourceCounters --kernel-name regex:fwd_kernel -c 1 \\
        --page source --csv python3 benchmarks/one_call.py LIB.so 128 8192 > stalls.csv

then, on any machine, ``python benchmarks/stalls.py stalls.csv``. A line is a stretch of
instructions up to a branch, a barrier or the last product of a group: its share of all samples, how
often it ran, its commonest reasons to wait, and what it computes.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

ENDS = {"BRA", "WARPGROUP", "BAR", "EXIT"}
SHOWN = {"MUFU", "FMNMX", "HGMMA", "QGMMA", "FADD", "F2FP", "STSM", "REDG", "LDS", "STL", "LDL"}


def read_instructions(path: Path) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of the source page; lines before the header are ncu's chatter."""
    rows = list(csv.reader(path.open()))
    start = next(i for i, row in enumerate(rows) if row and row[0] == "Address")
    header = rows[start]
    return header, [row for row in rows[start + 1:] if len(row) == len(header)]


def opcode(source: str) -> str:
    words = source.split()
    return (words[1] if words[0].startswith("@") else words[0]).split(".")[0]


def stretches(header: list[str], rows: list[list[str]]) -> list[dict]:
    samples = header.index("# Samples")
    executed = header.index("Instructions Executed")
    reasons = {i: name[len("stall_"):] for i, name in enumerate(header)
               if name.startswith("stall_") and "Not" not in name}
    found = []
    current: dict = {}
    for number, row in enumerate(rows):
        if not current:
            current = dict(first=number, count=0, samples=0, executed=0, reasons=Counter(),
                           opcodes=Counter())
        current["count"] += 1
        current["samples"] += int(row[samples] or 0)
        current["executed"] = max(current["executed"], int(row[executed] or 0))
        current["opcodes"][opcode(row[1])] += 1
        for i, name in reasons.items():
            current["reasons"][name] += int(row[i] or 0)
        last_of_group = opcode(row[1]) in ("HGMMA", "QGMMA") and "gsb0" in row[1]
        if opcode(row[1]) in ENDS or last_of_group:
            current["end"] = row[1].strip()
            found.append(current)
            current = {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--least", type=float, default=0.3, help="percent of samples shown")
    arguments = parser.parse_args()
    found = stretches(*read_instructions(arguments.csv))
    total = sum(stretch["samples"] for stretch in found)
    for stretch in found:
        share = 100 * stretch["samples"] / max(total, 1)
        if share < arguments.least:
            continue
        reasons = ", ".join(f"{name} {n}" for name, n in stretch["reasons"].most_common(4) if n)
        work = ", ".join(f"{name} {n}" for name, n in stretch["opcodes"].items() if name in SHOWN)
        print(f"{stretch['first']:5d} +{stretch['count']:3d} {share:5.2f} % "
              f"x{stretch['executed']:<9d} {stretch['end'][:44]:44s} {reasons} | {work}")


if __name__ == "__main__":
    main()
