"""The machine code of the built kernels: the instructions it is made for, and nothing spilled.

Needs no GPU. cuobjdump and nvdisasm come from PATH or from their wheels.
FLASH_ATTN3_SASS_LIBRARY names another library than the package's.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import build_modules
import pytest

kernel_library = build_modules.load("kernel_library")
units = build_modules.load("units")

ROOT = build_modules.ROOT
GIVEN = os.environ.get("FLASH_ATTN3_SASS_LIBRARY")
MAIN_KERNELS = ("fwd_kernel", "bwd_kernel")
# A TMA load of a tensor tile, setmaxnreg; and wgmma, of 16 or of 8 bits.
REQUIRED = ("GMMA", "UTMALDG", "USETMAXREG")
LOCAL_MEMORY = re.compile(r"\b(STL|LDL)\b")


def library():
    path = Path(GIVEN) if GIVEN else ROOT / "flash_attn3" / kernel_library.LIBRARY
    if not path.is_file():
        pytest.skip(f"no kernel library was built here ({path.name}): make build")
    return path


def tool_folder(name):
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path).parent
    paths = sysconfig.get_paths()
    for site in (paths["purelib"], paths["platlib"]):
        for place in sorted(Path(site).glob(f"nvidia/cu*/bin/{name}"), reverse=True):
            return place.parent
    return None


def run_cuobjdump(*arguments):
    folders = [tool_folder("cuobjdump"), tool_folder("nvdisasm")]
    if folders[0] is None or (folders[1] is None and "-sass" in arguments):
        pytest.skip("cuobjdump or nvdisasm is not installed: "
                    "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = os.pathsep.join([*(str(f) for f in folders if f), os.environ.get("PATH", "")])
    done = subprocess.run(
        [str(folders[0] / "cuobjdump"), *arguments], env={**os.environ, "PATH": path},
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def machine_code():
    """Kernel name -> the opcodes in it, counted."""
    counts = {}
    name = None
    for line in run_cuobjdump("-sass", str(library())).splitlines():
        header = re.match(r"\s*Function : (\S+)", line)
        if header:
            name = header[1]
            counts[name] = {}
            continue
        code = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line)
        if name and code:
            counts[name][code[1]] = counts[name].get(code[1], 0) + 1
    return counts


@pytest.fixture(scope="module")
def resources():
    """Kernel name -> {"REG": ..., "STACK": ..., "LOCAL": ...}."""
    text = run_cuobjdump("--dump-resource-usage", str(library()))
    found = {}
    for name, usage in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", text):
        found[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    return found


def main_kernels(names):
    kernels = [name for name in names if any(kernel in name for kernel in MAIN_KERNELS)]
    assert kernels, f"none of {MAIN_KERNELS} is in the library"
    return kernels


def test_one_main_kernel_per_unit(machine_code):
    # At least: a unit may hold variants of its kernel, a build may leave out units.
    kernels = main_kernels(machine_code)
    assert len(kernels) >= expected_units()


def expected_units():
    """How many units this build selected; 1 where only the library itself is known."""
    info = ROOT / "flash_attn3" / "_build_info.py"
    if GIVEN or not info.is_file():
        return 1
    facts = {}
    exec(info.read_text(), facts)
    listed = facts["KERNELS"]
    return len(listed) if isinstance(listed, tuple) and listed else 1


@pytest.mark.parametrize("opcode", REQUIRED)
def test_main_kernels_use_hopper(machine_code, opcode):
    def wanted(name):
        return opcode if opcode != "GMMA" else "QGMMA" if "fp8" in name else "HGMMA"

    lacking = [n for n in main_kernels(machine_code) if not machine_code[n].get(wanted(n))]
    assert not lacking


def test_no_main_kernel_touches_local_memory(machine_code):
    touching = {
        name: {op: n for op, n in machine_code[name].items() if LOCAL_MEMORY.search(op)}
        for name in main_kernels(machine_code)
    }
    assert not {name: ops for name, ops in touching.items() if ops}


def test_no_main_kernel_has_a_stack(resources):
    using = {
        name: resources[name]
        for name in main_kernels(resources)
        if resources[name].get("STACK", 0) or resources[name].get("LOCAL", 0)
    }
    assert not using


def test_registers_fit_the_block(resources):
    # At launch 384 threads can have at most 168 each; setmaxnreg hands them round later.
    over = {n: resources[n]["REG"] for n in main_kernels(resources) if resources[n]["REG"] > 168}
    assert not over


def test_ptxas_had_nothing_to_complain_of():
    if GIVEN:
        folder = Path(GIVEN).resolve().parent / "kernels"
    else:
        folder = ROOT / "build" / "kernels"
    library()
    logs = kernel_library.compile_logs(folder, units.ALL_UNITS)
    if not logs:
        pytest.skip("the library was not compiled here, so there are no compile logs")
    remarks = {name: kernel_library.slow_kernel_remarks(log) for name, log in logs.items()}
    assert not {name: found for name, found in remarks.items() if found}
