"""A small model with every kind of layer, for vectors that need a configuration and no recorded set.

Layer 0 and 1 see their window only; 2 is a source with ratio 2 and 3 reuses it; 4 is a source with ratio 1 and
publishes the candidates, 5 reuses it, 6 re-indexes among the candidates and 7 reuses that.  Engram acts before 1 and 3.
All widths are multiples of 32, the group of the quantisers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.config import ModelConfig

CONFIG: Mapping[str, Any] = {
    "vocab_size": 128,
    "dim": 64,
    "moe_inter_dim": 64,
    "n_layers": 8,
    "n_mtp_layers": 0,
    "n_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_activated_experts": 2,
    "score_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "gate_temp": 1.0,
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 64,
    "head_dim": 64,
    "rope_head_dim": 32,
    "norm_eps": 1e-20,
    "o_groups": 2,
    "o_lora_rank": 32,
    "window_size": 8,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layers": [2, 4],
    "index_source_layers": [2, 4, 6],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "original_seq_len": 1024,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [660, 864],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 100,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 64,
}
"""As a port receives it; the YaRN ramp runs from pair 2 to pair 7 of 16."""

MODEL = ModelConfig.from_mapping(CONFIG, "conformance/cases/vectors/configuration.py")
"""The same as the judge reads it."""

WINDOW_ONLY, RATIO_TWO, RATIO_ONE = 0, 2, 4
"""One layer of each compression ratio."""
