"""What the numbers of a configuration must satisfy, alone and together: a set that breaks a rule is damaged.

Without these rules the first to notice would be the implementation, and it would be blamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.config import ModelConfig

LEAST: Mapping[str, float] = {
    **dict.fromkeys(("vocab_size", "dim", "moe_inter_dim", "n_layers", "n_heads", "n_routed_experts"), 1),
    **dict.fromkeys(("n_activated_experts", "q_lora_rank", "head_dim", "o_groups", "o_lora_rank", "window_size"), 1),
    **dict.fromkeys(("hc_mult", "hc_sinkhorn_iters", "original_seq_len"), 1),
    "rope_head_dim": 2,
    **dict.fromkeys(("n_shared_experts", "n_mtp_layers", "vision_n_layers", "dspark_block_size"), 0),
    **dict.fromkeys(("norm_eps", "hc_eps"), 0),
}
ABOVE: Mapping[str, float] = {
    # The logarithm of a base divides.
    **dict.fromkeys(("rope_theta", "compress_rope_theta"), 1),
    **dict.fromkeys(("rope_factor", "beta_fast", "beta_slow", "swiglu_limit"), 0),
}
MOST: Mapping[str, float] = {
    "vocab_size": 1 << 24,
    "window_size": 1 << 20,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "index_topk": 1 << 24,
    "candidate_topk_blocks": 1 << 24,
    "candidate_block_size": 1 << 16,
    "engram_max_ngram_size": 64,
    "engram_n_heads": 1024,
    "dspark_block_size": 1024,
}
"""Where nothing else in a set would contradict a number that only takes memory or time; far beyond any model."""
LARGEST_RATIO = 1 << 12
LARGEST_TABLE = 1 << 40

INDEXER = {"index_n_heads": 1, "index_head_dim": 1, "index_topk": 1}
CANDIDATES = {"candidate_topk_blocks": 1, "candidate_block_size": 1}
ENGRAM = {
    "engram_vocab_size": 1,
    "engram_n_heads": 1,
    "engram_head_dim": 1,
    "engram_max_ngram_size": 2,
    "engram_compressed_vocab_size": 1,
}
VISION = {f"vision_{name}": 1 for name in ("dim", "n_heads", "inter_dim", "patch_size", "downsample_ratio")}
DRAFT = {"n_mtp_layers": 1, "dspark_n_routed_experts": 1, "dspark_n_activated_experts": 1}


def problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with a configuration, each naming its key; the first is the one to show."""
    yield from _below(config, LEAST)
    for name, limit in ABOVE.items():
        if not getattr(config, name) > limit:
            yield f"key {name!r} is {getattr(config, name)}, must be above {limit:g}"
    for name, most in MOST.items():
        if getattr(config, name) > most:
            yield f"key {name!r} is {getattr(config, name)}, must be at most {most}"
    yield from _sizes(config)
    yield from _sources(config)
    yield from _candidates(config)
    yield from _engram(config)
    yield from _vision(config)
    yield from _drafts(config)


def _below(config: ModelConfig, least: Mapping[str, float], condition: str = "") -> Iterator[str]:
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            yield f"key {name!r} is {getattr(config, name)}, must be at least {smallest:g}{condition}"


def _sizes(config: ModelConfig) -> Iterator[str]:
    if config.n_activated_experts > config.n_routed_experts:
        yield f"key 'n_activated_experts' is {config.n_activated_experts}, of {config.n_routed_experts} routed experts"
    if config.rope_head_dim % 2:
        yield f"key 'rope_head_dim' is {config.rope_head_dim}, must be even"
    if config.rope_head_dim > config.head_dim:
        yield f"key 'head_dim' is {config.head_dim}, below rope_head_dim {config.rope_head_dim}"
    if config.n_heads % config.o_groups:
        yield f"key 'n_heads' is {config.n_heads}, not a multiple of o_groups {config.o_groups}"


def _layer_ids(config: ModelConfig, name: str) -> Iterator[str]:
    layers: tuple[int, ...] = getattr(config, name)
    for layer in layers:
        if not 0 <= layer < config.n_layers:
            yield f"key {name!r} names layer {layer}, the model has {config.n_layers}"
    if list(layers) != sorted(set(layers)):
        yield f"key {name!r} must ascend without repetition"


def _sources(config: ModelConfig) -> Iterator[str]:
    if len(config.compress_ratios) < config.n_layers:
        yield f"key 'compress_ratios' has fewer entries than n_layers = {config.n_layers}"
    for ratio in config.compress_ratios:
        if not 0 <= ratio <= LARGEST_RATIO:
            yield f"key 'compress_ratios' holds {ratio}, a ratio is between 0 and {LARGEST_RATIO}"
    for name in ("kv_source_layers", "index_source_layers"):
        yield from _layer_ids(config, name)
        for layer in getattr(config, name):
            if not config.ratio(layer):
                yield f"key {name!r} names layer {layer}, whose entry in compress_ratios is 0"
    for layer in config.kv_source_layers:
        if layer not in config.index_source_layers:
            yield f"key 'index_source_layers' lacks layer {layer}, which kv_source_layers names"
    for layer in range(config.n_layers):
        if not config.ratio(layer):
            continue
        if not any(source <= layer for source in config.kv_source_layers):
            yield f"layer {layer} compresses but key 'kv_source_layers' has no source before it"
        source = config.kv_source(layer)
        if config.ratio(source) != config.ratio(layer):
            ratios = f"{config.ratio(layer)} for layer {layer} and {config.ratio(source)} for its source {source}"
            yield f"key 'compress_ratios' has {ratios}"
    if config.index_source_layers:
        yield from _below(config, INDEXER, " with index_source_layers")
        if config.rope_head_dim > config.index_head_dim:
            yield f"key 'index_head_dim' is {config.index_head_dim}, below rope_head_dim {config.rope_head_dim}"


def _candidates(config: ModelConfig) -> Iterator[str]:
    source = config.candidate_source_layer
    if source < 0:
        return
    if source not in config.index_source_layers:
        yield f"key 'candidate_source_layer' is {source}, which is not among index_source_layers"
    yield from _below(config, CANDIDATES, " with a candidate_source_layer")
    for layer in config.index_source_layers:
        if layer > source and config.kv_source(layer) != config.kv_source(source):
            yield f"key 'candidate_source_layer' is {source}, but layer {layer} scores other rows than it"


def _engram(config: ModelConfig) -> Iterator[str]:
    layers, tables = config.engram_layer_ids, config.engram_num_embeddings
    yield from _layer_ids(config, "engram_layer_ids")
    if len(tables) != len(layers):
        relation = "fewer" if len(tables) < len(layers) else "more"
        yield f"key 'engram_num_embeddings' has {relation} entries than 'engram_layer_ids'"
    if not layers:
        return
    yield from _below(config, ENGRAM, " with engram_layer_ids")
    for rows in tables:
        if not 1 <= rows < LARGEST_TABLE:
            yield f"key 'engram_num_embeddings' holds {rows}, which is no number of rows"
    if not 0 <= config.engram_pad_id < config.vocab_size:
        yield f"key 'engram_pad_id' is {config.engram_pad_id}, not in the vocabulary of {config.vocab_size}"


def _vision(config: ModelConfig) -> Iterator[str]:
    if not config.vision_n_layers:
        return
    yield from _below(config, VISION, " with vision_n_layers")
    if config.vision_dim % (4 * config.vision_n_heads):
        yield f"key 'vision_dim' is {config.vision_dim}, not a multiple of 4 vision_n_heads"


def _drafts(config: ModelConfig) -> Iterator[str]:
    for layer in config.dspark_target_layer_ids:
        if not 0 <= layer < config.n_layers:
            yield f"key 'dspark_target_layer_ids' names layer {layer}, the model has {config.n_layers}"
    if not config.dspark_block_size:
        return
    yield from _below(config, DRAFT, " with dspark_block_size")
    if config.dspark_n_activated_experts > config.dspark_n_routed_experts:
        chosen, routed = config.dspark_n_activated_experts, config.dspark_n_routed_experts
        yield f"key 'dspark_n_activated_experts' is {chosen}, of {routed} routed experts"
    if not config.dspark_target_layer_ids:
        yield "key 'dspark_target_layer_ids' is empty with dspark_block_size"
    if any(config.compress_ratios[config.n_layers :]):
        yield "key 'compress_ratios' has a ratio above 0 for a draft block"
    if not 0 <= config.dspark_noise_token_id < config.vocab_size:
        yield f"key 'dspark_noise_token_id' is {config.dspark_noise_token_id}, not in the vocabulary"
