"""e4m3 forward figures: this package and its peers, interleaved in one process.

    python benchmarks/fp8.py                              everything that the issue asks of speed
    python benchmarks/fp8.py --points 128:full:* --peers fa3
    python benchmarks/fp8.py --dry-run                    the list of cases, without a GPU

A number is made as benchmarks/README.md says of the forward. Accuracy: python -m
flash_attn3.accuracy.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases  # noqa: E402
import figures  # noqa: E402
import flops  # noqa: E402
import forward  # noqa: E402
import fp8_parts as parts  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402

# Two e4m3 results differ by a few hundredths in ||a - b|| / ||b||: P is rounded to 3 bits.
AGREEMENT = 8e-2


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--points", help="D:full|causal|*:S items: 64:*:1024,128:causal:*")
    p.add_argument("--peers", help="comma-separated, of fa3,cudnn,fa2; 'none' (default: all)")
    forward.add_run_options(p)
    args = p.parse_args(argv)  # fmt: skip
    names = [] if args.peers == "none" else (args.peers or ",".join(parts.PEERS)).split(",")
    unknown = set(names) - set(parts.PEERS)
    if unknown:
        p.error(f"--peers: {sorted(unknown)} is none of {list(parts.PEERS)}")
    args.peers = {name: parts.PEERS[name] for name in names}
    return args


def wants(case, name: str) -> bool:
    """FlashAttention-2 is asked for at one length and head dim."""
    return name != "fa2" or (case.head_dim == 128 and case.lengths[0] == cases.TOKENS)


def run_case(case, args: argparse.Namespace) -> dict:
    inputs = parts.make_inputs(case)
    columns = {n: s for n, s in parts.columns(args.peers).items() if wants(case, n)}
    calls, reasons = forward.prepare_calls(case, inputs, columns, fp16=False)
    wrong = forward.disagreement(calls, ["ours", parts.BLOCKS], AGREEMENT)
    kind, timers, failures = timing.make_timers(calls, False, args.warmup, args.rep)
    reasons.update(failures)
    measured = timing.interleave(timers, args.rounds)
    own = ["ours", parts.BLOCKS]
    (row,) = forward.make_rows(case, own, columns, kind, measured, reasons, wrong)
    del timers, calls, inputs
    torch.cuda.empty_cache()
    return row


def cublas(file: results.ResultsFile, size: int = 8192) -> None:
    a = parts.to_e4m3(torch.randn(size, size, device="cuda"))
    one = torch.ones((), device="cuda")

    def call():
        return torch._scaled_mm(a, a.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    measured = timing.interleave({"cublas": timing.EventTimer(call)})["cublas"]
    rate = round(flops.tflops(2 * size**3, measured.median), 1)
    file.data["reference"]["cublas_e4m3"] = rate
    print(f"cuBLAS e4m3 at {size}: {rate:.0f} TFLOP/s", flush=True)


def bandwidth(file: results.ResultsFile, args: argparse.Namespace) -> None:
    """TB/s of quantize() and of a copy, by head dim, into the file."""
    rates = file.data["reference"].setdefault("quantize_tb_s", {})
    for head_dim in cases.HEAD_DIMS:
        if str(head_dim) in rates:
            continue
        calls = parts.bandwidth_calls(head_dim)
        _, timers, reasons = timing.make_timers(
            {name: call for name, (call, _) in calls.items()}, True, args.warmup, args.rep
        )
        measured = timing.interleave(timers, args.rounds)
        rates[str(head_dim)] = {
            name: round(calls[name][1] / m.median / 1e9, 3) for name, m in measured.items()
        }
        print(f"D {head_dim}: {rates[str(head_dim)]} TB/s {reasons or ''}", flush=True)


def report(file: results.ResultsFile) -> bool:
    """Prints figures and what is missing; True if no figure was missed."""
    reference = file.data["reference"]
    cublas_rate, rates = reference.get("cublas_e4m3"), reference.get("quantize_tb_s", {})
    return forward.report_figures(file, parts.evaluate(file.rows, cublas_rate, rates))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    selected = parts.dense_cases()
    try:
        if args.points:
            selected = cases.select_dense(args.points, selected)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    code = forward.ready(selected, args, "fp8.py")
    if code is not None:
        return code
    warnings.filterwarnings("ignore", category=UserWarning)
    forward.find_package()
    file = forward.open_file("fp8", args)
    cublas(file)
    bandwidth(file, args)
    left = forward.measure(
        selected, lambda case: [run_case(case, args)],
        lambda case: parts.columns(args.peers), args, file,
    )  # fmt: skip
    print()
    print(figures.table(file.rows, ["ours", parts.BLOCKS, *args.peers]))
    good = report(file)
    forward.print_left(left, file)
    return 1 if args.strict and not good else 0


if __name__ == "__main__":
    sys.exit(main())
