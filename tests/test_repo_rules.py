"""What holds for every file of the repository, whoever writes it."""

import ast
import re
import subprocess
from pathlib import Path

import build_modules
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".hpp"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".in", ".json", ".yml", ".yaml", ".cfg", ".txt"}
MAX_LINES = 600
MAX_UNITS = 48
MAX_INSTANTIATION_LINES = 15

# What counts as checking something: a call whose name says so.
CHECKING_CALL = re.compile(
    r"^(assert|check|compare|expect|verify|raises|warns|opcheck|gradcheck|fail)|_(check|compare)$"
)


def repository_files():
    """What git tracks; the tree itself where there is no git (an unpacked sdist)."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        names = done.stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    skipped = {".git", ".venv", "build", "dist", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not skipped.intersection(path.relative_to(ROOT).parts)
    ]


FILES = repository_files()
SOURCES = [path for path in FILES if path.suffix in SOURCE_SUFFIXES]
TEXTS = [
    path
    for path in FILES
    if path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run", ".gitignore")
]


def relative(path):
    return path.relative_to(ROOT).as_posix()


def lines_matching(paths, pattern):
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    return found


def under(folder):
    return [path for path in SOURCES if relative(path).startswith(folder + "/")]


def test_the_tree_was_found():
    assert {"setup.py", "pyproject.toml", "Makefile", "README.md"} <= {relative(p) for p in FILES}


def test_no_file_is_longer_than_600_lines():
    long = [relative(p) for p in SOURCES if len(p.read_text().splitlines()) > MAX_LINES]
    assert not long


def test_at_most_48_units_of_compilation():
    units = [p for p in under("csrc") if p.suffix in (".cu", ".cpp")]
    assert 0 < len(units) <= MAX_UNITS


def test_instantiation_files_are_a_few_lines():
    long = [
        relative(p)
        for p in under("csrc/instantiations")
        if len(p.read_text().splitlines()) > MAX_INSTANTIATION_LINES
    ]
    assert not long


def test_the_list_of_units_is_the_folder():
    listed = set(build_modules.load("units").KERNEL_UNITS)
    present = {p.stem for p in under("csrc/instantiations")}
    assert listed == present


def test_cpp_never_ends_the_process():
    assert not lines_matching(under("csrc"), r"\b(exit|_exit|quick_exit|abort|terminate)\s*\(")


def test_torch_is_included_in_the_binding_only():
    others = [p for p in under("csrc") if not relative(p).startswith("csrc/api/")]
    assert not lines_matching(others, r"#\s*include\s*[<\"](torch|ATen|c10|pybind11)/")


def test_the_binding_includes_no_kernel():
    assert not lines_matching(under("csrc/api"), r"#\s*include\s*[<\"](kernels|cute|cutlass)/")


def test_kernels_point_one_way():
    leaf = under("csrc/kernels/common")
    assert not lines_matching(leaf, r"#\s*include\s*\"(kernels/(attn|fwd|bwd|decode|fp8)|api)/")
    attn = under("csrc/kernels/attn")
    assert not lines_matching(attn, r"#\s*include\s*\"(kernels/(fwd|bwd|decode)|api)/")


def test_no_unfinished_work_is_left():
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3))
    assert not lines_matching(SOURCES, rf"\b({marks})\b")


def _checks_something(function, helpers):
    """True if the function asserts, or calls what does (one that is named so, or a helper)."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if CHECKING_CALL.search(name) or name in helpers:
                return True
    return False


def _functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def functions_without_check(source):
    functions = _functions(ast.parse(source))
    helpers = {f.name for f in functions if _checks_something(f, frozenset())}
    tests = [f for f in functions if f.name.startswith("test_")]
    return [f.name for f in tests if not _checks_something(f, helpers)]


def test_every_test_checks_something():
    bare = [
        f"{relative(path)}: {name}"
        for path in under("tests")
        if path.name.startswith("test_")
        for name in functions_without_check(path.read_text())
    ]
    assert not bare


def test_a_test_without_a_check_would_be_seen():
    source = "def test_a():\n  f()\n\ndef test_b():\n  assert f()\n\ndef test_c():\n  check(1)\n"
    assert functions_without_check(source) == ["test_a"]


def _anchor(heading):
    """The anchor that a heading gets: lower case, no punctuation, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        destination = (page.parent / name).resolve() if name else page
        if not destination.exists():
            broken.append(f"{relative(page)}: {target}")
        elif anchor and destination.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", destination.read_text(), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                broken.append(f"{relative(page)}: {target}")
    return broken


def test_links_of_the_documents_resolve():
    pages = [p for p in FILES if p.suffix == ".md"]
    assert pages and not [link for page in pages for link in broken_links(page)]


def test_files_that_the_readme_names_exist():
    named = re.findall(
        r"`((?:csrc|tests|docs|benchmarks|examples|third_party|_build)/[\w./-]*)`",
        (ROOT / "README.md").read_text(),
    )
    absent = [n for n in named if not (ROOT / n).exists()]
    assert named and absent in ([], ["third_party/cutlass"])


def test_no_host_of_a_package_registry_is_named():
    hosts = r"(pypi\.org|pythonhosted|npmjs\.(org|com)|deb\.debian|pypi\.nvidia|download\.pytorch)"
    this = Path(__file__).resolve()
    assert not lines_matching([p for p in TEXTS if p != this], hosts)


def test_no_path_of_one_machine_is_named():
    places = r"(?<![\w.$}])/(root|home|work|opt)/[\w.]"
    assert not lines_matching(TEXTS, places)


@pytest.mark.parametrize("name", [
    "Makefile", "README.md", "pyproject.toml", "setup.py", "_build", "flash_attn3", "tests",
    "benchmarks", "examples"])
def test_lines_fit_100_columns(name):
    paths = [p for p in FILES if relative(p) == name or relative(p).startswith(name + "/")]
    assert paths
    for path in paths:
        tables = r"(?!.*\|)" if path.suffix == ".md" else ""
        assert path.suffix == ".json" or not lines_matching([path], rf"^{tables}.{{101,}}$")
