"""Train a small byte-level GPT on real text, with this package's attention and with PyTorch's.

    python examples/train_gpt.py                    both, 500 steps; bf16, torch.compile on a GPU
    python examples/train_gpt.py --noise            and PyTorch's second kernel, to judge by
    python examples/train_gpt.py --small --steps 40 a model for a CPU, under a minute
    python examples/train_gpt.py --layers 8 --heads 16 --head-dim 128 --seqlen 8192 --batch 2 \
        --steps 12 --attention-alone                    what a step gains from faster attention

The text is the source code of Python's standard library. Both runs start from the same weights and
see the same batches, so their losses may differ by rounding alone. Prints both curves, their
difference and the tokens per second of each; exit code 1 if the curves part. How far rounding alone
takes two curves apart is what `--noise` shows, by two kernels of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_attn3
from flash_attn3 import ops

BYTES = 256
# The curves are compared as means over so many steps, since single steps are noisy.
SMOOTHED_STEPS = 20
MOST_APART = 0.02  # of the smoothed loss
WARMUP_STEPS = 10  # compilation and the first steps are not timed
# With --attention-alone both are timed in turn: a card at its power limit drifts by as much as a
# step gains.
TURNS, STEPS_A_TURN = 8, 6
# Of the attention by itself. The host queues a turn's calls one after the other, the first ones
# before the clock starts: so its time is hidden behind theirs.
ATTENTION_TURNS, WARMUP_CALLS, CALLS_A_TURN = 12, 2, 5


@dataclass
class Shape:
    layers: int = 6
    heads: int = 8
    head_dim: int = 64
    seqlen: int = 1024
    batch: int = 16


SMALL = Shape(layers=2, heads=4, head_dim=16, seqlen=64, batch=8)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=500, help="default: %(default)s")
    p.add_argument("--small", action="store_true", help="a model for a CPU (default without a GPU)")
    for name, value in vars(Shape()).items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int,
                       help=f"default: {value}, small: {getattr(SMALL, name)}")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--attention", choices=("both", *ATTENTION), default="both")
    p.add_argument("--backward", choices=("kernels", "torch"),
                   help="gradients of flash_attn3 (default: as FLASH_ATTN3_BACKWARD says)")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--attention-alone", action="store_true",
                   help="also time the attention of one step by itself (needs a GPU)")
    p.add_argument("--noise", action="store_true",
                   help="also train with PyTorch's second kernel (needs a GPU)")
    p.add_argument("--out", type=Path, help="curves as JSON (default: $OUT/train_gpt.json, if set)")
    p.add_argument("--plot", type=Path, help="both curves as a picture (needs matplotlib)")
    args = p.parse_args(argv)  # fmt: skip
    on_gpu = torch.cuda.is_available()
    base = vars(SMALL if args.small or not on_gpu else Shape())
    args.shape = Shape(**{name: getattr(args, name) or value for name, value in base.items()})
    args.device = "cuda" if on_gpu and not args.small else "cpu"
    if args.steps < 1:
        p.error("--steps must be at least 1")
    if args.noise and (args.device == "cpu" or args.attention != "both"):
        p.error("--noise needs a GPU and --attention both")
    return args


# ---- the text ------------------------------------------------------------------------------------


def corpus(most_bytes: int = 16 << 20) -> Tensor:
    """Bytes of the standard library's sources, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or total >= most_bytes:
            continue
        data = path.read_bytes()
        parts.append(data)
        total += len(data)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batch_of(text: Tensor, shape: Shape, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: the same for every run."""
    generator = torch.Generator().manual_seed(step)
    at = torch.randint(len(text) - shape.seqlen - 1, (shape.batch,), generator=generator)
    rows = torch.stack([text[i:i + shape.seqlen + 1] for i in at.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


# ---- the model -----------------------------------------------------------------------------------


def attend_flash(qkv: Tensor) -> Tensor:
    return flash_attn3.flash_attn_qkvpacked_func(qkv, causal=True)


def attend_torch(qkv: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# From the packed projection (B, S, 3, H, D) to (B, S, H, D).
ATTENTION: dict[str, Callable] = {"flash_attn3": attend_flash, "torch": attend_torch}


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Callable):
        super().__init__()
        width = shape.heads * shape.head_dim
        self.heads, self.attend = shape.heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, width // self.heads)
        x = x + self.project(self.attend(qkv).reshape(b, s, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, shape: Shape, attend: Callable):
        super().__init__()
        width = shape.heads * shape.head_dim
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(shape.seqlen, width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = 0.02 / (2 * shape.layers) ** 0.5
                nn.init.normal_(parameter, std=small if "project" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---- training ------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer and what its steps have lost. The same weights and batches whatever
    the attention."""

    def __init__(self, name: str, args: argparse.Namespace, text: Tensor):
        self.name, self.args, self.text = name, args, text
        self.on_gpu = args.device == "cuda"
        torch.manual_seed(0)
        self.model = Gpt(args.shape, ATTENTION[name]).to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=self.on_gpu)
        compiled = self.on_gpu and not args.no_compile
        self.run = torch.compile(self.model) if compiled else self.model
        self.losses: list[float] = []
        self.ended: list[float] = []

    def step(self) -> None:
        args, step = self.args, len(self.losses)
        rise = max(1, min(50, args.steps // 5))
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / rise)
        tokens, targets = (t.to(args.device) for t in batch_of(self.text, args.shape, step))
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=self.on_gpu):
            loss = self.run(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        # Waits for the device: the clock is that of whole steps.
        self.losses.append(loss.item())
        self.ended.append(time.perf_counter())

    def train(self) -> Trainer:
        for step in range(self.args.steps):
            self.step()
            if step % 50 == 0 or step == self.args.steps - 1:
                print(f"{self.name:12} step {step:4}  loss {self.losses[-1]:.4f}", flush=True)
        return self

    def result(self, step_ms: float | None = None) -> Run:
        if step_ms is None:
            times = [b - a for a, b in zip(self.ended, self.ended[1:])]
            times = times[WARMUP_STEPS:] or times or [float("nan")]
            step_ms = statistics.median(times) * 1e3
        tokens = self.args.shape.batch * self.args.shape.seqlen
        return Run(self.losses[:self.args.steps], tokens / step_ms * 1e3, step_ms)


@dataclass
class Run:
    losses: list[float]
    tokens_per_second: float
    step_ms: float


def step_ms_in_turn(trainers: list[Trainer]) -> list[float]:
    """Milliseconds of a step of each, a few steps of each in turn; the first of a turn warms up."""
    times = [[] for _ in trainers]
    for _ in range(TURNS):
        for trainer, found in zip(trainers, times):
            for _ in range(STEPS_A_TURN):
                trainer.step()
            ended = trainer.ended[-STEPS_A_TURN:]
            found += [b - a for a, b in zip(ended, ended[1:])]
    return [statistics.median(found) * 1e3 for found in times]


def smoothed(losses: list[float]) -> list[float]:
    n = min(SMOOTHED_STEPS, len(losses))
    return [statistics.fmean(losses[i:i + n]) for i in range(len(losses) - n + 1)]


def apart(a: list[float], b: list[float]) -> float:
    """Largest difference of the smoothed curves, over their value."""
    return max(abs(x - y) / y for x, y in zip(smoothed(a), smoothed(b)))


# ---- attention by itself -------------------------------------------------------------------------


def attention_ms(attends: list[Callable], args: argparse.Namespace) -> list[float]:
    """Milliseconds of the attention of one step, forward and backward of all layers; in turn.

    As in the step the gradient is one of the packed projection: what a side has to do to get there
    from those of q, k, v is in its time.
    """
    shape = args.shape
    size = (shape.batch, shape.seqlen, 3, shape.heads, shape.head_dim)
    qkv = torch.randn(size, device=args.device, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn(size[:2] + size[3:], device=args.device, dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = [[] for _ in attends]
    for _ in range(ATTENTION_TURNS):
        for attend, found in zip(attends, times):
            for call in range(WARMUP_CALLS + CALLS_A_TURN):
                if call == WARMUP_CALLS:
                    start.record()
                torch.autograd.grad(attend(qkv), qkv, dout)
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / CALLS_A_TURN)
    return [statistics.median(found) * shape.layers for found in times]


TORCH_KERNELS = ("cuDNN", "flash")


def use_torch_kernel(name: str) -> None:
    """Leaves this one of PyTorch's attention kernels switched on, for all that follows."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(name == "cuDNN")
    torch.backends.cuda.enable_flash_sdp(name == "flash")


def order_of_torch_kernels(args: argparse.Namespace) -> list[str]:
    """PyTorch's attention kernels that run here, the fastest first."""
    found = {}
    for name in TORCH_KERNELS:
        use_torch_kernel(name)
        try:
            (found[name],) = attention_ms([attend_torch], args)
        except RuntimeError as error:
            print(f"PyTorch's {name} attention can't run: {str(error).splitlines()[0]}")
    if not found:
        raise SystemExit("none of PyTorch's fused attentions runs here")
    order = sorted(found, key=found.get)
    print("PyTorch's attention: " + ", ".join(f"{n} {ms:.2f} ms" for n, ms in found.items())
          + f" a step; {order[0]} is used")
    return order


# ---- main ----------------------------------------------------------------------------------------


def draw(path: Path, runs: dict[str, Run], shape: Shape) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, run in runs.items():
        axes.plot(run.losses, linewidth=0.8, label=f"{name}, {run.tokens_per_second:,.0f} tokens/s")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"byte-level GPT, {shape}")
    axes.title.set_fontsize(8)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.backward:
        ops.use_backward(args.backward)
    text = corpus()
    print(f"{len(text):,} bytes of text; {args.shape}; {args.device}", flush=True)
    torch_kernels = order_of_torch_kernels(args) if args.device == "cuda" else []
    if torch_kernels:
        use_torch_kernel(torch_kernels[0])
    names = list(ATTENTION) if args.attention == "both" else [args.attention]
    trainers = [Trainer(name, args, text).train() for name in names]
    alone = {}
    step_ms = [None] * len(trainers)
    if args.attention_alone and args.device == "cuda":
        step_ms = step_ms_in_turn(trainers)
        alone = dict(zip(names, attention_ms([ATTENTION[name] for name in names], args)))
    runs = {t.name: t.result(ms) for t, ms in zip(trainers, step_ms)}
    for name, run in runs.items():
        print(f"{name:12} final loss {smoothed(run.losses)[-1]:.4f}  {run.step_ms:.2f} ms a step  "
              f"{run.tokens_per_second:,.0f} tokens/s")  # fmt: skip
    if alone:
        print("attention alone, ms a step: "
              + ", ".join(f"{name} {ms:.2f}" for name, ms in alone.items()))
        if len(names) == 2:
            gain = runs["torch"].step_ms - runs["flash_attn3"].step_ms
            most = alone["torch"] - alone["flash_attn3"]
            print(f"the step gains {gain:.2f} ms of the {most:.2f} ms between the attentions "
                  f"({gain / most:.2f}; asked: 0.90)")  # fmt: skip
    out = args.out
    if out is None and os.environ.get("OUT"):
        out = Path(os.environ["OUT"]) / "train_gpt.json"
    if out is not None:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        out.write_text(json.dumps({
            "what": "train", "device": device, "torch": torch.__version__,
            "commit": os.environ.get("FLASH_ATTN3_COMMIT"), "shape": vars(args.shape),
            "attention_alone_ms": alone, "runs": {name: vars(run) for name, run in runs.items()}}))
        print(f"written to {out}")
    if args.plot:
        draw(args.plot, runs, args.shape)
    if len(runs) < 2:
        return 0
    if args.noise and len(torch_kernels) > 1:
        use_torch_kernel(torch_kernels[1])
        torch._dynamo.reset()  # what was compiled has the first kernel in it
        noise = apart(Trainer("torch", args, text).train().losses, runs["torch"].losses)
        print(f"PyTorch's {' and '.join(torch_kernels)} differ by at most {noise:.2%}")
    difference = apart(*(run.losses for run in runs.values()))
    verdict = "within" if difference <= MOST_APART else "NOT within"
    print(f"the smoothed losses differ by at most {difference:.2%}, {verdict} {MOST_APART:.0%}")
    return 0 if difference <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main())
