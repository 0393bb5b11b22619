"""Tensor parallelism: the same results from ranks that each hold a part of the weights (numerics.md 12).

Every function is called by all ranks of the default process group with the same arguments, uses its own part of the
weights only, and returns the whole result on every rank.  Weights are handed over whole, as views cost nothing here; a
deployment keeps only what `own_part` takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed
from torch.nn import functional

from reference.attention import Attention
from reference.block import Block
from reference.config import Config
from reference.engram import engram_write
from reference.experts import expert
from reference.gate import gate
from reference.model import Model, collapse
from reference.parameters import Scoped, Weights
from reference.precision import to_bf16
from reference.quantize import FP8_GROUP, WEIGHT_TILE, dequantize_fp8_weight, fp8_weight, quantized_fp8
from reference.rotary import rotate
from reference.runtime import Runtime
from reference.sparse_attention import sparse_attention
from reference.stack import Stack


def own_part(count: int, multiple: int = 1) -> slice:
    """This rank's part of `count` things, which is not cut inside a `multiple`; it may be empty.

    Parts follow one another by rank and differ by one `multiple` at most.
    """
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    units = -(-count // multiple)
    shared, more = divmod(units, ranks)
    first = rank * shared + min(rank, more)
    last = first + shared + (1 if rank < more else 0)
    return slice(min(first * multiple, count), min(last * multiple, count))


def reduced(partial: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks, in the type of the arithmetic: partial sums are not rounded before they meet."""
    total = partial.clone()
    torch.distributed.all_reduce(total)
    return total


def gathered(part: torch.Tensor, own: slice, count: int, dim: int) -> torch.Tensor:
    """Each rank's part put where it belongs along `dim`: the whole tensor on every rank.

    A sum in which every element has one term: exact in any type, fp32 here.
    """
    shape = list(part.shape)
    shape[dim] = count
    whole = torch.zeros(shape, dtype=torch.float64 if part.dtype == torch.float64 else torch.float32)
    whole.narrow(dim, own.start, own.stop - own.start).copy_(part)
    torch.distributed.all_reduce(whole)
    return whole.to(part.dtype)


def embed(weight: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Embedding split by vocabulary: bf16 [V,D], int32 [B,T] -> bf16 [B,T,D].  Exact: one rank has the row."""
    own = own_part(weight.shape[0])
    return _own_rows(weight[own], input_ids.long() - own.start)


def _own_rows(part: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows of a table of which this rank holds `part`, by their place in it: the rows of all ranks put together."""
    held = (row >= 0) & (row < part.shape[0])
    found = torch.zeros(*row.shape, part.shape[1], dtype=torch.float32)
    found[held] = part[row[held]].to(torch.float32)
    torch.distributed.all_reduce(found)
    return found.to(part.dtype)


def head(
    config: Config, weights: Weights, h: torch.Tensor, pre: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head split by vocabulary; arguments and results as `reference.model.head`.  No sum is split."""
    final_norm = collapse(config, weights, h, pre, compute=compute)
    vocabulary = weights["head.weight"].shape[0]
    own = own_part(vocabulary)
    logits = functional.linear(final_norm.to(compute), weights["head.weight"][own].to(compute))
    return final_norm, gathered(logits, own, vocabulary, -1)


def _fp8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Q8 of x times a part of an FP8 weight, not rounded: bf16 [...,K] -> [...,N] of the arithmetic's type."""
    return functional.linear(quantized_fp8(x, compute=compute), fp8_weight(weight, scale, compute=compute))


def column_linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """FP8 linear split by output features: bf16 [...,K] -> bf16 [...,N].  No sum is split: the same bits."""
    own = own_part(weight.shape[0], WEIGHT_TILE)
    tiles = slice(own.start // WEIGHT_TILE, -(-own.stop // WEIGHT_TILE))
    if own.start == own.stop:
        part = torch.zeros(*x.shape[:-1], 0, dtype=torch.bfloat16)
    else:
        part = to_bf16(_fp8_product(x, weight[own], scale[tiles], compute))
    return gathered(part, own, weight.shape[0], -1)


def row_linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """FP8 linear split by inputs: bf16 [...,K] -> bf16 [...,N], rounded once, after the sum over the ranks.

    The quantiser's groups of 32 inputs are not cut: their scales are those of one rank.
    """
    own = own_part(x.shape[-1], FP8_GROUP)
    partial = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=compute)
    if own.start < own.stop:
        groups = slice(own.start // FP8_GROUP, own.stop // FP8_GROUP)
        partial = _fp8_product(x[..., own], weight[:, own], scale[:, groups], compute)
    return to_bf16(reduced(partial))


def attention_queries(
    config: Config,
    layer_id: int,
    weights: Weights,
    q_latent: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`reference.attention.attention_queries` split by heads: the same bits."""
    q = column_linear_fp8(q_latent, weights["wq_b.weight"], weights["wq_b.scale"], compute=compute)
    return rotate(
        config, layer_id, torch.unflatten(q, -1, (config.n_heads, config.head_dim)), positions, compute=compute
    )


def attention_output(
    config: Config,
    layer_id: int,
    weights: Weights,
    o: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`reference.attention.attention_output` of which each rank uses its own heads of o [B,T,H,d].

    Heads of a group may be on several ranks: a group's product is a sum over ranks, rounded after it.
    """
    own = own_part(config.n_heads)
    o = rotate(config, layer_id, o[..., own, :], positions, inverse=True, compute=compute)
    wo_a = weights["wo_a.weight"]
    if "wo_a.scale" in weights:
        wo_a = dequantize_fp8_weight(wo_a, weights["wo_a.scale"])
    heads_by_group = config.n_heads // config.o_groups
    by_head = wo_a.view(config.o_groups, config.o_lora_rank, heads_by_group, config.head_dim)
    low = torch.zeros(*o.shape[:2], config.o_groups, config.o_lora_rank, dtype=compute)
    for place, head_id in enumerate(range(own.start, own.stop)):
        group, inside = divmod(head_id, heads_by_group)
        low[:, :, group] += functional.linear(o[:, :, place].to(compute), by_head[group, :, inside].to(compute))
    flat = to_bf16(reduced(low)).flatten(-2)
    return row_linear_fp8(flat, weights["wo_b.weight"], weights["wo_b.scale"], compute=compute)


def experts(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_indices: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`reference.experts.experts` with the routed experts split by number; the shared one is on every rank.

    Partial sums meet in fp32, the shared expert is added once, and the whole is rounded once.
    """
    own = own_part(config.n_routed_experts)
    total = torch.zeros(x.shape, dtype=compute)
    for index in range(own.start, own.stop):
        token, choice = torch.nonzero(expert_indices == index, as_tuple=True)
        if len(token):
            routed = Scoped(weights, f"experts.{index}")
            out = expert(config, routed, x[token], routing_weights[token, choice], compute=compute)
            total.index_add_(0, token, out.to(compute))
    total = reduced(total)
    if config.n_shared_experts:
        total = total + expert(config, Scoped(weights, "shared_experts"), x, None, compute=compute).to(compute)
    return to_bf16(total)


def moe(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """`reference.moe.moe_taps`: every rank gates every token, from the same bits to the same choice."""
    routing, indices = gate(config, Scoped(weights, "gate"), x, image_mask, compute=compute)
    out = experts(config, weights, x, routing, indices, compute=compute)
    return {"gate_weights": routing, "gate_indices": indices, "ffn_out": out}


class OwnTableRows(Mapping[str, torch.Tensor]):
    """Weights of an Engram whose table is split by rows: those that a call needs come from the ranks that hold them."""

    def __init__(self, weights: Weights, rows: torch.Tensor) -> None:
        """int64 rows [...] of the whole table; afterwards they are numbered as they stand there."""
        self._weights = weights
        table = weights["embed.weight"]
        own = own_part(table.shape[0])
        place = rows.flatten() - own.start
        self._fetched = {
            name: _own_rows(weights[name][own].view(torch.uint8), place).view(weights[name].dtype)
            for name in ("embed.weight", "embed.scale")
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._fetched[name] if name in self._fetched else self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def parallel_engram_write(
    config: Config,
    layer_id: int,
    weights: Weights,
    h: torch.Tensor,
    rows: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`reference.engram.engram_write` with the table split by rows: bytes are fetched, so the bits are the same."""
    here = torch.arange(rows.numel()).view(rows.shape)
    return engram_write(config, layer_id, OwnTableRows(weights, rows), h, here, image_mask, compute=compute)


class ParallelAttention(Attention):
    """Heads are split; the window, compressor and indexer, which all heads share, are on every rank."""

    def _queries(self, q_latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attention_queries(self.config, self.layer_id, self.weights, q_latent, positions, compute=self.compute)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, listed: torch.Tensor, scale: float) -> torch.Tensor:
        own = own_part(self.config.n_heads)
        part = sparse_attention(q[:, :, own], kv, listed, self.weights["attn_sink"][own], scale, compute=self.compute)
        return gathered(part, own, self.config.n_heads, 2)

    def _output(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attention_output(self.config, self.layer_id, self.weights, o, positions, compute=self.compute)


class ParallelBlock(Block):
    """A block whose attention, experts and Engram table are split; the arguments are those of `Block`."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, layer_id, weights, runtime, token_map, batch_size, compute=compute)
        self.attention = ParallelAttention(
            config, layer_id, Scoped(weights, "attn"), runtime, batch_size, compute=compute
        )

    def _write_engram(self, h: torch.Tensor, rows: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        weights = Scoped(self.weights, "engram")
        return parallel_engram_write(self.config, self.layer_id, weights, h, rows, image_mask, compute=self.compute)

    def _moe(self, x: torch.Tensor, image_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        mask = None if image_mask is None else image_mask.flatten()
        taps = moe(self.config, Scoped(self.weights, "ffn"), x.flatten(0, 1), mask, compute=self.compute)
        return taps | {"ffn_out": taps["ffn_out"].view(x.shape)}


class ParallelStack(Stack):
    """Layers that are split; the arguments are those of `Stack`."""

    def __init__(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.blocks = {
            layer_id: ParallelBlock(
                config, layer_id, Scoped(weights, f"layers.{layer_id}"), runtime, token_map, batch_size, compute=compute
            )
            for layer_id in layer_ids
        }


class ParallelModel(Model):
    """A model of split layers.  Its embedding and head are on every rank; `embed` and `head` above are split."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, weights, runtime, token_map, batch_size, compute=compute)
        layers = range(config.n_layers)
        self.stack = ParallelStack(config, layers, weights, runtime, token_map, batch_size, compute=compute)
