"""A small checkpoint with the released schedule of layers in miniature, filled from the weights recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.checkpoint import INDEX
from conformance.config import ModelConfig
from conformance.recipe_weights import RecipeWeights
from conformance.tensors import write_safetensors

CONFIG: Mapping[str, Any] = {
    "score_func": "sqrtsoftplus",
    "norm_eps": 1e-20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "original_seq_len": 64,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "swiglu_limit": 10.0,
    "route_scale": 1.5,
    "vocab_size": 200,
    "dim": 128,
    "n_layers": 8,
    "n_mtp_layers": 0,
    "n_heads": 4,
    "q_lora_rank": 64,
    "head_dim": 64,
    "rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "window_size": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
    "kv_source_layers": [1, 4],
    "index_source_layers": [1, 4, 6],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "moe_inter_dim": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "n_activated_experts": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "engram_layer_ids": [3],
    "engram_vocab_size": 50,
    "engram_num_embeddings": [112],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 1,
    "engram_head_dim": 64,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 100,
}


def write_checkpoint(directory: Path, changes: Mapping[str, Any] | None = None, seed: int = 5) -> Path:
    """Configuration, index, and a shard for every layer; returns the folder."""
    mapping = {**CONFIG, **(changes or {})}
    config = ModelConfig.from_mapping(mapping, "config")
    weights = RecipeWeights(config, seed)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(mapping))
    placed: dict[str, str] = {}
    for layer in range(config.n_layers):
        shard = f"model-{layer + 1:05}-of-{config.n_layers:05}.safetensors"
        names = [name for name in weights if name.startswith(f"layers.{layer}.")]
        write_safetensors(directory / shard, {name: weights[name] for name in names})
        placed |= dict.fromkeys(names, shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return directory
