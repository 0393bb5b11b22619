"""Hyper-parameters that the kernels' launchers read, under the names of the published `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """The keys that the text path reads."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    q_lora_rank: int
    head_dim: int
    rope_head_dim: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    norm_eps: float
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    original_seq_len: int
    rope_factor: float
    beta_fast: float
    beta_slow: float
    moe_inter_dim: int
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    route_scale: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    candidate_source_layer: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_id: int = 0
    engram_compressed_vocab_size: int = 0

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Config:
        """Read the published key names; other keys are ignored.

        Raises:
            ValueError: a key is missing.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in mapping:
                value = mapping[field.name]
                values[field.name] = tuple(value) if isinstance(value, list | tuple) else value
            elif field.default is MISSING:
                raise ValueError(f"config: key {field.name!r} is missing")
        return cls(**values)

    def ratio(self, layer_id: int) -> int:
        """Tokens that one compressed row of a layer stands for; 0 without compression."""
        return self.compress_ratios[layer_id]

    def kv_source(self, layer_id: int) -> int:
        """The layer whose compressed rows and index keys a layer reads: the nearest KV source at or before it."""
        return self._nearest("kv_source_layers", layer_id)

    def _nearest(self, name: str, layer_id: int) -> int:
        earlier = [source for source in getattr(self, name) if source <= layer_id]
        if not earlier:
            raise ValueError(f"config: {name} has no layer at or before layer {layer_id}, which reads compressed rows")
        return int(max(earlier))

    def compresses(self, layer_id: int) -> bool:
        """The layer compresses its own input, and owns compressed rows and index keys."""
        return layer_id in self.kv_source_layers

    def selects(self, layer_id: int) -> bool:
        """The layer runs an indexer and publishes selected positions."""
        return layer_id in self.index_source_layers

    def publishes_candidates(self, layer_id: int) -> bool:
        """The layer publishes the candidate blocks."""
        return layer_id == self.candidate_source_layer

    def uses_candidates(self, layer_id: int) -> bool:
        """The layer's indexer is restricted to the published candidate blocks."""
        source = self.candidate_source_layer
        return source is not None and self.selects(layer_id) and layer_id > source

    def has_engram(self, layer_id: int) -> bool:
        """An Engram writes to the residual before this layer."""
        return layer_id in self.engram_layer_ids
