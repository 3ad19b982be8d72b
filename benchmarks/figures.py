"""The forward issue's figures, computed from the rows of a results file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import cases
import flops

BEST_OF = ("fa3", "fa4", "cudnn")


@dataclass(frozen=True)
class Figure:
    name: str
    asked: str
    value: float | None  # None: not measured
    passed: bool | None
    note: str = ""

    def line(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "not measured"}[self.passed]
        value = "" if self.value is None else f"{self.value:.3f}"
        note = f"  ({self.note})" if self.note else ""
        return f"{self.name:46} {value:>8}  asked {self.asked:<9} {verdict}{note}"


def _figure(
    name: str, asked: str, values: list[float], pick: Callable, test: Callable, expected: int
) -> Figure:
    """A figure over `expected` rows: it can fail early but passes only when all are there."""
    if not values:
        return Figure(name, asked, None, None)
    value = pick(values)
    note = "" if len(values) == expected else f"{len(values)} of {expected} points"
    passed = test(value)
    return Figure(name, asked, value, None if note and passed else passed, note)


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def best_peer(row: dict) -> tuple[str, float] | None:
    """(name, ms) of the fastest of FA3, FA4 and cuDNN in this row."""
    times = {p: row["ms"][p] for p in BEST_OF if row["ms"].get(p)}
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(row: dict, other_ms: float | None, column: str) -> float | None:
    """Speed of `column` over that of another time in the same row."""
    mine = row["ms"].get(column)
    return other_ms / mine if mine and other_ms else None


def _section(rows: list[dict], name: str, dtype: str = "bf16") -> list[dict]:
    return [
        row for row in rows if row["config"].get("case") == name and row["config"]["dtype"] == dtype
    ]


def _known(values) -> list[float]:
    return [value for value in values if value is not None]


def dense_ratios(rows: list[dict], column: str = "ours", dtype: str = "bf16") -> list[float]:
    found = []
    for row in _section(rows, "dense", dtype):
        best = best_peer(row)
        found.append(ratio(row, best[1], column) if best else None)
    return _known(found)


def fp16_ratios(rows: list[dict]) -> list[float]:
    bf16 = {(r["config"]["D"], r["config"]["causal"], r["config"]["S"]): r
            for r in _section(rows, "dense")}  # fmt: skip
    found = []
    for row in _section(rows, "dense", "fp16"):
        config = row["config"]
        twin = bf16.get((config["D"], config["causal"], config["S"]))
        found.append(ratio(row, twin["ms"].get("ours"), "ours") if twin else None)
    return _known(found)


def _long(rows: list[dict], column: str) -> tuple[float | None, float | None]:
    """(rate at 128k over rate at 16k, peak memory over inputs and outputs)."""
    by_length = {row["config"]["S"]: row for row in _section(rows, "long")}
    short, long = by_length.get(cases.TOKENS), by_length.get(cases.LONG_SEQLEN)
    if not short or not long or not short["ms"].get(column) or not long["ms"].get(column):
        return None, None
    rate = (long["flops"] / long["ms"][column]) / (short["flops"] / short["ms"][column])
    return rate, long.get("peak_memory", {}).get("ratio")


def _short(rows: list[dict], column: str) -> float | None:
    times = {row["config"]["ragged"]: row["ms"].get(column) for row in _section(rows, "short")}
    return times[True] / times[False] if times.get(True) and times.get(False) else None


def window_bound() -> float:
    """Time of the windowed call allowed, over the dense call's: 1.25 times the share of blocks."""
    full = (flops.UNLIMITED, flops.UNLIMITED)
    some = flops.visible_blocks(cases.TOKENS, cases.TOKENS, cases.WINDOW)
    return 1.25 * some / flops.visible_blocks(cases.TOKENS, cases.TOKENS, full)


def _window(rows: list[dict], column: str) -> float | None:
    times = {"window" in r["config"]: r["ms"].get(column) for r in _section(rows, "window")}
    if not times.get(True) or not times.get(False):
        return None
    return 1.25 * (times[True] / times[False]) / window_bound()


def evaluate(rows: list[dict], column: str = "ours") -> list[Figure]:
    dense = dense_ratios(rows, column)
    over_fa2: dict[bool, list[float]] = {False: [], True: []}
    for row in _section(rows, "dense"):
        if row["config"]["S"] >= 8192:
            value = ratio(row, row["ms"].get("fa2"), column)
            over_fa2[row["config"]["D"] == 256] += _known([value])
    ragged = _known(ratio(r, r["ms"].get("fa3"), column) for r in _section(rows, "ragged"))
    rate, memory = _long(rows, column)
    one = lambda value: [] if value is None else [value]  # noqa: E731
    return [
        _figure("dense bf16, best peer: geometric mean", ">= 1.00", dense, geomean,
                lambda x: x >= 1.0, 36),
        _figure("dense bf16, best peer: lowest point", ">= 0.95", dense, min,
                lambda x: x >= 0.95, 36),
        _figure("fp16 over bf16: lowest point", ">= 0.95", fp16_ratios(rows), min,
                lambda x: x >= 0.95, 36),
        _figure("over FA2, S >= 8k, D 64 and 128: lowest", ">= 1.80", over_fa2[False], min,
                lambda x: x >= 1.8, 8),
        _figure("over FA2, S >= 8k, D 256: lowest", ">= 2.20", over_fa2[True], min,
                lambda x: x >= 2.2, 4),
        _figure("128k causal D 128: rate over that at 16k", ">= 0.97", one(rate), min,
                lambda x: x >= 0.97, 1),
        _figure("128k: peak memory over inputs and outputs", "<= 1.01", one(memory), max,
                lambda x: x <= 1.01, 1),
        _figure("ragged, 16 lengths, over FA3: lowest", ">= 1.00", ragged, min,
                lambda x: x >= 1.0, 4),
        _figure("8192 x 34 ragged: time over the dense batch's", "<= 1.50",
                one(_short(rows, column)), max, lambda x: x <= 1.5, 1),
        _figure("window (1023, 0): time over its share of blocks", "<= 1.25",
                one(_window(rows, column)), max, lambda x: x <= 1.25, 1),
    ]  # fmt: skip


def table(rows: list[dict], columns: list[str]) -> str:
    """One line per row: TFLOP/s of every column, and the first one's ratio to the best peer."""
    lines = [f"{'':42}" + "".join(f"{c[:9]:>10}" for c in columns) + "   ratio"]
    for row in rows:
        config = row["config"]
        shape = f"S {config['S']}" if "S" in config else f"{len(config['lengths'])} lengths"
        mask = "causal" if config["causal"] else "full"
        mask = f"window {config['window']}" if "window" in config else mask
        kind = "ragged" if config.get("ragged") and config["case"] == "short" else ""
        label = f"{config['case']} {config['dtype']} D {config['D']} {mask} {shape} {kind}"
        values = []
        for column in columns:
            ms = row["ms"].get(column)
            values.append(f"{flops.tflops(row['flops'], ms):10.0f}" if ms else f"{'-':>10}")
        best = best_peer(row)
        own = [c for c in columns if c not in (*BEST_OF, "fa2")]
        ratios = [ratio(row, best[1], c) if best else None for c in own]
        text = " ".join(f"{r:.3f}" for r in ratios if r is not None)
        wrong = "  WRONG: " + ", ".join(row["wrong"]) if row.get("wrong") else ""
        mark = " graph" if config["timing"] == "graph" else ""
        lines.append(f"{label:42}" + "".join(values) + f"   {text}{mark}{wrong}")
    return "\n".join(lines)
