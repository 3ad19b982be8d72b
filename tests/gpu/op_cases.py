"""Calls of the operators for the tests of this folder, and what they must give.

Values are judged as the design says: against float64, at most 2x (gradients 3x) the error of the
same formula computed operation by operation in the kernel's dtype, plus a floor.
"""

import dataclasses

import torch

import reference

fa3 = torch.ops.flash_attn3


@dataclasses.dataclass
class Options:
    """The operator's arguments after v."""

    max_q: int
    max_k: int
    cu_q: torch.Tensor = None
    cu_k: torch.Tensor = None
    used_q: torch.Tensor = None
    used_k: torch.Tensor = None
    scale: float = 0.125
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    sm_margin: int = 0

    def args(self):
        """In the order of the schema."""
        return (self.cu_q, self.cu_k, self.used_q, self.used_k, self.max_q, self.max_k, self.scale,
                self.causal, *self.window, self.chunk, self.softcap, self.deterministic,
                self.sm_margin)


def randn(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(shape, dtype=dtype, device=device)


def int32(*values, device="cuda"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def dense(batch=2, rows_q=100, rows_k=150, heads=4, heads_kv=2, d=64, dv=None,
          dtype=torch.bfloat16, **options):
    q = randn(batch, rows_q, heads, d, dtype=dtype)
    k = randn(batch, rows_k, heads_kv, d, dtype=dtype)
    v = randn(batch, rows_k, heads_kv, dv or d, dtype=dtype)
    return (q, k, v), Options(rows_q, rows_k, **options)


def ragged(lengths_q, lengths_k, heads=4, heads_kv=2, d=64, extra=0, dtype=torch.bfloat16,
           **options):
    """`extra` rows follow the last sequence of q, k and v."""
    q = randn(sum(lengths_q) + extra, heads, d, dtype=dtype)
    k = randn(sum(lengths_k) + extra, heads_kv, d, dtype=dtype)
    v = randn(sum(lengths_k) + extra, heads_kv, d, dtype=dtype)
    cu_q = torch.tensor([0, *lengths_q]).cumsum(0).to("cuda", torch.int32)
    cu_k = torch.tensor([0, *lengths_k]).cumsum(0).to("cuda", torch.int32)
    return (q, k, v), Options(max(lengths_q), max(lengths_k), cu_q, cu_k, **options)


def plain_with_gradients(tensors, o, dout, dlse, dtype):
    """(out, lse, dq, dk, dv) of tests/reference.py."""
    lengths = (None if t is None else t.tolist() for t in (o.cu_q, o.cu_k, o.used_q, o.used_k))
    options = dict(zip(("cu_q", "cu_k", "used_q", "used_k"), lengths), scale=o.scale,
                   causal=o.causal, window=o.window, chunk=o.chunk, softcap=o.softcap, dtype=dtype)
    with torch.no_grad():
        out, lse = reference.attention(*tensors, **options)
    return out, lse, *reference.gradients(dout, dlse, *tensors, **options)


def assert_as_good_as_plain(name, got, plain_result, exact, factor, floor=1e-5):
    """Largest and relative error at most `factor` times those of the plain computation."""
    assert torch.isfinite(got).all(), name
    error, allowed = got.double() - exact, plain_result.double() - exact
    assert error.abs().max() <= factor * allowed.abs().max() + floor, name
    # The floor also stands in for a norm where the exact result is 0.
    size = exact.norm() + exact.numel() ** 0.5
    assert error.norm() <= factor * allowed.norm() + floor * size, name


def check_against_reference(tensors, o: Options, with_dlse=False):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = fa3.fwd(*leaves, *o.args())
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse) if with_dlse else None
    outputs, weights = ((out, lse), (dout, dlse)) if with_dlse else ((out,), (dout,))
    grads = torch.autograd.grad(outputs, leaves, weights)
    exact = plain_with_gradients(tensors, o, dout, dlse, torch.float64)
    rough = plain_with_gradients(tensors, o, dout, dlse, tensors[0].dtype)
    assert_as_good_as_plain("out", out.detach(), rough[0], exact[0], 2)
    assert torch.equal(torch.isinf(lse), torch.isinf(exact[1]))
    torch.testing.assert_close(lse.detach().double(), exact[1], atol=1e-3, rtol=1e-4)
    for name, got, r, e in zip(("dq", "dk", "dv"), grads, rough[2:], exact[2:]):
        # Where the exact gradient is 0 (one key), rounding is all that there is.
        assert_as_good_as_plain(name, got, r, e, 3, floor=1e-4)
    return out, lse, grads
