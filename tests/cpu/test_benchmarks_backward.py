"""benchmarks/backward.py without a GPU: cases, FLOPs, figures, the whole command on stand-ins."""

import json
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "benchmarks"))

import backward  # noqa: E402
import backward_parts as parts  # noqa: E402
import flops  # noqa: E402
import forward  # noqa: E402
import providers  # noqa: E402
import results  # noqa: E402
import timing  # noqa: E402


def test_backward_flops():
    """Five products of the size of the forward's two."""
    one = dict(lengths=[(10, 20)], heads=3, head_dim=8)
    assert flops.backward_flops(**one) * 2 == flops.forward_flops(**one) * 5
    assert flops.backward_flops([(4, 4)], 1, 8, 16) == 2 * (3 * 8 + 2 * 16) * 16
    half = flops.backward_flops([(10, 10)], 3, 8, causal=True)
    assert half * 2 == flops.backward_flops([(10, 10)], 3, 8)


def test_cases_are_those_of_the_issue(capsys):
    dense = parts.dense_cases()
    assert len(dense) == 36
    assert all(sum(c.lengths) == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    everything = [c for make in parts.SECTIONS.values() for c in make()]
    assert len({results.row_key(c.config) for c in everything}) == len(everything) == 36 + 12 + 8
    assert backward.main(["--dry-run", "--only", "dense", "--points", "128:causal:*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_inputs_have_the_head_dim_of_v():
    case = next(c for c in parts.deterministic_cases() if c.head_dim_v)
    small = parts.BackwardCase("det", case.head_dim, False, (4, 4), 2, head_dim_v=case.head_dim_v)
    inputs = parts.make_inputs(small, "cpu")
    assert inputs.q.shape == (2, 4, 2, 192) and inputs.v.shape == (2, 4, 2, 128)


def rows(ours, deterministic, ragged):
    def row(case, ms):
        return {"config": {**case.config, "timing": "event"}, "flops": case.flops, "ms": ms,
                "reasons": {}}

    found = [row(c, {"ours": ours * c.flops / 6e11, "cudnn": c.flops / 6e11, "fa2": 1e9})
             for c in parts.dense_cases()]
    found += [row(c, {"ours": deterministic, parts.PLAIN: 1.0})
              for c in parts.deterministic_cases()]
    return found + [row(c, {"ours": (ragged if c.ragged else 1.0) * c.flops / 1e12})
                    for c in parts.ragged_cases()]


def test_figures_pass_and_fail():
    good = parts.evaluate(rows(0.95, 1.1, 1.2), 790.0)
    assert all(figure.passed for figure in good), [f.line() for f in good]
    assert good[0].value == pytest.approx(1 / 0.95)
    bad = parts.evaluate(rows(1.5, 1.3, 1.4), 790.0)
    assert not any(figure.passed for figure in bad)
    part = parts.evaluate(rows(0.95, 1.1, 1.2)[:40], None)
    assert part[0].passed and [figure.passed for figure in part[2:]] == [None, None, None]


def plain(case, inputs):
    def call():
        q, k, v = (t.transpose(1, 2).float() for t in (inputs.q, inputs.k, inputs.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return out.transpose(1, 2).to(inputs.q.dtype)

    return call


def test_gradients_run_the_forward_once():
    case = parts.BackwardCase("dense", 8, True, (16, 16), 2)
    forwards = []

    def setup(case, inputs):
        call = plain(case, inputs)
        return lambda: forwards.append(0) or call()

    gradients = parts.Backward(setup, case, parts.make_inputs(case, "cpu"))
    first, second = gradients(), gradients()
    assert len(forwards) == 1 and len(first) == 3
    assert all(torch.equal(a, b) and a.shape == (2, 16, 2, 8) for a, b in zip(first, second))


def test_main_on_cpu_stand_ins(tmp_path, monkeypatch, capsys):
    small = [parts.BackwardCase("dense", 8, c, (s,), 2) for c in (False, True) for s in (16, 512)]
    ordered = [parts.BackwardCase("det", 8, False, (16,), 2, deterministic=True)]
    make = parts.make_inputs
    monkeypatch.setattr(parts, "SECTIONS", {"dense": lambda: small, "det": lambda: ordered})
    monkeypatch.setattr(parts, "make_inputs", lambda case: make(case, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(forward, "cublas", lambda file: None)
    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    scale = [1.0]

    def own(deterministic):
        def setup(case, inputs):
            call = plain(case, inputs)
            return lambda: call() * scale[0]

        return setup

    def refuse(case, inputs):
        raise providers.Unavailable("not here")

    def make_timers(calls, graph, warmup, rep):
        timers = {name: timing.HostTimer(fn, 0.1, 0.1) for name, fn in calls.items()}
        return "graph" if graph else "event", timers, {}

    monkeypatch.setattr(timing, "make_timers", make_timers)
    monkeypatch.setattr(timing, "CARD_WARMUP_MS", 0.0)
    monkeypatch.setattr(parts, "ours", own)
    monkeypatch.setattr(parts, "PEERS", {"fa4": refuse, "cudnn": plain})
    out = tmp_path / "backward.json"
    arguments = ["--only", "dense,det", "--rounds", "2", "--out", str(out)]
    assert backward.main([*arguments, "--budget-s", "0"]) == 0
    assert "time budget spent" in capsys.readouterr().out
    assert backward.main([*arguments, "--resume", str(out)]) == 0
    assert "fa4: 4 rows without a figure: not here" in capsys.readouterr().out
    stored = json.loads(out.read_text())
    assert stored["what"] == "backward" and len(stored["rows"]) == 5
    first, last = stored["rows"][0], stored["rows"][-1]
    assert first["peers"]["fa4"] is None and first["ms"]["cudnn"] > 0 and "wrong" not in first
    assert last["config"]["deterministic"] and last["ms"][parts.PLAIN] > 0
    assert {r["config"]["timing"] for r in stored["rows"]} == {"event", "graph"}

    scale[0] = 1.1
    assert backward.main([*arguments, "--strict"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_readme_holds_the_backward_too(tmp_path, monkeypatch):
    import readme_table

    monkeypatch.setenv("FLASH_ATTN3_COMMIT", "abc")
    measured = rows(0.95, 1.1, 1.2)
    for one in measured:
        one["ours"] = flops.tflops(one["flops"], one["ms"]["ours"])
        one["peers"] = {"cudnn": 600.0}
    data = {**results.header("backward"), "rows": measured, "reference": {}}
    data["figures"] = [vars(figure) for figure in parts.evaluate(measured, 790.0)]
    (tmp_path / "backward-x.json").write_text(results.dump(data))
    readme = tmp_path / "README.md"
    readme.write_text((REPO / "README.md").read_text())
    assert readme_table.main(["--readme", str(readme), "--results", str(tmp_path)]) == 0
    text = readme.read_text().split(readme_table.BEGIN.format("backward"))[1]
    table = text.split(readme_table.END.format("backward"))[0]
    assert table.count("| 1.05 |") == 36 and "best of FA4 and cuDNN" in table
    assert "| ragged, 16 lengths, over dense S 2k: lowest | 0.833 | >= 0.80 | yes |" in table
