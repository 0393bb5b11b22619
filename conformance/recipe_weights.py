"""The weights of a configuration under checkpoint names, made from the recipe when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.lazy import LazyTensors
from conformance.recipe import RecipeScale, RecipeTensor
from conformance.tensors import Tensor

Shape = tuple[int, ...]
Ints = npt.NDArray[np.int64]

GAINS: Mapping[str, float] = {
    "wq_a": 1.6,
    "wq_b": 1.0,
    "wkv": 1.8,
    "wo_a": 1.6,
    "wo_b": 1.9,
    "gate": 2.9,
    "w1": 1.8,
    "w3": 1.8,
    "w2": 1.2,
}
"""By the last component of the name (`.weight` aside); 1 elsewhere."""


class Declared(NamedTuple):
    """Shape and kind of one parameter."""

    shape: Shape
    kind: str


def attention(config: ModelConfig, layer: int) -> dict[str, Declared]:
    """Parameters of one attention by its role (numerics.md 6.1), relative to `attn.`."""
    ratio, heads = config.ratio(layer), config.n_heads * config.head_dim
    low_rank = config.o_groups * config.o_lora_rank
    table = {
        "attn_sink": Declared((config.n_heads,), "sink"),
        "wq_a.weight": Declared((config.q_lora_rank, config.dim), "fp8"),
        "q_norm.weight": Declared((config.q_lora_rank,), "norm"),
        "wq_b.weight": Declared((heads, config.q_lora_rank), "fp8"),
        "wkv.weight": Declared((config.head_dim, config.dim), "fp8"),
        "kv_norm.weight": Declared((config.head_dim,), "norm"),
        "wo_a.weight": Declared((low_rank, heads // config.o_groups), "bf16"),
        "wo_b.weight": Declared((config.dim, low_rank), "fp8"),
    }
    if config.compresses(layer):
        matrix = Declared((config.head_dim, config.dim), "bf16" if ratio == 1 else "fp32")
        table["compressor.wkv.weight"] = matrix
        if ratio > 1:
            table["compressor.wgate.weight"] = matrix
        table["compressor.norm.weight"] = Declared((config.head_dim,), "norm")
        table["indexer.wk.weight"] = Declared((config.index_head_dim, config.head_dim), "bf16")
        table["indexer.k_norm.weight"] = Declared((config.index_head_dim,), "norm")
    if config.indexes(layer):
        queries = config.index_n_heads * config.index_head_dim
        table["indexer.wq_b.weight"] = Declared((queries, config.q_lora_rank), "fp8")
        table["indexer.weights_proj.weight"] = Declared((config.index_n_heads, config.dim), "bf16")
    return table


def expert(config: ModelConfig, kind: str, width: int) -> dict[str, Declared]:
    """The three matrices of an expert of hidden width `width`."""
    return {
        "w1.weight": Declared((width, config.dim), kind),
        "w2.weight": Declared((config.dim, width), kind),
        "w3.weight": Declared((width, config.dim), kind),
    }


def mixture(config: ModelConfig) -> dict[str, Declared]:
    """Gate, routed and shared experts, relative to `ffn.`."""
    table = {
        # fp32 in the recipe, rounded to bf16: the type in which the checkpoint holds it.
        "gate.weight": Declared((config.n_routed_experts, config.dim), "bf16"),
        "gate.bias": Declared((config.n_routed_experts,), "small"),
        "gate.bias_vl": Declared((config.n_routed_experts,), "small"),
    }
    routed = expert(config, "fp4", config.moe_inter_dim)
    for index in range(config.n_routed_experts):
        table |= _under(f"experts.{index}.", routed)
    shared = expert(config, "fp8", config.n_shared_experts * config.moe_inter_dim)
    return table | _under("shared_experts.", shared)


def engram(config: ModelConfig, layer: int) -> dict[str, Declared]:
    """Table and projection of an Engram layer, relative to `engram.`."""
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    features = config.engram_columns * config.engram_head_dim
    per_stream = Declared((config.hc_mult, config.dim), "norm")
    return {
        "embed.weight": Declared((rows, config.engram_head_dim), "fp8row"),
        "wkv.weight": Declared(((config.hc_mult + 1) * config.dim, features), "fp8"),
        "q_weight": per_stream,
        "k_weight": per_stream,
    }


def block(config: ModelConfig, layer: int) -> dict[str, Declared]:
    """Everything of one layer, relative to `layers.{layer}.`."""
    table = {}
    for sublayer in ("attn", "ffn"):
        table[f"hc_{sublayer}_fn"] = Declared((config.coefficient_rows, config.hc_mult * config.dim), "fp32")
        table[f"hc_{sublayer}_base"] = Declared((config.coefficient_rows,), "small")
        table[f"hc_{sublayer}_scale"] = Declared((3,), "scale3")
        table[f"{sublayer}_norm.weight"] = Declared((config.dim,), "norm")
    table |= _under("attn.", attention(config, layer)) | _under("ffn.", mixture(config))
    if layer in config.engram_layer_ids:
        table |= _under("engram.", engram(config, layer))
    return table


def _under(prefix: str, table: Mapping[str, Declared]) -> dict[str, Declared]:
    return {prefix + name: declared for name, declared in table.items()}


class RecipeWeights(LazyTensors):
    """Parameters of some layers under checkpoint names; each look-up makes the tensor anew and keeps nothing.

    What a name stands for is known for all layers.  Iteration lists the names in `listed`, those that a case needs, so
    that whoever writes the mapping to a file does not write 384 experts of which six are used.
    """

    def __init__(self, config: ModelConfig, seed: int, listed: Iterable[str] | None = None) -> None:
        self._config, self._seed = config, seed
        self._declared: dict[int, dict[str, Declared]] = {}
        self._listed = None if listed is None else tuple(listed)

    def listing(self, names: Iterable[str]) -> RecipeWeights:
        """The same weights with only these names listed; a quantised weight brings its scale."""
        listed = list(names)
        scales = [_scale_name(name) for name in listed if self.declaration(name).quantized]
        return RecipeWeights(self._config, self._seed, [*listed, *scales])

    def declaration(self, name: str) -> RecipeTensor:
        """The parameter of that name, not made yet: for its rows, its elements, its scale.

        Raises:
            KeyError: no parameter of the configuration, or one that the recipe does not cover.
        """
        match = re.fullmatch(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)", name)
        if match is None or int(match[1]) >= self._config.n_layers:
            raise KeyError(name)
        declared = self._layer(int(match[1]))[match[2]]
        owner = match[2].removesuffix(".weight").rpartition(".")[2]
        return RecipeTensor(name, declared.kind, declared.shape, self._seed, GAINS.get(owner, 1.0))

    def _layer(self, layer: int) -> dict[str, Declared]:
        if layer not in self._declared:
            self._declared[layer] = block(self._config, layer)
        return self._declared[layer]

    def recipe(self, name: str) -> RecipeTensor | RecipeScale:
        """How the parameter, or the scale, of that name is made.

        Raises:
            KeyError: as `declaration`.
        """
        if name.endswith(".scale"):
            try:
                return self.declaration(name.removesuffix("scale") + "weight").scale
            except ValueError:
                raise KeyError(name) from None
        return self.declaration(name)

    def __getitem__(self, name: str) -> Tensor:
        return self.recipe(name).tensor()

    def rows(self, name: str, rows: Ints) -> Tensor:
        """Rows [...] of a matrix or of its scales, without the rest: [..., K]."""
        return self.recipe(name).rows(rows)

    def __contains__(self, name: object) -> bool:
        try:
            self.recipe(str(name))
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        if self._listed is not None:
            yield from self._listed
            return
        for layer in range(self._config.n_layers):
            for name in self._layer(layer):
                yield f"layers.{layer}.{name}"
                if self.declaration(f"layers.{layer}.{name}").quantized:
                    yield _scale_name(f"layers.{layer}.{name}")

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"
