"""One attention layer in any of its roles (numerics.md 6 and 6.1, model.py 613–790)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from reference.candidates import candidate_mask
from reference.compressor import Compressor, compressed_rows
from reference.config import Config
from reference.indexer import (
    index_keys,
    index_queries,
    index_scores,
    index_weights,
    select_positions,
    visible_positions,
)
from reference.linear import linear_fp8
from reference.norm import rms_norm
from reference.parameters import Weights
from reference.precision import to_bf16
from reference.quantize import dequantize_fp8_weight
from reference.rotary import rotate
from reference.runtime import Runtime, grow
from reference.sparse_attention import sparse_attention
from reference.window import RingCall, rolled_back_ring, window_context, window_indices, window_rows, window_update


def query_latent(
    config: Config, layer_id: int, weights: Weights, x: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """RMSNorm(wq_a x): bf16 [B,T,D] -> bf16 [B,T,q_lora_rank] (numerics.md 6, item 1)."""
    latent = linear_fp8(x, weights["wq_a.weight"], weights["wq_a.scale"], compute=compute)
    return rms_norm(latent, weights["q_norm.weight"], config.norm_eps, compute=compute)


def attention_queries(
    config: Config,
    layer_id: int,
    weights: Weights,
    q_latent: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """wq_b of the latent by heads, rotated, not normed: bf16 [B,T,q_lora_rank] -> bf16 [B,T,H,d] (6, item 1)."""
    q = linear_fp8(q_latent, weights["wq_b.weight"], weights["wq_b.scale"], compute=compute)
    q = torch.unflatten(q, -1, (config.n_heads, config.head_dim))
    return rotate(config, layer_id, q, positions, compute=compute)


def attention_output(
    config: Config,
    layer_id: int,
    weights: Weights,
    o: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Turn the heads back and project them group by group: bf16 [B,T,H,d] -> bf16 [B,T,D] (numerics.md 6, item 6).

    `wo_a` may come dequantised (bf16) or as the checkpoint stores it (FP8 with `wo_a.scale`).
    """
    o = rotate(config, layer_id, o, positions, inverse=True, compute=compute)
    grouped = torch.unflatten(o.flatten(-2), -1, (config.o_groups, -1))
    wo_a = weights["wo_a.weight"]
    if "wo_a.scale" in weights:
        wo_a = dequantize_fp8_weight(wo_a, weights["wo_a.scale"])
    by_group = torch.unflatten(wo_a, 0, (config.o_groups, config.o_lora_rank))
    low = to_bf16(torch.einsum("btgd,grd->btgr", grouped.to(compute), by_group.to(compute)))
    return linear_fp8(low.flatten(-2), weights["wo_b.weight"], weights["wo_b.scale"], compute=compute)


def cat_padded(tensors: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
    """[1,T,n_b] of each request -> [B,T,max n], filled up on the right."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return torch.cat([functional.pad(tensor, (0, width - tensor.shape[-1]), value=fill) for tensor in tensors])


class Attention:
    """The attention of one layer: its ring, and what it owns and publishes by role.

    Ring [B,W,d]; a KV source also owns compressed rows [B,C,d], index keys [B,C,index_head_dim] and a compressor.
    """

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        runtime: Runtime,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.layer_id = layer_id
        self.weights = weights
        self.runtime = runtime
        self.compute = compute
        self.window = torch.zeros(batch_size, config.window_size, config.head_dim, dtype=torch.bfloat16)
        self._last_call: RingCall | None = None
        self.compressor: Compressor | None = None
        if config.compresses(layer_id):
            self.compressor = Compressor(config, layer_id, weights, batch_size, compute=compute)
            self.compressed = torch.zeros(batch_size, 0, config.head_dim, dtype=torch.bfloat16)
            self.index_keys = torch.zeros(batch_size, 0, config.index_head_dim, dtype=torch.bfloat16)

    def step(self, x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        """bf16 x [B,T,D], int64 start_pos [B] -> `attn_out` bf16 [B,T,D] and every intermediate by tap name.

        The layers that share a runtime are stepped in ascending order within a call.
        """
        config, layer_id, weights, compute = self.config, self.layer_id, self.weights, self.compute
        positions = start_pos.unsqueeze(1) + torch.arange(x.shape[1])
        taps = {"attn_in": x}

        taps["q_latent"] = query_latent(config, layer_id, weights, x, compute=compute)
        q = taps["attn_q"] = self._queries(taps["q_latent"], positions)

        rows = window_rows(config, layer_id, weights, x, positions, compute=compute)
        ring_before = self.window.masked_fill((start_pos == 0)[:, None, None], 0.0)
        self.window = window_update(config, ring_before, rows, start_pos)
        self._last_call = RingCall(start_pos, ring_before, rows)
        taps["window_rows"] = rows

        if self.compressor is not None:
            taps |= self._compress(self.compressor, x, start_pos)
        if config.selects(layer_id):
            taps |= self._select(x, taps["q_latent"], positions)

        kv, taps["window_slots"], taps["attn_list"] = self._context(ring_before, rows, start_pos)
        scale = config.head_dim**-0.5
        taps["attn_o"] = self._attend(q, kv, taps["attn_list"], scale)
        taps["attn_out"] = self._output(taps["attn_o"], positions)
        return taps

    def _queries(self, q_latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attention_queries(self.config, self.layer_id, self.weights, q_latent, positions, compute=self.compute)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, listed: torch.Tensor, scale: float) -> torch.Tensor:
        return sparse_attention(q, kv, listed, self.weights["attn_sink"], scale, compute=self.compute)

    def _output(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attention_output(self.config, self.layer_id, self.weights, o, positions, compute=self.compute)

    def _compress(self, compressor: Compressor, x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        """Append the rows that this call completes, and publish rows and keys (numerics.md 6.2 and 6.3)."""
        config, layer_id, compute = self.config, self.layer_id, self.compute
        ratio = config.ratio(layer_id)
        first_row, row_count = start_pos // ratio, (start_pos + x.shape[1]) // ratio
        taps = compressor.step(x, start_pos)
        if "latent" in taps:
            latent = taps["latent"]
            row = first_row.unsqueeze(1) + torch.arange(latent.shape[1])
            taps["compressed_rows"] = compressed_rows(config, layer_id, latent, row * ratio, compute=compute)
            taps["index_keys"] = index_keys(config, layer_id, self.weights, latent, row * ratio, compute=compute)
            request, index = torch.nonzero(row < row_count.unsqueeze(1), as_tuple=True)
            self.compressed = grow(self.compressed, int(row_count.max())).clone()
            self.index_keys = grow(self.index_keys, int(row_count.max())).clone()
            self.compressed[request, row[request, index]] = taps["compressed_rows"][request, index]
            self.index_keys[request, row[request, index]] = taps["index_keys"][request, index]
        existing = int(row_count.max())
        self.runtime.compressed = self.compressed[:, :existing]
        self.runtime.publish_index_keys(self.index_keys[:, :existing], row_count > first_row)
        return taps

    def _select(self, x: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Score the published keys and publish the selected positions (numerics.md 6.3).

        Each request is scored over its own number of compressed rows; what it lacks to the largest is filled up.
        """
        config, layer_id, weights, compute = self.config, self.layer_id, self.weights, self.compute
        runtime = self.runtime
        existing = visible_positions(config, layer_id, positions[:, -1]).tolist()
        if max(existing) == 0:
            runtime.selected = torch.zeros(*positions.shape, 0, dtype=torch.int32)
            runtime.candidates = torch.zeros(*positions.shape, 0, dtype=torch.bool)
            return {}
        queries = index_queries(config, layer_id, weights, q_latent, positions, compute=compute)
        head_weights = index_weights(config, layer_id, weights, x, compute=compute)
        keys = grow(runtime.index_keys, max(existing))
        scores, selected, candidates = [], [], []
        for request, count in enumerate(existing):
            one = slice(request, request + 1)
            mask = runtime.candidates[one, :, :count] if config.uses_candidates(layer_id) else None
            own = (queries[one], head_weights[one], keys[one, :count], positions[one], mask)
            scores.append(index_scores(config, layer_id, *own, compute=compute))
            selected.append(select_positions(config, layer_id, scores[-1], positions[one], ties=runtime.ties))
            if config.publishes_candidates(layer_id):
                candidates.append(candidate_mask(config, layer_id, scores[-1], positions[one], ties=runtime.ties))
        taps = {"index_q": queries, "index_weights": head_weights, "index_score": cat_padded(scores, -torch.inf)}
        taps["selected"] = runtime.selected = cat_padded(selected, -1)
        if candidates:
            taps["candidates"] = runtime.candidates = cat_padded(candidates, False)
        return taps

    def _context(
        self, ring_before: torch.Tensor, rows: torch.Tensor, start_pos: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows to attend to, the window's part of the list, the whole list: bf16 [B,N,d], int32 [B,T,·] twice.

        The window's rows come first, the compressed rows after them (numerics.md 6, items 3 and 4).  Requests are put
        together one by one and filled up at the end, so that none depends on where the others stand.
        """
        contexts, window_lists, lists = [], [], []
        for request, start in enumerate(start_pos.tolist()):
            context = window_context(self.config, ring_before[request], self.window[request], rows[request], start)
            window_list = window_indices(self.config, start, rows.shape[1])
            whole_list = window_list
            if self.config.ratio(self.layer_id) > 0:
                selected = self.runtime.selected[request]
                shifted = torch.where(selected >= 0, selected + context.shape[0], -1).to(torch.int32)
                whole_list = torch.cat((window_list, shifted), dim=-1)
                context = torch.cat((context, self.runtime.compressed[request]))
            contexts.append(context)
            window_lists.append(window_list.unsqueeze(0))
            lists.append(whole_list.unsqueeze(0))
        return pad_sequence(contexts, batch_first=True), cat_padded(window_lists, -1), cat_padded(lists, -1)

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1).

        The ring is made anew, since rejected tokens have overwritten rows that are in the window again.  Compressed
        rows and index keys are cut after the last group that is still complete.  What the runtime holds is published
        anew by the next call.
        """
        self.window = rolled_back_ring(self.config, self._last_call, end)
        if self.compressor is not None:
            self.compressor.roll_back(end)
            remaining = end // self.config.ratio(self.layer_id)
            exists = (torch.arange(int(remaining.max())) < remaining.unsqueeze(1)).unsqueeze(-1)
            self.compressed = self.compressed[:, : exists.shape[1]] * exists
            self.index_keys = self.index_keys[:, : exists.shape[1]] * exists

    def state(self) -> dict[str, torch.Tensor]:
        """`window` [B,W,d]; of a KV source also `compressed`, `index_keys`, `carry_kv`, `carry_score`."""
        state = {"window": self.window}
        if self.compressor is not None:
            state |= {"compressed": self.compressed, "index_keys": self.index_keys, **self.compressor.state()}
        return state
