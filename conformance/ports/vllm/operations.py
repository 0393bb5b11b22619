"""Quantiser, linear, rotary embedding and hyper-connections: one function of vLLM's each."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from conformance.interface import Array, Config, Implementation, Unsupported
from conformance.ports.vllm.parts import COMMON, LINEAR, MHC, MXFP8, ROTARY, VLLM

GROUP = 32
TILE = 32
"""Side of the squares of an FP8 weight that share a scale."""
LATENT = 512
"""Features of a latent: vLLM's kernels exist for this width only."""
RECORD = LATENT + LATENT // GROUP
"""Bytes of a cached row: codes, then scales."""


class Operations(Implementation):
    """What needs no more than its arguments."""

    # quantize -------------------------------------------------------------------------------------------------------

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """The torch form of its MXFP8 quantiser."""
        codes, scales = VLLM.function(MXFP8, "_mxfp8_e4m3_quantize_torch")(_grouped(x).reshape(-1, x.shape[-1]))
        return codes.reshape(x.shape), scales.view(torch.float8_e8m0fnu).reshape(*x.shape[:-1], -1)

    def fake_quantize_fp8(self, x: Array) -> Array:
        """Into the paged cache by its insert kernel, with rotations by nothing, and back."""
        insert = VLLM.function(f"{COMMON}.ops.fused_compress_quant_cache", "rope_quant_insert")
        dequantize = VLLM.function(MXFP8, "dequant_mxfp8_to_bf16")
        flat = _grouped(x).reshape(-1)
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % LATENT)).reshape(-1, LATENT)
        cache = torch.zeros(1, len(rows), RECORD, dtype=torch.uint8)
        unturned = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=-1)
        insert(rows, torch.zeros(len(rows), dtype=torch.int64), unturned, cache, torch.arange(len(rows)), 1)
        codes, scales = cache[0, :, :LATENT], cache[0, :, LATENT:]
        values = dequantize(codes.contiguous().view(torch.float8_e4m3fn), scales)
        result: Array = values.reshape(-1)[: len(flat)].reshape(x.shape)
        return result

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """Its MXFP8 form, for which the scales of tiles are repeated in every row of a tile."""
        if weight.shape[-1] % GROUP:
            raise Unsupported(f"vllm: widths that are no multiple of {GROUP}")
        result: Array = VLLM.function(MXFP8, "dequant_mxfp8_to_bf16")(weight, _by_row(weight, scale))
        return result

    # linear ---------------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """Its emulation, which leaves inputs as they are."""
        apply = VLLM.function(LINEAR, "EmulationMxfp8LinearKernel").apply_weights
        layer = SimpleNamespace(weight=weight, weight_scale=_by_row(weight, scale))
        result: Array = apply(None, layer, _grouped(x))
        return result

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """The layer's embedding's."""
        embedding = _embedding(*_scaling(config, layer_id))
        result: Array = embedding._compute_inv_freq(embedding.scaling_factor)
        return result

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """The two halves of its table."""
        cos, sin = _table(_scaling(config, layer_id), positions)[positions].chunk(2, dim=-1)
        return cos, sin

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """The torch form."""
        scaling = _scaling(config, layer_id)
        embedding = _embedding(*scaling)
        embedding.cos_sin_cache = _table(scaling, positions)
        heads = x if x.dim() == 4 else x[:, :, None]
        turned, _ = embedding.forward_native(positions, heads, inverse=inverse)
        result: Array = turned.reshape(x.shape)
        return result

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """The torch form with the late mix."""
        lead, (streams, width) = h.shape[:-2], h.shape[-2:]
        post, comb, _, pre = VLLM.function(f"{MHC}.torch", "mhc_pre_delayed_torch")(
            h.reshape(-1, streams, width),
            fn,
            scale,
            base,
            config["norm_eps"],
            config["hc_eps"],
            config["hc_eps"],
            2.0,
            config["hc_sinkhorn_iters"],
        )
        return pre.reshape(*lead, streams), post.reshape(*lead, streams), comb.reshape(*lead, streams, streams)

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """A Triton kernel."""
        streams, width = h.shape[-2:]
        collapse = VLLM.function(f"{MHC}.triton", "hc_collapse_triton")
        result: Array = collapse(h.reshape(-1, streams, width), pre.reshape(-1, streams)).reshape(*h.shape[:-2], width)
        return result

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """The torch form."""
        result: Array = VLLM.function(f"{MHC}.torch", "mhc_post_torch")(y, h, post[..., None], comb)
        return result


def _grouped(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % GROUP:
        raise Unsupported(f"vllm: widths that are no multiple of {GROUP}")
    return x.contiguous()


def _by_row(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes [N, K/32] of every row, from those of tiles."""
    return scale.view(torch.uint8).repeat_interleave(TILE, dim=0)[: len(weight)].contiguous()


def _scaling(config: Config, layer_id: int) -> tuple[int, int, float, float, int, int]:
    """How vLLM asks for a layer's embedding: without compression a scaling by 1 over all positions."""
    compressed = bool(config["compress_ratios"][layer_id])
    original, factor = config["original_seq_len"], config["rope_factor"]
    return (
        config["rope_head_dim"],
        original if compressed else int(original * factor),
        config["compress_rope_theta"] if compressed else config["rope_theta"],
        factor if compressed else 1.0,
        config["beta_fast"],
        config["beta_slow"],
    )


def _embedding(width: int, positions: int, base: float, factor: float, beta_fast: int, beta_slow: int) -> Any:
    """An embedding without its table."""
    kind = VLLM.function(f"{ROTARY}.deepseek_scaling_rope", "DeepseekV4ScalingRotaryEmbedding")
    untabled = type(kind.__name__, (kind,), {"_compute_cos_sin_cache": lambda self: None})
    return untabled(
        width,
        width,
        positions,
        base,
        False,
        factor,
        torch.float32,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=0,
        mscale_all_dim=0,
    )


def _table(scaling: tuple[Any, ...], positions: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of all positions that a model with this scaling has [P, rope_head_dim]."""
    table = _all_positions(*scaling)
    if int(positions.max()) >= len(table):
        raise Unsupported(f"vllm: positions up to {len(table) - 1} with this configuration")
    return table


@functools.lru_cache(2)
def _all_positions(*scaling: Any) -> torch.Tensor:
    kind = VLLM.function(f"{ROTARY}.deepseek_scaling_rope", "DeepseekV4ScalingRotaryEmbedding")
    table: torch.Tensor = kind._compute_cos_sin_cache(_embedding(*scaling))
    return table
