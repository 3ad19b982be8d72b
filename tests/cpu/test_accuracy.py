"""python -m flash_attn3.accuracy and examples/fp8_activations.py, emulated."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.fp8_cases import Fp8Case

import reference
from flash_attn3 import accuracy, flash_attn_func, quantize

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "examples"))

pytestmark = pytest.mark.cpu


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("options", [dict(), dict(block=64, rotate=True), dict(transpose_v=True),
                                     dict(smooth_k=True, rotate=True), dict(block=None)], ids=str)
def test_emulation_has_the_error_of_rounded_probabilities(options):
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((50, 4), (300, 2), (300, 2)))
    parts = quantize(q, k, v, **options)
    got = accuracy.emulated(parts)
    case = Fp8Case(lengths_q=(50, 50), lengths_k=(300, 300), heads=4)
    real = case.real(parts, {})
    want, _ = reference.attention(*real)
    rounded, _ = reference.attention(*real, e4m3_p=True)
    assert got.dtype == torch.bfloat16
    assert 0.8 < relative(got, want) / relative(rounded, want) < 1.15
    assert relative(flash_attn_func(*parts), want) < 0.3 * relative(got, want)  # P as it is


@pytest.mark.parametrize("d, dv, options, coded", [
    (64, 64, dict(), True), (128, 96, dict(), True), (64, 128, dict(block=None), True),
    (192, 128, dict(), False), (160, 64, dict(transpose_v=True), False),
    (256, 256, dict(), True), (256, 64, dict(transpose_v=True), True), (64, 192, dict(), True),
    (256, 256, dict(block=None), True)], ids=str)
@pytest.mark.parametrize("keys", [200, 1025])
def test_p_is_made_by_code_where_the_tensor_unit_adds_it_up(monkeypatch, d, dv, options, coded,
                                                            keys):
    """fp8_config.h: all schedules but those with RowSums::kExact."""
    text = (ROOT / "csrc/kernels/fp8/fp8_config.h").read_text()
    schedules = re.findall(r"struct Fp8(\w*)ScheduleOf<(\d+), (\d+)> {(.*?)};", text, re.DOTALL)
    exact = {(kind, int(a), int(b)) for kind, a, b, body in schedules if "kExact" in body}
    assert len(schedules) == 6 and exact == {("", 192, 128), ("", 256, 256)}
    calls = []
    by_code = accuracy.by_code
    monkeypatch.setattr(accuracy, "by_code", lambda x: calls.append(x) or by_code(x))
    q, k, v = (torch.randn(1, n, 1, dim).bfloat16() for n, dim in ((4, d), (keys, d), (keys, dv)))
    out = accuracy.emulated(quantize(q, k, v, **options))
    if keys > accuracy.SHORT_KEYS:  # V as rows
        coded = coded and (d, options) != (256, dict(block=None))
    # Of the blocks all but the first.
    assert out.shape == (1, 4, 1, dv) and len(calls) == int(coded) * ((keys - 1) // 128)


def small(**changes):
    return accuracy.Setting(4, 1024, 64, (256, 512), False, "cpu")._replace(**changes)


def test_rotation_helps_on_outliers_alone():
    outlier = accuracy.rms_errors(small(), "outlier")
    assert set(outlier) == set(accuracy.SCHEMES)
    assert outlier[accuracy.ROTATED] * 1.3 < outlier["blocks"] < outlier["one scale"]
    normal = accuracy.rms_errors(small(), "normal")
    assert 0.9 < normal[accuracy.ROTATED] / normal["one scale"] < 1.1


def test_relative_error_is_flat_in_length():
    for positive in (False, True):
        short, long = (accuracy.relative_errors(small(), n, positive) for n in (512, 4096))
        assert long[accuracy.ROTATED] < 1.2 * short[accuracy.ROTATED]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the text for machines without a GPU")
def test_the_command_says_that_it_emulates(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accuracy", "--heads", "1", "--keys", "256", "--dim", "16"])
    monkeypatch.setattr(accuracy, "default_setting", lambda heads, keys, dim: small(
        heads=heads, keys=keys, dim=dim, lengths=(128,)))
    assert accuracy.main() == 0
    printed = capsys.readouterr().out
    assert "emulated on cpu" in printed
    assert printed.count("rms error, outlier, S 256, D 16") == 1
    assert printed.count("relative error, V positive, S 128") == 1


def test_results_file(tmp_path, monkeypatch):
    import accuracy_fp8

    path = tmp_path / "fp8_accuracy.json"
    monkeypatch.setattr(sys, "argv", ["accuracy_fp8.py", "--output", str(path)])
    monkeypatch.setattr(accuracy, "default_setting", lambda heads, keys, dim: small(
        heads=1, keys=128, lengths=(128,)))
    accuracy_fp8.main()
    data = json.loads(path.read_text())
    assert data["what"] == "fp8_accuracy" and data["emulated"] and len(data["rows"]) == 4
    first = data["rows"][0]
    assert first["config"] == {"input": "outlier", "S": 128, "D": 64, "error": "rms"}
    assert first["ours"] == first["schemes"][accuracy.ROTATED] > 0
    assert first["peers"] == {"fa3": None}


def test_activations_are_those_of_each_layer():
    transformers = pytest.importorskip("transformers")
    import fp8_activations

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        vocab_size=50, max_position_embeddings=40)
    model = transformers.BertModel(config).eval()
    ids = torch.arange(30)[None]
    layers = list(fp8_activations.caught(model, ids, 2))
    assert len(layers) == 3
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
        for (q, k, v), x, layer in zip(layers, hidden, model.encoder.layer):
            part = layer.attention.self
            for got, projection in ((q, part.query), (k, part.key), (v, part.value)):
                want = projection(x).unflatten(-1, (2, 16)).bfloat16()
                torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
    sums = {}
    fp8_activations.compare(*layers[0], False, sums)
    for name in fp8_activations.NAMES:
        dot, out2, truth2, error2 = sums[name].tolist()
        assert dot / (out2 * truth2) ** 0.5 > 0.99 and error2 < 0.01 * truth2
