"""benchmarks/fp8.py without a GPU: cases, figures, the whole command on stand-ins."""

import json
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "benchmarks"))

import forward  # noqa: E402
import fp8  # noqa: E402
import fp8_parts as parts  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402


def test_cases_are_those_of_the_issue(capsys):
    dense = parts.dense_cases()
    assert len(dense) == len({results.row_key(c.config) for c in dense}) == 30
    assert all(sum(c.lengths) == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    assert fp8.main(["--dry-run", "--points", "128:causal:*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_flash_attention_2_is_measured_where_it_is_asked_for():
    wanted = [c for c in parts.dense_cases() if fp8.wants(c, "fa2")]
    assert [(c.head_dim, c.lengths) for c in wanted] == [(128, (16384,))] * 2
    assert all(fp8.wants(c, "fa3") for c in parts.dense_cases())


def test_e4m3_saturates():
    x = torch.tensor([1e6, -1e6, 1.0, float("nan")])
    assert parts.to_e4m3(x).float()[:3].tolist() == [448.0, -448.0, 1.0]
    assert parts.to_e4m3(x).float()[3].isnan()


def rows(ours, blocks):
    """Rows in which ours takes so much of the best peer's time, blocks so much of ours."""
    found = []
    for case in parts.dense_cases():
        ms = {"ours": ours * case.flops / 1e12, parts.BLOCKS: blocks * ours * case.flops / 1e12,
              "fa3": case.flops / 1e12, "cudnn": case.flops / 9e11}
        if fp8.wants(case, "fa2"):
            ms["fa2"] = case.flops / 3.2e11
        found.append({"config": {**case.config, "timing": "event"}, "flops": case.flops, "ms": ms,
                      "reasons": {}})
    return found


def test_figures_pass_and_fail():
    copy = {str(d): {"quantize": 3.2, "quantize, rotated": 3.0, "copy": 4.2}
            for d in (64, 128, 256)}
    good = parts.evaluate(rows(0.95, 1.02), 1150.0, copy)
    assert all(figure.passed for figure in good), [f.line() for f in good]
    assert good[0].value == pytest.approx(1 / 0.95)
    slow = {d: {"quantize": 2.0, "quantize, rotated": 1.5, "copy": 4.2} for d in copy}
    bad = parts.evaluate(rows(2.0, 1.05), 1150.0, slow)
    assert not any(figure.passed for figure in bad)
    part = parts.evaluate(rows(0.95, 1.02)[:5], None, {})
    assert {figure.passed for figure in part} == {None}


def plain(case, inputs):
    def call():
        q, k, v = (t.transpose(1, 2).float() for t in (inputs.q, inputs.k, inputs.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return out.transpose(1, 2).to(torch.bfloat16)

    return call


def test_main_on_cpu_stand_ins(tmp_path, monkeypatch, capsys):
    from cases import Case

    small = [Case("dense", 16, c, (32,), 2, dtype="e4m3") for c in (False, True)]
    make = parts.make_inputs
    monkeypatch.setattr(parts, "dense_cases", lambda: small)
    monkeypatch.setattr(parts, "make_inputs", lambda case: make(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(fp8, "cublas", lambda file: None)
    monkeypatch.setattr(fp8, "bandwidth", lambda file, args: None)
    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    scale = [1.0]

    def own(case, inputs):
        call = plain(case, inputs)
        return lambda: call() * scale[0]

    def refuse(case, inputs):
        raise providers.Unavailable("not here")

    def make_timers(calls, graph, warmup, rep):
        timers = {name: timing.HostTimer(fn, 0.1, 0.1) for name, fn in calls.items()}
        return "event", timers, {}

    monkeypatch.setattr(timing, "make_timers", make_timers)
    monkeypatch.setattr(timing, "CARD_WARMUP_MS", 0.0)
    monkeypatch.setattr(parts, "setup_ours", own)
    monkeypatch.setattr(parts, "setup_blocks", plain)
    monkeypatch.setattr(parts, "PEERS", {"fa3": plain, "cudnn": refuse})
    out = tmp_path / "fp8.json"
    arguments = ["--rounds", "2", "--out", str(out)]
    assert fp8.main([*arguments, "--budget-s", "0"]) == 0
    assert "time budget spent" in capsys.readouterr().out
    assert fp8.main([*arguments, "--resume", str(out)]) == 0
    assert "cudnn: 2 rows without a figure: not here" in capsys.readouterr().out
    stored = json.loads(out.read_text())
    assert stored["what"] == "fp8" and len(stored["rows"]) == 2
    row = stored["rows"][0]
    assert row["config"]["dtype"] == "e4m3" and row["ms"]["ours"] > 0 and "wrong" not in row
    assert row["peers"] == {"fa3": row["peers"]["fa3"], "cudnn": None}
    assert row["ms"][parts.BLOCKS] > 0

    scale[0] = 1.2
    assert fp8.main([*arguments, "--strict"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert forward.AGREEMENT < fp8.AGREEMENT  # e4m3 is coarser


def test_the_readme_holds_e4m3_too(tmp_path, monkeypatch):
    import flops
    import readme_table

    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    measured = rows(0.95, 1.02)
    for row in measured:
        row["ours"] = flops.tflops(row["flops"], row["ms"]["ours"])
        row["peers"] = {p: flops.tflops(row["flops"], row["ms"][p]) for p in ("fa3", "cudnn")}
    data = {**results.header("fp8"), "rows": measured, "reference": {}}
    data["figures"] = [vars(figure) for figure in parts.evaluate(measured, 1150.0, {})]
    (tmp_path / "fp8-x.json").write_text(results.dump(data))
    readme = tmp_path / "README.md"
    readme.write_text((REPO / "README.md").read_text())
    assert readme_table.main(["--readme", str(readme), "--results", str(tmp_path)]) == 0
    text = readme.read_text().split(readme_table.BEGIN.format("fp8"))[1]
    table = text.split(readme_table.END.format("fp8"))[0]
    assert table.count("| 1.05 |") == 30 and "best of FA3 and cuDNN" in table and "e4m3" in table


def test_readme_table_of_errors():
    import readme_table

    data = {"device": "card", "commit": "0123456789abcdef", "date": "today", "rows": [
        {"config": {"input": "outlier", "S": 8, "D": 16, "error": "rms"}, "ours": 0.01,
         "peers": {"fa3": 0.025}},
        {"config": {"input": "normal", "S": 8, "D": 16, "error": "rms"}, "ours": 0.01,
         "peers": {"fa3": None}}]}
    text = readme_table.accuracy_markdown(data)
    assert "| outlier | 8 | 16 | rms | 1.00e-02 | 2.50e-02 | 2.50 |" in text
    assert "| normal | 8 | 16 | rms | 1.00e-02 | - | - |" in text and "0123456789ab," in text
