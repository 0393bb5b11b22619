"""What a checkpoint holds: names, shapes and storage of every tensor, declared as tables over a configuration.

Shapes are logical (FP4 unpacked); a `Form` says what they become in a file. Names are those of the released checkpoint;
sources are numerics.md 0, 2, 3, 10 and 11 and the golden set `tiny`, which stores a whole model under these names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from conformance.config import ModelConfig
from conformance.errors import FixtureError

Shape = tuple[int, ...]

SCALE_GROUP = 32
FP4_CODES_PER_BYTE = 2
TEXT, DRAFT, VISION = "text", "draft", "vision"

#: A layout beyond this is not believed: the released one has 97,000 tensors, and `config.json` is untrusted.
MAX_TENSORS = 2_000_000
MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class Form:
    """One way to store a parameter.

    `scale_tile` is how many rows and columns share a scale, None without scales; scales are E8M0 under the weight's
    name with `.scale` for `.weight`. `per_item` logical elements of the last axis share one stored item.
    """

    dtype: str
    reason: str
    scale_tile: tuple[int, int] | None = None
    per_item: int = 1

    def stored(self, shape: Shape) -> Shape:
        """The shape in the file."""
        return (*shape[:-1], -(-shape[-1] // self.per_item))

    def scale(self, shape: Shape) -> Shape | None:
        """The shape of the scales of a logical matrix."""
        if self.scale_tile is None:
            return None
        rows, columns = self.scale_tile
        return (-(-shape[0] // rows), -(-shape[1] // columns))


SCALE_DTYPE = "F8_E8M0"

_BF16 = Form("BF16", "numerics.md 3: bf16")
_F32 = Form("F32", "numerics.md 3: fp32")
_TILED = Form("F8_E4M3", "numerics.md 2: E4M3, one scale per 32x32 tile", (SCALE_GROUP, SCALE_GROUP))

#: How a parameter may be stored, the usual form first; every further form carries the reason why it is accepted.
STORAGES: Mapping[str, tuple[Form, ...]] = {
    "bf16": (_BF16,),
    "fp32": (_F32,),
    "fp8": (_TILED,),
    "fp8 rows": (Form("F8_E4M3", "numerics.md 2: one scale per row and 32 features", (1, SCALE_GROUP)),),
    "fp4": (
        Form("U8", "numerics.md 1 and 2: two codes a byte", (1, SCALE_GROUP), FP4_CODES_PER_BYTE),
        Form("I8", "the same bytes: a packed FP4 tensor type is often saved signed", (1, SCALE_GROUP), 2),
    ),
    "wo_a": (
        _TILED,
        Form("BF16", "numerics.md 2: dequantised before use; a model saved after loading holds it so"),
    ),
    "head": (
        Form("BF16", "numerics.md 3: stored bf16, used in fp32"),
        Form("F32", "a model saved after loading holds the promoted weight, as the golden set `tiny` does"),
    ),
    "markov head": (
        Form("F32", "as the golden set `tiny` stores it"),
        Form("BF16", "as the backbone's head; the specification does not name its storage"),
    ),
}


@dataclass(frozen=True)
class Rule:
    """A parameter of a unit: name, axes (by the names in `_sizes`), storage, and the roles a layer needs to have it."""

    name: str
    axes: str
    storage: str
    needs: frozenset[str] = frozenset()


def _rule(name: str, axes: str, storage: str, needs: str = "") -> Rule:
    return Rule(name, axes, storage, frozenset(needs.split()))


# Roles of a layer: `compresses`, with `pools` (ratio above 1) or `single` (ratio 1); `indexes`; `engram`;
# `shared-expert`; `first-draft` and `last-draft` among the draft layers. `*` in a name stands for every routed expert.

ATTENTION = (
    _rule("attn.wq_a.weight", "q_lora_rank dim", "fp8"),
    _rule("attn.q_norm.weight", "q_lora_rank", "bf16"),
    _rule("attn.wq_b.weight", "heads·head_dim q_lora_rank", "fp8"),
    _rule("attn.wkv.weight", "head_dim dim", "fp8"),
    _rule("attn.kv_norm.weight", "head_dim", "bf16"),
    _rule("attn.attn_sink", "n_heads", "fp32"),
    _rule("attn.wo_a.weight", "groups·o_lora_rank group_features", "wo_a"),
    _rule("attn.wo_b.weight", "dim groups·o_lora_rank", "fp8"),
    _rule("attn.compressor.wkv.weight", "head_dim dim", "fp32", "compresses pools"),
    _rule("attn.compressor.wgate.weight", "head_dim dim", "fp32", "compresses pools"),
    _rule("attn.compressor.wkv.weight", "head_dim dim", "bf16", "compresses single"),
    _rule("attn.compressor.norm.weight", "head_dim", "bf16", "compresses"),
    _rule("attn.indexer.wk.weight", "index_head_dim head_dim", "bf16", "compresses"),
    _rule("attn.indexer.k_norm.weight", "index_head_dim", "bf16", "compresses"),
    _rule("attn.indexer.wq_b.weight", "index_heads·index_head_dim q_lora_rank", "fp8", "indexes"),
    _rule("attn.indexer.weights_proj.weight", "index_n_heads dim", "bf16", "indexes"),
)
STREAMS = tuple(
    _rule(f"hc_{sublayer}_{name}", axes, "fp32")
    for sublayer in ("attn", "ffn")
    for name, axes in (("fn", "coefficients streams·dim"), ("base", "coefficients"), ("scale", "3"))
)
NORMS = (_rule("attn_norm.weight", "dim", "bf16"), _rule("ffn_norm.weight", "dim", "bf16"))
MIXTURE = (
    _rule("ffn.gate.weight", "n_routed_experts dim", "bf16"),
    _rule("ffn.gate.bias", "n_routed_experts", "fp32"),
    _rule("ffn.gate.bias_vl", "n_routed_experts", "fp32"),
    _rule("ffn.experts.*.w1.weight", "moe_inter_dim dim", "fp4"),
    _rule("ffn.experts.*.w2.weight", "dim moe_inter_dim", "fp4"),
    _rule("ffn.experts.*.w3.weight", "moe_inter_dim dim", "fp4"),
    _rule("ffn.shared_experts.w1.weight", "shared_width dim", "fp8", "shared-expert"),
    _rule("ffn.shared_experts.w2.weight", "dim shared_width", "fp8", "shared-expert"),
    _rule("ffn.shared_experts.w3.weight", "shared_width dim", "fp8", "shared-expert"),
)
ENGRAM = (
    _rule("engram.embed.weight", "engram_rows engram_head_dim", "fp8 rows", "engram"),
    _rule("engram.wkv.weight", "streams·dim+dim engram_features", "fp8", "engram"),
    _rule("engram.q_weight", "hc_mult dim", "bf16", "engram"),
    _rule("engram.k_weight", "hc_mult dim", "bf16", "engram"),
)
DRAFT_ENDS = (
    _rule("main_proj.weight", "dim target_features", "fp8", "first-draft"),
    _rule("main_norm.weight", "dim", "bf16", "first-draft"),
    _rule("norm.weight", "dim", "bf16", "last-draft"),
    _rule("markov_head.embed.weight", "vocab_size dspark_markov_rank", "bf16", "last-draft"),
    _rule("markov_head.head.weight", "vocab_size dspark_markov_rank", "markov head", "last-draft"),
    _rule("confidence_head.proj.weight", "1 dim+markov", "fp32", "last-draft"),
)
LAYER = (*ENGRAM, *STREAMS, *NORMS, *ATTENTION, *MIXTURE)
ENDS = (
    _rule("embed.weight", "vocab_size dim", "bf16"),
    _rule("norm.weight", "dim", "bf16"),
    _rule("head.weight", "vocab_size dim", "head"),
)
VISION_BLOCK = (
    _rule("norm1.weight", "vision_dim", "fp32"),
    _rule("norm2.weight", "vision_dim", "fp32"),
    _rule("attn.wqkv.weight", "3·vision_dim vision_dim", "bf16"),
    _rule("attn.wqkv.bias", "3·vision_dim", "bf16"),
    _rule("attn.wo.weight", "vision_dim vision_dim", "bf16"),
    _rule("attn.wo.bias", "vision_dim", "bf16"),
    _rule("mlp.w1.weight", "2·vision_inter vision_dim", "bf16"),
    _rule("mlp.w2.weight", "vision_dim vision_inter_dim", "bf16"),
)
VISION_ENDS = (
    _rule("vision.patch_embed.proj.weight", "vision_dim patch_features", "bf16"),
    _rule("vision.patch_embed.proj.bias", "vision_dim", "bf16"),
    _rule("vision.norm.weight", "vision_dim", "fp32"),
    _rule("aligner.w1.weight", "dim aligner_features", "bf16"),
    _rule("aligner.w1.bias", "dim", "bf16"),
    _rule("aligner.w2.weight", "dim dim", "bf16"),
    _rule("aligner.w2.bias", "dim", "bf16"),
    _rule("image_start", "dim", "bf16"),
    _rule("image_end", "dim", "bf16"),
    _rule("image_newline", "dim", "bf16"),
)

#: What a draft layer shares with the backbone and therefore does not store (numerics.md 10).
TIES: Mapping[str, str] = {"embed.weight": "embed.weight", "head.weight": "head.weight"}


@dataclass(frozen=True)
class Parameter:
    """A learned tensor: logical shape, the forms it may be stored in, and its part of the model."""

    shape: Shape
    forms: tuple[Form, ...]
    part: str

    @property
    def elements(self) -> int:
        """Learned elements, scales not counted."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Every parameter of a checkpoint by name, and `ties`: names that must not be stored and what they share."""

    config: ModelConfig
    parameters: Mapping[str, Parameter]
    ties: Mapping[str, str]


def scale_name(name: str) -> str:
    """The name of a weight's scales."""
    return name.removesuffix(".weight") + ".scale"


def layout(mapping: Mapping[str, Any], origin: str) -> Layout:
    """The layout that a configuration calls for; draft and vision parts only where it has layers for them.

    Raises:
        FixtureError: a key is missing, of the wrong type, or calls for an absurd number of tensors; begins with
            `origin`.
    """
    config = _sane(mapping, origin)
    counts = _Counts(mapping, origin)
    draft_layers, vision_layers = counts["n_mtp_layers"], counts["vision_n_layers"]
    draft_experts = counts["dspark_n_routed_experts"] if draft_layers else 0
    mixtures = config.n_layers * config.n_routed_experts + draft_layers * draft_experts
    if 6 * mixtures + 100 * (config.n_layers + draft_layers) + 10 * vision_layers > MAX_TENSORS:
        raise FixtureError(f"{origin}: calls for more than {MAX_TENSORS:,} tensors")
    sizes = _sizes(config)
    parameters = dict(_unit("", ENDS, sizes, frozenset(), TEXT))
    for layer in range(config.n_layers):
        parameters.update(_unit(f"layers.{layer}.", LAYER, _with_engram(config, layer, sizes), _roles(config, layer)))
    ties = {}
    if draft_layers:
        sizes |= {
            "n_routed_experts": draft_experts,
            "dspark_markov_rank": counts["dspark_markov_rank"],
            "dim+markov": config.dim + counts["dspark_markov_rank"],
            "target_features": len(mapping.get("dspark_target_layer_ids") or ()) * config.dim,
        }
        for layer in range(draft_layers):
            roles = {"shared-expert"} if config.n_shared_experts else set()
            roles |= {"first-draft"} if layer == 0 else set()
            roles |= {"last-draft"} if layer == draft_layers - 1 else set()
            rules = (*LAYER, *DRAFT_ENDS)
            parameters.update(_unit(f"mtp.{layer}.", rules, sizes, frozenset(roles), DRAFT))
            ties.update({f"mtp.{layer}.{name}": shared for name, shared in TIES.items()})
    if vision_layers:
        sizes |= _vision_sizes(counts)
        parameters.update(_unit("", VISION_ENDS, sizes, frozenset(), VISION))
        for block in range(vision_layers):
            parameters.update(_unit(f"vision.blocks.{block}.", VISION_BLOCK, sizes, frozenset(), VISION))
    return Layout(config, parameters, ties)


def _sane(mapping: Mapping[str, Any], origin: str) -> ModelConfig:
    """The text model's configuration, refused where a size is none: the file is untrusted."""
    try:
        config = ModelConfig.from_mapping(mapping, origin)
    except OverflowError as error:  # JSON may hold an infinity.
        raise FixtureError(f"{origin}: holds a number without bound") from error
    for name, value in vars(config).items():
        if (
            name not in ("candidate_source_layer", "image_token_id")
            and isinstance(value, int)
            and not 0 <= value < MAX_SIZE
        ):
            raise FixtureError(f"{origin}: key {name!r} is {value}, not a size")
    return config


def _unit(
    prefix: str, rules: tuple[Rule, ...], sizes: Mapping[str, int], roles: frozenset[str], part: str = TEXT
) -> Iterator[tuple[str, Parameter]]:
    for rule in rules:
        if not rule.needs <= roles:
            continue
        shape = tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in rule.axes.split())
        parameter = Parameter(shape, STORAGES[rule.storage], part)
        if "*" not in rule.name:
            yield prefix + rule.name, parameter
            continue
        for expert in range(sizes["n_routed_experts"]):
            yield prefix + rule.name.replace("*", str(expert)), parameter


def _roles(config: ModelConfig, layer: int) -> frozenset[str]:
    compresses = config.compresses(layer)
    roles = {
        "compresses": compresses,
        "pools": compresses and config.ratio(layer) > 1,
        "single": compresses and config.ratio(layer) == 1,
        "indexes": config.indexes(layer),
        "engram": layer in config.engram_layer_ids,
        "shared-expert": config.n_shared_experts > 0,
    }
    return frozenset(name for name, holds in roles.items() if holds)


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The axes that the tables name: fields of the configuration, and products of them."""
    sizes = {name: value for name, value in vars(config).items() if isinstance(value, int)}
    return sizes | {
        "heads·head_dim": config.n_heads * config.head_dim,
        "groups·o_lora_rank": config.o_groups * config.o_lora_rank,
        "group_features": config.n_heads * config.head_dim // max(1, config.o_groups),
        "index_heads·index_head_dim": config.index_n_heads * config.index_head_dim,
        "coefficients": config.coefficient_rows,
        "streams·dim": config.hc_mult * config.dim,
        "streams·dim+dim": (config.hc_mult + 1) * config.dim,
        "shared_width": config.n_shared_experts * config.moe_inter_dim,
        "engram_features": config.engram_columns * config.engram_head_dim,
    }


def _with_engram(config: ModelConfig, layer: int, sizes: dict[str, int]) -> dict[str, int]:
    if layer not in config.engram_layer_ids:
        return sizes
    return {**sizes, "engram_rows": config.engram_num_embeddings[config.engram_layer_ids.index(layer)]}


def _vision_sizes(counts: _Counts) -> dict[str, int]:
    dim, inter = counts["vision_dim"], counts["vision_inter_dim"]
    return {
        "vision_dim": dim,
        "3·vision_dim": 3 * dim,
        "vision_inter_dim": inter,
        "2·vision_inter": 2 * inter,
        "patch_features": 3 * counts["vision_patch_size"] ** 2,
        "aligner_features": dim * counts["vision_downsample_ratio"] ** 2,
    }


class _Counts:
    """Whole numbers of the configuration that the text model does not read."""

    def __init__(self, mapping: Mapping[str, Any], origin: str) -> None:
        self._mapping = mapping
        self._origin = origin

    def __getitem__(self, key: str) -> int:
        value = self._mapping.get(key)
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise FixtureError(f"{self._origin}: key {key!r} must be a count")
        return value
