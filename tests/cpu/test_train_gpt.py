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


def test_both_attentions_give_the_gradient_of_the_packed_projection():
    qkv = torch.randn(2, 10, 3, 4, 16, requires_grad=True)
    dout = torch.randn(2, 10, 4, 16)
    outs = [attend(qkv) for attend in train_gpt.ATTENTION.values()]
    grads = [torch.autograd.grad(out, qkv, dout)[0] for out in outs]
    assert outs[0].shape == dout.shape and grads[0].shape == qkv.shape
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


class Event:
    """A clock of calls instead of one of the device."""

    calls = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.calls

    def elapsed_time(self, end):
        return float(end.at - self.at)


def test_attention_alone_queues_a_turn_and_waits_once(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(Event.calls))

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, qkv):
            return qkv[:, :, 0].clone()

        @staticmethod
        def backward(ctx, dout):
            Event.calls += 1
            return torch.stack([dout] * 3, 2)

    args = train_gpt.parse(["--small", "--layers", "3"])
    found = train_gpt.attention_ms([Counted.apply, Counted.apply], args)
    assert found == [3.0, 3.0]  # one call, of each layer
    turn = train_gpt.WARMUP_CALLS + train_gpt.CALLS_A_TURN
    assert waits == [turn * (n + 1) for n in range(2 * train_gpt.ATTENTION_TURNS)]
