"""Weights for hand-made vectors: drawn from generators that the names seed, in the types of numerics.md 3."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import E8M0
from conformance.judge.components.linear import Parameters
from conformance.tensors import Tensor

Floats = npt.NDArray[np.float64]
FP8_SCALE_EXPONENTS = (-4, -2)
"""Exponents of the tiles' scales: several, so that a scale of the wrong tile shows."""


def normal(name: str, *shape: int) -> Floats:
    """Standard normal numbers that depend on the name and the shape alone."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def bf16(name: str, *shape: int) -> Tensor:
    """Normal numbers rounded to bf16."""
    return Tensor.from_values(normal(name, *shape), "BF16")


def fp8(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """An FP8 matrix with a scale per 32x32 tile, as `{name}.weight` and `{name}.scale`."""
    tiles = (-(-rows // 32), -(-columns // 32))
    low, high = FP8_SCALE_EXPONENTS
    exponents = np.random.default_rng(zlib.crc32(f"{name}.scale".encode())).integers(low, high + 1, tiles)
    return {
        f"{name}.weight": Tensor.from_values(normal(f"{name}.weight", rows, columns), "F8_E4M3"),
        f"{name}.scale": Tensor("F8_E8M0", E8M0.encode(2.0**exponents).astype(np.uint8)),
    }


def fp4(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """An FP4 matrix with a scale per row and 32 inputs, as `{name}.weight` and `{name}.scale`."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    packed = generator.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    exponents = generator.integers(-5, -3, (rows, columns // 32))
    return {
        f"{name}.weight": Tensor("U8", packed),
        f"{name}.scale": Tensor("F8_E8M0", E8M0.encode(2.0**exponents).astype(np.uint8)),
    }


def matrix(name: str, rows: int, columns: int, dtype: str) -> dict[str, Tensor]:
    """A bf16 or fp32 matrix whose products with normal inputs are about normal."""
    values = normal(f"{name}.weight", rows, columns) / np.sqrt(columns)
    return {f"{name}.weight": Tensor.from_values(values, dtype)}


def norm(name: str, width: int) -> dict[str, Tensor]:
    """A norm's bf16 weight around one."""
    return {f"{name}.weight": Tensor.from_values(1.0 + 0.1 * normal(name, width), "BF16")}


def attention(config: ModelConfig, layer: int, prefix: str = "") -> dict[str, Tensor]:
    """The weights of one attention in any role, under names that begin with `prefix`."""
    c, p = config, prefix
    tensors = {
        **fp8(f"{p}wq_a", c.q_lora_rank, c.dim),
        **norm(f"{p}q_norm", c.q_lora_rank),
        **fp8(f"{p}wq_b", c.n_heads * c.head_dim, c.q_lora_rank),
        **fp8(f"{p}wkv", c.head_dim, c.dim),
        **norm(f"{p}kv_norm", c.head_dim),
        f"{p}attn_sink": Tensor.from_values(normal(f"{p}attn_sink", c.n_heads), "F32"),
        **matrix(f"{p}wo_a", c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups, "BF16"),
        **fp8(f"{p}wo_b", c.dim, c.o_groups * c.o_lora_rank),
    }
    if c.compresses(layer):
        kind = "BF16" if c.ratio(layer) == 1 else "F32"
        tensors |= matrix(f"{p}compressor.wkv", c.head_dim, c.dim, kind)
        if c.ratio(layer) > 1:
            tensors |= matrix(f"{p}compressor.wgate", c.head_dim, c.dim, kind)
        tensors |= norm(f"{p}compressor.norm", c.head_dim)
        tensors |= matrix(f"{p}indexer.wk", c.index_head_dim, c.head_dim, "BF16")
        tensors |= norm(f"{p}indexer.k_norm", c.index_head_dim)
    if c.indexes(layer):
        tensors |= fp8(f"{p}indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        tensors |= matrix(f"{p}indexer.weights_proj", c.index_n_heads, c.dim, "BF16")
    return tensors


def mixture(config: ModelConfig, prefix: str = "") -> dict[str, Tensor]:
    """The gate, the routed experts and the shared one."""
    c, p = config, prefix
    tensors = {
        **matrix(f"{p}gate", c.n_routed_experts, c.dim, "BF16"),
        f"{p}gate.bias": Tensor.from_values(0.1 * normal(f"{p}gate.bias", c.n_routed_experts), "F32"),
        f"{p}gate.bias_vl": Tensor.from_values(0.1 * normal(f"{p}gate.bias_vl", c.n_routed_experts), "F32"),
    }
    for expert in range(c.n_routed_experts):
        tensors |= fp4(f"{p}experts.{expert}.w1", c.moe_inter_dim, c.dim)
        tensors |= fp4(f"{p}experts.{expert}.w2", c.dim, c.moe_inter_dim)
        tensors |= fp4(f"{p}experts.{expert}.w3", c.moe_inter_dim, c.dim)
    tensors |= fp8(f"{p}shared_experts.w1", c.moe_inter_dim, c.dim)
    tensors |= fp8(f"{p}shared_experts.w2", c.dim, c.moe_inter_dim)
    return tensors | fp8(f"{p}shared_experts.w3", c.moe_inter_dim, c.dim)


def engram(config: ModelConfig, layer: int, prefix: str = "") -> dict[str, Tensor]:
    """The tables and projections of one Engram."""
    c, p = config, prefix
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    exponents = np.random.default_rng(rows).integers(-3, 1, (rows, c.engram_head_dim // 32))
    return {
        f"{p}embed.weight": Tensor.from_values(normal(f"{p}embed.weight", rows, c.engram_head_dim), "F8_E4M3"),
        f"{p}embed.scale": Tensor("F8_E8M0", E8M0.encode(2.0**exponents).astype(np.uint8)),
        **fp8(f"{p}wkv", (c.hc_mult + 1) * c.dim, c.engram_columns * c.engram_head_dim),
        f"{p}q_weight": Tensor.from_values(1.0 + 0.1 * normal(f"{p}q_weight", c.hc_mult, c.dim), "BF16"),
        f"{p}k_weight": Tensor.from_values(1.0 + 0.1 * normal(f"{p}k_weight", c.hc_mult, c.dim), "BF16"),
    }


def block(config: ModelConfig, layer: int, seed: str = "") -> dict[str, Tensor]:
    """One layer with its stream weights, norms, attention, mixture, and Engram where it has one.

    Layers with different seeds have different stream weights; the rest is the same for all.
    """
    tensors = attention(config, layer, "attn.") | mixture(config, "ffn.")
    stream = config.hc_mult * config.dim
    for sublayer in ("attn", "ffn"):
        name = f"hc_{sublayer}"
        projection = normal(f"{seed}{name}_fn", config.coefficient_rows, stream) / np.sqrt(stream)
        tensors |= norm(f"{sublayer}_norm", config.dim)
        tensors[f"{name}_fn"] = Tensor.from_values(projection, "F32")
        tensors[f"{name}_base"] = Tensor.from_values(normal(f"{seed}{name}_base", config.coefficient_rows), "F32")
        tensors[f"{name}_scale"] = Tensor.from_values([0.75, 0.5, 1.25], "F32")
    if layer in config.engram_layer_ids:
        tensors |= engram(config, layer, "engram.")
    return tensors


def with_zeros(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """The same weights, those named set to zero: what they project then takes no part."""
    blank = {name: Tensor(tensors[name].dtype, np.zeros_like(tensors[name].data)) for name in names}
    return {**tensors, **blank}


def parameters(tensors: Mapping[str, Tensor]) -> Parameters:
    """The weights as the judge and the suite's calls take them."""
    return Parameters(tensors)
