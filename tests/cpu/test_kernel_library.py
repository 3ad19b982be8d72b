"""What the built kernel library decides and refuses before it asks for a device."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "benchmarks"))

from ctypes_fp8 import Fp8Library, Fp8Params  # noqa: E402
from ctypes_lib import DTYPE_CODES, Strides  # noqa: E402

pytestmark = pytest.mark.cpu

LIBRARY = REPO / "flash_attn3" / "libflash_attn3_sm90.so"
PLACE = 1 << 20  # an address that nothing reads


@pytest.fixture(scope="module")
def library():
    if not LIBRARY.exists():
        pytest.skip("the kernel library is not built")
    return Fp8Library(LIBRARY)


def call(batch=1, sq=8192, sk=8192, heads=4, heads_kv=4, d=128, ragged=False, **options):
    """A call on memory that is not there; ragged: sq and sk are all sequences' rows together."""
    params = Fp8Params()
    fwd = params.fwd
    for name in ("q", "k", "v", "out", "lse", "workspace"):
        setattr(fwd, name, PLACE)
    if ragged:
        fwd.cu_seqlens_q = fwd.cu_seqlens_k = PLACE
    fwd.batch, fwd.max_seqlen_q, fwd.max_seqlen_k = batch, sq, sk
    fwd.total_q, fwd.total_k, fwd.heads, fwd.heads_kv = sq, sk, heads, heads_kv
    fwd.head_dim = fwd.head_dim_v = d
    fwd.dtype, fwd.softmax_scale = DTYPE_CODES[torch.float8_e4m3fn], 1.0
    fwd.window_left = fwd.window_right = -1
    fwd.v_strides = Strides(sk * heads_kv * d, heads_kv * d, d)
    for name, value in options.items():
        setattr(params if hasattr(params, name) else fwd, name, value)
    return params


# Room for V in blocks of 128 keys, or none where too few queries meet a key.
@pytest.mark.parametrize("options, keys", [
    (dict(), 8192), (dict(sq=2048), 8192), (dict(sq=2047), 0), (dict(sk=8000), 8064),
    (dict(sq=1024, heads=8), 8192), (dict(v_transposed=1), 0),
    (dict(d=64, sq=4096), 8192), (dict(d=64, sq=4095), 0), (dict(attention_chunk=2047), 0),
    (dict(d=256, sq=1024), 8192), (dict(d=256, sq=1023), 0), (dict(d=256, sq=2047, sk=1024), 0),
    (dict(d=256, sq=2048, sk=1024), 1024), (dict(d=256, sq=1024, sk=1025), 1152),
    (dict(window_right=0), 8192), (dict(window_right=0, sq=4095), 0),
    (dict(window_left=100), 8192), (dict(window_left=100, sq=4095), 0),
    (dict(window_left=2047, window_right=0), 8192), (dict(window_left=2046, window_right=0), 0),
    (dict(window_left=10, window_right=5000), 8192), (dict(batch=3), 3 * 8192),
    (dict(ragged=True, batch=6), 8192 + 6 * 128), (dict(ragged=True, batch=192), 4 * 8192),
    (dict(ragged=True, batch=193), 0), (dict(sm_margin=1), 0)], ids=str)
def test_room_for_values_transposed_ahead(library, options, keys):
    params = call(**options)
    got = library._fp8_room_bytes(ctypes.byref(params))
    assert got == keys * params.fwd.heads_kv * params.fwd.head_dim_v


@pytest.mark.parametrize("change", [
    dict(v=PLACE + 8), dict(v_strides=Strides(1 << 20, 520, 128)),
    dict(v_strides=Strides(1 << 20, 512, 136)), dict(v_strides=Strides(1000, 512, 128))], ids=str)
def test_values_that_cannot_be_read_by_16_bytes_are_refused(library, change):
    message = ctypes.create_string_buffer(512)

    def refusal(**more):
        params = call(**change, **more, device=1 << 20)  # which no machine has
        assert library._fp8(ctypes.byref(params), None, message, len(message)) != 0
        return message.value

    assert refusal(v_room=PLACE).startswith(b"v must start at a multiple")
    for more in (dict(), dict(v_room=PLACE, v_transposed=1)):
        assert not refusal(**more).startswith(b"v must")
