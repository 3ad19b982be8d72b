"""What fp8.py measures: its cases, the calls of every column, and the issue's figures."""

from __future__ import annotations

import math

import cases
import figures
import providers
import torch
from cases import Case, Inputs
from figures import Figure

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCKS = "ours, scales a block"
# What the shares of cuBLAS's e4m3 rate at S 16k, not causal, have to be.
SHARES = {64: 0.55, 128: 0.80, 256: 0.90}


def dense_cases() -> list[Case]:
    """30 points: 16,384 tokens in all, hidden 2048, S 1k to 16k."""
    return [c.with_dtype("e4m3") for c in cases.dense_cases() if c.lengths[0] >= 1024]


def make_inputs(case: Case, device: str | torch.device = "cuda") -> Inputs:
    """In bf16: set-ups make e4m3 of them as their peer takes it."""
    return cases.make_inputs(case.with_dtype("bf16"), device)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Scale 1, saturating: torch's cast makes NaN of what is too large."""
    return x.float().clamp(-LARGEST, LARGEST).to(E4M3)


def _descaled(case: Case, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Q, K, V in e4m3, and the descales (B, Hk) that FA3 and this package take."""
    q, k, v = (to_e4m3(t) for t in (inputs.q, inputs.k, inputs.v))
    ones = torch.ones(len(case.lengths), case.heads, device=q.device)
    return [q, k, v], {"q_descale": ones, "k_descale": ones, "v_descale": ones}


def _own_package(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """flash_attn3, refused when the call would run on the fallback."""
    module = providers.require("flash_attn3")
    chosen = module.backend_for(q, k, v)
    if chosen.name != "sm90":
        why = chosen.reasons.get("sm90", "not chosen")
        raise providers.Unavailable(f"runs on the fallback {chosen.name}, not on sm90: {why}")
    return module


def setup_ours(case: Case, inputs: Inputs):
    """V as it lies in memory, a descale for each batch entry and KV head."""
    tensors, descales = _descaled(case, inputs)
    module = _own_package(*tensors)
    return lambda: module.flash_attn_func(*tensors, causal=case.causal, **descales)


def setup_blocks(case: Case, inputs: Inputs):
    """What quantize() makes: a scale for each block of rows, V transposed."""
    module = providers.require("flash_attn3")
    made = module.quantize(inputs.q, inputs.k, inputs.v)
    _own_package(*_descaled(case, inputs)[0])
    return lambda: module.flash_attn_func(*made, causal=case.causal)


def setup_fa3(case: Case, inputs: Inputs):
    """FlashAttention-3's e4m3 call, wheel fa3-fwd."""
    module = providers.require("fa3_fwd_interface")
    tensors, descales = _descaled(case, inputs)
    return lambda: module.flash_attn_func(*tensors, causal=case.causal, **descales)


def setup_cudnn(case: Case, inputs: Inputs):
    """cuDNN's e4m3 attention by its graph API: scales a tensor, out in e4m3 (all it has here)."""
    cudnn = providers.require("cudnn")
    (q, k, v), _ = _descaled(case, inputs)
    batch, seqlen, heads, head_dim = q.shape
    out = torch.empty_like(q)
    one = torch.ones(1, 1, 1, 1, device=q.device)
    amax = torch.empty_like(one)
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32
    )
    dims = (batch, heads, seqlen, head_dim)
    strides = (seqlen * heads * head_dim, head_dim, heads * head_dim, 1)
    operands = {
        name: graph.tensor(name=name, dim=dims, stride=strides, data_type=e4m3) for name in "qkv"
    }
    scales = {
        name: graph.tensor(name=name, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=fp32)
        for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    }
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **operands, **scales, is_inference=True, attn_scale=1 / math.sqrt(head_dim),
        use_causal_mask=case.causal,
    )  # fmt: skip
    o.set_output(True).set_dim(dims).set_stride(strides).set_data_type(e4m3)
    for found in (amax_s, amax_o):
        found.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.device)
    handle = cudnn.create_handle()
    tensors = {operands["q"]: q, operands["k"]: k, operands["v"]: v, o: out,
               amax_s: amax, amax_o: torch.empty_like(one)}  # fmt: skip
    tensors.update({scale: one for scale in scales.values()})

    def call():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return out

    return call


# fa2 is bf16 on the same numbers, for the factor of 3 at D 128, S 16k.
PEERS: dict[str, providers.Setup] = {
    "fa3": setup_fa3,
    "cudnn": setup_cudnn,
    "fa2": providers.setup_fa2,
}


def columns(peers: dict[str, providers.Setup]) -> dict[str, providers.Setup]:
    return {"ours": setup_ours, BLOCKS: setup_blocks, **peers}


# --- quantize, against a copy ---------------------------------------------------------------------


def bandwidth_calls(head_dim: int) -> dict[str, tuple]:
    """Name -> (callable, bytes read and written): the fused quantise call and a copy of bf16."""
    module = providers.require("flash_attn3")
    shape = (1, cases.TOKENS, cases.HIDDEN // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    source = torch.cat([q, k, v])
    target = torch.empty_like(source)
    size = source.numel()
    return {
        "quantize": (lambda: module.quantize(q, k, v), 3 * size),
        "quantize, rotated": (lambda: module.quantize(q, k, v, rotate=True), 3 * size),
        "copy": (lambda: target.copy_(source), 4 * size),
    }


# --- figures --------------------------------------------------------------------------------------


def evaluate(rows: list[dict], cublas_e4m3: float | None,
             bandwidth: dict[str, dict[str, float]]) -> list[Figure]:
    dense = [row for row in rows if row["config"]["case"] == "dense"]
    ratios = figures.dense_ratios(rows, dtype="e4m3")
    longest = {
        row["config"]["D"]: row["flops"] / row["ms"]["ours"] / 1e9
        for row in dense
        if row["config"]["S"] == cases.TOKENS and not row["config"]["causal"]
        and row["ms"].get("ours")
    }  # fmt: skip
    over_fa2 = [
        figures.ratio(row, row["ms"].get("fa2"), "ours")
        for row in dense
        if row["config"]["S"] == cases.TOKENS and row["config"]["D"] == 128
    ]
    blocks = [figures.ratio(row, row["ms"].get("ours"), BLOCKS) for row in dense]
    copy_shares = {
        name: [rates[name] / rates["copy"] for rates in bandwidth.values()
               if rates.get(name) and rates.get("copy")]
        for name in ("quantize", "quantize, rotated")
    }  # fmt: skip
    figure, known = figures._figure, figures._known
    return [
        figure("e4m3, best peer: geometric mean", ">= 1.05", ratios, figures.geomean,
               lambda x: x >= 1.05, 30),
        figure("e4m3, best peer: lowest point", ">= 0.97", ratios, min, lambda x: x >= 0.97, 30),
        *(figure(f"D {d}, S 16k: rate over cuBLAS's", f">= {share:.2f}",
                 [longest[d] / cublas_e4m3] if cublas_e4m3 and d in longest else [], min,
                 lambda x, share=share: x >= share, 1)
          for d, share in SHARES.items()),
        figure("D 128, S 16k: over FA2 in bf16, lowest", ">= 3.00", known(over_fa2), min,
               lambda x: x >= 3.0, 2),
        figure("scales a block over (B, Hk): lowest rate", ">= 0.97", known(blocks), min,
               lambda x: x >= 0.97, 30),
        *(figure(f"{name}: bytes a second over the copy's, lowest", ">= 0.70", shares, min,
                 lambda x: x >= 0.7, len(cases.HEAD_DIMS))
          for name, shares in copy_shares.items()),
    ]  # fmt: skip
