"""The numerics of the e4m3 forward, block by block, on the CPU: no layout, no barriers.

What csrc/kernels/fp8/fp8_consumer.h does with references, probabilities and sums, and what the
tensor unit does with sums (about 13 fraction bits, cut off), so that decisions can be tried without
a GPU.
"""

import math

import torch

KEYS = 128
TOP_EXPONENT = 8  # fp8_traits.h
LARGEST = 448.0


def to_e4m3(x):
    """Rounded to e4m3, saturating; in x's own dtype. NaN stays."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def cut(x, largest, bits=13):
    """Fraction bits of x below 2^-bits of `largest` are cut off, towards zero."""
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-30))) - bits)
    return torch.trunc(x / unit) * unit


def tensor_unit_sum(p, v, start):
    """start + p @ v in steps of 32 keys, each cut to the bits that the unit keeps."""
    total = start
    for k in range(0, p.shape[-1], 32):
        product = p[:, k:k + 32] @ v[k:k + 32]
        largest = torch.maximum(total.abs(), product.abs())
        total = cut(total + product, largest)
    return total


def tensor_unit_products(p, v, start):
    """The same as the unit was found to do it: each product is cut, by the largest of a step's.

    Errors measured at head dim 256 agree within 3 % (docs/fp8.md, "Sums").
    """
    total = start
    for k in range(0, p.shape[-1], 32):
        products = p[:, k:k + 32, None] * v[None, k:k + 32]
        largest = torch.maximum(total.abs(), products.abs().amax(1))
        total = cut(total, largest) + cut(products, largest[:, None]).sum(1)
    return total


def carried_model(q, k, v, blocks_a_sum, mean_dtype=torch.float16, v_scale=None, split=False,
                  coded=None):
    """One head as csrc/kernels/fp8/fp8_carried_consumer.h has it: O and the sums of rows are the
    tensor unit's over some blocks, then go into a mean; O's unit is the newest block's v_scale.
    split: a row's sum is that of two, of 16 keys of every 32 each. coded: as in
    attention_model."""
    sq, sk = q.shape[0], k.shape[0]
    last = -(-sk // KEYS) - 1
    v_scale = torch.ones(last + 1) if v_scale is None else v_scale
    reference = torch.full((sq, 1), -3.4e38, dtype=torch.float64)
    even = torch.arange(sk)[:, None] % 32 < 16
    ones = [even.double(), (~even).double()] if split else [torch.ones(sk, 1, dtype=torch.float64)]
    with_ones, dim = torch.cat([v.double(), *ones], 1), v.shape[1]
    # O, the sums of rows, and the same in O's units of V, which bound it.
    part = torch.zeros(sq, with_ones.shape[1], dtype=torch.float64)
    bound = torch.zeros_like(reference)
    mean, weight = torch.zeros(sq, v.shape[1], dtype=torch.float64), torch.zeros_like(reference)
    sums = torch.zeros_like(reference)
    for n in range(last, -1, -1):
        keys = slice(n * KEYS, min(sk, (n + 1) * KEYS))
        x = q.double() @ k[keys].double().T / math.sqrt(q.shape[1]) / math.log(2)
        after = torch.maximum(reference, x.amax(1, keepdim=True) - TOP_EXPONENT)
        factor, reference = torch.exp2(reference - after), after
        carry = float(v_scale[min(n + 1, last)] / v_scale[n])
        part, sums = part * factor, sums * factor
        bound, weight = bound * factor * carry, weight * factor * carry
        part[:, :dim] *= carry
        p = to_e4m3(torch.exp2(x - reference))
        if coded is not None and n < last:
            by_code = torch.arange(p.shape[1]) % 32 >= 16
            p = torch.where(by_code, coded(x - reference).double(), p)
        before = part[:, dim:].sum(1, keepdim=True)
        part = tensor_unit_products(p, with_ones[keys], part)
        bound = bound + part[:, dim:].sum(1, keepdim=True) - before
        if n % blocks_a_sum == 0 and n > 0:
            old = (weight / (weight + bound)).to(mean_dtype).double()
            mean = (mean * old + (1 - old) * part[:, :dim] / bound).to(mean_dtype).double()
            weight, sums = weight + bound, sums + part[:, dim:].sum(1, keepdim=True)
            part, bound = torch.zeros_like(part), torch.zeros_like(bound)
    sums = sums + part[:, dim:].sum(1, keepdim=True)
    return (mean * weight + part[:, :dim]) * float(v_scale[0]) / sums


def attention_model(q, k, v, score_scale=None, q_scale=1.0, k_scale=None, v_scale=None,
                    promote_every=1, rounded_sums=False, top_exponent=TOP_EXPONENT,
                    cut_sums=True, coded=None):
    """One head: e4m3 values q (sq, D), k, v (sk, D); scales of blocks of 128 keys (blocks,).

    q_scale is a number or (sq, 1). rounded_sums: the sums of a row, for out and LSE alike, are
    those of P after rounding. coded: what makes half of P from its exponents, in all blocks but the
    first. Returns out (sq, D) and lse (sq,).
    """
    sq, sk = q.shape[0], k.shape[0]
    blocks = -(-sk // KEYS)
    ones = torch.ones(blocks, dtype=torch.float64)
    k_scale = ones if k_scale is None else k_scale.double()
    v_scale = ones if v_scale is None else v_scale.double()
    scale = (1 / math.sqrt(q.shape[1]) if score_scale is None else score_scale) / math.log(2)
    reference = torch.full((sq, 1), -3.4e38, dtype=torch.float64)
    total = torch.zeros(sq, 1, dtype=torch.float64)
    out = torch.zeros(sq, v.shape[1], dtype=torch.float64)
    partial, pending = torch.zeros_like(out), 0
    for n in range(blocks - 1, -1, -1):
        keys = slice(n * KEYS, min(sk, (n + 1) * KEYS))
        x = q.double() @ k[keys].double().T * (scale * q_scale * k_scale[n])
        after = torch.maximum(reference, x.amax(1, keepdim=True) - top_exponent)
        factor = torch.exp2(reference - after)
        reference = after
        out, partial, total = out * factor, partial * factor, total * factor
        p = torch.exp2(x - reference)
        rounded, values = to_e4m3(p), v[keys].double()
        if coded is not None and n < blocks - 1:
            by_code = torch.arange(p.shape[1]) % 32 >= 16
            rounded = torch.where(by_code, coded(x - reference).double(), rounded)
        total = total + (rounded if rounded_sums else p).sum(1, keepdim=True)
        partial = tensor_unit_sum(rounded, values, partial) if cut_sums else partial + (
            rounded @ values)
        pending += 1
        if pending == promote_every or n == 0:
            out = out + partial * v_scale[n]
            partial, pending = torch.zeros_like(out), 0
    lse = (reference + torch.log2(total))[:, 0] * math.log(2)
    return out / total, lse


def attention_exact(q, k, v, score_scale=None):
    scores = q.double() @ k.double().T
    scores *= 1 / math.sqrt(q.shape[1]) if score_scale is None else score_scale
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)


def quantize_blocks(x, rows):
    """e4m3 values of x (S, D), in float, and the scale of each block, a power of two; rows None:
    one of all, as it comes."""
    blocks = [x] if rows is None else list(x.split(rows))
    scales = torch.stack([(b.abs().max() / LARGEST).clamp_min(2.0**-126) if b.abs().max() > 0
                          else torch.tensor(1.0) for b in blocks])
    if rows is not None:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    values = torch.cat([to_e4m3(b / s) for b, s in zip(blocks, scales)])
    return values, scales


def hadamard(x):
    size = x.shape[-1] & -x.shape[-1]
    h = torch.ones(1, 1, dtype=x.dtype)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (x.unflatten(-1, (-1, size)) @ h / math.sqrt(size)).flatten(-2)
