"""Names, shapes and counts of the learned tensors (numerics.md 0 and 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from reference.config import Config

Weights = Mapping[str, torch.Tensor]
"""Parameter names, relative to the unit they belong to, and their tensors."""

Shape = tuple[int, ...]


class Scoped(Mapping[str, torch.Tensor]):
    """The part of a mapping whose names begin with a prefix and a dot, under the names that follow.

    Looks tensors up one by one, so a mapping that makes its tensors on demand makes only those that are used.
    """

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix + "."

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._weights

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def norm_shape(config: Config) -> Shape:
    """One RMSNorm of a block."""
    return (config.dim,)


def stream_shapes(config: Config) -> dict[str, Shape]:
    """Hyper-connection weights of one sublayer: projection, offsets, scales (numerics.md 5)."""
    streams = config.hc_mult
    coefficients = (2 + streams) * streams
    return {"fn": (coefficients, streams * config.dim), "base": (coefficients,), "scale": (3,)}


def attention_shapes(config: Config, layer_id: int) -> dict[str, Shape]:
    """Weights of one attention by role (numerics.md 6 and 6.1)."""
    group_features = config.n_heads * config.head_dim // config.o_groups
    shapes: dict[str, Shape] = {
        "wq_a.weight": (config.q_lora_rank, config.dim),
        "q_norm.weight": (config.q_lora_rank,),
        "wq_b.weight": (config.n_heads * config.head_dim, config.q_lora_rank),
        "wkv.weight": (config.head_dim, config.dim),
        "kv_norm.weight": (config.head_dim,),
        "attn_sink": (config.n_heads,),
        "wo_a.weight": (config.o_groups * config.o_lora_rank, group_features),
        "wo_b.weight": (config.dim, config.o_groups * config.o_lora_rank),
    }
    if config.compresses(layer_id):
        shapes["compressor.wkv.weight"] = (config.head_dim, config.dim)
        if config.ratio(layer_id) > 1:
            shapes["compressor.wgate.weight"] = (config.head_dim, config.dim)
        shapes["compressor.norm.weight"] = (config.head_dim,)
    if config.owns_index(layer_id):
        shapes["indexer.wk.weight"] = (config.index_head_dim, config.head_dim)
        shapes["indexer.k_norm.weight"] = (config.index_head_dim,)
    if config.selects(layer_id):
        shapes["indexer.wq_b.weight"] = (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        shapes["indexer.weights_proj.weight"] = (config.index_n_heads, config.dim)
    return shapes


def expert_shapes(config: Config, width: int) -> dict[str, Shape]:
    """One expert of hidden width `width` (numerics.md 7); FP4 counted unpacked."""
    return {"w1.weight": (width, config.dim), "w2.weight": (config.dim, width), "w3.weight": (width, config.dim)}


def moe_shapes(config: Config) -> dict[str, Shape]:
    """Mixture of experts of one layer, both selection biases included (numerics.md 7)."""
    shapes: dict[str, Shape] = {
        "gate.weight": (config.n_routed_experts, config.dim),
        "gate.bias": (config.n_routed_experts,),
        "gate.bias_vl": (config.n_routed_experts,),
    }
    for expert in range(config.n_routed_experts):
        shapes |= _under(f"experts.{expert}", expert_shapes(config, config.moe_inter_dim))
    if config.n_shared_experts:
        shapes |= _under("shared_experts", expert_shapes(config, config.n_shared_experts * config.moe_inter_dim))
    return shapes


def engram_shapes(config: Config, layer_id: int) -> dict[str, Shape]:
    """Engram of one layer (numerics.md 8)."""
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer_id)]
    streams = config.hc_mult
    return {
        "embed.weight": (rows, config.engram_head_dim),
        "wkv.weight": ((streams + 1) * config.dim, config.engram_columns * config.engram_head_dim),
        "q_weight": (streams, config.dim),
        "k_weight": (streams, config.dim),
    }


def layer_shapes(config: Config, layer_id: int) -> dict[str, Shape]:
    """One layer: Engram where it has one, two sublayers with their norms and stream weights."""
    shapes: dict[str, Shape] = {}
    if config.has_engram(layer_id):
        shapes |= _under("engram", engram_shapes(config, layer_id))
    shapes |= {f"hc_attn_{name}": shape for name, shape in stream_shapes(config).items()}
    shapes["attn_norm.weight"] = norm_shape(config)
    shapes |= _under("attn", attention_shapes(config, layer_id))
    shapes |= {f"hc_ffn_{name}": shape for name, shape in stream_shapes(config).items()}
    shapes["ffn_norm.weight"] = norm_shape(config)
    shapes |= _under("ffn", moe_shapes(config))
    return shapes


def parameter_shapes(config: Config) -> dict[str, Shape]:
    """Learned tensors of the text path under checkpoint names, without quantisation scales (numerics.md 0)."""
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, config.dim)}
    for layer_id in range(config.n_layers):
        shapes |= _under(f"layers.{layer_id}", layer_shapes(config, layer_id))
    shapes["norm.weight"] = norm_shape(config)
    shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def parameter_counts(config: Config) -> dict[str, int]:
    """Learned elements by unit: `stream`, `norm`, and `attention/{l}`, `moe/{l}`, `layer/{l}` (numerics.md 0)."""
    counts = {"stream": _elements(stream_shapes(config)), "norm": math.prod(norm_shape(config))}
    for layer_id in range(config.n_layers):
        counts[f"attention/{layer_id}"] = _elements(attention_shapes(config, layer_id))
        counts[f"moe/{layer_id}"] = _elements(moe_shapes(config))
        counts[f"layer/{layer_id}"] = _elements(layer_shapes(config, layer_id))
    return counts


def _under(prefix: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _elements(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
