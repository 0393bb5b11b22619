"""mlx-lm as an implementation under test: each method runs mlx-lm's own code on the suite's arguments.

Where mlx-lm does several components in one function, that function runs with stand-ins before the component and ends
behind it, so that nothing of its arithmetic is written again here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conformance.interface import Array, Config, Description, Reading, Stateful, Unsupported, Weights
from conformance.ports.mlx_lm import indexing
from conformance.ports.mlx_lm.arrays import Given, mx, repair_cpu_backend, to_mlx, to_torch
from conformance.ports.mlx_lm.indexing import one_position
from conformance.ports.mlx_lm.loading import Cache, D, arguments
from conformance.ports.mlx_lm.operations import Operations, bare_attention, by_token, make_sampler, offsets
from conformance.ports.mlx_lm.stateful import (
    MlxAttention,
    MlxBlock,
    MlxCompressor,
    MlxModel,
    MlxStack,
    Runtime,
    refuse_images,
    ring,
)
from conformance.ports.watching import replaced, seen, stop

tree_flatten: Any = importlib.import_module("mlx.utils").tree_flatten

DEVIATIONS = (
    "no-activation-quantiser",
    "fp32-index-scores",
    "fp32-probabilities",
    "norm-rounded-before-weight",
    "routing-weight-after-expert",
    "no-engram",
)
"""How mlx-lm is written: its own words for the first and the last, its code for the others; RMSNorm is mlx's kernel.

mlx-lm refuses a configuration with Engram, so the adapter leaves Engram out of what it hands over.
"""


class MlxLm(Operations):
    """mlx-lm's DeepSeek-V4.1 on mlx's default device."""

    def __init__(self) -> None:
        self._repaired = repair_cpu_backend()
        self._loaded = Cache()

    def describe(self) -> Description:
        """Versions, device and what the adapter adds."""
        conventions = {
            "weights": "loaded by mlx_lm.utils.load_model from a folder in the checkpoint's names and types",
            "selected positions": "sorted by the adapter; mlx-lm keeps the order of its partition",
            "window": "rows in order, shown as a ring by the adapter",
            "image tokens": "not in mlx-lm",
        }
        if self._repaired:
            conventions["matrix products"] = "fp32 on the CPU, rounded once, where mlx has no bf16 or sums in bf16"
        return Description(
            name="mlx-lm",
            version=f"{importlib.metadata.version('mlx-lm')} (mlx {importlib.metadata.version('mlx')})",
            device=str(mx.default_device().type).rpartition(".")[2],
            homepage="github.com/ml-explore/mlx-lm",
            conventions=conventions,
            deviations=DEVIATIONS,
        )

    # window ---------------------------------------------------------------------------------------------------------

    def window_rows(self, config: Config, layer_id: int, weights: Weights, x: Array, positions: Array) -> Array:
        """The rows that an attention puts into its cache."""
        attention = self._attention(config, layer_id, weights)
        cache = D.LayerCache(config["window_size"])
        cache.update_window = stop
        rows = seen(
            lambda: attention(by_token(x), start_pos=offsets(positions), window_idx=None, cache=cache, shared={})
        )
        return to_torch(rows).reshape(*x.shape[:2], -1)

    def window_indices(self, config: Config, start_pos: int, length: int) -> Array:
        """Rows of the ordered window, told as slots of a ring in decode."""
        window = config["window_size"]
        previous = min(start_pos, window)
        listed = to_torch(D._window_indices(previous=previous, length=length, window=window)).to(torch.int32)
        if start_pos == 0:
            return listed
        slots = torch.where(listed < 0, -1, (listed + start_pos - previous) % window)
        return torch.nn.functional.pad(slots, (0, window - slots.shape[1]), value=-1)

    def window_update(self, config: Config, ring: Array, rows: Array, start_pos: int) -> Array:
        """Rows appended to a cache that holds the ring's rows in order."""
        window = config["window_size"]
        cache = D.LayerCache(window)
        before = torch.arange(max(0, start_pos - window), start_pos)
        if len(before):
            cache.window = to_mlx(ring[:, before % window])
        cache.offset = start_pos
        cache.update_window(to_mlx(rows))
        return self._ring(cache, ring)

    def _ring(self, cache: Any, like: torch.Tensor) -> torch.Tensor:
        return ring(cache, like.shape[0], like.shape[-1])

    # compressor -----------------------------------------------------------------------------------------------------

    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        """The rows that an attention makes of a latent."""
        cache = _compress(bare_attention(config, layer_id), latent, positions)
        return to_torch(cache.compress_kv).reshape(latent.shape)

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """A compressor with its carry."""
        return MlxCompressor(self._attention(config, layer_id, weights).compressor, config["window_size"])

    # indexer, candidates --------------------------------------------------------------------------------------------

    def index_keys(self, config: Config, layer_id: int, weights: Weights, latent: Array, positions: Array) -> Array:
        """The keys that an attention makes of a latent."""
        cache = _compress(self._attention(config, layer_id, weights), latent, positions)
        return to_torch(cache.index_k).reshape(*latent.shape[:2], -1)

    def index_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """The queries inside the indexer."""
        attention = self._attention(config, layer_id, weights)
        found = indexing.queries(attention.indexer, attention.rope, by_token(q_latent), offsets(positions))
        return to_torch(found).reshape(*q_latent.shape[:2], *found.shape[2:])

    def index_weights(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Not there to be seen."""
        raise Unsupported("mlx-lm scales weights by the heads and scores by the width, both in fp32: no such value")

    def index_scores(
        self,
        config: Config,
        layer_id: int,
        queries: Array,
        head_weights: Array,
        keys: Array,
        positions: Array,
        candidates: Array | None,
    ) -> Array:
        """The scores that go to the indexer's top-k; call by call of consecutive positions."""
        indexer = bare_attention(config, layer_id).indexer
        mask = None if candidates is None else to_mlx(candidates)
        parts = []
        for span in _runs(positions):
            part = None if mask is None else mask[:, span]
            start = one_position(positions[:, span.start])
            found = indexing.scores(
                indexer, to_mlx(queries[:, span]), to_mlx(head_weights[:, span]), to_mlx(keys), start, part
            )
            parts.append(to_torch(found))
        return torch.cat(parts, dim=1)

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """What the indexer keeps of scores."""
        return indexing.choices(bare_attention(config, layer_id).indexer, scores, positions)[0]

    def candidate_mask(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """The candidates that the indexer of the source publishes."""
        return indexing.choices(bare_attention(config, layer_id).indexer, scores, positions)[1]

    # sparse_attention, attention ------------------------------------------------------------------------------------

    def query_latent(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Projection and norm."""
        attention = self._attention(config, layer_id, weights)
        return to_torch(attention.q_a_norm(attention.q_a_proj(to_mlx(x))))

    def attention_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """The queries of an attention over the window alone, given their latent."""
        attention = self._attention(config, layer_id, weights)
        x = mx.zeros((positions.numel(), 1, config["dim"]), mx.bfloat16)
        with replaced(attention, ratio=0, q_a_norm=Given(by_token(q_latent))), replaced(D, _sparse_attention=stop):
            found = seen(lambda: _window_only(attention, x, positions))
        return to_torch(found).reshape(*q_latent.shape[:2], *found.shape[2:])

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        """The end of an attention over the window alone, given the weighted sums."""
        attention = self._attention(config, layer_id, weights)
        x = mx.zeros((positions.numel(), 1, config["dim"]), mx.bfloat16)
        with replaced(attention, ratio=0), replaced(D, _sparse_attention=lambda *_, **__: by_token(o)):
            return to_torch(_window_only(attention, x, positions)).reshape(*o.shape[:2], -1)

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """One attention with its cache."""
        attention = self._attention(config, layer_id, weights)
        return MlxAttention(attention, layer_id, runtime, batch_size, config["window_size"])

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """The dictionary that layers share."""
        if reading != "intended":
            raise Unsupported("mlx-lm: each layer scores its own source's keys")
        return Runtime()

    # gate, experts, moe ---------------------------------------------------------------------------------------------

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        """The router."""
        refuse_images(image_mask)
        router = D.Router(arguments(config))
        router.weight, router.e_score_correction_bias = to_mlx(weights["weight"]), to_mlx(weights["bias"])
        chosen, routing_weights = router(to_mlx(x))
        return to_torch(routing_weights), to_torch(chosen.astype(mx.int32))

    def expert(self, config: Config, weights: Weights, x: Array, routing_weight: Array | None) -> Array:
        """One routed expert through the experts' layer, or the shared one."""
        if weights["w1.weight"].dtype != torch.uint8:
            if routing_weight is not None:
                raise Unsupported("mlx-lm: the shared expert has no routing weight")
            prefix = "layers.0.ffn.shared_experts."
            shared = self._loaded.get(config, weights, prefix, num_hidden_layers=1).layer(0).mlp.shared_experts
            return to_torch(shared(to_mlx(x)))
        changes = {"num_hidden_layers": 1, "n_routed_experts": 1}
        experts = self._loaded.get(config, weights, "layers.0.ffn.experts.0.", **changes).layer(0).mlp.experts
        first = mx.zeros((x.shape[0], 1), mx.int32)
        if routing_weight is None:
            return to_torch(experts.switch_mlp(to_mlx(x), first)[:, 0])
        # The port sums unrounded products over experts; one expert's result is rounded as the sum would be.
        return to_torch(experts(to_mlx(x), first, to_mlx(routing_weight)[:, None]).astype(mx.bfloat16))

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """A mixture whose gate answers with the given choice."""
        listed = sorted({int(name.split(".")[1]) for name in weights if name.startswith("experts.")})
        if listed != list(range(config["n_routed_experts"])):
            raise Unsupported("mlx-lm loads all experts of a layer or none")
        mixture = self._mixture(config, weights)
        with replaced(mixture, gate=Given((to_mlx(expert_indices), to_mlx(routing_weights)))):
            return to_torch(mixture(to_mlx(x)))

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """A mixture."""
        refuse_images(image_mask)
        return to_torch(self._mixture(config, weights)(to_mlx(x)))

    def _mixture(self, config: Config, weights: Weights) -> Any:
        return self._loaded.get(config, weights, "layers.0.ffn.", num_hidden_layers=1).layer(0).mlp

    # block, stack, model, sampling ----------------------------------------------------------------------------------

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One decoder layer."""
        layer = self._loaded.get(config, weights, f"layers.{layer_id}.").layer(layer_id)
        return MlxBlock(layer, layer_id, runtime, batch_size, config["window_size"])

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Consecutive decoder layers of the loaded model."""
        loaded = self._loaded.get(config, weights, "")
        window = config["window_size"]
        return MlxStack([MlxBlock(loaded.layer(layer), layer, runtime, batch_size, window) for layer in layer_ids])

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The loaded model."""
        return MlxModel(self._loaded.get(config, weights, "").model, make_sampler(temp=0.0), batch_size)

    def head(self, config: Config, weights: Weights, h: Array, pre: Array) -> tuple[Array, Array]:
        """Collapse, norm and head of the loaded model."""
        model = self._loaded.get(config, weights, "").model
        final = model.model.norm(D._collapse(to_mlx(h), to_mlx(pre)))
        return to_torch(final), to_torch(model.lm_head(final))

    def parameter_counts(self, config: Config) -> Mapping[str, int]:
        """Of the model as constructed, of which nothing is computed."""
        counts = {}
        for number, layer in enumerate(D.Model(arguments(config)).layers):
            counts["stream"], counts["norm"] = _count(layer.attn_hc), _count(layer.input_layernorm)
            counts[f"attention/{number}"], counts[f"moe/{number}"] = _count(layer.self_attn), _count(layer.mlp)
            counts[f"layer/{number}"] = _count(layer)
        return counts

    def _attention(self, config: Config, layer_id: int, weights: Weights) -> Any:
        return self._loaded.get(config, weights, f"layers.{layer_id}.attn.").layer(layer_id).self_attn


def _window_only(attention: Any, x: Any, positions: torch.Tensor) -> Any:
    nothing = mx.zeros((x.shape[0], 1, 1), mx.int32)
    cache = D.LayerCache(1)
    return attention(x, start_pos=offsets(positions), window_idx=nothing, cache=cache, shared={})


def _compress(attention: Any, latent: torch.Tensor, positions: torch.Tensor) -> Any:
    """The cache of an attention that has compressed one group a batch entry."""
    if bool((positions % attention.ratio).any()):
        raise Unsupported("mlx-lm: a group begins at a multiple of the ratio")
    cache = D.LayerCache(1)
    given = Given((by_token(latent), offsets(positions // attention.ratio)))
    with replaced(attention, compressor=given):
        attention._compress(None, start_pos=0, cache=cache, shared={})
    return cache


def _runs(positions: torch.Tensor) -> list[slice]:
    """Spans in which positions [B,T] are consecutive."""
    breaks = (positions.diff(dim=1) != 1).any(dim=0).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), positions.shape[1]]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def _count(module: Any) -> int:
    return sum(parameter.size for _, parameter in tree_flatten(module.parameters()))
