"""Backward figures: this package's gradient kernels and their peers, interleaved in one process.

    python benchmarks/backward.py                                  everything that the issue asks
    python benchmarks/backward.py --only dense --points 128:causal:* --peers cudnn
    python benchmarks/backward.py --dry-run                        the list of cases, without a GPU

A number is made as benchmarks/README.md says of the forward. A call is torch.autograd.grad of one
forward that is run before the clock starts, so the peers' own autograd code takes part.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import backward_parts as parts  # noqa: E402
import figures  # noqa: E402
import forward  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402

# Two right gradients in bf16 differ by less than this, in ||a - b|| / ||b||.
AGREEMENT = 2e-2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", default=",".join(parts.SECTIONS),
                   help="sections, comma-separated: %(default)s")
    p.add_argument("--points", help="dense points, D:full|causal|*:S items: 64:*:512,128:causal:*")
    p.add_argument("--peers", help="comma-separated, of fa2,fa4,cudnn; 'none' (default: all)")
    forward.add_run_options(p)
    args = p.parse_args(argv)  # fmt: skip
    unknown = set(args.only.split(",")) - set(parts.SECTIONS)
    if unknown:
        p.error(f"--only: {sorted(unknown)} is none of {list(parts.SECTIONS)}")
    names = [] if args.peers == "none" else (args.peers or ",".join(parts.PEERS)).split(",")
    unknown = set(names) - set(parts.PEERS)
    if unknown:
        p.error(f"--peers: {sorted(unknown)} is none of {list(parts.PEERS)}")
    args.peers = {name: parts.PEERS[name] for name in names}
    return args


def prepare(case, inputs, columns: dict) -> tuple[dict, dict]:
    """Callables by column, and reasons of those that can't run."""
    calls, reasons = {}, {}
    for name, setup in columns.items():
        try:
            calls[name] = parts.Backward(setup, case, inputs)
        except providers.Unavailable as reason:
            reasons[name] = str(reason)
        except Exception as error:  # noqa: BLE001 - a column's failure must not end the run
            reasons[name] = f"{type(error).__name__}: {timing.first_line(error)}"
    return calls, reasons


def disagreement(calls: dict) -> dict[str, float]:
    """{"ours": difference} if a gradient of ours is far from another column's, else nothing."""
    others = (name for name in ("cudnn", "fa4", "fa2", parts.PLAIN) if name in calls)
    for name in others if "ours" in calls else ():
        with contextlib.suppress(Exception):
            pairs = list(zip(calls["ours"](), calls[name]()))
            worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
            return {} if worst <= AGREEMENT else {"ours": worst}  # NaN is far too
    return {}


def run_case(case, args: argparse.Namespace) -> dict:
    inputs = parts.make_inputs(case)
    columns = parts.columns(case, args.peers)
    calls, reasons = prepare(case, inputs, columns)
    wrong = disagreement(calls)
    # The issue asks for device time at S 512; other points decide by the fastest call.
    graph = case.section == "dense" and case.lengths[0] == 512
    kind, timers, failures = timing.make_timers(calls, graph, args.warmup, args.rep)
    reasons.update(failures)
    measured = timing.interleave(timers, args.rounds)
    (row,) = forward.make_rows(case, ["ours"], columns, kind, measured, reasons, wrong)
    del timers, calls, inputs
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def report(file: results.ResultsFile) -> bool:
    """Prints figures and what is missing; True if no figure was missed."""
    cublas = file.data["reference"].get("cublas_bf16")
    return forward.report_figures(file, parts.evaluate(file.rows, cublas))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        selected = forward.select(args, parts.SECTIONS)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    code = forward.ready(selected, args, "backward.py")
    if code is not None:
        return code
    warnings.filterwarnings("ignore", category=UserWarning)
    forward.find_package()
    package = providers._import("flash_attn3")
    if not isinstance(package, str):
        package.ops.use_backward("kernels")
    file = forward.open_file("backward", args)
    forward.cublas(file)
    left = forward.measure(
        selected, lambda case: [run_case(case, args)],
        lambda case: parts.columns(case, args.peers), args, file,
    )  # fmt: skip
    print()
    print(figures.table([r for r in file.rows if r["config"]["case"] == "dense"],
                        ["ours", *args.peers]))  # fmt: skip
    good = report(file)
    forward.print_left(left, file)
    return 1 if args.strict and not good else 0


if __name__ == "__main__":
    sys.exit(main())
