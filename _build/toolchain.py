"""Finds what the kernels are compiled with: nvcc, CUDA headers, CUTLASS headers, torch.

Nothing here downloads anything. What is missing is reported by one sentence (BuildError).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from errors import BuildError

OLDEST_NVCC = (12, 8)
OLDEST_TORCH = (2, 9)
OLDEST_CUTLASS = (4, 0)
NVCC_WHEELS = 'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]"'
SKIP_HINT = "or set FLASH_ATTN3_SKIP_CUDA=1 to install the fallback alone"

USUAL_ROOT = Path("/usr/local/cuda")

# Where the CUDA wheels lie inside site-packages, newest first.
_WHEEL_ROOTS = ("nvidia/cu14", "nvidia/cu13")


def version_tuple(text: str) -> tuple[int, ...]:
    """(2, 11, 0) of '2.11.0+cu130'; what follows the numbers is dropped."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_isolated_venv() -> bool:
    """True in the throw-away environment of `python -m build`."""
    return Path(sys.prefix).name.startswith("build-env-")


def site_folders() -> list[Path]:
    """The site-packages folders of the environment that will run the package.

    pip's build isolation hides them from sys.path, but sysconfig and site still name them.
    `python -m build` isolates with a venv of its own: then the active environment counts.
    """
    folders: list[str] = []
    active = os.environ.get("VIRTUAL_ENV")
    if is_isolated_venv() and active:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        folders += [str(Path(active) / "lib" / version / "site-packages")]
    paths = sysconfig.get_paths()
    folders += [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def search_folders() -> list[Path]:
    """sys.path (an isolated build's own packages) and then the target environment."""
    own = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    return list(dict.fromkeys(own + site_folders()))


@dataclass(frozen=True)
class Torch:
    """A torch installation, read from its files without importing it."""

    version: str
    cuda: str | None  # None: built without CUDA
    site: Path


def find_torch(folders: list[Path] | None = None) -> Torch | None:
    """The torch that the package will run with, or None."""
    for folder in search_folders() if folders is None else folders:
        stamp = folder / "torch" / "version.py"
        if not stamp.is_file():
            continue
        text = stamp.read_text()
        cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        version = re.search(r"^__version__\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if version is None:  # an editable or unusual torch: its metadata knows
            found = list(importlib.metadata.distributions(name="torch", path=[str(folder)]))
            if not found:
                continue
            return Torch(found[0].version, cuda[1] if cuda else None, folder)
        return Torch(version[1], cuda[1] if cuda else None, folder)
    return None


def require_torch() -> Torch:
    """The torch to build the binding against, made importable; else a sentence."""
    torch = find_torch()
    if torch is None:
        raise BuildError(
            "torch is not installed in this environment: pip install torch (2.9 or newer) first."
        )
    if version_tuple(torch.version) < OLDEST_TORCH:
        raise BuildError(f"torch {torch.version} is too old: pip install 'torch>=2.9'.")
    if torch.cuda is None:
        raise BuildError(
            f"torch {torch.version} in this environment is built without CUDA: install a CUDA "
            f"build of torch, {SKIP_HINT}."
        )
    if importlib.util.find_spec("torch") is None:
        sys.path.append(str(torch.site))  # isolation hid it: last, so the isolated tools win
    return torch


def loaded_cxx_runtime(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The libstdc++.so that this process has loaded, with torch: one path, or none.

    The binding is linked to that one by name. A compiler that brings libstdc++ as an archive alone
    would put a second copy into it, and a message written by both, with shapes from torch, ends the
    process instead of raising.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    found = {line.split(maxsplit=5)[-1] for line in lines if "/libstdc++.so" in line}
    return sorted(found)[:1]


@dataclass(frozen=True)
class Toolkit:
    """nvcc and the folder it belongs to."""

    nvcc: Path
    root: Path
    version: str  # "13.0.88"

    @property
    def library_dirs(self) -> list[Path]:
        """Folders that may hold libcudart_static.a; wheels keep it where nvcc doesn't look."""
        folders = [self.root / "lib64", self.root / "lib"]
        return [folder for folder in folders if (folder / "libcudart_static.a").exists()]


def cuda_root_with_headers(folder: Path) -> bool:
    return (folder / "include" / "cuda_runtime_api.h").is_file()


def _nvcc_top(nvcc: Path) -> Path | None:
    """The toolkit folder that nvcc itself reports: right for wrapper scripts and links too."""
    try:
        done = subprocess.run(
            [str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull],
            capture_output=True, text=True, timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^#\$ TOP=(.+)$", done.stderr + done.stdout, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else None


def _nvcc_version(nvcc: Path) -> str:
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{nvcc} does not start ({error}): repair it, {SKIP_HINT}.") from None
    match = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if match is None:
        raise BuildError(f"{nvcc} --version does not tell a version: repair it, {SKIP_HINT}.")
    return match[1]


def _wheel_roots() -> list[Path]:
    return [folder / root for folder in search_folders() for root in _WHEEL_ROOTS]


def _nvcc_candidates(environ) -> list[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = environ.get(variable)
        if not home:
            continue
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            raise BuildError(
                f"{variable}={home} holds no bin/nvcc: unset it or point it at a CUDA toolkit, "
                f"{SKIP_HINT}."
            )
        return [nvcc]
    candidates = []
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if on_path:
        candidates.append(Path(on_path))
    candidates.append(USUAL_ROOT / "bin" / "nvcc")
    candidates += [root / "bin" / "nvcc" for root in _wheel_roots()]
    return candidates


def find_toolkit(environ=os.environ) -> Toolkit | None:
    """CUDA_HOME, nvcc on PATH, the usual folder, the wheels; None when there is no nvcc."""
    for nvcc in _nvcc_candidates(environ):
        if not nvcc.is_file():
            continue
        version = _nvcc_version(nvcc)
        roots = [nvcc.resolve().parent.parent, _nvcc_top(nvcc)]
        root = next((r for r in roots if r is not None and cuda_root_with_headers(r)), None)
        if root is None:
            raise BuildError(
                f"{nvcc} has no CUDA headers (include/cuda_runtime_api.h) beside it: install the "
                f"whole toolkit, for instance {NVCC_WHEELS}, {SKIP_HINT}."
            )
        if version_tuple(version) < OLDEST_NVCC:
            raise BuildError(
                f"{nvcc} is CUDA {version}, and 12.8 or newer is needed (13.0 is what is tested): "
                f"point CUDA_HOME at a newer toolkit or {NVCC_WHEELS}, {SKIP_HINT}."
            )
        return Toolkit(nvcc, root, version)
    return None


def find_cuda_headers(environ=os.environ) -> Path:
    """A CUDA root for the binding alone, which needs the runtime's headers and no compiler."""
    roots = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    roots.append(USUAL_ROOT)
    roots += _wheel_roots()
    for root in roots:
        # torch's own wheels bring the first of these headers without the second.
        if cuda_root_with_headers(root) and (root / "include" / "crt" / "host_config.h").is_file():
            return root.resolve()  # as find_toolkit gives it: one build's objects serve the other
    toolkit = find_toolkit(environ)
    if toolkit is not None:
        return toolkit.root
    raise BuildError(
        "the CUDA runtime headers (cuda_runtime_api.h, crt/host_config.h) were not found: set "
        f'CUDA_HOME, or pip install "cuda-toolkit[cudart,crt]", {SKIP_HINT}.'
    )


@dataclass(frozen=True)
class Cutlass:
    """CUTLASS's headers."""

    include: Path
    version: str


def cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    numbers = [re.search(rf"#define\s+CUTLASS_{part}\s+(\d+)", text) for part in
               ("MAJOR", "MINOR", "PATCH")]
    return ".".join(number[1] if number else "0" for number in numbers)


def find_cutlass(root: Path, environ=os.environ) -> Cutlass | None:
    """CUTLASS_PATH, third_party/cutlass, the nvidia-cutlass wheel; None when there is none."""
    given = environ.get("CUTLASS_PATH")
    if given:
        places = [Path(given) / "include", Path(given)]
    else:
        places = [root / "third_party" / "cutlass" / "include"]
        places += [f / "cutlass_library" / "source" / "include" for f in search_folders()]
    for include in places:
        if (include / "cute" / "tensor.hpp").is_file() and (
            include / "cutlass" / "version.h"
        ).is_file():
            version = cutlass_version(include)
            if version_tuple(version) < OLDEST_CUTLASS:
                raise BuildError(
                    f"CUTLASS {version} in {include} is too old: take 4.0 or newer, for instance "
                    "pip install 'nvidia-cutlass>=4.2'."
                )
            return Cutlass(include, version)
    if given:
        raise BuildError(
            f"CUTLASS_PATH={given} holds no include/cute/tensor.hpp: point it at a CUTLASS 4 "
            "checkout or unset it."
        )
    return None


def require_cutlass(root: Path, environ=os.environ) -> Cutlass:
    cutlass = find_cutlass(root, environ)
    if cutlass is None:
        raise BuildError(
            "the CUTLASS headers were not found: pip install 'nvidia-cutlass>=4.2', or set "
            f"CUTLASS_PATH, or fill third_party/cutlass (its README says how), {SKIP_HINT}."
        )
    return cutlass


def require_host_compiler(environ=os.environ) -> None:
    """nvcc and the binding both need a C++ compiler, the binding Python's headers too."""
    compiler = (environ.get("CXX") or "c++").split()[0]
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        raise BuildError(
            f"no C++ compiler ({compiler}): apt-get install g++ (or set CXX), {SKIP_HINT}."
        )


def require_python_headers() -> None:
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python's headers are missing ({include}/Python.h): apt-get install python3-dev, "
            f"{SKIP_HINT}."
        )


def find_ninja(environ=os.environ) -> str:
    on_path = shutil.which("ninja", path=environ.get("PATH"))
    if on_path:
        return on_path
    scripts = [Path(sys.executable).parent, *(folder.parent.parent.parent / "bin"
                                              for folder in search_folders())]
    for place in scripts:
        if (place / "ninja").is_file():
            return str(place / "ninja")
    raise BuildError("ninja was not found: pip install ninja.")
