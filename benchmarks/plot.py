"""Draw benchmarks/results/{forward,backward}-*.json, a picture each beside the file; needs no GPU.

    python benchmarks/plot.py [FILE.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = {
    "ours": "flash_attn3", "fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN", "fa2": "FA2",
}  # fmt: skip


def series(data: dict) -> dict[tuple[int, bool], dict[str, list[tuple[int, float]]]]:
    """(D, causal) -> column -> [(S, TFLOP/s)] of the dense bf16 points."""
    found: dict = {}
    for row in data["rows"]:
        config = row["config"]
        if config.get("case") != "dense" or config["dtype"] != "bf16":
            continue
        panel = found.setdefault((config["D"], config["causal"]), {})
        for column in COLUMNS:
            value = row["ours"] if column == "ours" else row["peers"].get(column)
            if value:
                panel.setdefault(column, []).append((config["S"], value))
    return {key: {c: sorted(v) for c, v in panel.items()} for key, panel in found.items()}


def draw(source: Path) -> Path | None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads(source.read_text())
    panels = series(data)
    if not panels:
        return None
    head_dims = sorted({d for d, _ in panels})
    figure, axes = plt.subplots(
        2, len(head_dims), figsize=(4.2 * len(head_dims), 7), squeeze=False, sharey="col"
    )
    for column, head_dim in enumerate(head_dims):
        for line, causal in enumerate((False, True)):
            axis = axes[line][column]
            for name, points in panels.get((head_dim, causal), {}).items():
                width = 2.2 if name == "ours" else 1.2
                axis.plot(*zip(*points), marker="o", ms=3, lw=width, label=COLUMNS[name])
            axis.set_xscale("log", base=2)
            axis.set_title(f"D {head_dim}, {'causal' if causal else 'not causal'}")
            axis.set_xlabel("sequence length")
            axis.set_ylabel(data["unit"])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(
        f"{data['what'].capitalize()}, bf16, 16,384 tokens, {data['device']}, "
        f"commit {data['commit']}"
    )
    figure.tight_layout()
    target = source.with_suffix(".png")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def main() -> int:
    files = [Path(a) for a in sys.argv[1:]] or sorted(RESULTS.glob("*ward-*.json"))
    if not files:
        print(f"no forward-*.json in {RESULTS}: run benchmarks/forward.py on a GPU first")
        return 1
    for file in files:
        print(draw(file) or f"{file}: no dense rows to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
