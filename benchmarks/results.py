"""Results files: benchmarks/results/WHAT-DEVICE.json, written row by row."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]


def device_slug(name: str) -> str:
    """"NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """FLASH_ATTN3_COMMIT where there is no git (a copied tree), else HEAD, marked if changed."""
    given = os.environ.get("FLASH_ATTN3_COMMIT")
    if given:
        return given
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return head + ("-changed" if changed else "")


def header(what: str, unit: str = "TFLOP/s") -> dict:
    cuda = torch.cuda.is_available()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "what": what,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": driver.splitlines()[0] if driver else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "unit": unit,
    }


def default_path(what: str, device: str) -> Path:
    """$OUT where the machine has one (its files are what comes back), else benchmarks/results."""
    folder = os.environ.get("OUT")
    base = Path(folder) if folder else REPO / "benchmarks" / "results"
    return base / f"{what}-{device_slug(device)}.json"


def row_key(config: dict) -> str:
    """What identifies a row: the timing is how it was measured, not what."""
    return json.dumps({k: v for k, v in config.items() if k != "timing"}, sort_keys=True)


class ResultsFile:
    """Rows by configuration; every change is on disk at once, so a cut run leaves what it has."""

    def __init__(self, path: Path, head: dict):
        self.path = path
        self.data = {**head, "rows": [], "reference": {}}

    def resume(self, source: Path) -> int:
        """Take over the rows of an earlier part of this run: same device and same commit."""
        old = json.loads(source.read_text())
        for key in ("what", "device", "commit", "unit"):
            if old.get(key) != self.data[key]:
                raise ValueError(
                    f"can't resume {source}: its {key} is {old.get(key)!r}, "
                    f"this run's is {self.data[key]!r}"
                )
        self.data["rows"] = old["rows"]
        self.data["reference"] = old.get("reference", {})
        return len(old["rows"])

    @property
    def rows(self) -> list[dict]:
        return self.data["rows"]

    def find(self, config: dict) -> dict | None:
        key = row_key(config)
        return next((row for row in self.rows if row_key(row["config"]) == key), None)

    def put(self, row: dict) -> None:
        old = self.find(row["config"])
        if old is not None:
            self.rows.remove(old)
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Rename over the old file: a run that is killed while writing leaves a whole file.
        partial = self.path.with_suffix(".json.partial")
        partial.write_text(dump(self.data))
        partial.replace(self.path)


def dump(data: dict) -> str:
    """JSON with one row per line, so that a diff shows which figures moved."""
    head = {key: value for key, value in data.items() if key != "rows"}
    text = json.dumps(head, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in data["rows"])
    return text[: text.rindex("\n}")] + ',\n "rows": [\n' + rows + "\n ]\n}\n"
