"""Compressor and indexer: SGLang's modules with the suite's weights, its scoring of a request, its candidate blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from conformance.interface import Array, Config, Stateful, Unsupported, Weights
from conformance.ports.sglang.operations import Operations, norm, table
from conformance.ports.sglang.parts import INDEXER, LAYERS, SGLANG, SPARSE

MODULES = f"{LAYERS}.attention.dsv4.dsv41_sparse"
BLOCKS = f"{SPARSE}.candidate_blocks"


class Indexing(Operations):
    """What layers that compress do before they attend."""

    # compressor -----------------------------------------------------------------------------------------------------

    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        """The fused kernel, which rotates and quantises."""
        fused = SGLANG.function(f"{SPARSE}.fp4_rope_fake_quant", "rope_tail_fake_quant_fp4")
        rows = latent.reshape(-1, latent.shape[-1])
        turns = table(config, layer_id, positions.reshape(-1))
        result: Array = fused(rows, turns, config["rope_head_dim"], compressed_kv=True).reshape(latent.shape)
        return result

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """SGLang's projections, pooling and norm; which tokens make a group is the adapter's doing."""
        ratio = config["compress_ratios"][layer_id]
        if ratio not in (1, 2):
            raise Unsupported("sglang: ratios 1 and 2")
        return _Compressor(_compressor(config, ratio, weights), ratio, batch_size, config["head_dim"])

    # indexer --------------------------------------------------------------------------------------------------------

    def index_keys(self, config: Config, layer_id: int, weights: Weights, latent: Array, positions: Array) -> Array:
        """The torch form."""
        indexer = _indexer(config)
        indexer.wk = _linear(weights["indexer.wk.weight"])
        indexer.k_norm = norm(weights["indexer.k_norm.weight"], config["norm_eps"])
        rows = latent.reshape(-1, latent.shape[-1])
        keys = indexer.index_keys(rows, table(config, layer_id, positions.reshape(-1)))
        result: Array = keys.reshape(*latent.shape[:-1], -1)
        return result

    def index_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """The torch form behind SGLang's FP8 linear."""
        indexer = _indexer(config)
        indexer.wq_b = _given(
            lambda x: self.linear_fp8(x, weights["indexer.wq_b.weight"], weights["indexer.wq_b.scale"])
        )
        tokens = q_latent.reshape(-1, q_latent.shape[-1])
        queries = indexer.queries(tokens, table(config, layer_id, positions.reshape(-1)))
        result: Array = queries.reshape(*q_latent.shape[:-1], *queries.shape[1:])
        return result

    def index_weights(self, config: Config, layer_id: int, weights: Weights, x: Array) -> Array:
        """Its head weights; the projection is an ordinary linear."""
        indexer = _indexer(config)
        indexer.weights_proj = _given(_linear(weights["indexer.weights_proj.weight"]))
        result: Array = indexer.head_weights(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
        return result

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
        """The scores of a request's rows, of which invisible ones are masked."""
        if candidates is not None:
            raise Unsupported("sglang: chooses among the positions of candidate blocks, and masks no scores")
        score, request_of = SGLANG.function(INDEXER, "_score_chunks"), SGLANG.function(INDEXER, "RequestScores")
        indexer = _indexer(config)
        rows = torch.arange(queries.shape[1])
        columns = torch.arange(keys.shape[1])
        results = []
        for q, w, k, at in zip(queries, head_weights, keys, positions, strict=True):
            lens = _visible(config, layer_id, at)
            request = request_of(lc=len(k), k=len(k), columns=columns, tok=rows, lens=lens, slots=columns)
            chunks = score(indexer=indexer, q=q, weights=w, index_k=k, request=request)
            results.append(torch.cat([chunk.scores for chunk in chunks]))
        return torch.stack(results)

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Its choice among blocks, all of which are candidates; sorted as its caller does."""
        choose = SGLANG.function(BLOCKS, "topk_among_blocks")
        width, size = scores.shape[-1], config["candidate_block_size"]
        kept = min(config["index_topk"], width)
        if not width:
            return torch.empty(scores.shape, dtype=torch.int32)
        rows = scores.reshape(-1, width)
        blocks = torch.arange(-(-width // size), dtype=torch.int32).expand(len(rows), -1)
        lens = _visible(config, layer_id, positions).reshape(-1)
        chosen = choose(rows, lens, blocks, kept, block_size=size)
        ordered = chosen.masked_fill(chosen < 0, width).sort(dim=-1).values
        result: Array = ordered.masked_fill(ordered == width, -1).to(torch.int32).reshape(*scores.shape[:-1], kept)
        return result

    # candidates -----------------------------------------------------------------------------------------------------

    def candidate_mask(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        """Its choice of blocks, and the mask that its Hopper path makes of them."""
        choose, mask = (
            SGLANG.function(BLOCKS, "select_candidate_block_ids"),
            SGLANG.function(BLOCKS, "candidate_block_mask"),
        )
        width, size = scores.shape[-1], config["candidate_block_size"]
        rows = scores.reshape(-1, width)
        lens = _visible(config, layer_id, positions).reshape(-1, 1)
        blocks = choose(rows, lens, topk_blocks=config["candidate_topk_blocks"], block_size=size)
        result: Array = mask(blocks, width, size).reshape(scores.shape)
        return result


class _Compressor(Stateful):
    """A compressor and the projections of each request's unfinished group."""

    def __init__(self, module: Any, ratio: int, batch_size: int, width: int) -> None:
        self._module, self._ratio = module, ratio
        self._carry = {
            "carry_kv": torch.zeros(batch_size, ratio, width),
            "carry_score": torch.full((batch_size, ratio, width), -torch.inf),
        }

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`latent` where groups complete, zeros for a request that completes fewer than another."""
        x, starts = inputs["x"], inputs["start_pos"]
        batch, length, _ = x.shape
        projected = self._module.project(x.reshape(batch * length, -1))
        if self._ratio == 1:
            return {"latent": self._module.finish(projected[0]).reshape(batch, length, -1)}
        kv, score = (part.reshape(batch, length, -1) for part in projected)
        latents = [self._request(b, int(starts[b]), kv[b], score[b]) for b in range(batch)]
        latent = torch.nn.utils.rnn.pad_sequence(latents, batch_first=True)
        return {"latent": latent} if latent.shape[1] else {}

    def _request(self, request: int, start: int, kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """Latents of the groups that end in one request's tokens."""
        held = start % self._ratio
        kept = {"carry_kv": kv, "carry_score": score}
        joined = {name: torch.cat([self._carry[name][request, :held], part]) for name, part in kept.items()}
        whole = (held + len(kv)) // self._ratio
        for name, part in joined.items():
            waiting = part[whole * self._ratio :]
            self._carry[name][request, : len(waiting)] = waiting
        groups = [torch.unflatten(part[: whole * self._ratio], 0, (whole, self._ratio)) for part in joined.values()]
        latent: torch.Tensor = self._module.finish(self._module.pool_pairs(*groups))
        return latent

    def state(self) -> Mapping[str, Array]:
        """The unfinished groups."""
        return {name: part.clone() for name, part in self._carry.items()} if self._ratio > 1 else {}


def _compressor(config: Config, ratio: int, weights: Weights) -> Any:
    module = SGLANG.function(MODULES, "DeepseekV41Compressor")(1, 1, ratio, config["norm_eps"], fused_compress=False)
    module.norm = norm(weights["compressor.norm.weight"], config["norm_eps"])
    names = ("wkv",) if ratio == 1 else ("wkv", "wgate")
    for name in names:
        setattr(module, name, _linear(weights[f"compressor.{name}.weight"]))
    return module


def _indexer(config: Config) -> Any:
    """An indexer without projections: its own constructor makes them for a GPU."""
    kind = SGLANG.function(MODULES, "DeepseekV41Indexer")
    indexer = kind.__new__(kind)
    torch.nn.Module.__init__(indexer)
    indexer.n_heads = indexer.n_local_heads = config["index_n_heads"]
    indexer.index_head_dim, indexer.rope_head_dim = config["index_head_dim"], config["rope_head_dim"]
    indexer.softmax_scale = config["index_head_dim"] ** -0.5
    indexer.weights_proj_small_max_m = -1
    return indexer


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    """torch's linear, which these projections are."""
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def _given(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    """A linear that returns what SGLang's layers return: the product, and no bias."""
    return lambda x: (function(x), None)


def _visible(config: Config, layer_id: int, positions: torch.Tensor) -> torch.Tensor:
    """How many compressed positions each query sees, as SGLang's callers compute it."""
    visible: torch.Tensor = (positions + 1) // config["compress_ratios"][layer_id]
    return visible
