"""The e4m3 half of the C interface (csrc/host/params.h), without the binding: see ctypes_lib.py."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass

import torch
from ctypes_lib import (
    DTYPE_CODES,
    MESSAGE_SIZE,
    FwdParams,
    FwdPlan,
    KernelLibrary,
    PreparedForward,
    Strides,
    _pointer,
    _raise,
    _strides,
)

MEAN_FLOATS = 33  # flash_attn3_mean wants so many times the mean's room


class Fp8Scale(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("block_rows", c_int32),
    ]


class Fp8Params(ctypes.Structure):
    _fields_ = [
        ("fwd", FwdParams),
        ("q_scale", Fp8Scale),
        ("k_scale", Fp8Scale),
        ("v_scale", Fp8Scale),
        ("v_transposed", c_int32),
        ("exact_lse", c_int32),
        ("v_room", c_void_p),
    ]


class QuantizeParams(ctypes.Structure):
    _fields_ = [
        ("in", c_void_p),
        ("mean", c_void_p),
        ("cu_seqlens", c_void_p),
        ("seqused", c_void_p),
        ("out", c_void_p),
        ("scale", c_void_p),
        ("in_strides", Strides),
        ("batch", c_int32),
        ("seqlen", c_int32),
        ("total", c_int64),
        ("max_seqlen", c_int32),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("block_rows", c_int32),
        ("rotate", c_int32),
        ("transposed", c_int32),
        ("device", c_int32),
    ]


@dataclass
class Quantized:
    """e4m3 values with a scale per block of rows: scale is (B, H, blocks), ragged (H, blocks)."""

    data: torch.Tensor  # like the input; transposed: (blocks, H, D, 128)
    scale: torch.Tensor
    block_rows: int
    transposed: bool = False
    mean: torch.Tensor | None = None


class Fp8Library(KernelLibrary):
    def __init__(self, path):
        super().__init__(path)
        lib = self._lib
        tail = [c_void_p, c_char_p, c_size_t]
        self._fp8 = lib.flash_attn3_fp8_fwd
        self._fp8.argtypes = [ctypes.POINTER(Fp8Params), *tail]
        self._fp8_plan = lib.flash_attn3_fp8_fwd_plan
        self._fp8_plan.argtypes = [
            ctypes.POINTER(Fp8Params), ctypes.POINTER(FwdPlan), c_char_p, c_size_t,
        ]  # fmt: skip
        self._fp8_room_bytes = lib.flash_attn3_fp8_room_bytes
        self._fp8_room_bytes.argtypes = [ctypes.POINTER(Fp8Params)]
        self._fp8_room_bytes.restype = c_int64
        self._quantize = lib.flash_attn3_quantize
        self._quantize.argtypes = [ctypes.POINTER(QuantizeParams), *tail]
        self._mean = lib.flash_attn3_mean
        self._mean.argtypes = [ctypes.POINTER(QuantizeParams), ctypes.POINTER(c_float), *tail]
        for function in (self._fp8, self._fp8_plan, self._quantize, self._mean):
            function.restype = c_int

    def prepare_fp8(self, q, k, v, **options) -> PreparedFp8:
        return PreparedFp8(self, q, k, v, **options)

    def prepare_quantize(self, x: torch.Tensor, **options) -> PreparedQuantize:
        return PreparedQuantize(self, x, **options)

    def quantize(self, x: torch.Tensor, **options) -> Quantized:
        return self.prepare_quantize(x, **options)()


class PreparedQuantize:
    """One tensor's quantisation; calling it launches on the current stream."""

    def __init__(
        self, library: Fp8Library, x: torch.Tensor, *, block_rows=128, rotate=False,
        transposed=False, smooth=False, cu_seqlens=None, seqused=None,
    ):  # fmt: skip
        self._library, self._keep = library, (x, cu_seqlens, seqused)
        ragged = cu_seqlens is not None
        heads, dim = x.shape[-2:]
        batch = cu_seqlens.numel() - 1 if ragged else x.shape[0]
        if ragged:
            blocks, scale_shape = x.shape[0] // block_rows + batch, (heads,)
        else:
            blocks, scale_shape = -(-x.shape[1] // block_rows), (batch, heads)
        tiles = blocks if ragged else batch * blocks
        shape = (tiles, heads, dim, 128) if transposed else x.shape
        data = torch.empty(shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty((*scale_shape, blocks), dtype=torch.float32, device=x.device)
        mean = None
        if smooth:
            mean = torch.empty(
                (MEAN_FLOATS, batch, heads, dim), dtype=torch.float32, device=x.device
            )
        self.result = Quantized(
            data.view(torch.float8_e4m3fn), scale, block_rows, transposed,
            None if mean is None else mean[0],
        )  # fmt: skip
        self.params = QuantizeParams(
            None, _pointer(mean), _pointer(cu_seqlens), _pointer(seqused), data.data_ptr(),
            scale.data_ptr(), _strides(x, ragged), batch, 0 if ragged else x.shape[1],
            x.shape[0] if ragged else 0, 0, heads, dim, DTYPE_CODES[x.dtype], block_rows,
            int(rotate), int(transposed), x.device.index or 0,
        )  # fmt: skip
        setattr(self.params, "in", x.data_ptr())
        self._mean = mean

    def poison(self) -> None:
        self.result.data.view(torch.uint8).fill_(0x7F)
        self.result.scale.fill_(float("nan"))
        if self._mean is not None:
            self._mean.fill_(float("nan"))

    def __call__(self) -> Quantized:
        library, message = self._library, ctypes.create_string_buffer(MESSAGE_SIZE)
        stream = torch.cuda.current_stream(self.result.scale.device).cuda_stream
        code = 0
        if self._mean is not None:
            room = ctypes.cast(self._mean.data_ptr(), ctypes.POINTER(c_float))
            code = library._mean(
                ctypes.byref(self.params), room, stream, message, MESSAGE_SIZE
            )
        code = code or library._quantize(
            ctypes.byref(self.params), stream, message, MESSAGE_SIZE
        )
        if code:
            _raise(code, message.value)
        return self.result


def _scale(given: torch.Tensor | Quantized | None) -> Fp8Scale:
    """A (B, Hk) descale of any strides, or the blocks' scales of a Quantized."""
    if given is None:
        return Fp8Scale(None, 0, 0, 0)
    if isinstance(given, Quantized):
        strides = given.scale.stride()
        batch = strides[0] if given.scale.dim() == 3 else 0
        return Fp8Scale(given.scale.data_ptr(), batch, strides[-2], given.block_rows)
    return Fp8Scale(given.data_ptr(), given.stride(0), given.stride(1), 0)


class PreparedFp8(PreparedForward):
    """An e4m3 forward. q, k, v are e4m3 tensors, or Quantized; descales go with plain ones.

    `ahead`: bytes of room in which to transpose V first; 0 never, None as the library advises.
    """

    def __init__(
        self, library: Fp8Library, q, k, v, *, q_descale=None, k_descale=None, v_descale=None,
        head_dim_v=None, exact_lse=False, ahead=None, **options,
    ):  # fmt: skip
        def tensor(x):
            return x.data if isinstance(x, Quantized) else x

        transposed = isinstance(v, Quantized) and v.transposed
        rows = tensor(v)
        if transposed:  # only its shape is of use
            rows = torch.empty(
                (*tensor(k).shape[:-1], v.data.shape[2]), dtype=torch.float8_e4m3fn, device="meta"
            )
        super().__init__(library, tensor(q), tensor(k), rows, **options)
        scales = [x if isinstance(x, Quantized) else descale
                  for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale))]
        self._keep_fp8 = (q, k, v, q_descale, k_descale, v_descale)
        self.params.v = tensor(v).data_ptr()
        self.fp8 = Fp8Params(self.params, *map(_scale, scales), int(transposed),
                             int(exact_lse))
        self._fp8_reference = ctypes.byref(self.fp8)
        room_bytes = library._fp8_room_bytes(self._fp8_reference) if ahead is None else ahead
        if room_bytes:
            self._room = torch.empty(room_bytes, dtype=torch.uint8, device=self.out.device)
            self.fp8.v_room = self._room.data_ptr()

    def plan(self) -> FwdPlan:
        plan = FwdPlan()
        code = self._library._fp8_plan(
            self._fp8_reference, ctypes.byref(plan), self._message, MESSAGE_SIZE
        )
        if code:
            _raise(code, self._message.value)
        return plan

    def __call__(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.out.device).cuda_stream
        code = self._library._fp8(self._fp8_reference, stream, self._message, MESSAGE_SIZE)
        if code:
            _raise(code, self._message.value)
        return self.out
