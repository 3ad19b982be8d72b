"""What backward.py measures: its cases, the calls of every column, and the issue's figures."""

from __future__ import annotations

from dataclasses import dataclass

import cases
import figures
import flops
import providers
import torch
from cases import Case, Inputs
from figures import Figure

PLAIN = "ours, not deterministic"
DETERMINISTIC_SEQLEN = 8192
RAGGED_BESIDE = 2048  # the dense batch that the ragged one's rate is compared with
# (D, Dv): every compiled pair.
HEAD_DIM_PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@dataclass(frozen=True)
class BackwardCase(Case):
    """A row of the backward; head_dim_v 0 is as head_dim."""

    head_dim_v: int = 0
    deterministic: bool = False

    @property
    def flops(self) -> int:
        pairs = ((length, length) for length in self.lengths)
        return flops.backward_flops(
            pairs, self.heads, self.head_dim, self.head_dim_v or None, causal=self.causal
        )

    @property
    def config(self) -> dict:
        config = super().config
        if self.head_dim_v:
            config["Dv"] = self.head_dim_v
        if self.deterministic:
            config["deterministic"] = True
        return config

    @property
    def label(self) -> str:
        text = super().label
        return f"{text} Dv {self.head_dim_v}" if self.head_dim_v else text


def dense_cases() -> list[Case]:
    """The forward's 36 points: 16,384 tokens in all, hidden 2048."""
    return [
        BackwardCase("dense", c.head_dim, c.causal, c.lengths, c.heads) for c in cases.dense_cases()
    ]


def deterministic_cases() -> list[Case]:
    """Hidden size as near to 2048 as whole heads allow."""
    lengths = (DETERMINISTIC_SEQLEN,) * (cases.TOKENS // DETERMINISTIC_SEQLEN)
    return [
        BackwardCase("det", d, causal, lengths, cases.HIDDEN // d, head_dim_v=dv if dv != d else 0,
                     deterministic=True)
        for d, dv in HEAD_DIM_PAIRS
        for causal in (False, True)
    ]  # fmt: skip


def ragged_cases() -> list[Case]:
    """The forward issue's 16 lengths, each beside a dense batch of the same heads."""
    dense = (RAGGED_BESIDE,) * (cases.TOKENS // RAGGED_BESIDE)
    return [
        BackwardCase("ragged", d, causal, lengths, cases.HIDDEN // d, ragged=lengths is not dense)
        for d in (64, 128)
        for causal in (False, True)
        for lengths in (dense, cases.RAGGED_LENGTHS)
    ]


SECTIONS = {"dense": dense_cases, "det": deterministic_cases, "ragged": ragged_cases}


def make_inputs(case: BackwardCase, device: str | torch.device = "cuda") -> Inputs:
    inputs = cases.make_inputs(case, device)
    if case.head_dim_v:
        inputs.v = torch.randn(
            (*inputs.v.shape[:-1], case.head_dim_v), dtype=inputs.v.dtype, device=device
        )
    return inputs


class Backward:
    """Gradients of one attention call, by autograd, again and again.

    Autograd runs a node on the stream of its forward, and a CUDA graph holds what runs on the
    stream that is captured: so each stream that asks for gradients gets a forward of its own, the
    first time. That first time is never inside a capture: every timer calls before it captures.
    """

    def __init__(self, setup: providers.Setup, case: Case, inputs: Inputs):
        self._setup, self._case, self._inputs = setup, case, inputs
        generator = torch.Generator(inputs.q.device).manual_seed(1)
        shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        self._dout = torch.randn(
            shape, dtype=inputs.q.dtype, device=inputs.q.device, generator=generator
        )
        self._graphs: dict[int, tuple] = {}
        self()  # what can't run says so here

    def __call__(self) -> tuple[torch.Tensor, ...]:
        on_gpu = self._dout.is_cuda
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
        if stream not in self._graphs:
            given = self._inputs
            leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
            call = self._setup(self._case, Inputs(*leaves, given.cu_seqlens, given.max_seqlen))
            self._graphs[stream] = providers.as_tensor(call()), leaves
        out, leaves = self._graphs[stream]
        return torch.autograd.grad(out, leaves, self._dout, retain_graph=True)


def ours(deterministic: bool) -> providers.Setup:
    """flash_attn3, refused where its own backward kernels would not run."""

    def setup(case: Case, inputs: Inputs):
        module = providers.require("flash_attn3")
        providers.setup_ours(case, inputs)  # says why the forward's kernels would not run
        refusal = module.ops._C.backward_refusal(
            case.dtype, inputs.q.shape[-1], inputs.v.shape[-1], inputs.q.device.index or 0
        )
        if refusal:
            raise providers.Unavailable(refusal)
        options = {**providers._options(case, inputs), "deterministic": deterministic}
        function = module.flash_attn_varlen_func if case.ragged else module.flash_attn_func
        return lambda: function(inputs.q, inputs.k, inputs.v, **options)

    return setup


PEERS: dict[str, providers.Setup] = {
    "fa2": providers.setup_fa2,
    "fa4": providers.setup_fa4,
    "cudnn": providers.setup_cudnn,
}


def columns(case: BackwardCase, peers: dict[str, providers.Setup]) -> dict[str, providers.Setup]:
    """The columns of a case's row; the first is this package's."""
    if case.section == "dense":
        return {"ours": ours(False), **peers}
    if case.section == "det":
        return {"ours": ours(True), PLAIN: ours(False)}
    return {"ours": ours(False)}


def _rates(rows: list[dict], section: str) -> list[tuple[dict, float]]:
    return [
        (row["config"], row["flops"] / row["ms"]["ours"])
        for row in rows
        if row["config"]["case"] == section and row["ms"].get("ours")
    ]


def ragged_ratios(rows: list[dict]) -> list[float]:
    """FLOP rate of the 16 lengths over that of the dense batch."""
    rates = {(c["D"], c["causal"], c["ragged"]): rate for c, rate in _rates(rows, "ragged")}
    return [
        rate / rates[d, causal, False]
        for (d, causal, ragged), rate in rates.items()
        if ragged and (d, causal, False) in rates
    ]


def evaluate(rows: list[dict], cublas_tflops: float | None) -> list[Figure]:
    dense = figures.dense_ratios(rows)
    over_cublas = [
        rate / 1e9 / cublas_tflops
        for config, rate in _rates(rows, "dense")
        if cublas_tflops and config["D"] == 256 and config["S"] == cases.TOKENS
    ]
    deterministic = [
        row["ms"][PLAIN] / row["ms"]["ours"]
        for row in rows
        if row["config"]["case"] == "det" and row["ms"].get("ours") and row["ms"].get(PLAIN)
    ]
    figure = figures._figure
    return [
        figure("backward bf16, best peer: geometric mean", ">= 1.00", dense, figures.geomean,
               lambda x: x >= 1.0, 36),
        figure("backward bf16, best peer: lowest point", ">= 0.95", dense, min,
               lambda x: x >= 0.95, 36),
        figure("D 256, S 16k: rate over cuBLAS's, lowest", ">= 0.60", over_cublas, min,
               lambda x: x >= 0.6, 2),
        figure("deterministic, S 8k, over the plain rate: lowest", ">= 0.85", deterministic, min,
               lambda x: x >= 0.85, 2 * len(HEAD_DIM_PAIRS)),
        figure("ragged, 16 lengths, over dense S 2k: lowest", ">= 0.80", ragged_ratios(rows), min,
               lambda x: x >= 0.8, 4),
    ]  # fmt: skip
