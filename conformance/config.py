"""The model's hyper-parameters as the suite reads them, under the published names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from conformance.config_checks import problems
from conformance.errors import FixtureError

LARGEST_NUMBER = 1 << 40
"""No size, count or base of a model comes near; larger numbers would only make a search endless."""

SCORE_FUNCTION = "sqrtsoftplus"

QUANTISER_GROUP = 32
"""The larger of the two group sizes of numerics.md 2."""


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of the text model; field names are those of the published `config.json` (numerics.md 0)."""

    vocab_size: int
    dim: int
    moe_inter_dim: int
    n_layers: int
    n_heads: int
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    route_scale: float
    swiglu_limit: float
    q_lora_rank: int
    head_dim: int
    rope_head_dim: int
    norm_eps: float
    o_groups: int
    o_lora_rank: int
    window_size: int
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
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    candidate_source_layer: int = -1
    """Negative where no layer publishes candidates; the file may also say null or leave the keys out."""
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_vocab_size: int = 0
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_id: int = 0
    engram_compressed_vocab_size: int = 0
    n_mtp_layers: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0
    vision_n_layers: int = 0
    vision_dim: int = 0
    vision_n_heads: int = 0
    vision_inter_dim: int = 0
    vision_patch_size: int = 0
    vision_rope_theta: float = 0.0
    vision_downsample_ratio: int = 0
    vision_max_n_token: int = 0
    vision_min_pixels: int = 0
    vision_max_wh_ratio: float = 0.0
    """0 where the file says null: any width counts."""
    image_token_id: int = -1

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any], origin: str) -> ModelConfig:
        """Read the fields this suite needs; other keys belong to parts of the model it does not look at here.

        Raises:
            FixtureError: a key is missing or of the wrong type, or its value contradicts the others; `origin` names the
                file, the line the key.
        """
        values: dict[str, Any] = {}
        for field in fields(ModelConfig):
            optional = field.default is not MISSING
            if optional and mapping.get(field.name) is None:
                continue
            if field.name not in mapping:
                raise FixtureError(f"{origin}: key {field.name!r} is missing")
            value = mapping[field.name]
            kind = str(field.type)
            if kind.startswith("tuple"):
                if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
                    raise FixtureError(
                        f"{origin}: key {field.name!r} must be a list of integers, got {str(value)[:40]}"
                    )
                value = tuple(value)
            elif not _is_number(value, kind):
                raise FixtureError(f"{origin}: key {field.name!r} must be {kind}, got {str(value)[:40]}")
            else:
                value = int(value) if kind == "int" else float(value)
            values[field.name] = value
        config = ModelConfig(**values)
        score = mapping.get("score_func", SCORE_FUNCTION)
        if score != SCORE_FUNCTION:
            raise FixtureError(f"{origin}: key 'score_func' is {str(score)[:40]!r}, only {SCORE_FUNCTION!r} is known")
        # The first is shown: a rule may assume those before it.
        for problem in problems(config):
            raise FixtureError(f"{origin}: {problem}")
        for name, width in config._quantised_widths().items():
            if width % QUANTISER_GROUP:
                raise FixtureError(
                    f"{origin}: {name} is {width}, but is quantised in groups of {QUANTISER_GROUP}, all of them whole"
                )
        return config

    def _quantised_widths(self) -> dict[str, int]:
        """Widths of the rows that quantisers take; what a part of a group would be is not defined (numerics.md 2)."""
        widths = {
            "key 'dim'": self.dim,
            "key 'q_lora_rank'": self.q_lora_rank,
            "key 'o_groups' times 'o_lora_rank'": self.o_groups * self.o_lora_rank,
            "key 'moe_inter_dim'": self.moe_inter_dim,
            "key 'head_dim'": self.head_dim,
        }
        if self.index_source_layers:
            widths["key 'index_head_dim'"] = self.index_head_dim
        if self.engram_layer_ids:
            widths["key 'engram_head_dim' times the columns"] = self.engram_columns * self.engram_head_dim
        return widths

    def ratio(self, layer: int) -> int:
        """Compression ratio; 0 is a window-only layer."""
        return self.compress_ratios[layer]

    def compresses(self, layer: int) -> bool:
        """Whether the layer makes compressed rows and index keys (numerics.md 6.1)."""
        return layer in self.kv_source_layers

    def indexes(self, layer: int) -> bool:
        """Whether the layer runs its own indexer."""
        return layer in self.index_source_layers

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows and index keys this one reads."""
        return max(s for s in self.kv_source_layers if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selected positions this one uses."""
        return max(s for s in self.index_source_layers if s <= layer)

    def masked_by_candidates(self, layer: int) -> bool:
        """Whether the layer's scores are restricted to the published candidates."""
        return self.indexes(layer) and layer > self.candidate_source_layer >= 0

    def with_sources(self, layers: Iterable[int]) -> list[int]:
        """These layers and those whose rows, selections or candidates they read, ascending (numerics.md 6.1)."""
        needed = set(layers)
        for layer in sorted(needed):
            if self.ratio(layer):
                needed |= {self.kv_source(layer), self.index_source(layer)}
                if self.masked_by_candidates(self.index_source(layer)):
                    needed.add(self.candidate_source_layer)
        return sorted(needed)

    def role(self, layer: int) -> str:
        """The attention role in words, used in case ids (numerics.md 6.1)."""
        if not self.ratio(layer):
            return "window-only"
        if layer == self.candidate_source_layer:
            return f"candidate-source-ratio-{self.ratio(layer)}"
        if self.compresses(layer):
            return f"source-ratio-{self.ratio(layer)}"
        if self.indexes(layer):
            return "re-indexing"
        if self.masked_by_candidates(self.index_source(layer)):
            return "reusing-re-indexed"
        return f"reusing-ratio-{self.ratio(layer)}"

    @cached_property
    def coefficient_rows(self) -> int:
        """Rows of a hyper-connection projection: pre and post of S each, comb of S squared."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def draft_layers(self) -> range:
        """Ids of the draft blocks, which follow the model's layers (numerics.md 10)."""
        return range(self.n_layers, self.n_layers + self.n_mtp_layers)

    @property
    def engram_columns(self) -> int:
        """Hash columns of one position: (max n-gram - 1) sizes times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def _is_number(value: Any, kind: str) -> bool:
    """A finite number of plausible size, whole where `kind` is int."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        return False
    return kind != "int" or value == int(value)
