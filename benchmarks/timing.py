"""Interleaved timing: every candidate is measured once per round, and the median of rounds counts.

Sustained figures of one and the same binary move by 3 % on a card at its power limit, and the
first round after idle reads high. So all candidates of a point run one after the other, each after
a warm-up of its own, in an order that changes from round to round.

EventTimer measures as triton.testing.do_bench(fn, warmup=..., rep=40, return_mode="median") does
(L2 emptied before every run, a pair of CUDA events around it); GraphTimer as do_bench_cudagraph
does (many calls in one CUDA graph: device time alone). They are written out here because a timer
is prepared once per point and then asked for several rounds; Triton's functions would warm up,
estimate and capture again in each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Under its power limit the card's clock follows what ran in the last tenth of a second: whoever
# came after a light kernel would read 5 to 10 % high. So each candidate warms up by itself.
WARMUP_MS = 100.0
REP_MS = 40.0
CARD_WARMUP_MS = 100.0
ROUNDS = 3
# Below this the host's launch cost shows in a time taken with events.
GRAPH_BELOW_MS = 0.2
L2_FLUSH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Measurement:
    """Milliseconds per call: one value per round, and their median."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def repeats(total_ms: float, estimate_ms: float, least: int = 1) -> int:
    """How many calls fill total_ms; an estimate of 0 (clock too coarse) counts as 1 us."""
    return max(least, int(total_ms / max(estimate_ms, 1e-3)))


class HostTimer:
    """perf_counter around single calls, for callables that finish before they return (CPU)."""

    kind = "host"

    def __init__(
        self,
        fn: Callable[[], object],
        warmup_ms: float = WARMUP_MS,
        rep_ms: float = REP_MS,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._fn, self._clock = fn, clock
        fn()
        self.estimate_ms = self._once()
        self._warmup = repeats(warmup_ms, self.estimate_ms)
        self._rep = repeats(rep_ms, self.estimate_ms)

    def _once(self) -> float:
        start = self._clock()
        self._fn()
        return (self._clock() - start) * 1e3

    def warm_up(self, milliseconds: float) -> None:
        for _ in range(repeats(milliseconds, self.estimate_ms)):
            self._fn()

    def round(self) -> float:
        for _ in range(self._warmup):
            self._fn()
        return statistics.median(self._once() for _ in range(self._rep))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def estimate_cuda_ms(fn: Callable[[], object], runs: int = 5) -> float:
    """Rough time of a call: `runs` calls between two events, after one that may compile."""
    fn()
    torch.cuda.synchronize()
    start, end = _event(), _event()
    start.record()
    for _ in range(runs):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs


class EventTimer:
    """CUDA events around single calls, the L2 cache emptied before each."""

    kind = "event"
    _flush: torch.Tensor | None = None  # shared by all timers

    def __init__(
        self,
        fn: Callable[[], object],
        warmup_ms: float = WARMUP_MS,
        rep_ms: float = REP_MS,
        estimate_ms: float | None = None,
    ):
        self._fn = fn
        self.estimate_ms = estimate_cuda_ms(fn) if estimate_ms is None else estimate_ms
        self._warmup = repeats(warmup_ms, self.estimate_ms)
        # Three at least, so that a median means something for calls of many milliseconds.
        self._rep = repeats(rep_ms, self.estimate_ms, least=3)
        if EventTimer._flush is None:
            EventTimer._flush = torch.empty(
                L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda"
            )

    def warm_up(self, milliseconds: float) -> None:
        for _ in range(repeats(milliseconds, self.estimate_ms)):
            self._fn()
        torch.cuda.synchronize()

    def round(self) -> float:
        for _ in range(self._warmup):
            self._fn()
        starts = [_event() for _ in range(self._rep)]
        ends = [_event() for _ in range(self._rep)]
        for start, end in zip(starts, ends):
            # The flush also keeps the device busy while the host prepares the launch.
            EventTimer._flush.zero_()
            start.record()
            self._fn()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends))


class GraphTimer:
    """Device time alone: replays of a CUDA graph that holds many calls."""

    kind = "graph"
    _GRAPH_MS = 10.0  # device time captured in one graph

    def __init__(
        self,
        fn: Callable[[], object],
        warmup_ms: float = WARMUP_MS,
        rep_ms: float = REP_MS,
        estimate_ms: float | None = None,
    ):
        estimate_ms = estimate_cuda_ms(fn) if estimate_ms is None else estimate_ms
        self._calls = min(repeats(self._GRAPH_MS, estimate_ms, least=2), 500)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn()  # whatever a peer sets up per stream must not fall into the capture
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for _ in range(self._calls):
                fn()
        torch.cuda.synchronize()
        # The estimate above holds the host's launch cost; the graph's own time does not.
        self._graph.replay()
        self.estimate_ms = self._replay_ms() / self._calls
        replay_ms = self.estimate_ms * self._calls
        self._warmup = repeats(warmup_ms, replay_ms)
        self._rep = repeats(rep_ms, replay_ms, least=3)

    def _replay_ms(self) -> float:
        start, end = _event(), _event()
        start.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def warm_up(self, milliseconds: float) -> None:
        for _ in range(repeats(milliseconds, self.estimate_ms * self._calls)):
            self._graph.replay()
        torch.cuda.synchronize()

    def round(self) -> float:
        for _ in range(self._warmup):
            self._graph.replay()
        return statistics.median(self._replay_ms() / self._calls for _ in range(self._rep))


def interleave(
    timers: Mapping[str, HostTimer | EventTimer | GraphTimer],
    rounds: int = ROUNDS,
    card_warmup_ms: float = CARD_WARMUP_MS,
) -> dict[str, Measurement]:
    """One value per timer and round, in an order of its own: no neighbour stays the same."""
    names = list(timers)
    if not names:
        return {}
    timers[names[0]].warm_up(card_warmup_ms)
    values: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in random.Random(index).sample(names, len(names)):
            values[name].append(timers[name].round())
    return {name: Measurement(tuple(times)) for name, times in values.items()}


def make_timers(
    calls: Mapping[str, Callable[[], object]],
    force_graph: bool = False,
    warmup_ms: float = WARMUP_MS,
    rep_ms: float = REP_MS,
) -> tuple[str, dict[str, EventTimer | GraphTimer], dict[str, str]]:
    """(timing, timers, reasons): all timers of a point are of one kind.

    Graphs are used if asked for or if the fastest call takes less than GRAPH_BELOW_MS. `reasons`
    says why a call has no timer: it failed, or it can't be captured.
    """
    estimates: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name, fn in calls.items():
        try:
            estimates[name] = estimate_cuda_ms(fn)
        except Exception as error:  # noqa: BLE001 - a peer's failure must not end the run
            reasons[name] = f"{type(error).__name__}: {first_line(error)}"
    if not estimates:
        return "event", {}, reasons
    use_graph = force_graph or min(estimates.values()) < GRAPH_BELOW_MS
    kind = GraphTimer if use_graph else EventTimer
    timers = {}
    for name, estimate in estimates.items():
        try:
            timers[name] = kind(calls[name], warmup_ms, rep_ms, estimate)
        except Exception as error:  # noqa: BLE001
            reasons[name] = f"no CUDA graph: {type(error).__name__}: {first_line(error)}"
    return kind.kind, timers, reasons


def first_line(error: BaseException, limit: int = 200) -> str:
    text = str(error).strip() or repr(error)
    return text.splitlines()[0][:limit]
