"""The parts of benchmarks/ that need no GPU: FLOPs, timing, results files, figures, ctypes."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "benchmarks"))

import cases  # noqa: E402
import check  # noqa: E402
import ctypes_fp8  # noqa: E402
import ctypes_lib  # noqa: E402
import figures  # noqa: E402
import flops  # noqa: E402
import forward  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402


def struct_fields(name: str) -> list[tuple[str, str]]:
    text = (REPO / "csrc" / "host" / "params.h").read_text()
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1)
    body = re.sub(r"//[^\n]*", "", body)
    return [
        (type_.replace("const ", "").replace(" ", ""), field)
        for type_, field in re.findall(r"([\w\s:]+?\**)\s+(\w+);", body)
    ]


@pytest.mark.parametrize("name", [
    "Strides", "FwdParams", "FwdPlan", "BwdParams", "BwdPlan", "Fp8Scale", "Fp8Params",
    "QuantizeParams"])
def test_ctypes_structures_repeat_params_h(name):
    codes = {
        "int32_t": ctypes_lib.c_int32,
        "int64_t": ctypes_lib.c_int64,
        "float": ctypes_lib.c_float,
        "DType": ctypes_lib.c_int32,
        "Strides": ctypes_lib.Strides,
        "FwdParams": ctypes_lib.FwdParams,
        "Fp8Scale": ctypes_fp8.Fp8Scale,
    }
    module = ctypes_lib if hasattr(ctypes_lib, name) else ctypes_fp8
    expected = [
        (field, ctypes_lib.c_void_p if type_.endswith("*") else codes[type_.strip()])
        for type_, field in struct_fields(name)
    ]
    assert list(getattr(module, name)._fields_) == expected


def test_visible_pairs_and_blocks_by_brute_force():
    for sq, sk in ((1, 1), (5, 9), (9, 5), (16, 16)):
        for window in ((-1, -1), (-1, 0), (2, 0), (0, 3), (3, 1)):
            case = check.CheckCase(8, ((sq, sk),), window=window)
            mask = check.visible_mask(case, torch.arange(sq), sq, sk)
            assert flops.visible_pairs(sq, sk, window) == int(mask.sum())
            padded = torch.zeros(16, 16, dtype=torch.bool)
            padded[:sq, :sk] = mask
            tiles = padded.view(4, 4, 4, 4).transpose(1, 2).flatten(2).any(-1)
            assert flops.visible_blocks(sq, sk, window, block=4) == int(tiles.sum())


def test_forward_flops():
    assert flops.forward_flops([(10, 20)], heads=3, head_dim=8) == 4 * 3 * 10 * 20 * 8
    assert flops.forward_flops([(10, 10)], 3, 8, causal=True) == 2 * 3 * 100 * 8
    assert flops.forward_flops([(4, 4)], 1, 8, 16) == 2 * (8 + 16) * 16
    assert flops.forward_flops([(4, 4)], 1, 8, window=(1, 0)) == 4 * 8 * 7
    assert flops.tflops(2 * 10**12, 1.0) == 2000.0


def test_window_bound_is_the_share_of_blocks():
    # 8 rows of blocks that grow from 1 to 8, then 120 of 9.
    assert figures.window_bound() == pytest.approx(1.25 * (36 + 120 * 9) / 128**2)


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_interleaved_rounds_with_a_fake_clock():
    clock, order = FakeClock(), []

    def call(name, seconds):
        def fn():
            order.append(name)
            clock.now += seconds

        return fn

    timers = {
        "a": timing.HostTimer(call("a", 0.001), 2, 5, clock),
        "b": timing.HostTimer(call("b", 0.010), 2, 5, clock),
    }
    order.clear()
    measured = timing.interleave(timers, rounds=3, card_warmup_ms=20)
    assert measured["a"].median == pytest.approx(1.0)
    assert measured["b"].median == pytest.approx(10.0)
    assert len(measured["a"].rounds) == 3 and measured["a"].spread < 1e-6
    assert order[:20] == ["a"] * 20  # the card's warm-up
    assert set(order[20:]) == {"a", "b"}


def test_no_candidate_always_follows_the_same_one():
    order = []

    class Timer:
        def __init__(self, name):
            self.name = name

        def warm_up(self, milliseconds):
            pass

        def round(self):
            order.append(self.name)
            return 1.0

    timing.interleave({name: Timer(name) for name in "abcde"}, rounds=3, card_warmup_ms=0)
    rounds = [order[i:i + 5] for i in range(0, 15, 5)]
    assert all(sorted(names) == list("abcde") for names in rounds)
    for name in "abcde":
        before = {names[i - 1] for names in rounds for i in range(1, 5) if names[i] == name}
        first = any(names[0] == name for names in rounds)
        assert len(before) + first > 1


def test_median_of_rounds_and_spread():
    measured = timing.Measurement((1.0, 9.0, 2.0))
    assert measured.median == 2.0 and measured.spread == 4.0
    assert timing.repeats(40, 0.0) == 40000 and timing.repeats(40, 100.0, least=3) == 3


def test_cases_are_those_of_the_issue():
    dense = cases.dense_cases()
    assert len(dense) == 36 and len({results.row_key(c.config) for c in dense}) == 36
    assert all(sum(c.lengths) == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    assert len(cases.RAGGED_LENGTHS) == 16
    everything = [c for make in cases.SECTIONS.values() for c in make()]
    assert len({results.row_key(c.config) for c in everything}) == len(everything)


def test_select_dense():
    points = cases.dense_cases()
    assert len(cases.select_dense("64:*:512,128:causal:*", points)) == 8
    with pytest.raises(ValueError, match="D:full"):
        cases.select_dense("64", points)
    with pytest.raises(ValueError, match="none of the 36"):
        cases.select_dense("65:*:*", points)


def test_results_file_is_written_row_by_row_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    head = results.header("forward")
    assert head["commit"] == "abc"
    file = results.ResultsFile(tmp_path / "forward-x.json", head)
    case = cases.dense_cases()[0]
    row = {"config": {**case.config, "timing": "graph"}, "ours": 1.0, "peers": {}}
    file.put(row)
    file.put({**row, "ours": 2.0})
    stored = json.loads(file.path.read_text())
    assert [r["ours"] for r in stored["rows"]] == [2.0] and stored["unit"] == "TFLOP/s"
    again = results.ResultsFile(tmp_path / "other.json", head)
    assert again.resume(file.path) == 1
    assert again.find(case.config)["ours"] == 2.0
    other = results.ResultsFile(tmp_path / "other.json", {**head, "commit": "def"})
    with pytest.raises(ValueError, match="commit"):
        other.resume(file.path)
    assert results.device_slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def row(case: cases.Case, ms: dict[str, float], **extra) -> dict:
    return {
        "config": {**case.config, "timing": "event"},
        "flops": case.flops,
        "ms": ms,
        "reasons": {},
        **extra,
    }


def all_rows(ours: float) -> list[dict]:
    peers = {"fa2": 2.5, "fa3": 1.05, "fa4": 1.2, "cudnn": 1.1}
    rows = []
    for case in cases.dense_cases():
        rows.append(row(case, {"ours": ours, **peers}))
        rows.append(row(case.with_dtype("fp16"), {"ours": ours * 1.02}))
    short, long = cases.long_cases()
    rows.append(row(short, {"ours": 1.0}))
    rows.append(row(long, {"ours": 64.5}, peak_memory={"ratio": 1.001}))
    rows += [row(case, {"ours": ours, "fa3": 1.05}) for case in cases.ragged_cases()]
    dense, ragged = cases.short_cases()
    rows += [row(dense, {"ours": 1.0}), row(ragged, {"ours": 1.4})]
    dense, window = cases.window_cases()
    rows += [row(dense, {"ours": 3.0}), row(window, {"ours": 0.24})]
    return rows


def test_figures_pass_and_fail():
    found = figures.evaluate(all_rows(1.0))
    assert all(figure.passed for figure in found), [f.line() for f in found]
    assert found[0].value == pytest.approx(1.05)
    slow = figures.evaluate(all_rows(1.2))
    assert slow[0].passed is False and slow[1].passed is False and slow[3].passed


def test_figures_of_a_partial_run_can_fail_but_not_pass():
    part = figures.evaluate(all_rows(1.0)[:10])
    assert part[0].passed is None and "of 36" in part[0].note
    assert figures.evaluate(all_rows(1.2)[:10])[0].passed is False
    assert all(figure.passed is None for figure in figures.evaluate([]))


def plain_dense(case, inputs):
    one = check.CheckCase(case.head_dim, (), case.heads, case.heads, causal=case.causal)
    return lambda: torch.stack(
        [
            check.plain_attention(one, q, k, v, torch.float32)[0]
            for q, k, v in zip(inputs.q, inputs.k, inputs.v)
        ]
    )


def test_forward_main_on_cpu_stand_ins(tmp_path, monkeypatch, capsys):
    """The whole command with small cases, CPU callables and host timers in the GPU's place."""
    small = [cases.Case("dense", 8, c, (s,), 2) for c in (False, True) for s in (16, 512)]
    make = cases.make_inputs
    monkeypatch.setitem(cases.SECTIONS, "dense", lambda: small)
    monkeypatch.setattr(cases, "make_inputs", lambda case: make(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(forward, "cublas", lambda file: None)
    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")

    def make_timers(calls, graph, warmup, rep):
        timers = {name: timing.HostTimer(fn, 0.1, 0.1) for name, fn in calls.items()}
        return "graph" if graph else "event", timers, {}

    def refuse(case, inputs):
        raise providers.Unavailable("not here")

    def wrong(case, inputs):
        return lambda: plain_dense(case, inputs)() * 1.1

    def slow(case, inputs):
        fn = plain_dense(case, inputs)
        return lambda: [fn() for _ in range(5)][0]

    monkeypatch.setattr(timing, "make_timers", make_timers)
    monkeypatch.setattr(timing, "CARD_WARMUP_MS", 0.0)
    monkeypatch.setattr(providers, "setup_ours", plain_dense)
    peers = {"fa2": slow, "fa3": slow, "fa4": refuse, "cudnn": slow}
    monkeypatch.setattr(providers, "PEERS", peers)
    out = tmp_path / "forward.json"
    arguments = ["--only", "dense", "--rounds", "2", "--out", str(out)]
    assert forward.main([*arguments, "--budget-s", "0", "--points", "8:full:16"]) == 0
    assert forward.main([*arguments, "--budget-s", "0"]) == 0
    text = capsys.readouterr().out
    assert "time budget spent" in text and "--resume" in text
    assert forward.main([*arguments, "--resume", str(out)]) == 0
    text = capsys.readouterr().out
    assert "fa4: 4 rows without a figure: not here" in text and "geometric mean" in text
    stored = json.loads(out.read_text())
    assert len(stored["rows"]) == 8 and stored["device"] == "NVIDIA H200"
    first = stored["rows"][0]
    assert first["peers"]["fa4"] is None and first["reasons"]["fa4"] == "not here"
    # Most rows, not each: on a busy machine a single one may be off by much.
    beside = [r["ms"] for r in stored["rows"] if "fa3" in r["ms"]]
    assert sum(ms["ours"] < ms["fa3"] for ms in beside) > len(beside) / 2
    assert "wrong" not in first
    assert {r["config"]["dtype"] for r in stored["rows"]} == {"bf16", "fp16"}
    assert {r["config"]["timing"] for r in stored["rows"]} == {"event", "graph"}

    monkeypatch.setattr(providers, "setup_ours", wrong)
    assert forward.main([*arguments, "--strict"]) == 1
    assert "WRONG" in capsys.readouterr().out


class FakeLibrary:
    """Stands for a kernel library: plain attention, with a planted fault on demand."""

    def __init__(self, fault=lambda out, lse: None, lacks=()):
        self.fault, self.lacks = fault, lacks

    def prepare(self, q, k, v, **options):
        if q.shape[-1] in self.lacks:
            raise NotImplementedError("not compiled in")
        return FakeCall(self, q, k, v, options)


class FakeCall:
    def __init__(self, library, q, k, v, options):
        self.library, self.tensors, self.options = library, (q, k, v), options

    def poison(self):
        pass

    def __call__(self):
        q, k, v = self.tensors
        o = self.options
        case = check.CheckCase(
            q.shape[-1], (), q.shape[-2], k.shape[-2], causal=o["causal"],
            window=o["window_size"], chunk=o["attention_chunk"], softcap=o["softcap"],
        )  # fmt: skip
        if "cu_seqlens_q" in o:
            ends_q, ends_k = o["cu_seqlens_q"].tolist(), o["cu_seqlens_k"].tolist()
            parts = [
                check.plain_attention(case, q[a:b], k[c:d], v[c:d], torch.float32)
                for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
            ]
            out, self.lse = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], 1)
        else:
            parts = [check.plain_attention(case, *t, torch.float32) for t in zip(q, k, v)]
            out, self.lse = (torch.stack(list(column)) for column in zip(*parts))
        out = out.to(q.dtype)
        self.library.fault(out, self.lse)
        return out


def test_check_passes_right_results_and_finds_planted_faults(capsys):
    chosen = [c for c in check.small_cases("bf16") if c.head_dim == 64]
    assert len(chosen) == 17
    for case in chosen:
        result = check.run_case(FakeLibrary(), case, "cpu")
        assert result.passed, f"{case.label}: {result.detail}"

    def nan(out, lse):
        out.view(-1)[-1] = math.nan

    def shifted(out, lse):
        lse += 0.01

    def scaled(out, lse):
        out *= 1.05

    case = check.CheckCase(64, ((200, 333),) * 2)
    for fault in (nan, shifted, scaled):
        assert check.run_case(FakeLibrary(fault), case, "cpu").passed is False
    assert check.run_case(FakeLibrary(lacks=(64,)), case, "cpu").passed is None


def test_prepared_forward_fills_the_structure(monkeypatch):
    class Library:
        def _workspace_bytes(self, params):
            return 64

    q = torch.randn(2, 5, 4, 24, dtype=torch.bfloat16)
    kv = torch.randn(2, 7, 2, 2, 24, dtype=torch.bfloat16)
    k, v = kv.unbind(3)
    call = ctypes_lib.PreparedForward(Library(), q, k, v, causal=True, window_size=(3, 5))
    p = call.params
    assert (p.batch, p.max_seqlen_q, p.max_seqlen_k, p.heads, p.heads_kv) == (2, 5, 7, 4, 2)
    assert (p.window_left, p.window_right, p.dtype, p.head_dim_v) == (3, 0, 1, 24)
    assert (p.k_strides.batch, p.k_strides.row, p.k_strides.head) == k.stride()[:3]
    assert p.softmax_scale == pytest.approx(24**-0.5) and p.workspace == call.workspace.data_ptr()
    assert call.lse.shape == (2, 4, 5) and p.cu_seqlens_q is None
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    call = ctypes_lib.PreparedForward(
        Library(), q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3,
        max_seqlen_k=3,
    )  # fmt: skip
    p = call.params
    assert (p.batch, p.total_q, p.total_k, p.q_strides.row) == (2, 5, 7, 96)
    assert call.lse.shape == (4, 5) and p.cu_seqlens_q == cu.data_ptr()
    call.poison()
    assert bool(call.out.isnan().all()) and bool((call.workspace == 255).all())


def test_readme_table_between_markers(tmp_path, monkeypatch):
    import readme_table

    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    rows = all_rows(1.0)
    for one in rows:
        ms = one["ms"]
        one["ours"] = flops.tflops(one["flops"], ms["ours"])
        one["peers"] = {p: flops.tflops(one["flops"], t) for p, t in ms.items() if p != "ours"}
    data = {**results.header("forward"), "rows": rows, "reference": {}}
    data["figures"] = [vars(figure) for figure in figures.evaluate(rows)]
    (tmp_path / "forward-x.json").write_text(results.dump(data))
    readme = tmp_path / "README.md"
    begin, end = readme_table.BEGIN.format("forward"), readme_table.END.format("forward")
    readme.write_text(f"a\n{begin}\nold\n{end}\nb\n")
    arguments = ["--readme", str(readme), "--results", str(tmp_path)]
    assert readme_table.main([*arguments, "--check"]) == 1
    assert readme_table.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("a\n") and text.endswith("b\n") and "old" not in text
    assert sum("| 1.05 |" in line for line in text.splitlines()) == 36
    assert readme_table.main([*arguments, "--check"]) == 0
    # A part of a run without dense rows has no table of them.
    data["rows"] = [row for row in rows if row["config"]["case"] != "dense"]
    (tmp_path / "forward-y.json").write_text(results.dump(data))
    assert readme_table.main(arguments) == 0
    assert readme.read_text().count("| D | mask |") == 1
    assert readme.read_text().count("Measured on") == 2


def test_plot_series():
    import plot

    rows = [{**r, "ours": 1.0, "peers": {"fa3": 2.0, "fa4": None}} for r in all_rows(1.0)]
    panels = plot.series({"rows": rows})
    assert len(panels) == 6 and all(len(p["ours"]) == 6 and "fa4" not in p for p in panels.values())
