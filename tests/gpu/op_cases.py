"""Calls of the operators for the tests of this folder, and what they must give.

Values are judged as the design says: against float64, at most 2x (gradients 3x) the error of the
same formula computed operation by operation in the kernel's dtype, plus a floor.
"""

import dataclasses

import torch

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


# ---- reference -----------------------------------------------------------------------------------


def plain_sequence(q, k, v, o: Options):
    """One sequence, (rows, heads, dim), in the dtype of q; every operation written out."""
    rows_q, rows_k = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * o.scale
    if o.softcap > 0:
        scores = o.softcap * torch.tanh(scores / o.softcap)
    position = torch.arange(rows_q, device=q.device)[:, None] + rows_k - rows_q
    key = torch.arange(rows_k, device=q.device)[None]
    left, right = o.window[0], 0 if o.causal else o.window[1]
    seen = torch.ones(rows_q, rows_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if o.chunk > 0:
        seen &= torch.div(key, o.chunk, rounding_mode="floor") == torch.div(
            position, o.chunk, rounding_mode="floor")
    # A row without keys: probabilities 0, and no NaN in its gradient either.
    any_seen = seen.any(-1)[None, :, None]
    scores = scores.masked_fill(~seen, float("-inf")).masked_fill(~any_seen, 0.0)
    out = torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1) * any_seen, v)
    lse = scores.logsumexp(-1).masked_fill(~any_seen[..., 0], float("-inf"))
    return out, lse


def plain(q, k, v, o: Options):
    """(out, lse) of a whole call, sequence by sequence; 0 and -inf in rows that are not used."""
    is_ragged = o.cu_q is not None
    batch = o.cu_q.shape[0] - 1 if is_ragged else q.shape[0]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    shape = (q.shape[1], q.shape[0]) if is_ragged else (batch, q.shape[2], q.shape[1])
    lse = q.new_full(shape, float("-inf"))
    for b in range(batch):
        if is_ragged:
            start_q, end_q = o.cu_q[b].item(), o.cu_q[b + 1].item()
            start_k, end_k = o.cu_k[b].item(), o.cu_k[b + 1].item()
        else:
            start_q, end_q, start_k, end_k = 0, q.shape[1], 0, k.shape[1]
        if o.used_q is not None:
            end_q = start_q + o.used_q[b].item()
        if o.used_k is not None:
            end_k = start_k + o.used_k[b].item()
        rows, keys = slice(start_q, end_q), slice(start_k, end_k)
        if is_ragged:
            out[rows], lse[:, rows] = plain_sequence(q[rows], k[keys], v[keys], o)
        else:
            out[b, rows], lse[b, :, rows] = plain_sequence(
                q[b, rows], k[b, keys], v[b, keys], o)
    return out, lse


def plain_with_gradients(tensors, o, dout, dlse, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out, lse = plain(*leaves, o)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == float("-inf"), 0.0) * dlse.to(dtype)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


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
