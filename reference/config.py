"""Hyper-parameters of the model, under the names that the published `config.json` uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

POSITIVE_SIZES = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "q_lora_rank",
    "head_dim",
    "rope_head_dim",
    "o_groups",
    "o_lora_rank",
    "window_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_inter_dim",
    "n_routed_experts",
    "n_activated_experts",
    "hc_mult",
    "hc_sinkhorn_iters",
)


@dataclass(frozen=True)
class Config:
    """The keys of `config.json` that the text path reads, and what follows from them."""

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

    score_func: str = "sqrtsoftplus"

    candidate_source_layer: int | None = None
    """None (or a negative number in the file) where no layer publishes candidates."""
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

    n_mtp_layers: int = 0
    """Draft blocks; their layer ids follow those of the model."""
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0

    vision_n_layers: int = 0
    vision_dim: int = 0
    vision_n_heads: int = 1
    vision_inter_dim: int = 0
    vision_patch_size: int = 1
    vision_rope_theta: float = 10000.0
    vision_downsample_ratio: int = 1
    vision_max_n_token: int = 0
    vision_min_pixels: int = 0
    vision_max_wh_ratio: float | None = None
    """None where any width counts."""
    image_token_id: int = -1

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Config:
        """Read the published key names; other keys are ignored.

        A ValueError names the first key that is missing or that contradicts another.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in mapping:
                value = mapping[field.name]
                values[field.name] = tuple(value) if isinstance(value, (list, tuple)) else value
            elif field.default is MISSING:
                raise ValueError(f"config: key {field.name!r} is missing")
        source = values.get("candidate_source_layer")
        if source is not None and source < 0:
            values["candidate_source_layer"] = None
        return cls(**values)

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_sources()
        self._check_candidates()
        self._check_engram()
        self._check_vision()
        self._check_dspark()

    def _check_sizes(self) -> None:
        for name in POSITIVE_SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be at least 1, not {getattr(self, name)}")
        if self.rope_head_dim % 2:
            raise ValueError(f"config: rope_head_dim must be even, not {self.rope_head_dim}")
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) < self.rope_head_dim:
                raise ValueError(f"config: {name} {getattr(self, name)} is below rope_head_dim {self.rope_head_dim}")
        if self.n_heads % self.o_groups:
            raise ValueError(f"config: n_heads {self.n_heads} is not divisible by o_groups {self.o_groups}")
        if self.n_activated_experts > self.n_routed_experts:
            raise ValueError("config: n_activated_experts exceeds n_routed_experts")
        if self.score_func != "sqrtsoftplus":
            raise ValueError(f"config: score_func {self.score_func!r} is not supported, only 'sqrtsoftplus'")

    def _check_sources(self) -> None:
        if len(self.compress_ratios) < self.n_layers:
            raise ValueError(
                f"config: compress_ratios has {len(self.compress_ratios)} entries for n_layers {self.n_layers}"
            )
        for name in ("kv_source_layers", "index_source_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"config: {name} must ascend without repetition")
            for layer in layers:
                if not 0 <= layer < self.n_layers:
                    raise ValueError(f"config: {name} names layer {layer} of {self.n_layers}")
                if self.ratio(layer) == 0:
                    raise ValueError(f"config: {name} names layer {layer}, whose compress_ratios entry is 0")
        for layer in self.kv_source_layers:
            if layer not in self.index_source_layers:
                raise ValueError(f"config: kv_source_layers names layer {layer}, index_source_layers does not")
        for layer in range(self.n_layers):
            ratio = self.ratio(layer)
            if ratio < 0:
                raise ValueError(f"config: compress_ratios entry {layer} is negative")
            if ratio and self.ratio(self.kv_source(layer)) != ratio:
                raise ValueError(
                    f"config: compress_ratios of layer {layer} differs from that of its source {self.kv_source(layer)}"
                )

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer
        if source is None:
            return
        if source not in self.index_source_layers:
            raise ValueError(f"config: candidate_source_layer {source} is not in index_source_layers")
        for name in ("candidate_topk_blocks", "candidate_block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be at least 1 with a candidate_source_layer")
        for layer in self.index_source_layers:
            if layer > source and self.kv_source(layer) != self.kv_source(source):
                raise ValueError(
                    f"config: index_source_layers names layer {layer}, whose rows are not those of "
                    f"candidate_source_layer {source}"
                )

    def _check_engram(self) -> None:
        if len(self.engram_num_embeddings) != len(self.engram_layer_ids):
            raise ValueError("config: engram_num_embeddings and engram_layer_ids differ in length")
        if not self.engram_layer_ids:
            return
        for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be at least 1 with engram_layer_ids")
        if self.engram_max_ngram_size < 2:
            raise ValueError("config: engram_max_ngram_size must be at least 2 with engram_layer_ids")
        for layer in self.engram_layer_ids:
            if not 0 <= layer < self.n_layers:
                raise ValueError(f"config: engram_layer_ids names layer {layer} of {self.n_layers}")

    def _check_vision(self) -> None:
        if not self.vision_n_layers:
            return
        for name in ("dim", "n_heads", "inter_dim", "patch_size", "downsample_ratio"):
            if getattr(self, f"vision_{name}") < 1:
                raise ValueError(f"config: vision_{name} must be at least 1 with vision_n_layers")
        if self.vision_dim % (4 * self.vision_n_heads):
            raise ValueError(f"config: vision_dim {self.vision_dim} is not divisible by 4 times vision_n_heads")

    def _check_dspark(self) -> None:
        for layer in self.dspark_target_layer_ids:
            if not 0 <= layer < self.n_layers:
                raise ValueError(f"config: dspark_target_layer_ids names layer {layer} of {self.n_layers}")
        if not self.dspark_block_size:
            return
        for name in ("n_mtp_layers", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_n_activated_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be at least 1 with dspark_block_size")
        if not self.dspark_target_layer_ids:
            raise ValueError("config: dspark_target_layer_ids must not be empty with dspark_block_size")
        if any(self.compress_ratios[self.n_layers :]):
            raise ValueError("config: compress_ratios of draft blocks must be 0")
        if not 0 <= self.dspark_noise_token_id < self.vocab_size:
            raise ValueError(f"config: dspark_noise_token_id {self.dspark_noise_token_id} is not in the vocabulary")

    # DSpark (numerics.md 10) ----------------------------------------------------------------------------------------

    @property
    def draft_layers(self) -> range:
        """Ids of the draft blocks, which follow the model's layers."""
        return range(self.n_layers, self.n_layers + self.n_mtp_layers)

    def of_drafts(self) -> Config:
        """The hyper-parameters of a draft block: window only, experts of its own number."""
        ratios = (*self.compress_ratios[: self.n_layers], *(0 for _ in self.draft_layers))
        return replace(
            self,
            compress_ratios=ratios,
            n_routed_experts=self.dspark_n_routed_experts,
            n_activated_experts=self.dspark_n_activated_experts,
        )

    # roles (numerics.md 6.1) ----------------------------------------------------------------------------------------

    def ratio(self, layer_id: int) -> int:
        """Tokens in a group of the layer's compressed rows; 0 where the layer has its window only."""
        return self.compress_ratios[layer_id]

    def kv_source(self, layer_id: int) -> int:
        """The layer whose compressed rows this one reads: the nearest KV source at or before it."""
        return self._nearest("kv_source_layers", layer_id)

    def index_source(self, layer_id: int) -> int:
        """The layer whose selected positions this one reads: the nearest index source at or before it."""
        return self._nearest("index_source_layers", layer_id)

    def _nearest(self, name: str, layer_id: int) -> int:
        earlier = [source for source in getattr(self, name) if source <= layer_id]
        if not earlier:
            raise ValueError(f"config: {name} has no layer at or before layer {layer_id}, which reads compressed rows")
        return int(max(earlier))

    def compresses(self, layer_id: int) -> bool:
        """The layer compresses its own input and owns compressed rows."""
        return layer_id in self.kv_source_layers

    def owns_index(self, layer_id: int) -> bool:
        """The layer owns index keys, one for each of its compressed rows."""
        return self.compresses(layer_id)

    def selects(self, layer_id: int) -> bool:
        """The layer runs an indexer and publishes selected positions."""
        return layer_id in self.index_source_layers

    def re_indexes(self, layer_id: int) -> bool:
        """The layer runs its own indexer over another layer's index keys."""
        return self.selects(layer_id) and not self.compresses(layer_id)

    def reuses(self, layer_id: int) -> bool:
        """The layer reads both the compressed rows and the selected positions of earlier layers."""
        return self.ratio(layer_id) > 0 and not self.selects(layer_id)

    def publishes_candidates(self, layer_id: int) -> bool:
        """The layer publishes the candidate blocks."""
        return layer_id == self.candidate_source_layer

    def uses_candidates(self, layer_id: int) -> bool:
        """The layer's indexer is restricted to the published candidate blocks."""
        source = self.candidate_source_layer
        return source is not None and self.selects(layer_id) and layer_id > source

    # Engram (numerics.md 8) -----------------------------------------------------------------------------------------

    def has_engram(self, layer_id: int) -> bool:
        """An Engram writes to the residual before this layer."""
        return layer_id in self.engram_layer_ids

    @property
    def engram_look_back(self) -> int:
        """Tokens before a position that its n-grams reach."""
        return max(self.engram_max_ngram_size - 1, 0)

    @property
    def engram_columns(self) -> int:
        """Table rows fetched a position: one for every n-gram size and head."""
        return self.engram_look_back * self.engram_n_heads
