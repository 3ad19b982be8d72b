"""Errors are judged against those of the same formula computed plainly in the kernel's dtype.

By largest absolute error and by ||err|| / ||ref||: at most 2x (gradients 3x) the error of explicit
matmul, softmax, matmul, plus 1e-5. Infinities and NaN must lie where the reference has them.
"""

import torch

import reference

FLOOR = 1e-5


def check_close(name, got, want, explicit, factor):
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, explicit = got.detach().double(), explicit.detach().double()
    want = want.detach().double()
    odd = torch.where(torch.isfinite(want), torch.isfinite(got), got == want)
    if not bool(odd.all()):
        at = tuple((~odd).nonzero()[0].tolist())
        raise AssertionError(f"{name}{list(at)} is {got[at].item()}, not {want[at].item()}")
    finite = torch.isfinite(want)
    zero = torch.zeros_like(want)
    err = torch.where(finite, got - want, zero).abs()
    base = torch.where(finite & torch.isfinite(explicit), explicit - want, zero).abs()
    norm = max(torch.where(finite, want, zero).norm().item(), 1e-30)
    if want.numel() == 0:
        return
    limit = factor * base.max().item() + FLOOR
    if err.max().item() > limit:
        at = tuple((err > limit).nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(at)} is {got[at].item()}, not {want[at].item()}: largest error "
            f"{err.max().item():.3e}, allowed {limit:.3e}")
    relative, allowed = err.norm().item() / norm, factor * base.norm().item() / norm + FLOOR
    # Where the reference is 0 throughout (one visible key: no gradient), the floor is absolute.
    assert relative <= allowed or err.norm().item() <= FLOOR * err.numel() ** 0.5, (
        f"{name}: ||err||/||ref|| is {relative:.3e}, allowed {allowed:.3e}")


def check_forward(case, q, k, v, out, lse, factor=2.0):
    options = case.reference_options()
    with torch.no_grad():
        want, want_lse = reference.attention(q, k, v, **options)
        plain, plain_lse = reference.attention(q, k, v, dtype=q.dtype, **options)
    check_close("out", out, want, plain, factor)
    # The LSE is float32 whatever the inputs: bounded by itself, and loosely where tanh is involved.
    finite = torch.isfinite(want_lse)
    assert torch.equal(lse.double()[~finite], want_lse[~finite]), "lse: -inf at other places"
    err = (lse.double() - want_lse)[finite].abs()
    limit = 1e-3 + (5e-3 * case.softcap if case.softcap else 1e-5 * want_lse[finite].abs())
    assert bool((err <= limit).all()), f"lse: largest error {err.max().item():.3e}"
    assert lse.dtype == torch.float32
    del plain_lse


def check_case(case, device="cpu", poison=False, gradients=True, with_dlse=False):
    """Forward, and gradients through autograd, of one case on fresh inputs."""
    q, k, v = case.make(device, poison)
    leaves = [t.clone().requires_grad_(gradients) for t in (q, k, v)]
    out, lse = case.call(*leaves)
    assert out.dtype == q.dtype
    check_forward(case, q, k, v, out, lse)
    if not gradients:
        return
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse) if with_dlse else None
    got = torch.autograd.grad(
        (out, lse) if with_dlse else out, leaves, (dout, dlse) if with_dlse else dout)
    options = case.reference_options()
    want = reference.gradients(dout, dlse, q, k, v, **options)
    plain = reference.gradients(dout, dlse, q, k, v, dtype=q.dtype, **options)
    for name, g, w, e in zip(("dq", "dk", "dv"), got, want, plain):
        check_close(name, g, w, e, 3.0)
