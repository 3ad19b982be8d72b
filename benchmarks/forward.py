"""Forward figures: this package and its peers, interleaved in one process.

    python benchmarks/forward.py                                   everything that the issue asks
    python benchmarks/forward.py --only dense --points 128:causal:*
    python benchmarks/forward.py --kernels --lib a.so --lib b.so   variants of the kernel library

benchmarks/README.md says how a number is made and how to get the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases as case_lists  # noqa: E402
import figures  # noqa: E402
import flops  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402
from cases import Case, Inputs  # noqa: E402

FP16 = "ours fp16"
# Two right results in bf16 differ by less than this, in ||a - b|| / ||b||.
AGREEMENT = 1e-2


def add_run_options(p: argparse.ArgumentParser) -> None:
    """What backward.py and fp8.py take too."""
    # fmt: off
    p.add_argument("--rounds", type=int, default=timing.ROUNDS)
    p.add_argument("--warmup", type=float, default=timing.WARMUP_MS, help="ms, per round")
    p.add_argument("--rep", type=float, default=timing.REP_MS, help="ms, per round")
    p.add_argument("--budget-s", type=float, help="start no further case after so many seconds")
    p.add_argument("--resume", type=Path, metavar="FILE",
                   help="take over the rows of an earlier part (same device and commit)")
    p.add_argument("--out", type=Path, help="results file (default: $OUT or benchmarks/results)")
    p.add_argument("--strict", action="store_true", help="exit code 1 if a figure is missed")
    p.add_argument("--dry-run", action="store_true", help="list the cases and stop; no GPU needed")
    # fmt: on


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", default=",".join(case_lists.SECTIONS),
                   help="sections, comma-separated: %(default)s")
    p.add_argument("--points", help="dense points, D:full|causal|*:S items: 64:*:512,128:causal:*")
    p.add_argument("--peers", help="comma-separated, of fa2,fa3,fa4,cudnn; 'none' for none "
                                   "(default: all; with --kernels fa3 where it is installed)")
    p.add_argument("--no-fp16", action="store_true", help="leave the fp16 column out")
    add_run_options(p)
    k = p.add_argument_group("kernel libraries, by ctypes and without the binding")
    k.add_argument("--kernels", action="store_true", help="measure --lib columns instead of ours")
    k.add_argument("--lib", action="append", type=Path, default=[], metavar="[NAME=]FILE.so",
                   help="repeat for more columns (default: flash_attn3/libflash_attn3_sm90.so)")
    k.add_argument("--no-check", action="store_true", help="skip the correctness cases")
    k.add_argument("--small-check", action="store_true", help="only the small correctness cases")
    k.add_argument("--dtypes", default="bf16,fp16", help="dtypes of the check: %(default)s")
    args = p.parse_args(argv)  # fmt: skip
    unknown = set(args.only.split(",")) - set(case_lists.SECTIONS)
    if unknown:
        p.error(f"--only: {sorted(unknown)} is none of {list(case_lists.SECTIONS)}")
    if args.peers not in (None, "none"):
        unknown = set(args.peers.split(",")) - set(providers.PEERS)
        if unknown:
            p.error(f"--peers: {sorted(unknown)} is none of {list(providers.PEERS)}")
    return args


def select(args: argparse.Namespace, sections=case_lists.SECTIONS) -> list[Case]:
    chosen = []
    for section in args.only.split(","):
        found = sections[section]()
        if section == "dense" and args.points:
            found = case_lists.select_dense(args.points, found)
        chosen += found
    return chosen


def load_libraries(args: argparse.Namespace) -> dict[str, providers.KernelLibrary]:
    """Column name -> library. NAME=FILE gives a name; else the file's stem, or its folder's."""
    paths = args.lib or [results.REPO / "flash_attn3" / "libflash_attn3_sm90.so"]
    loaded: dict[str, providers.KernelLibrary] = {}
    for item in map(str, paths):
        name, _, file = item.rpartition("=")
        path = Path(file)
        if not name:
            name = path.stem
            if name == "libflash_attn3_sm90":
                name = path.resolve().parent.name
        name = name if name not in loaded else f"{name}#{len(loaded) + 1}"
        if not path.is_file():
            raise SystemExit(f"--lib {file}: no such file")
        loaded[name] = providers.KernelLibrary(path)
        print(f"{name}: {path}: {loaded[name].build_info()}")
    return loaded


def print_plans(name: str, library: providers.KernelLibrary) -> None:
    for head_dim in case_lists.HEAD_DIMS:
        for causal in (False, True):
            case = Case("dense", head_dim, causal, (4096,) * 4, 2048 // head_dim)
            try:
                inputs = case_lists.make_inputs(case)
                call = library.prepare(inputs.q, inputs.k, inputs.v, causal=causal)
                plan = call.plan().as_dict()
            except NotImplementedError as error:
                print(f"{name}: D {head_dim}: {timing.first_line(error)}")
                break
            text = " ".join(f"{key}={value}" for key, value in plan.items())
            print(f"{name}: D {head_dim} {'causal' if causal else 'full'}: {text}")


def choose_columns(args: argparse.Namespace) -> tuple[dict[str, providers.Setup], list[str]]:
    """(columns with their set-up, names of the project's own columns)."""
    own: dict[str, providers.Setup] = {}
    if args.kernels:
        libraries = load_libraries(args)
        for name, library in libraries.items():
            print_plans(name, library)
            own[name] = providers.library_setup(library)
        if not args.no_check:
            import check

            for name, library in libraries.items():
                started = time.perf_counter()
                check.check_library(
                    library, name, args.dtypes.split(","), large=not args.small_check
                )
                print(f"{name}: checked in {time.perf_counter() - started:.0f} s", flush=True)
        default = ["fa3"] if not isinstance(providers._import("fa3_fwd_interface"), str) else []
    else:
        own["ours"] = providers.setup_ours
        default = list(providers.PEERS)
    names = default if args.peers is None else args.peers.split(",")
    peers = {} if args.peers == "none" else {name: providers.PEERS[name] for name in names}
    return {**own, **peers}, list(own)


def prepare_calls(case: Case, inputs: Inputs, columns: dict, fp16: bool):
    calls, reasons = {}, {}
    for name, setup in columns.items():
        try:
            calls[name] = setup(case, inputs)
        except providers.Unavailable as reason:
            reasons[name] = str(reason)
        except Exception as error:  # noqa: BLE001 - a column's failure must not end the run
            reasons[name] = f"{type(error).__name__}: {timing.first_line(error)}"
    if fp16:
        try:
            half = inputs.to(torch.float16)
            calls[FP16] = providers.setup_ours(case.with_dtype("fp16"), half)
        except providers.Unavailable as reason:
            reasons[FP16] = str(reason)
    return calls, reasons


def disagreement(calls: dict, own: list[str], limit: float = AGREEMENT) -> dict[str, float]:
    """Own columns whose result is far from a peer's (relative difference), so that no wrong
    result is timed unnoticed. Peers that fail are left to the timers to report."""

    def result(name: str) -> torch.Tensor | None:
        with contextlib.suppress(Exception):
            return providers.as_tensor(calls[name]())
        return None

    candidates = [peer for peer in ("fa3", "cudnn", "fa2", "fa4") if peer in calls]
    reference = next((out for out in map(result, candidates) if out is not None), None)
    wrong = {}
    for name in own:
        out = result(name) if name in calls and reference is not None else None
        if out is None:
            continue
        # Per slice of rows: the largest case has outputs of 1 GB, and float32 copies add to that.
        squares = [0.0, 0.0]
        rows_a, rows_b = out.flatten(0, -2), reference.flatten(0, -2)
        for a, b in zip(rows_a.split(2**18), rows_b.split(2**18)):
            squares[0] += float((a.float() - b.float()).square().sum())
            squares[1] += float(b.float().square().sum())
        difference = (squares[0] / squares[1]) ** 0.5
        if not difference <= limit:  # NaN too
            wrong[name] = difference
    return wrong


def peak_memory(case: Case) -> dict | None:
    """Peak of torch's allocator in one call of ours, over the bytes of inputs and outputs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    inputs = case_lists.make_inputs(case)
    try:
        call = providers.setup_ours(case, inputs)
    except providers.Unavailable:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tensors = (inputs.q, inputs.k, inputs.v, out)
    needed = sum(t.numel() * t.element_size() for t in tensors)
    needed += sum(case.lengths) * case.heads * 4  # the LSE
    return {"bytes": peak, "inputs_outputs": needed, "ratio": round(peak / needed, 5)}


def make_rows(case, own, columns, kind, measured, reasons, wrong) -> list[dict]:
    """The row of the case, and the fp16 row beside it where that column was measured."""

    def tflops(name: str) -> float | None:
        found = measured.get(name)
        return round(flops.tflops(case.flops, found.median), 2) if found else None

    ms = {n: round(m.median, 6) for n, m in measured.items() if n != FP16}
    row = {
        "config": {**case.config, "timing": kind},
        "ours": tflops("ours"),
        "peers": {name: tflops(name) for name in columns if name not in own},
        "reasons": {n: text for n, text in reasons.items() if n != FP16},
        "flops": case.flops,
        "ms": ms,
        "spread": {n: round(m.spread, 4) for n, m in measured.items() if n != FP16},
    }
    if "ours" not in own:
        row["libs"] = {name: tflops(name) for name in own}
    if wrong:
        row["wrong"] = {name: round(value, 5) for name, value in wrong.items()}
    rows = [row]
    if FP16 in measured or FP16 in reasons:
        why = "fp16 is compared with this package's own bf16 row"
        rows.append({
            "config": {**case.with_dtype("fp16").config, "timing": kind},
            "ours": tflops(FP16),
            "peers": {name: None for name in row["peers"]},
            "reasons": {name: why for name in row["peers"]}
            | ({"ours": reasons[FP16]} if FP16 in reasons else {}),
            "flops": case.flops,
            "ms": {"ours": round(measured[FP16].median, 6)} if FP16 in measured else {},
            "spread": {"ours": round(measured[FP16].spread, 4)} if FP16 in measured else {},
        })  # fmt: skip
    return rows


def run_case(case: Case, columns: dict, own: list[str], args: argparse.Namespace) -> list[dict]:
    inputs = case_lists.make_inputs(case)
    fp16 = "ours" in own and case.section == "dense" and not args.no_fp16
    calls, reasons = prepare_calls(case, inputs, columns, fp16)
    wrong = disagreement(calls, own)
    # Device time is asked for at S 512, and a windowed call is short beside the dense one that it
    # is compared with: events add 4 us to either. Other points decide by the fastest call.
    graph = (case.section == "dense" and case.lengths[0] == 512) or case.section == "window"
    rep = args.rep
    if case.section == "long":
        rep = max(rep, 250.0)  # a call takes 90 ms
    kind, timers, failures = timing.make_timers(calls, graph, args.warmup, rep)
    reasons.update(failures)
    measured = timing.interleave(timers, args.rounds)
    rows = make_rows(case, own, columns, kind, measured, reasons, wrong)
    del timers, calls, inputs
    if case.section == "long" and case.lengths[0] == case_lists.LONG_SEQLEN and "ours" in own:
        memory = peak_memory(case)
        if memory:
            rows[0]["peak_memory"] = memory
    torch.cuda.empty_cache()
    return rows


def cublas(file: results.ResultsFile) -> None:
    call, operations = providers.cublas_call()
    measured = timing.interleave({"cublas": timing.EventTimer(call)})["cublas"]
    rate = round(flops.tflops(operations, measured.median), 1)
    file.data["reference"]["cublas_bf16"] = rate
    print(f"cuBLAS bf16 at 8192: {rate:.0f} TFLOP/s", flush=True)


def progress(row: dict, case: Case, columns: dict, spent: float) -> None:
    parts = []
    for name in columns:
        ms = row["ms"].get(name)
        parts.append(f"{name} {flops.tflops(row['flops'], ms):.0f}" if ms else f"{name} -")
    wrong = f"  WRONG {row['wrong']}" if row.get("wrong") else ""
    print(f"{case.label}  {row['config']['timing']}  {'  '.join(parts)}{wrong}  [{spent:.0f} s]",
          flush=True)  # fmt: skip


def measure(selected, run, columns: Callable, args, file) -> list[Case]:
    """Measures what is not in the file yet, by run(case) -> rows; what the time budget left out.

    columns(case): whose times a line of the progress shows.
    """
    started = time.perf_counter()
    for index, case in enumerate(selected):
        if file.find(case.config) is not None:
            continue
        spent = time.perf_counter() - started
        if args.budget_s is not None and spent > args.budget_s:
            return [c for c in selected[index:] if file.find(c.config) is None]
        rows = run(case)
        for row in rows:
            file.put(row)
        progress(rows[0], case, columns(case), time.perf_counter() - started)
    return []


def print_missing(file: results.ResultsFile) -> None:
    counts: dict[tuple[str, str], int] = {}
    for row in file.rows:
        for name, reason in row["reasons"].items():
            counts[name, reason] = counts.get((name, reason), 0) + 1
    for (name, reason), count in counts.items():
        print(f"{name}: {count} rows without a figure: {reason}")


def find_package() -> None:
    """Makes flash_attn3 importable, from the source tree where it is not installed."""
    if isinstance(providers._import("flash_attn3"), str):
        # Behind everything else on the path, so that it never shadows an installed package.
        sys.path.append(str(results.REPO))
        providers._import.cache_clear()


def open_file(what: str, args: argparse.Namespace) -> results.ResultsFile:
    head = results.header(what)
    file = results.ResultsFile(args.out or results.default_path(what, head["device"]), head)
    if args.resume:
        print(f"resumed with {file.resume(args.resume)} rows of {args.resume}")
    print(" ".join(f"{key} {head[key]};" for key in ("device", "driver", "torch", "commit")))
    return file


def print_left(left: list[Case], file: results.ResultsFile) -> None:
    if left:
        print(f"time budget spent: {len(left)} cases not measured, from {left[0].label.strip()!r} "
              f"on; continue with --resume {file.path}")  # fmt: skip


def ready(selected: list[Case], args: argparse.Namespace, script: str) -> int | None:
    """The exit code of a run that ends before measuring, or None."""
    if args.dry_run:
        for case in selected:
            print(f"{case.label}  {case.flops / 1e12:8.3f} TFLOP")
        return 0
    if not torch.cuda.is_available():
        print(f"{script} measures on a GPU, and torch sees none; --dry-run lists the cases")
        return 2
    return None


def report_figures(file: results.ResultsFile, found: list[figures.Figure]) -> bool:
    """Prints what is missing and the figures, which go into the file; True if none was missed."""
    print_missing(file)
    for figure in found:
        print(figure.line())
    file.data["figures"] = [vars(figure) for figure in found]
    file.write()
    print(f"\nwritten to {file.path}")
    wrong = any(row.get("wrong") for row in file.rows)
    return not wrong and all(figure.passed is not False for figure in found)


def report(file: results.ResultsFile, columns: dict, own: list[str]) -> bool:
    """Prints the tables; True if no figure was missed."""
    print()
    print(figures.table(file.rows, list(columns)))
    print_missing(file)
    good = True
    for column in own:
        print(f"\n{column}:")
        found = figures.evaluate(file.rows, column)
        for figure in found:
            print(figure.line())
        good &= all(figure.passed is not False for figure in found)
        if column == "ours":
            file.data["figures"] = [vars(figure) for figure in found]
    good &= not any(row.get("wrong") for row in file.rows)
    file.write()
    print(f"\nwritten to {file.path}")
    return good


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        selected = select(args)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    code = ready(selected, args, "forward.py")
    if code is not None:
        return code
    # The fallback's notice would otherwise stand between the rows; setup_ours gives the reason.
    warnings.filterwarnings("ignore", category=UserWarning)
    find_package()
    file = open_file("kernels" if args.kernels else "forward", args)
    columns, own = choose_columns(args)
    cublas(file)
    left = measure(
        selected, lambda case: run_case(case, columns, own, args), lambda _: columns, args, file
    )
    good = report(file, columns, own)
    print_left(left, file)
    return 1 if args.strict and not good else 0


if __name__ == "__main__":
    sys.exit(main())
