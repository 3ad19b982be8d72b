"""Time and peak memory of a full build, from an empty folder.

    python benchmarks/build_time.py            every kernel and the binding
    python benchmarks/build_time.py --kernels  the kernel library alone

Selection switches (FLASH_ATTN3_HEAD_DIMS, ...) and MAX_JOBS hold as in any build. Memory is the
sum of the proportional set sizes of all processes of the build, sampled five times a second.
Writes benchmarks/results/build-time-DEVICE.json (s) and build-memory-DEVICE.json (GiB), and the
table of README.md from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "_build"))

import toolchain  # noqa: E402

SWITCHES = ("FLASH_ATTN3_HEAD_DIMS", "FLASH_ATTN3_DTYPES", "FLASH_ATTN3_PASSES", "MAX_JOBS")
INTERVAL = 0.2
BEGIN, END = "<!-- build figures: begin -->", "<!-- build figures: end -->"


def descendants(pid: int) -> list[int]:
    """pid and all processes below it, from one look at /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(entry.name))
    found, frontier = [], [pid]
    while frontier:
        process = frontier.pop()
        found.append(process)
        frontier += children.get(process, [])
    return found


def resident_bytes(pid: int) -> int:
    """Memory of one process, pages shared with others counted in proportion."""
    for name, pattern in (("smaps_rollup", r"^Pss:\s+(\d+)"), ("status", r"^VmRSS:\s+(\d+)")):
        try:
            match = re.search(pattern, Path(f"/proc/{pid}/{name}").read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1]) * 1024
    return 0


def measure(command: list[str], cwd: Path = ROOT) -> tuple[int, float, int]:
    """(exit status, seconds, peak bytes) of a command and all that it starts."""
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(resident_bytes, descendants(process.pid))))
        time.sleep(INTERVAL)
    return process.returncode, time.monotonic() - begin, peak


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict:
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
    }


def readme_text() -> str:
    """The table of benchmarks/results/build-*.json for README.md."""
    rows: dict[str, dict] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("build-*.json")):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            entry = rows.setdefault(json.dumps(row["config"], sort_keys=True), dict(row["config"]))
            entry[data["unit"]] = row["ours"]
            entry["cuda"] = data["cuda"]
    if not rows:
        return "Not measured yet: `make build-time`."
    titles = ("built", "units", "cores", "nvcc", "minutes", "peak memory, GiB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows.values():
        lines.append(
            f"| {row['what']} | {row['units']} | {row['cores']} | {row['cuda']} | "
            f"{row.get('s', 0) / 60:.1f} | {row.get('GiB', 0):.1f} |"
        )
    return "\n".join(lines)


def write_readme() -> None:
    page = ROOT / "README.md"
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{readme_text()}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="the kernel library alone")
    parser.add_argument("--device", help="name of the machine in the files' names")
    options = parser.parse_args()
    here = machine()
    device = options.device or f"{here['cores']}-cores"
    with tempfile.TemporaryDirectory() as folder:
        if options.kernels:
            target = ["build_kernels", "-b", folder, "-o", f"{folder}/kernels.so"]
        else:
            target = ["build", "-b", folder]
        status, seconds, peak = measure([sys.executable, "setup.py", "-q", *target])
        if status != 0:
            print("the build failed; nothing was written", file=sys.stderr)
            return status
        libraries = sorted(Path(folder).rglob("*.so"))
        units = len(list(Path(folder).rglob("instantiations-*.o")))
        sizes = {path.name: path.stat().st_size for path in libraries}
    config = {
        "what": "kernels" if options.kernels else "kernels and binding",
        "units": units,
        **here,
        **{name.lower(): os.environ[name] for name in SWITCHES if os.environ.get(name)},
    }
    toolkit = toolchain.find_toolkit()  # the one that setup.py takes
    head = {
        "what": "build",
        "device": device,
        "driver": None,
        "torch": _output(sys.executable, "-c", "import torch; print(torch.__version__)"),
        "cuda": toolkit.version if toolkit else None,
        "commit": _output("git", "rev-parse", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }
    figures = {"time": ("s", round(seconds, 1)), "memory": ("GiB", round(peak / 2**30, 2))}
    for name, (unit, value) in figures.items():
        path = ROOT / "benchmarks" / "results" / f"build-{name}-{device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"config": config, "ours": value, "peers": {}}]
        if path.is_file():  # other selections measured at this machine stay
            rows = [r for r in json.loads(path.read_text())["rows"] if r["config"] != config] + rows
        path.write_text(json.dumps({**head, "unit": unit, "rows": rows}, indent=1) + "\n")
        print(f"{path.relative_to(ROOT)}: {value} {unit}")
    print(f"bytes: {sizes}")
    write_readme()
    return 0


if __name__ == "__main__":
    sys.exit(main())
