"""examples/train_gpt.py on a CPU: a few steps of the small model, and its parts."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

import train_gpt  # noqa: E402


def test_a_few_steps_with_both_attentions(tmp_path, capsys):
    out = tmp_path / "curves.json"
    assert train_gpt.main(["--small", "--steps", "25", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "flash_attn3" in text and "tokens/s" in text and "within 2%" in text
    runs = json.loads(out.read_text())["runs"]
    for run in runs.values():
        assert len(run["losses"]) == 25 and run["tokens_per_second"] > 0
        assert run["losses"][-1] < run["losses"][0] - 0.5
    for a, b in zip(*(run["losses"] for run in runs.values())):
        assert a == pytest.approx(b, rel=1e-2)


def test_curves_that_part_are_seen():
    falling = [5.0 - 0.01 * i for i in range(100)]
    noisy = [x + (0.2 if i % 2 else -0.2) for i, x in enumerate(falling)]
    assert train_gpt.apart(noisy, falling) < train_gpt.MOST_APART
    worse = falling[:50] + [x + 0.3 for x in falling[50:]]
    assert train_gpt.apart(worse, falling) > train_gpt.MOST_APART


def test_batches_are_the_same_for_every_run():
    text = train_gpt.corpus(1 << 16)
    shape = train_gpt.SMALL
    first, again = (train_gpt.batch_of(text, shape, 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], train_gpt.batch_of(text, shape, 4)[0])


def test_shape_of_the_command_line():
    args = train_gpt.parse(["--small", "--heads", "2", "--seqlen", "32"])
    assert (args.shape.heads, args.shape.seqlen, args.shape.layers) == (2, 32, 2)
    assert args.device == "cpu"
    with pytest.raises(SystemExit):
        train_gpt.parse(["--steps", "0"])
    with pytest.raises(SystemExit):
        train_gpt.parse(["--small", "--noise"])


def test_steps_in_turn_go_on_with_the_same_batches(monkeypatch):
    monkeypatch.setattr(train_gpt, "TURNS", 2)
    monkeypatch.setattr(train_gpt, "STEPS_A_TURN", 3)
    args = train_gpt.parse(["--small", "--steps", "2"])
    text = train_gpt.corpus(1 << 16)
    trainers = [train_gpt.Trainer(name, args, text).train() for name in train_gpt.ATTENTION]
    times = train_gpt.step_ms_in_turn(trainers)
    assert all(0 < ms < 1e5 for ms in times)
    for trainer, ms in zip(trainers, times):
        assert len(trainer.losses) == 2 + 2 * 3
        run = trainer.result(ms)
        assert len(run.losses) == 2 and run.step_ms == ms
    for a, b in zip(*(trainer.losses for trainer in trainers)):
        assert a == pytest.approx(b, rel=1e-2)
