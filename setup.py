"""Builds flash_attn3: the kernel library by nvcc and ninja, the binding against torch.

    pip install .                              both; the fallback alone where there is no nvcc
    python setup.py build_ext --inplace        the same into the source tree, for development
    python setup.py build_kernels              the kernel library alone: needs no torch

Environment:
    FLASH_ATTN3_HEAD_DIMS, FLASH_ATTN3_DTYPES, FLASH_ATTN3_PASSES   compile a part (128; bf16; fwd)
    FLASH_ATTN3_KERNELS=PATH     take a kernel library built elsewhere, compile the binding only
    FLASH_ATTN3_SKIP_CUDA=1      compile nothing
    CUDA_HOME, CUTLASS_PATH      where nvcc and CUTLASS's headers are
    MAX_JOBS                     compilers at a time (default: by cores and memory)

The parts stand in _build/: errors, units (what is compiled), toolchain (with what), plan (whether),
kernel_library (how).
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "_build"))

from setuptools import Command, setup  # noqa: E402
from setuptools.command.build_ext import build_ext as setuptools_build_ext  # noqa: E402
from setuptools.command.build_py import build_py as setuptools_build_py  # noqa: E402

import kernel_library  # noqa: E402
import plan  # noqa: E402
import toolchain  # noqa: E402
from errors import BuildError  # noqa: E402
from plan import BuildKind  # noqa: E402
from units import select_units  # noqa: E402

PACKAGE = "flash_attn3"

# The only files that include torch's headers.
BINDING_SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "api").glob("*.cpp")
)

# Commands that compile. Others (egg_info, dist_info, sdist) must work without torch and nvcc.
COMPILING_COMMANDS = {
    "build", "build_ext", "bdist", "bdist_wheel", "develop", "editable_wheel", "install",
    "install_lib",
}


def write_build_info(folder: Path, facts: dict) -> None:
    """flash_attn3/_build_info.py: what the package at hand was built with, read at import."""
    lines = ['"""Written by setup.py: what this copy was built with."""\n']
    lines += [f"{name} = {value!r}" for name, value in facts.items()]
    text = "\n".join(lines) + "\n"
    target = folder / "_build_info.py"
    folder.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or target.read_text() != text:
        target.write_text(text)


def kernel_build(build_base: str) -> kernel_library.KernelBuild:
    """The kernel library as the environment asks for it; a sentence if something is missing."""
    units = select_units()
    toolkit = toolchain.find_toolkit()
    if toolkit is None:
        raise BuildError(
            f"no nvcc was found: {toolchain.NVCC_WHEELS}, or set CUDA_HOME, {toolchain.SKIP_HINT}."
        )
    toolchain.require_host_compiler()
    folder = Path(build_base).resolve() / "kernels"
    return kernel_library.KernelBuild(
        root=ROOT,
        folder=folder,
        output=folder / kernel_library.LIBRARY,
        toolkit=toolkit,
        cutlass=toolchain.require_cutlass(ROOT),
        units=units,
    )


class BuildKernels(Command):
    """The kernel library alone, into the package's folder or --output."""

    description = "compile the kernel library alone (no torch needed)"
    user_options = [
        ("build-base=", "b", "folder for objects (default: build)"),
        ("output=", "o", f"the library (default: {PACKAGE}/{kernel_library.LIBRARY})"),
    ]

    def initialize_options(self):
        self.build_base = "build"
        self.output = str(ROOT / PACKAGE / kernel_library.LIBRARY)

    def finalize_options(self):
        self.output = os.path.abspath(self.output)

    def run(self):
        build = kernel_build(self.build_base)
        kernel_library.build_library(build, kernel_library.job_count())
        install_library(build.output, Path(self.output))


def install_library(source: Path, target: Path) -> None:
    """Copies unless it is there already; never writes into a library that a process has mapped."""
    if target.exists() and (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(source, fresh)
    os.replace(fresh, target)


def fallback_commands(reason: str) -> dict:
    """Nothing is compiled; the package says at run time why."""
    facts = {"TORCH_VERSION": None, "TORCH_CUDA": None, "KERNELS": (), "NO_KERNELS_REASON": reason}
    print(f"flash_attn3: installing the fallback alone, since {reason}.", flush=True)

    class BuildPy(setuptools_build_py):
        def run(self):
            super().run()
            base = ROOT if getattr(self, "editable_mode", False) else Path(self.build_lib)
            write_build_info(base / PACKAGE, facts)

    class BuildNothing(setuptools_build_ext):
        def run(self):
            if self.inplace:
                write_build_info(ROOT / PACKAGE, facts)

    return {"cmdclass": {"build_py": BuildPy, "build_ext": BuildNothing}, "ext_modules": []}


def binding_commands(kind: BuildKind) -> dict:
    """The binding (a CUDAExtension) and, before it, the kernel library that it links to."""
    if not BINDING_SOURCES:
        raise BuildError("csrc/api holds no source: take a complete clone.")
    # Everything that can be missing is looked for before anything is compiled.
    jobs = kernel_library.job_count()
    torch = toolchain.require_torch()
    toolchain.require_host_compiler()
    toolchain.require_python_headers()
    if kind is BuildKind.PREBUILT:
        prebuilt = kernel_library.check_prebuilt(os.environ["FLASH_ATTN3_KERNELS"].strip())
        cuda_root = toolchain.find_cuda_headers()
        kernels, made_by = "prebuilt", f"FLASH_ATTN3_KERNELS ({prebuilt.name})"
    else:
        prebuilt = None
        build = kernel_build("build")
        cuda_root = build.toolkit.root
        kernels = tuple(unit.name for unit in build.units)
        made_by = f"nvcc {build.toolkit.version}, CUTLASS {build.cutlass.version}"
    facts = {
        "TORCH_VERSION": torch.version,
        "TORCH_CUDA": torch.cuda,
        "KERNELS": kernels,
        "MADE_BY": made_by,
        "NO_KERNELS_REASON": None,
    }

    # torch looks for CUDA_HOME once, when cpp_extension is imported, and takes the folder above
    # any nvcc on PATH, a wrapper script's too.
    os.environ["CUDA_HOME"] = str(cuda_root)
    os.environ.setdefault("MAX_JOBS", str(jobs))
    try:
        ninja = Path(toolchain.find_ninja()).parent
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{ninja}"
    except BuildError:
        if kind is BuildKind.KERNELS:
            raise  # the binding alone can do without
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    extension = CUDAExtension(
        f"{PACKAGE}._C",
        BINDING_SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        libraries=["flash_attn3_sm90"],
        # The release is named so that objects made for another torch in the same folder are
        # stale, whatever the time stamps of its headers say.
        extra_compile_args={
            "cxx": [
                "-O2", "-g0", "-fvisibility=hidden", "-Wall",
                f"-DFLASH_ATTN3_BUILT_FOR_TORCH={torch.version}",
            ]
        },
        extra_link_args=["-Wl,-rpath,$ORIGIN", "-Wl,-s", *toolchain.loaded_cxx_runtime()],
    )
    # The kernel library has its own static copy of the runtime, and the wheels of CUDA have no
    # libcudart.so to link; what the binding itself needs is loaded by torch.
    extension.libraries = [name for name in extension.libraries if name != "cudart"]

    class KernelsAndBinding(BuildExtension):
        def _package_folder(self) -> Path:
            return (ROOT if self.inplace else Path(self.build_lib).resolve()) / PACKAGE

        def run(self):
            library = prebuilt
            base = self.get_finalized_command("build").build_base
            if self.editable_mode:
                # setuptools gives a folder that it throws away: each `pip install -e .` would
                # compile the binding anew.
                self.build_temp = os.path.join(base, f"temp.{sys.implementation.cache_tag}")
            if library is None:
                chosen = kernel_build(base)
                kernel_library.build_library(chosen, jobs)
                library = chosen.output
            folder = self._package_folder()
            install_library(library, folder / kernel_library.LIBRARY)
            for ext in self.extensions:
                ext.library_dirs.insert(0, str(folder))
            super().run()
            write_build_info(folder, facts)

        def get_outputs(self):
            folder = self._package_folder()
            own = [folder / kernel_library.LIBRARY, folder / "_build_info.py"]
            return [*super().get_outputs(), *(str(path) for path in own)]

    return {
        "cmdclass": {"build_ext": KernelsAndBinding.with_options(no_python_abi_suffix=False)},
        "ext_modules": [extension],
    }


def commands_for(argv: list[str]) -> dict:
    if not COMPILING_COMMANDS.intersection(argv):
        return {"cmdclass": {}}
    reason = plan.fallback_reason()
    if reason is not None:
        return fallback_commands(reason)
    return binding_commands(plan.build_kind())


options = commands_for(sys.argv[1:])
options["cmdclass"]["build_kernels"] = BuildKernels
setup(**options)
