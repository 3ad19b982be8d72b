"""Host time of one small call: what Python, the operator and the launch cost.

    python benchmarks/host_time.py [--output FILE] [--rounds 7] [--calls 200]

Calls are made one after another without a synchronisation, in batches that fit the launch queue of
the device (a full queue would make the host wait for the GPU), and a batch is divided by its
number of calls. Peers and project alternate in every round; the median of rounds counts.
Writes benchmarks/results/host-DEVICE.json, unit us.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from providers import require
from results import ResultsFile, default_path, header
from timing import first_line
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]

BATCH, SEQLEN, HEADS, HEAD_DIM = 1, 128, 4, 64  # the GPU takes less than the host
BATCHES_PER_ROUND = 20


def host_us(call: Call, calls: int) -> float:
    """Median over batches of the host time of one call, in microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(BATCHES_PER_ROUND):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def _inputs(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (BATCH, SEQLEN, HEADS, HEAD_DIM)
    return tuple(
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad)
        for _ in range(3)
    )


def _forward_backward(call: Call, inputs) -> Call:
    dout = torch.randn((BATCH, SEQLEN, HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16)

    def both():
        return torch.autograd.grad(call(), inputs, dout)

    return both


def _interface_calls(module) -> dict[str, Call]:
    """The calls by the interface that FA3, FA4 and this package share."""
    q, k, v = _inputs()
    ragged = tuple(t.flatten(0, 1) for t in (q, k, v))
    cu_seqlens = torch.tensor([0, SEQLEN // 2, SEQLEN], device="cuda", dtype=torch.int32)
    with_grad = _inputs(requires_grad=True)

    def first(result):
        return result[0] if isinstance(result, tuple) else result

    dense = functools.partial(module.flash_attn_func, q, k, v, causal=True)
    recorded = functools.partial(module.flash_attn_func, *with_grad, causal=True)
    return {
        "dense": dense,
        "ragged": functools.partial(
            module.flash_attn_varlen_func, *ragged, cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens, max_seqlen_q=SEQLEN, max_seqlen_k=SEQLEN, causal=True),
        "dense, recorded for a gradient": recorded,
        "forward and backward": _forward_backward(lambda: first(recorded()), with_grad),
    }


def _sdpa_calls(backend: SDPBackend) -> dict[str, Call]:
    """scaled_dot_product_attention; the choice of the backend is made outside of the timed call."""
    q, k, v = (t.transpose(1, 2) for t in _inputs())
    with_grad = _inputs(requires_grad=True)
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def recorded():
        return attention(*(t.transpose(1, 2) for t in with_grad)).transpose(1, 2)

    def chosen(call: Call) -> Call:
        def run():
            return call()

        run.context = functools.partial(sdpa_kernel, backend)
        return run

    return {
        "dense": chosen(functools.partial(attention, q, k, v)),
        "dense, recorded for a gradient": chosen(recorded),
        "forward and backward": chosen(_forward_backward(recorded, with_grad)),
    }


def measure(call: Call, calls: int) -> float:
    context = getattr(call, "context", None)
    if context is None:
        return host_us(call, calls)
    with context():
        return host_us(call, calls)


def peer_calls() -> tuple[dict[str, dict[str, Call]], dict[str, str]]:
    """Calls of each peer, and why a peer has none."""
    found: dict[str, dict[str, Call]] = {}
    reasons: dict[str, str] = {}
    makers: dict[str, Callable[[], dict[str, Call]]] = {
        "fa2": lambda: _sdpa_calls(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: _sdpa_calls(SDPBackend.CUDNN_ATTENTION),
        "fa3": lambda: _interface_calls(require("fa3_fwd_interface")),
        "fa4": lambda: _interface_calls(require("flash_attn.cute")),
    }
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # noqa: BLE001 - a broken peer must not end the run
            reasons[name] = f"{type(error).__name__}: {first_line(error)}"
    return found, reasons


def layers() -> dict[str, Call]:
    """The same dense call entered lower down, and what an empty launch costs."""
    from flash_attn3 import ops

    q, k, v = _inputs()
    scale = HEAD_DIM**-0.5
    options = (None, None, None, None, SEQLEN, SEQLEN, scale, True, -1, -1, 0, 0.0, False, 0)
    word = torch.zeros(1, device="cuda")
    calls: dict[str, Call] = {
        "torch.ops.flash_attn3.fwd": lambda: torch.ops.flash_attn3.fwd(q, k, v, *options),
        "one fill kernel": word.zero_,
    }
    if ops._C is not None:
        calls["_C.fwd_dense_fast"] = lambda: ops._C.fwd_dense_fast(
            q, k, v, None, True, -1, -1, 0, 0.0, False, 0)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200, help="calls in a batch")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("host_time.py measures launches: it needs a GPU", file=sys.stderr)
        return 1

    import flash_attn3

    ours = _interface_calls(flash_attn3)
    peers, missing = peer_calls()
    head = header("host", unit="us")
    output = ResultsFile(arguments.output or default_path("host", head["device"]), head)
    gc.disable()  # a collection in the middle of a batch is nobody's host time
    for kind, our_call in ours.items():
        # A backward launches several kernels, and the queue holds about a thousand.
        calls_in_batch = max(1, arguments.calls // (8 if "backward" in kind else 1))
        candidates = {"ours": our_call}
        reasons = dict(missing)
        for peer, calls in peers.items():
            if kind not in calls:
                reasons[peer] = "has no such call"
                continue
            try:
                measure(calls[kind], 2)
                candidates[peer] = calls[kind]
            except Exception as error:  # noqa: BLE001
                reasons[peer] = f"{type(error).__name__}: {first_line(error)}"
        rounds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(arguments.rounds):
            for name, call in candidates.items():
                rounds[name].append(measure(call, calls_in_batch))
            gc.collect()
        medians = {name: round(statistics.median(times), 2) for name, times in rounds.items()}
        row = {
            "config": {"call": kind, "B": BATCH, "S": SEQLEN, "H": HEADS, "D": HEAD_DIM,
                       "causal": True, "dtype": "bf16", "timing": "host"},
            "ours": medians["ours"],
            "peers": {name: medians.get(name) for name in ("fa2", "cudnn", "fa3", "fa4")},
        }
        if reasons:
            row["reasons"] = reasons
        output.put(row)
        print(f"{kind:32s}", "  ".join(f"{name} {us:.2f}" for name, us in medians.items()))
    for name, call in layers().items():
        output.data["reference"][name] = round(
            statistics.median(measure(call, arguments.calls) for _ in range(arguments.rounds)), 2)
        print(f"{name:32s} {output.data['reference'][name]:.2f}")
    output.write()
    print(f"wrote {output.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
