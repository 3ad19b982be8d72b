"""Put tables and figures of benchmarks/results (forward, backward, fp8) between README's markers.

    python benchmarks/readme_table.py [--check]     --check: exit code 1 if the README is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- {} figures: begin -->", "<!-- {} figures: end -->"
# What is measured, and its peers (FA3's wheel has no backward).
PEERS = {
    "forward": ("fa2", "fa3", "fa4", "cudnn"),
    "backward": ("fa2", "fa4", "cudnn"),
    "fp8": ("fa3", "cudnn"),
}
DTYPES = {"forward": "bf16", "backward": "bf16", "fp8": "e4m3"}
TITLES = {"fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN"}
VERDICTS = {True: "yes", False: "**no**", None: "not measured"}


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def markdown(data: dict) -> str:
    dtype = DTYPES[data["what"]]
    dense = [row for row in data["rows"]
             if row["config"].get("case") == "dense" and row["config"]["dtype"] == dtype]
    columns = [p for p in PEERS[data["what"]]
               if p != "fa2" or any(row["peers"].get(p) for row in dense)]
    compared = [p for p in columns if p != "fa2"]
    lines = [
        f"Measured on {data['device']} (driver {data['driver']}, torch {data['torch']}),",
        f"commit {data['commit'][:12]}, {data['date']}; {data['unit']}, {dtype}, 16,384 tokens, "
        "hidden 2048.",
        "",
    ]
    if dense:
        titles = " | ".join(TITLES[p] for p in columns)
        lines += [f"| D | mask | S | flash_attn3 | {titles} | ratio |",
                  "|---" * (5 + len(columns)) + "|"]
    for row in dense:
        config, peers = row["config"], row["peers"]
        best = max((peers.get(p) or 0 for p in compared), default=0)
        ratio = f"{row['ours'] / best:.2f}" if best and row["ours"] else "-"
        mask = "causal" if config["causal"] else "full"
        rates = " | ".join(cell(peers.get(p)) for p in columns)
        lines.append(
            f"| {config['D']} | {mask} | {config['S']} | {cell(row['ours'])} | {rates} | {ratio} |"
        )
    if dense:
        names = [TITLES[p] for p in compared]
        best_of = f"{', '.join(names[:-1])} and {names[-1]}"
        lines += ["", f"ratio: to the best of {best_of} in the same run.", ""]
    if data.get("figures"):
        lines += ["| figure | measured | asked | met |", "|---|---|---|---|"]
        for figure in data["figures"]:
            value = "-" if figure["value"] is None else f"{figure['value']:.3f}"
            note = f" ({figure['note']})" if figure.get("note") else ""
            lines.append(
                f"| {figure['name']} | {value} | {figure['asked']} | "
                f"{VERDICTS[figure['passed']]}{note} |"
            )
    return "\n".join(lines).strip()


def accuracy_markdown(data: dict) -> str:
    """Errors of e4m3 attention: blocks with rotation, and FA3's one scale a tensor."""
    lines = [
        f"Errors against float64 on {data['device']}, commit {data['commit'][:12]}, "
        f"{data['date']}.",
        "",
        "| Q, K, V | S | D | error | flash_attn3, blocks, rotated | FA3 | FA3's over ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        config, ours, fa3 = row["config"], row["ours"], row["peers"].get("fa3")
        other, ratio = (f"{fa3:.2e}", f"{fa3 / ours:.2f}") if fa3 else ("-", "-")
        lines.append(f"| {config['input']} | {config['S']} | {config['D']} | {config['error']} | "
                     f"{ours:.2e} | {other} | {ratio} |")
    return "\n".join(lines)


def insert(readme: str, text: str, what: str = "forward") -> str:
    begin, end = BEGIN.format(what), END.format(what)
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"README.md must hold {begin} and {end} once each")
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", type=Path, default=REPO / "README.md")
    parser.add_argument("--results", type=Path, default=REPO / "benchmarks" / "results")
    args = parser.parse_args(argv)
    old = new = args.readme.read_text()
    makers = dict.fromkeys(PEERS, markdown) | {"fp8_accuracy": accuracy_markdown}
    found = {what: sorted(args.results.glob(f"{what}-*.json")) for what in makers}
    if not any(found.values()):
        print(f"no forward-*.json in {args.results}: run benchmarks/forward.py on a GPU first")
        return 1
    for what, files in found.items():
        if not files:
            continue
        text = "\n\n".join(makers[what](json.loads(file.read_text())) for file in files)
        try:
            new = insert(new, text, what)
        except ValueError as error:
            print(error)
            return 1
    if args.check:
        if new != old:
            print("README.md does not hold the figures of benchmarks/results; run `make readme`")
        return int(new != old)
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
