"""The published code's kernels on a CPU, from the reference: what `conformance record --kernels reference` runs.

Names and parameters are those that `conformance.recording.upstream.KERNELS` declares. Quantisers are bit-exact; the
others follow the order of the specification and differ from a GPU in the order of sums inside a block.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

import reference.hyper_connections
import reference.linear
import reference.quantize
import reference.sparse_attention

Pair = tuple[torch.Tensor, torch.Tensor]


def act_quant(
    x: torch.Tensor,
    block_size: int = reference.quantize.FP8_GROUP,
    scale_fmt: str | None = None,
    scale_dtype: torch.dtype | None = None,
    inplace: bool = False,
) -> Pair | torch.Tensor:
    """Q8 (numerics.md 2): codes and E8M0 scales, or with `inplace` the fake-quantised input."""
    _only(block_size, reference.quantize.FP8_GROUP, "act_quant")
    if inplace:
        return x.copy_(reference.quantize.fake_quantize_fp8(x))
    codes, scale = reference.quantize.quantize_fp8(x)
    return codes, scale if scale_dtype is None else scale.to(scale_dtype)


def fp4_act_quant(
    x: torch.Tensor, block_size: int = reference.quantize.FP4_E8M0_GROUP, inplace: bool = False
) -> Pair | torch.Tensor:
    """Q4-E8M0 for blocks of 32, Q4-E4M3 for blocks of 16 (numerics.md 2)."""
    if block_size == reference.quantize.FP4_E4M3_GROUP:
        fake, quantize = reference.quantize.fake_quantize_fp4_e4m3, reference.quantize.quantize_fp4_e4m3
    else:
        _only(block_size, reference.quantize.FP4_E8M0_GROUP, "fp4_act_quant")
        fake, quantize = reference.quantize.fake_quantize_fp4_e8m0, reference.quantize.quantize_fp4_e8m0
    return x.copy_(fake(x)) if inplace else quantize(x)


def fp8_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, scale_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """E4M3 a [..., K] times E4M3 b [N, K] with scales per 32 inputs and per 32x32 tile -> bf16 [..., N]."""
    return reference.linear.scaled_product(
        reference.quantize.scaled(a.float(), a_s.float()), reference.quantize.fp8_weight(b, b_s)
    )


def fp4_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, scale_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """E4M3 a [..., K] times packed FP4 b [N, K/2] with scales per 32 inputs of each -> bf16 [..., N]."""
    return reference.linear.scaled_product(
        reference.quantize.scaled(a.float(), a_s.float()), reference.quantize.fp4_weight(b.view(torch.uint8), b_s)
    )


def sparse_attn(
    q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, topk_idxs: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attention over listed rows with a sink (numerics.md 6, item 5): bf16 [B,T,H,d]."""
    return reference.sparse_attention.sparse_attention(q, kv, topk_idxs, attn_sink, softmax_scale)


def hc_split_sinkhorn(
    mixes: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, hc_mult: int, sinkhorn_iters: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed projection fp32 [..., (2+S)S] -> pre, post [..., S] and comb [..., S, S] (numerics.md 5)."""
    pre, post, comb = torch.split(mixes, [hc_mult, hc_mult, hc_mult * hc_mult], dim=-1)
    pre_base, post_base, comb_base = torch.split(hc_base, [hc_mult, hc_mult, hc_mult * hc_mult])
    comb = torch.unflatten(comb * hc_scale[2] + comb_base, -1, (hc_mult, hc_mult))
    return (
        torch.sigmoid(pre * hc_scale[0] + pre_base) + eps,
        2 * torch.sigmoid(post * hc_scale[1] + post_base),
        reference.hyper_connections.sinkhorn(comb, sinkhorn_iters, eps),
    )


def module() -> ModuleType:
    """A module `kernel` with the six functions, which do not depend on torch's default type."""
    made = ModuleType("kernel")
    functions: tuple[Any, ...] = (act_quant, fp4_act_quant, fp8_gemm, fp4_gemm, sparse_attn, hc_split_sinkhorn)
    for function in functions:
        setattr(made, function.__name__, _in_float32(function))
    return made


def _in_float32(function: Any) -> Any:
    """The published code runs with bf16 as the default type; the reference expects torch's own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call


def _only(block_size: int, expected: int, name: str) -> None:
    if block_size != expected:
        raise ValueError(f"{name}: block_size {block_size}, the specification has {expected}")
