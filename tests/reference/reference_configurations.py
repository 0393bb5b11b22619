"""Configurations for the tests of the reference, and random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reference.config import Config
from reference.parameters import parameter_shapes

SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "dim": 96,
    "n_layers": 9,
    "n_heads": 3,
    "q_lora_rank": 40,
    "head_dim": 48,
    "rope_head_dim": 8,
    "o_groups": 3,
    "o_lora_rank": 24,
    "window_size": 5,
    "norm_eps": 1e-20,
    "compress_ratios": [0, 2, 2, 4, 4, 1, 1, 1, 0],
    "kv_source_layers": [1, 3, 5],
    "index_source_layers": [1, 3, 5, 6],
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_topk": 3,
    "candidate_source_layer": 5,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 3,
    "rope_theta": 10000,
    "compress_rope_theta": 4000,
    "original_seq_len": 16,
    "rope_factor": 4,
    "beta_fast": 4,
    "beta_slow": 1,
    "moe_inter_dim": 40,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "n_activated_experts": 2,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 7,
    "hc_eps": 1e-6,
    "engram_layer_ids": [0, 4],
    "engram_num_embeddings": [240, 306],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 40,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 32,
    "dspark_target_layer_ids": [6, 7],
    "a_key_of_something_else": None,
}
"""Shares no size with the released configuration or with the golden one."""

RELEASED: Mapping[str, Any] = {
    "vocab_size": 129280,
    "dim": 5120,
    "moe_inter_dim": 2304,
    "n_layers": 40,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_n_activated_experts": 3,
    "n_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1280,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-20,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16000000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 99092,
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "image_token_id": 129264,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
}
"""The published `config.json`, vision left out."""


def make_weights(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the types that numerics.md 3 lists."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}

    def tiles(size: int) -> int:
        return (size + 31) // 32

    def scale(*shape: int) -> torch.Tensor:
        exponent = torch.randint(118, 122, shape, generator=generator)
        return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)

    for name, shape in parameter_shapes(config).items():
        normal = torch.randn(shape, generator=generator)
        stem, last = name.rpartition(".")[0], name.rpartition(".")[2]
        owner = stem.rpartition(".")[2]
        if ".ffn.experts." in name:
            rows, columns = shape
            weights[name] = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
            weights[f"{stem}.scale"] = scale(rows, tiles(columns))
        elif ".engram.embed." in name:
            weights[name] = (normal * 32).to(torch.float8_e4m3fn)
            weights[f"{stem}.scale"] = scale(shape[0], tiles(shape[1]))
        elif owner in ("wq_a", "wq_b", "wkv", "wo_b", "w1", "w2", "w3") and "compressor" not in name:
            weights[name] = (normal * 16).to(torch.float8_e4m3fn)
            weights[f"{stem}.scale"] = scale(tiles(shape[0]), tiles(shape[1]))
        elif "norm" in name or last in ("q_weight", "k_weight"):
            weights[name] = (1 + normal / 8).bfloat16()
        elif owner == "compressor" or "compressor" in name:
            fp32 = "wgate" in name or f"{stem.rpartition('.')[0]}.wgate.weight" in parameter_shapes(config)
            weights[name] = (normal / 8).to(torch.float32 if fp32 else torch.bfloat16)
        elif len(shape) == 1 or "hc_" in name:
            weights[name] = normal / (16 if "hc_" in name and "fn" in name else 2)
        else:
            weights[name] = (normal / (1 if "embed" in name else 8)).bfloat16()
    return weights
