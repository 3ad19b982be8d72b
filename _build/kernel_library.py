"""Compiles and links the kernel library: writes build.ninja, runs ninja, reads ptxas's remarks.

The library knows nothing of torch or Python; `python setup.py build_kernels` makes it alone.
Objects stay in build/kernels, so a second build compiles only what changed: ninja compares
command lines and the headers that nvcc reports (depfiles).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from errors import BuildError
from toolchain import Cutlass, Toolkit, find_ninja, site_folders
from units import Unit

LIBRARY = "libflash_attn3_sm90.so"
GENCODE = "-gencode arch=compute_90a,code=sm_90a"
GIB = 1 << 30
# Measured peaks, one job at a time: 0.5 GiB for a kernel unit, 1.5 for a file of the binding.
MEMORY_PER_JOB = 2 * GIB

# ptxas still makes a working kernel when it prints these, only a slow one.
SLOW_KERNEL_REMARKS = {
    "C7508": "setmaxnreg was ignored",
    "C7510": "WGMMA was serialised",
    "C7511": "WGMMA was serialised (too few registers)",
    "C7512": "WGMMA was serialised (too few registers)",
    "C7513": "WGMMA was serialised",
    "C7514": "WGMMA was serialised (accumulator registers touched in flight)",
    "C7515": "WGMMA was serialised",
}


def _available_memory() -> int:
    """Bytes that this process may still use: the machine's, or its control group's if less."""
    meminfo = Path("/proc/meminfo")
    limits = []
    if meminfo.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if match:
            limits.append(int(match[1]) * 1024)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(name)
        if limit.is_file() and limit.read_text().strip().isdigit():
            limits.append(int(limit.read_text()))
    return min(limits) if limits else MEMORY_PER_JOB


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def job_count(environ=os.environ, memory: int | None = None, cores: int | None = None) -> int:
    """MAX_JOBS, or as many compilers as cores and memory allow."""
    given = environ.get("MAX_JOBS", "").strip()
    if given:
        if not given.isdigit() or int(given) < 1:
            raise BuildError(f"MAX_JOBS={given!r} is not a positive whole number.")
        return int(given)
    memory = _available_memory() if memory is None else memory
    cores = _cores() if cores is None else cores
    return max(1, min(cores, memory // MEMORY_PER_JOB))


@dataclass(frozen=True)
class KernelBuild:
    """Everything that decides what the library becomes."""

    root: Path  # the source tree
    folder: Path  # objects, logs and build.ninja
    output: Path
    toolkit: Toolkit
    cutlass: Cutlass
    units: tuple[Unit, ...]

    @property
    def host_sources(self) -> list[str]:
        found = sorted((self.root / "csrc" / "host").glob("*.c[up]*"))
        return [source.relative_to(self.root).as_posix() for source in found
                if source.suffix in (".cu", ".cpp")]


def _stable_cutlass(build: KernelBuild) -> Path:
    """A path of the headers that stays the same from build to build.

    An isolated build unpacks the wheel into a new temporary folder each time, with new time
    stamps; compiled against it, every unit would be stale at the next build. Then the headers
    are copied once into the build folder.
    """
    include = build.cutlass.include.resolve()
    lasting = [build.root, *site_folders()]
    isolated = "pip-build-env-" in str(include) or "build-env-" in str(include)
    if not isolated or any(include.is_relative_to(folder.resolve()) for folder in lasting):
        return include
    kept = build.folder / f"cutlass-{build.cutlass.version}"
    if not (kept / "complete").is_file():
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(include, kept / "include")
        (kept / "complete").touch()
    return kept / "include"


def _escape(path) -> str:
    """A path as build.ninja writes it in a build line."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _shell(path) -> str:
    """A path inside a command of build.ninja."""
    return shlex.quote(str(path)).replace("$", "$$")


def ninja_text(build: KernelBuild, cutlass_include: Path) -> str:
    """build.ninja: one compile edge per unit and host source, one link."""
    nvcc = _shell(build.toolkit.nvcc)
    flags = (
        f"-std=c++17 -O3 {GENCODE} --expt-relaxed-constexpr -DNDEBUG "
        f"-I csrc -isystem {_shell(cutlass_include)} "
        "-Xcompiler -fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden "
        "-Xptxas -v --compress-mode=size"
    )
    link_dirs = " ".join(f"-L{_shell(folder)}" for folder in build.toolkit.library_dirs)
    macros = " ".join(f"-D{unit.macro}=1" for unit in build.units)
    # ptxas -v says a lot, so a unit's output goes to a log; it is shown when the compiler fails.
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {_escape(build.folder)}",
        f"nvcc_flags = {flags}",
        "rule compile",
        f"  command = {nvcc} $nvcc_flags $defines -MD -MF $out.d -c $in -o $out > $out.log 2>&1"
        " || { cat $out.log; exit 1; }",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule link",
        f"  command = {nvcc} -shared -cudart static {GENCODE} {link_dirs} "
        f"-Xlinker -s,-soname,{LIBRARY} -o $out $in",
        "  description = link $out",
        "",
    ]
    objects = []
    edges = [(unit.source, "") for unit in build.units]
    # Only the host's dispatch depends on the selection: another one recompiles no kernel.
    edges += [(source, macros) for source in build.host_sources]
    for source, defines in edges:
        stem = Path(source).with_suffix("").relative_to("csrc").as_posix().replace("/", "-")
        target = build.folder / f"{stem}.o"
        lines.append(f"build {_escape(target)}: compile {_escape(source)}")
        if defines:
            lines.append(f"  defines = {defines}")
        objects.append(_escape(target))
    lines.append(f"build {_escape(build.output)}: link {' '.join(objects)}")
    lines.append(f"default {_escape(build.output)}")
    return "\n".join(lines) + "\n"


def slow_kernel_remarks(log_text: str) -> list[str]:
    """The lines of a compile log that say a kernel is slower than its source."""
    found = []
    for line in log_text.splitlines():
        code = next((code for code in SLOW_KERNEL_REMARKS if code in line), None)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", line)
        if code or any(int(count) for count in spills):
            found.append(line.strip())
    return found


def compile_logs(folder: Path, units: tuple[Unit, ...]) -> dict[str, str]:
    """Unit name -> what nvcc and ptxas printed while compiling it."""
    logs = {unit.name: folder / f"instantiations-{unit.name}.o.log" for unit in units}
    return {name: log.read_text(errors="replace") for name, log in logs.items() if log.is_file()}


def build_library(build: KernelBuild, jobs: int) -> None:
    """Brings build.output up to date."""
    missing = [unit.source for unit in build.units if not (build.root / unit.source).is_file()]
    if missing:
        raise BuildError(f"{missing[0]} is missing from the source tree: take a complete clone.")
    build.folder.mkdir(parents=True, exist_ok=True)
    build.output.parent.mkdir(parents=True, exist_ok=True)
    text = ninja_text(build, _stable_cutlass(build))
    script = build.folder / "build.ninja"
    if not script.is_file() or script.read_text() != text:
        script.write_text(text)
    print(
        f"flash_attn3: {len(build.units)} kernel units, nvcc {build.toolkit.version}, CUTLASS "
        f"{build.cutlass.version}, {jobs} job(s) at a time",
        flush=True,
    )
    done = subprocess.run([find_ninja(), "-C", str(build.root), "-f", str(script), f"-j{jobs}"])
    if done.returncode != 0:
        raise BuildError(
            "a kernel did not compile (its output is above); if the compiler was killed, memory "
            f"ran out: set MAX_JOBS=1 (it was {jobs})."
        )
    for name, log in compile_logs(build.folder, build.units).items():
        for remark in slow_kernel_remarks(log):
            print(f"flash_attn3: warning: {name}: {remark}", flush=True)


def check_prebuilt(path_text: str) -> Path:
    """The library that FLASH_ATTN3_KERNELS names: a file, or a folder that holds it."""
    path = Path(path_text).expanduser()
    library = path / LIBRARY if path.is_dir() else path
    if not library.is_file():
        raise BuildError(
            f"FLASH_ATTN3_KERNELS={path_text} is no file: point it at a {LIBRARY} built elsewhere."
        )
    content = library.read_bytes()
    if content[:4] != b"\x7fELF" or b"flash_attn3_fwd" not in content:
        raise BuildError(
            f"FLASH_ATTN3_KERNELS={path_text} is not a kernel library of this project: point it "
            f"at a {LIBRARY} built elsewhere."
        )
    machine = int.from_bytes(content[18:20], "little")
    here = {"x86_64": 62, "aarch64": 183}.get(os.uname().machine, machine)
    if machine != here:
        raise BuildError(
            f"FLASH_ATTN3_KERNELS={path_text} was built for another processor than this "
            f"{os.uname().machine} machine."
        )
    return library.resolve()
