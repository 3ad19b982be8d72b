"""Who is measured: setup_<peer>(case, inputs) returns a callable, or raises Unavailable(reason)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case, Inputs
from ctypes_lib import KernelLibrary
from timing import first_line

Setup = Callable[[Case, Inputs], Callable[[], object]]


class Unavailable(Exception):
    """This peer can't run this case here; the text is the reason for the results file."""


@functools.cache
def _import(module: str):
    """The module, or the reason why it can't be imported (cached: failing imports are slow)."""
    try:
        return __import__(module, fromlist=["_"])
    except Exception as error:  # noqa: BLE001 - a broken wheel raises more than ImportError
        return f"import {module}: {type(error).__name__}: {first_line(error)}"


def require(module: str):
    """A peer's module; Unavailable, with the reason, where it can't be imported."""
    found = _import(module)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def _setup_sdpa(backend_name: str, case: Case, inputs: Inputs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.ragged:
        raise Unavailable("scaled_dot_product_attention takes no cu_seqlens")
    if case.window != (-1, -1):
        raise Unavailable("scaled_dot_product_attention takes no window")
    backend = getattr(SDPBackend, backend_name)
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))  # (B,H,S,D) views
    causal = case.causal

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def setup_fa2(case: Case, inputs: Inputs):
    """FlashAttention-2 as PyTorch carries it."""
    return _setup_sdpa("FLASH_ATTENTION", case, inputs)


def setup_cudnn(case: Case, inputs: Inputs):
    return _setup_sdpa("CUDNN_ATTENTION", case, inputs)


def _options(case: Case, inputs: Inputs) -> dict[str, object]:
    """The call's keywords, as FA3, FA4, this package and its kernel library name them."""
    options: dict[str, object] = {"causal": case.causal}
    if case.window != (-1, -1):
        options["window_size"] = case.window
    if case.ragged:
        options.update(
            cu_seqlens_q=inputs.cu_seqlens,
            cu_seqlens_k=inputs.cu_seqlens,
            max_seqlen_q=inputs.max_seqlen,
            max_seqlen_k=inputs.max_seqlen,
        )
    return options


def _flash_call(module, case: Case, inputs: Inputs):
    """A call by the interface that FA3, FA4 and this package share."""
    q, k, v = inputs.q, inputs.k, inputs.v
    options = _options(case, inputs)
    call = module.flash_attn_varlen_func if case.ragged else module.flash_attn_func
    return lambda: call(q, k, v, **options)


def setup_fa3(case: Case, inputs: Inputs):
    """FlashAttention-3, wheel fa3-fwd."""
    if case.dtype == "fp16":
        raise Unavailable("fp16 is compiled out of the wheel fa3-fwd")
    if case.window != (-1, -1):
        raise Unavailable("local windows are compiled out of the wheel fa3-fwd")
    return _flash_call(require("fa3_fwd_interface"), case, inputs)


def setup_fa4(case: Case, inputs: Inputs):
    """FlashAttention-4, wheel flash-attn-4. Each configuration compiles at its first call."""
    if case.section != "dense":
        raise Unavailable("not asked for outside the dense points (it compiles each new case)")
    return _flash_call(require("flash_attn.cute"), case, inputs)


def setup_ours(case: Case, inputs: Inputs):
    """flash_attn3, refused when the call would run on the fallback."""
    module = require("flash_attn3")
    chosen = module.backend_for(inputs.q, inputs.k, inputs.v, **_options(case, inputs))
    if chosen.name != "sm90":
        why = chosen.reasons.get("sm90", "not chosen")
        raise Unavailable(f"runs on the fallback {chosen.name}, not on sm90: {why}")
    return _flash_call(module, case, inputs)


def library_setup(library: KernelLibrary) -> Setup:
    """A column for one kernel library, called by ctypes."""

    def setup(case: Case, inputs: Inputs):
        try:
            call = library.prepare(inputs.q, inputs.k, inputs.v, **_options(case, inputs))
            call.plan()  # a configuration that this build lacks is refused here
        except NotImplementedError as error:
            raise Unavailable(first_line(error)) from error
        return call

    return setup


PEERS: dict[str, Setup] = {
    "fa2": setup_fa2,
    "fa3": setup_fa3,
    "fa4": setup_fa4,
    "cudnn": setup_cudnn,
}


def cublas_call(size: int = 8192, dtype: torch.dtype = torch.bfloat16):
    """(callable, FLOPs) of a square product: the practical ceiling at the card's power limit."""
    a, b = (torch.randn(size, size, dtype=dtype, device="cuda") for _ in range(2))
    return (lambda: a @ b), 2 * size**3


def as_tensor(result: object) -> torch.Tensor:
    """FA4 returns a tuple, everyone else the output."""
    return result[0] if isinstance(result, (tuple, list)) else result
