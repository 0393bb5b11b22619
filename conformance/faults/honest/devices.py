"""Variants that do what GPUs do: sums inside matrix instructions, and functions that are not correctly rounded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from conformance.faults.arithmetic import nudged
from conformance.faults.honest.orders import BF16_PRODUCT, BIASED_PRODUCT, products, scaled_products
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit, Replace

ELEMENTARY_ULPS = 2
"""fp32 exp, rsqrt and their like as GPU libraries document them (CUDA C++ Programming Guide, appendix on functions)."""

SPLITS = 3
"""Workers that share the list of one query."""

MIXES = ("hyper_connections.hyper_connection_coefficients", "functional.linear(flat, fn.to(compute))")
BY_TENSOR_CORE = "arithmetic.tensor_core_product({x}, {w}.mT)"
TORCH_FUNCTIONS = ("exp", "exp2", "rsqrt", "sqrt", "sigmoid", "softmax", "log", "cos", "sin")
FUNCTIONALS = ("silu", "softplus", "gelu")


def with_nudged(module: Any, names: tuple[str, ...]) -> SimpleNamespace:
    """A module whose functions of these names are a little off."""

    def off(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *values, **options: nudged(function(*values, **options), ELEMENTARY_ULPS)

    return SimpleNamespace(**{**vars(module), **{name: off(getattr(module, name)) for name in names}})


def attend_in_splits(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    compute: torch.dtype,
) -> torch.Tensor:
    """The list dealt to workers, each with a maximum and a denominator of its own; their results merged by weight.

    As `reference.sparse_attention`: bf16 q [B,T,H,d], kv [B,N,d], int32 indices [B,T,n] -> [B,T,H,d].
    """
    batch = torch.arange(q.shape[0])[:, None, None]
    outputs, logarithms = [], []
    for listed in torch.split(indices, max(1, -(-indices.shape[-1] // SPLITS)), dim=-1):
        rows = kv[batch, listed.clamp(min=0)].to(compute)
        scores = (q.to(compute) @ rows.mT * scale).masked_fill((listed < 0).unsqueeze(-2), -torch.inf)
        maximum = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - maximum)
        denominator = weights.sum(dim=-1, keepdim=True)
        outputs.append(weights.bfloat16().to(compute) @ rows / denominator.clamp(min=1e-30))
        logarithms.append(maximum + torch.log(denominator))
    logarithm = torch.stack(logarithms)
    total = torch.logaddexp(torch.logsumexp(logarithm, dim=0), sink.to(compute).unsqueeze(-1))
    return (torch.exp(logarithm - total) * torch.stack(outputs)).sum(dim=0).bfloat16()


DEVICES: tuple[HonestVariant, ...] = (
    HonestVariant(
        "sums-by-tensor-core",
        "Matrix instructions align what they add and cut it, where other units round (numerics.md 0: the sum is fp32).",
        changes=(
            Edit("linear.linear_bf16", BF16_PRODUCT, BY_TENSOR_CORE.format(x="x.to(compute)", w="weight.to(compute)")),
            Edit(
                "vision.linear_with_bias",
                BIASED_PRODUCT,
                BY_TENSOR_CORE.format(x="x.to(compute)", w="weight.to(compute)") + " + bias.to(compute)",
            ),
            scaled_products(BY_TENSOR_CORE),
            Edit(
                "attention.attention_output",
                'torch.einsum("btgd,grd->btgr", grouped.to(compute), by_group.to(compute))',
                "arithmetic.tensor_core_product("
                "grouped.to(compute).transpose(1, 2), by_group.to(compute).mT).transpose(1, 2)",
            ),
            Edit(
                "indexer._score_heads",
                "queries.to(compute) @ keys.to(compute).unsqueeze(1).transpose(-1, -2)",
                "arithmetic.tensor_core_product(queries.to(compute), keys.to(compute).unsqueeze(1).transpose(-1, -2))",
            ),
            Edit(
                "sparse_attention._attend",
                "q @ rows.transpose(-1, -2)",
                "arithmetic.tensor_core_product(q, rows.transpose(-1, -2))",
            ),
            Edit(
                "sparse_attention._attend",
                "to_bf16(probabilities).to(compute) @ rows",
                "arithmetic.tensor_core_product(to_bf16(probabilities).to(compute), rows)",
            ),
        ),
    ),
    HonestVariant(
        "list-split-and-merged",
        "Decode kernels deal the list to several workers and merge by the logarithms of their denominators.",
        changes=(Replace("sparse_attention._attend", attend_in_splits),),
    ),
    HonestVariant(
        "maximum-lags-behind",
        "A running maximum that is replaced only when it grows by much saves rescaling; any maximum is honest.",
        changes=(
            Edit(
                "sparse_attention._attend",
                "new_maximum = torch.maximum(maximum, scores.amax(dim=-1))",
                "largest = scores.amax(dim=-1)\n"
                "        new_maximum = torch.where(largest > maximum + 5.5, largest, maximum)",
            ),
            Replace("sparse_attention.LIST_BLOCK", 16),
        ),
    ),
    HonestVariant(
        "products-by-three-tf32",
        "fp32 products on matrix units, each operand split in two: as exact as fp32 needs.",
        changes=(
            *products("arithmetic.three_tf32_product({x}, {w})"),
            Edit(*MIXES, "arithmetic.three_tf32_product(flat, fn.to(compute))"),
        ),
    ),
    HonestVariant(
        "mixes-split-in-4",
        "Few outputs of a long sum: the streams' features are dealt to workers, whose sums are added at the end.",
        changes=(Edit(*MIXES, "arithmetic.split_product(flat, fn.to(compute), 4)"),),
    ),
    HonestVariant(
        "functions-off-by-two-ulps",
        "Elementary functions of GPU libraries are not correctly rounded.",
        changes=(
            Replace("norm.torch", with_nudged(torch, TORCH_FUNCTIONS)),
            Replace("experts.functional", with_nudged(functional, FUNCTIONALS)),
        ),
    ),
)
