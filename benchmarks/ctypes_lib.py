"""The kernel library called through its C interface (csrc/host/params.h), without the binding.

Serves to time variants of libflash_attn3_sm90.so side by side before, or without, building the
torch extension. The structures below repeat params.h field by field; tests/cpu/test_benchmarks.py
compares the two.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
MESSAGE_SIZE = 1024


class Strides(ctypes.Structure):
    _fields_ = [("batch", c_int64), ("row", c_int64), ("head", c_int64)]


# Runs of fields that stand in both directions' structs (csrc/host/params.h).
_LENGTHS_AND_STRIDES = [
    ("cu_seqlens_q", c_void_p),
    ("cu_seqlens_k", c_void_p),
    ("seqused_q", c_void_p),
    ("seqused_k", c_void_p),
    ("workspace", c_void_p),
    ("q_strides", Strides),
    ("k_strides", Strides),
    ("v_strides", Strides),
    ("out_strides", Strides),
]
_SIZES_AND_OPTIONS = [
    ("batch", c_int32),
    ("max_seqlen_q", c_int32),
    ("max_seqlen_k", c_int32),
    ("total_q", c_int64),
    ("total_k", c_int64),
    ("heads", c_int32),
    ("heads_kv", c_int32),
    ("head_dim", c_int32),
    ("head_dim_v", c_int32),
    ("dtype", c_int32),
    ("softmax_scale", c_float),
    ("softcap", c_float),
    ("window_left", c_int32),
    ("window_right", c_int32),
    ("attention_chunk", c_int32),
]


class FwdParams(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        *_LENGTHS_AND_STRIDES,
        *_SIZES_AND_OPTIONS,
        ("device", c_int32),
        ("sm_margin", c_int32),
    ]


class BwdParams(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("dout", c_void_p),
        ("lse", c_void_p),
        ("dlse", c_void_p),
        ("dq", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        *_LENGTHS_AND_STRIDES,
        ("dout_strides", Strides),
        ("dq_strides", Strides),
        ("dk_strides", Strides),
        ("dv_strides", Strides),
        *_SIZES_AND_OPTIONS,
        ("deterministic", c_int32),
        ("device", c_int32),
        ("sm_margin", c_int32),
    ]


class FwdPlan(ctypes.Structure):
    _fields_ = [
        (name, c_int32)
        for name in (
            "tile_m", "tile_n", "head_dim", "head_dim_v", "stages", "threads", "registers",
            "shared_bytes", "local_bytes", "grid",
        )
    ]  # fmt: skip

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name, _ in self._fields_}


class BwdPlan(ctypes.Structure):
    _fields_ = FwdPlan._fields_
    as_dict = FwdPlan.as_dict


def _strides(tensor: torch.Tensor, ragged: bool) -> Strides:
    if tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension must be contiguous, got strides {tensor.stride()}")
    if ragged:
        return Strides(0, tensor.stride(0), tensor.stride(1))
    return Strides(tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class KernelLibrary:
    """One libflash_attn3_sm90.so, or a variant of it."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        # RTLD_LOCAL (the default of CDLL): variants define the same symbols.
        self._lib = ctypes.CDLL(str(self.path))
        self._fwd = self._lib.flash_attn3_fwd
        self._fwd.argtypes = [ctypes.POINTER(FwdParams), c_void_p, c_char_p, c_size_t]
        self._fwd.restype = c_int
        self._plan = self._lib.flash_attn3_fwd_plan
        self._plan.argtypes = [
            ctypes.POINTER(FwdParams), ctypes.POINTER(FwdPlan), c_char_p, c_size_t,
        ]  # fmt: skip
        self._plan.restype = c_int
        self._workspace_bytes = self._lib.flash_attn3_fwd_workspace_bytes
        self._workspace_bytes.argtypes = [ctypes.POINTER(FwdParams)]
        self._workspace_bytes.restype = c_int64
        self._bwd = self._lib.flash_attn3_bwd
        self._bwd.argtypes = [ctypes.POINTER(BwdParams), c_void_p, c_char_p, c_size_t]
        self._bwd.restype = c_int
        self._bwd_plan = self._lib.flash_attn3_bwd_plan
        self._bwd_plan.argtypes = [
            ctypes.POINTER(BwdParams), ctypes.POINTER(BwdPlan), c_char_p, c_size_t,
        ]  # fmt: skip
        self._bwd_plan.restype = c_int
        self._bwd_workspace_bytes = self._lib.flash_attn3_bwd_workspace_bytes
        self._bwd_workspace_bytes.argtypes = [ctypes.POINTER(BwdParams)]
        self._bwd_workspace_bytes.restype = c_int64
        self._lib.flash_attn3_build_info.restype = c_char_p

    def build_info(self) -> str:
        return self._lib.flash_attn3_build_info().decode()

    def prepare(self, q, k, v, **options) -> PreparedForward:
        return PreparedForward(self, q, k, v, **options)

    def prepare_backward(self, dout, q, k, v, out, lse, **options) -> PreparedBackward:
        return PreparedBackward(self, dout, q, k, v, out, lse, **options)


def _raise(code: int, message: bytes) -> None:
    kind = {1: ValueError, 2: NotImplementedError}.get(code, RuntimeError)
    raise kind(message.decode(errors="replace") or f"the kernel library returned {code}")


def _shared_fields(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> dict:
    """The fields that FwdParams and BwdParams both have."""
    ragged_q, ragged_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    batch = cu_seqlens_q.numel() - 1 if ragged_q else q.shape[0]
    max_seqlen_q = max_seqlen_q if ragged_q else q.shape[1]
    max_seqlen_k = max_seqlen_k if ragged_k else k.shape[1]
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("ragged calls need max_seqlen_q and max_seqlen_k")
    heads, head_dim = q.shape[-2:]
    heads_kv, head_dim_v = v.shape[-2:]
    return dict(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        cu_seqlens_q=_pointer(cu_seqlens_q),
        cu_seqlens_k=_pointer(cu_seqlens_k),
        seqused_q=_pointer(seqused_q),
        seqused_k=_pointer(seqused_k),
        workspace=None,
        q_strides=_strides(q, ragged_q),
        k_strides=_strides(k, ragged_k),
        v_strides=_strides(v, ragged_k),
        out_strides=_strides(out, ragged_q),
        batch=batch,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        total_q=q.shape[0] if ragged_q else 0,
        total_k=k.shape[0] if ragged_k else 0,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=DTYPE_CODES[q.dtype],
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
        softcap=softcap,
        window_left=window_size[0],
        window_right=0 if causal else window_size[1],
        attention_chunk=attention_chunk,
        device=q.device.index or 0,
        sm_margin=sm_margin,
    )


class PreparedForward:
    """A forward call with its parameters filled in; calling it launches on the current stream.

    `options` are those of _shared_fields().

    out, lse and the workspace are allocated once, so that a call does no work on the host but the
    library's own. `poison()` fills them with NaN (the workspace with ones), to find elements that
    a launch leaves unwritten.
    """

    def __init__(
        self,
        library: KernelLibrary,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options,
    ):
        self._library = library
        out_dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
        self.out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype, device=q.device)
        fields = _shared_fields(q, k, v, self.out, **options)
        ragged = options.get("cu_seqlens_q") is not None
        heads = q.shape[-2]
        lse_shape = (heads, q.shape[0]) if ragged else (q.shape[0], heads, q.shape[1])
        self.lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        # What the pointers in the structure refer to must live as long as it does.
        self._keep = (q, k, v, options)
        self.params = FwdParams(lse=self.lse.data_ptr(), **fields)
        self._by_reference = ctypes.byref(self.params)
        self._message = ctypes.create_string_buffer(MESSAGE_SIZE)
        workspace_bytes = library._workspace_bytes(self._by_reference)
        if workspace_bytes < 0:
            raise RuntimeError(f"flash_attn3_fwd_workspace_bytes returned {workspace_bytes}")
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
        if workspace_bytes:
            self.params.workspace = self.workspace.data_ptr()

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.workspace.fill_(255)

    def plan(self) -> FwdPlan:
        plan = FwdPlan()
        code = self._library._plan(
            self._by_reference, ctypes.byref(plan), self._message, MESSAGE_SIZE
        )
        if code:
            _raise(code, self._message.value)
        return plan

    def __call__(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.out.device).cuda_stream
        code = self._library._fwd(self._by_reference, stream, self._message, MESSAGE_SIZE)
        if code:
            _raise(code, self._message.value)
        return self.out


def _for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the library cannot take its layout (a stride of 0, say)."""
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1]) if n > 1]
    fits = tensor.stride(-1) == 1 and all(s > 0 and s % 8 == 0 for s in strides)
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


class PreparedBackward:
    """A backward call with its parameters filled in, as PreparedForward is a forward call."""

    def __init__(
        self,
        library: KernelLibrary,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        dlse: torch.Tensor | None = None,
        deterministic: bool = False,
        **options,
    ):
        self._library = library
        dout = _for_tma(dout)
        ragged_q = options.get("cu_seqlens_q") is not None
        ragged_k = options.get("cu_seqlens_k") is not None
        self.dq, self.dk, self.dv = (torch.empty_like(t).contiguous() for t in (q, k, v))
        # What the pointers in the structure refer to must live as long as it does.
        self._keep = (dout, q, k, v, out, lse, dlse, options)
        self.params = BwdParams(
            dout=dout.data_ptr(),
            lse=lse.data_ptr(),
            dlse=_pointer(dlse),
            dq=self.dq.data_ptr(),
            dk=self.dk.data_ptr(),
            dv=self.dv.data_ptr(),
            dout_strides=_strides(dout, ragged_q),
            dq_strides=_strides(self.dq, ragged_q),
            dk_strides=_strides(self.dk, ragged_k),
            dv_strides=_strides(self.dv, ragged_k),
            deterministic=int(deterministic),
            **_shared_fields(q, k, v, out, **options),
        )
        self._by_reference = ctypes.byref(self.params)
        self._message = ctypes.create_string_buffer(MESSAGE_SIZE)
        workspace_bytes = library._bwd_workspace_bytes(self._by_reference)
        # At least a byte: a call that the library refuses says why itself.
        self.workspace = torch.empty(max(workspace_bytes, 16), dtype=torch.uint8, device=q.device)
        self.params.workspace = self.workspace.data_ptr()

    def poison(self) -> None:
        for tensor in (self.dq, self.dk, self.dv):
            tensor.fill_(float("nan"))
        self.workspace.fill_(255)

    def plan(self) -> BwdPlan:
        plan = BwdPlan()
        code = self._library._bwd_plan(
            self._by_reference, ctypes.byref(plan), self._message, MESSAGE_SIZE
        )
        if code:
            _raise(code, self._message.value)
        return plan

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stream = torch.cuda.current_stream(self.dq.device).cuda_stream
        code = self._library._bwd(self._by_reference, stream, self._message, MESSAGE_SIZE)
        if code:
            _raise(code, self._message.value)
        return self.dq, self.dk, self.dv
