"""One attention layer in any of its roles: projections, state, sparse attention (numerics.md 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimized.compressor import Compressor
from optimized.config import Config
from optimized.linear import linear_bf16, linear_fp8, scaled_product
from optimized.norm import rms_norm, rms_norm_quantize_fp8
from optimized.output_projection import project_turned_back
from optimized.packed_attention import packed_attention
from optimized.quantize import FP8_GROUP, dequantize_fp8_weight, quantize_fp8
from optimized.rotary import rotate, rotate_at, tables_at
from optimized.rows import write_rows
from optimized.runtime import Batch, LayerState, Runtime
from optimized.scoring import publish_selection

Weights = Mapping[str, torch.Tensor]


def query_latent(config: Config, layer_id: int, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """bf16 x [B,T,D] -> bf16 [B,T,q_lora_rank], normed (numerics.md 6, item 1)."""
    latent = linear_fp8(x, weights["wq_a.weight"], weights["wq_a.scale"])
    return rms_norm(latent, weights["q_norm.weight"], config.norm_eps)


def attention_queries(
    config: Config, layer_id: int, weights: Weights, q_latent: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 q_latent [B,T,q_lora_rank] -> rotated heads bf16 [B,T,H,d] (numerics.md 6, item 1)."""
    q = linear_fp8(q_latent, weights["wq_b.weight"], weights["wq_b.scale"])
    return rotate(config, layer_id, torch.unflatten(q, -1, (config.n_heads, config.head_dim)), positions)


def grouped_weight(weights: Weights) -> torch.Tensor:
    """`wo_a` in bf16: it may come so, or as the checkpoint stores it (FP8 with `wo_a.scale`)."""
    wo_a = weights["wo_a.weight"]
    return dequantize_fp8_weight(wo_a, weights["wo_a.scale"]) if "wo_a.scale" in weights else wo_a


def attention_output(
    config: Config, layer_id: int, weights: Weights, o: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 o [B,T,H,d] of the sparse attention -> turned back, projected, bf16 [B,T,D] (numerics.md 6, item 6)."""
    low = project_turned_back(o, *tables_at(config, layer_id, positions), grouped_weight(weights), config.o_groups)
    return linear_fp8(low, weights["wo_b.weight"], weights["wo_b.scale"])


class Attention:
    """The weights of one layer's attention.  What a request leaves behind is in the runtime that a step is handed.

    A step asks the device nothing, and no shape depends on what it computed: it can be captured as a graph.
    """

    def __init__(self, config: Config, layer_id: int, weights: Weights) -> None:
        """`weights` are those of the attention, on the kernels' device."""
        self.config, self.layer_id, self.weights = config, layer_id, weights
        self.wo_a = grouped_weight(weights)
        self.compressor = Compressor(config, layer_id, weights) if config.compresses(layer_id) else None

    def step(self, runtime: Runtime, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        """bf16 x [B,T,D] of the batch's requests -> bf16 [B,T,D] (numerics.md 6).

        The layers of a runtime are stepped in ascending order within a call.
        """
        config, layer_id, weights, state = self.config, self.layer_id, self.weights, runtime.layers[self.layer_id]
        quantised = quantize_fp8(x)
        q, q_latent = self._queries(runtime, batch, quantised)
        kv = scaled_product(*quantised, weights["wkv.weight"], weights["wkv.scale"], "fp8")
        call_rows = self._remember_window(runtime, batch, kv)
        if self.compressor is not None:
            self._compress(self.compressor, runtime, state, batch, x)
        if config.selects(layer_id):
            publish_selection(config, layer_id, weights, runtime, batch, x, q_latent)
        o = packed_attention(runtime, layer_id, batch, q, weights["attn_sink"], call_rows)
        if call_rows is not None:
            # Only now: earlier tokens of the call needed the rows that its later ones overwrite.
            self._write_window(runtime, batch, kv, batch.slots, state.window)
        low = project_turned_back(o, *runtime.rotary(layer_id), batch.positions, self.wo_a, config.o_groups)
        return linear_fp8(low, weights["wo_b.weight"], weights["wo_b.scale"])

    def _queries(
        self, runtime: Runtime, batch: Batch, quantised: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated heads bf16 [B,T,H,d], and the query latent: normed where the layer's indexer reads it."""
        config, layer_id, weights = self.config, self.layer_id, self.weights
        latent = scaled_product(*quantised, weights["wq_a.weight"], weights["wq_a.scale"], "fp8")
        norm = weights["q_norm.weight"], config.norm_eps
        if config.selects(layer_id) or config.q_lora_rank % FP8_GROUP:
            latent = rms_norm(latent, *norm)
            codes, scales = quantize_fp8(latent)
        else:
            codes, scales = rms_norm_quantize_fp8(latent, *norm)
        q = scaled_product(codes, scales, weights["wq_b.weight"], weights["wq_b.scale"], "fp8")
        heads = torch.unflatten(q, -1, (config.n_heads, config.head_dim))
        return rotate_at(heads, *runtime.rotary(layer_id), batch.positions), latent

    def _remember_window(self, runtime: Runtime, batch: Batch, kv: torch.Tensor) -> torch.Tensor | None:
        """Write the call's window rows to the ring, or, where they would overwrite what the call needs, aside."""
        if batch.length <= runtime.drafts + 1:
            self._write_window(runtime, batch, kv, batch.slots, runtime.layers[self.layer_id].window)
            return None
        shape = (batch.size, batch.length, runtime.window_format.bytes)
        call_rows = torch.empty(shape, dtype=torch.uint8, device=kv.device)
        self._write_window(runtime, batch, kv, torch.arange(batch.size, device=kv.device), call_rows)
        return call_rows

    def _write_window(
        self, runtime: Runtime, batch: Batch, kv: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> None:
        norm = self.weights["kv_norm.weight"], self.config.norm_eps
        tables = runtime.rotary(self.layer_id)
        write_rows(runtime.window_format, kv, tables, slots, batch.start, batch.length, 1, out, norm)

    def _compress(
        self, compressor: Compressor, runtime: Runtime, state: LayerState, batch: Batch, x: torch.Tensor
    ) -> None:
        """Append the rows and index keys of the groups that the call completes (numerics.md 6.2 and 6.3)."""
        if state.compressed is None or state.index_keys is None:
            raise ValueError(f"runtime: layer {self.layer_id} has no room for compressed rows")
        latent = compressor.step(state, batch, x)
        keys = linear_bf16(latent, self.weights["indexer.wk.weight"])
        norm = self.weights["indexer.k_norm.weight"], self.config.norm_eps
        call = (runtime.rotary(self.layer_id), batch.slots, batch.start, batch.length, compressor.ratio)
        write_rows(runtime.compressed_format, latent, *call, state.compressed)
        write_rows(runtime.index_key_format, keys, *call, state.index_keys, norm)
