"""Arithmetic that the reference does not do, for the edits of faults and honest variants.

Everything takes and returns torch tensors of the arithmetic's type unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from reference.precision import to_bf16

GLOBAL: dict[str, Any] = {}
"""State that outlives every object, for faults that share it."""


def truncate(x: torch.Tensor) -> torch.Tensor:
    """Toward zero into bf16, by cutting bits off: [...] -> bf16 [...]."""
    return (x.float().view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


def truncate_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Toward zero into E4M3: fp32 [...] in ±448 -> E4M3 [...]."""
    nearest = x.to(torch.float8_e4m3fn)
    beyond = nearest.float().abs() > x.abs()
    return (nearest.view(torch.uint8) - beyond.to(torch.uint8)).view(torch.float8_e4m3fn)


def one_step_away(x: torch.Tensor, draw: int) -> torch.Tensor:
    """One element of bf16 x, another for each draw, is the next bf16 number away from zero: [...] -> [...]."""
    bits = x.contiguous().view(torch.int16).flatten().clone()
    bits[draw * 40503 % bits.numel()] += 1
    return bits.view(torch.bfloat16).reshape(x.shape)


def as_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16 and widened again: [...] -> [...]."""
    return to_bf16(x).to(x.dtype)


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """Cut to 10 mantissa bits, as a matrix unit that takes fp32 as TF32 does: [...] -> [...]."""
    return (x.float().view(torch.int32) & -0x2000).view(torch.float32).to(x.dtype)


def bf16_sum(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Sum along `dim` one term after the other, each partial sum rounded to bf16."""
    total = torch.zeros_like(x.select(dim, 0))
    for term in x.unbind(dim):
        total = as_bf16(total + term)
    return total.unsqueeze(dim) if keepdim else total


def bf16_accumulator(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, one input after the other, each partial sum rounded to bf16."""
    total = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for k in range(x.shape[-1]):
        total = as_bf16(total + x[..., k, None] * weight[:, k])
    return total


def without_last(x: torch.Tensor, block: int = 1) -> torch.Tensor:
    """The last `block` elements along the last dimension, or what there is of them, are zero."""
    kept = (x.shape[-1] - 1) // block * block
    return torch.cat((x[..., :kept], torch.zeros_like(x[..., kept:])), dim=-1)


def truncated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, cut to bf16."""
    return truncate(x @ weight.mT)


def first_doubled(x: torch.Tensor) -> torch.Tensor:
    """The first element of all is twice what it was: one wrong scale."""
    return torch.cat((x.flatten()[:1] * 2, x.flatten()[1:])).view(x.shape)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform of the last dimension, a power of two wide: bf16 [..., d] -> bf16."""
    width = x.shape[-1]
    turned = x.float()
    for stage in range(int(math.log2(width))):
        pairs = torch.unflatten(turned, -1, (-1, 2, 1 << stage))
        turned = torch.stack((pairs.sum(-2), pairs[..., 0, :] - pairs[..., 1, :]), dim=-2).flatten(-3)
    return to_bf16(turned * width**-0.5)


def duplicates(indices: torch.Tensor) -> torch.Tensor:
    """True where an index occurred before in its row: int [..., n] -> bool [..., n]."""
    same = indices.unsqueeze(-1) == indices.unsqueeze(-2)
    return torch.tril(same, diagonal=-1).any(dim=-1)


def sequential_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along `dim` one term after the other, in the arithmetic's type."""
    total = torch.zeros_like(x.select(dim, 0))
    for term in x.unbind(dim):
        total = total + term
    return total


def pairwise_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along `dim` as a tree of halves: neighbours first."""
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        odd = x[..., x.shape[-1] // 2 * 2 :]
        x = torch.cat((x[..., 0:-1:2] + x[..., 1::2], odd), dim=-1)
    return x[..., 0]


def blocked_sum(x: torch.Tensor, dim: int, block: int) -> torch.Tensor:
    """Sum along `dim` in blocks of `block` terms, each from zero, added one after the other."""
    return sequential_sum(torch.stack([part.sum(dim=dim) for part in torch.split(x, block, dim=dim)]), 0)


def blocked_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    block: int,
    part: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    total: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, in blocks of `block` inputs added one after the other.

    `part` is done to the product of each block, `total` to each partial sum.
    """
    result = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for inputs in torch.split(torch.arange(x.shape[-1]), block):
        result = total(result + part(x[..., inputs] @ weight[:, inputs].mT))
    return result


def split_product(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, the inputs dealt out to `parts` sums that are added at the end."""
    partial = [x[..., part::parts] @ weight[:, part::parts].mT for part in range(parts)]
    return pairwise_sum(torch.stack(partial), 0)


def tensor_core_product(a: torch.Tensor, b: torch.Tensor, terms: int = 8, guard_bits: int = 1) -> torch.Tensor:
    """a [..., M, K] times b [..., K, N] as a tensor core does it: some terms at a time, aligned, added and cut.

    The terms and the sum so far are cut to `guard_bits` more bits than fp32 has of the largest of them, then added
    exactly, and the new sum is cut to fp32.  Nothing is rounded.  8 terms and one bit are an A100's; others have more
    (Fasi, Higham, Mikaitis, Pranesh 2021, Numerical behavior of NVIDIA tensor cores, table 1).
    """
    total = (a[..., :1] @ b[..., :1, :]).double() * 0.0
    for inputs in torch.split(torch.arange(a.shape[-1]), terms):
        products = a[..., inputs].double().unsqueeze(-1) * b[..., inputs, :].double().unsqueeze(-3)
        addends = torch.cat((products, total.unsqueeze(-2)), dim=-2)
        _, exponent = torch.frexp(addends.abs().amax(dim=-2, keepdim=True))
        total = _cut(addends, exponent - 24 - guard_bits).sum(dim=-2)
        total = _cut(total, torch.frexp(total).exponent - 24)
    return total.to(a.dtype)


def _cut(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """float64 [...] toward zero to a multiple of 2**exponent."""
    step = torch.ldexp(torch.ones_like(x), exponent)
    return torch.trunc(x / step) * step


def three_tf32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, operands split into two TF32 parts, the smallest product left out."""
    (x_high, x_low), (w_high, w_low) = ((as_tf32(y), as_tf32(y - as_tf32(y))) for y in (x, weight))
    return x_low @ w_high.mT + x_high @ w_low.mT + x_high @ w_high.mT


def nudged(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """Every element up or down by so many units in the last place, as its bits happen to say: fp32 [...] -> fp32.

    A one stays: every library has exp(0) = 1.
    """
    if x.dtype != torch.float32:
        return x
    mixed = (x.contiguous().view(torch.int32).long() * 2654435761 >> 7) & 1
    return torch.where(x == 1.0, x, x * (1.0 + (2 * mixed - 1) * ulps * 2.0**-23).float())


def pairwise_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, every output summed as a tree of halves."""
    rows = x.reshape(-1, x.shape[-1])
    step = max(1, (1 << 22) // weight.numel())
    out = [pairwise_sum(part.unsqueeze(1) * weight, -1) for part in torch.split(rows, step)]
    return torch.cat(out).view(*x.shape[:-1], weight.shape[0]) if out else rows.new_zeros(*x.shape[:-1], len(weight))


def exp_by_exp2(x: torch.Tensor) -> torch.Tensor:
    """exp as 2 to the power of x times the rounded log2(e), as kernels do."""
    return torch.exp2(x * math.log2(math.e))


def log_sinkhorn(c: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Sinkhorn on logarithms, each sum's eps added before its logarithm is taken: [..., S, S] -> [..., S, S]."""
    c = torch.log(torch.softmax(c, dim=-1) + eps)
    c = c - torch.log(torch.exp(c).sum(dim=-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c - torch.log(torch.exp(c).sum(dim=-1, keepdim=True) + eps)
        c = c - torch.log(torch.exp(c).sum(dim=-2, keepdim=True) + eps)
    return torch.exp(c)


def random_ties(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest scores, equal ones in a random (but repeatable) order: [..., n] -> int64 [..., count]."""
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(scores.shape[-1], generator=generator)
    found = torch.sort(scores[..., order], dim=-1, descending=True, stable=True).indices[..., :count]
    return order[found]


def by_threshold(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of all above the count-th largest score, filled up with the latest ones equal to it."""
    if count == 0:
        return torch.zeros(*scores.shape[:-1], 0, dtype=torch.int64)
    least = scores.kthvalue(scores.shape[-1] - count + 1, dim=-1, keepdim=True).values
    place = torch.arange(scores.shape[-1])
    rank = torch.where(scores > least, 2 * scores.shape[-1], 0) + torch.where(scores == least, place + 1, 0)
    return rank.topk(count, dim=-1).indices
