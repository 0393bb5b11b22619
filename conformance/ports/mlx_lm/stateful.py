"""What mlx-lm keeps between calls, stepped as the suite steps it: compressor, attention, block, stack, model.

mlx-lm makes new caches for every request; so does a call at position 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conformance.interface import Array, Stateful, Unsupported
from conformance.ports.mlx_lm.arrays import mx, to_mlx, to_torch
from conformance.ports.mlx_lm.indexing import in_order, one_position
from conformance.ports.mlx_lm.loading import D
from conformance.ports.watching import replaced


class Runtime:
    """The dictionary that the layers of one call share; mlx-lm makes a new one for each call."""

    def __init__(self) -> None:
        self._last = -1
        self._slots: dict[str, Any] = {}

    def slots(self, layer_id: int) -> dict[str, Any]:
        """The dictionary of the call that a layer is stepped in: layers come in ascending order within a call."""
        if layer_id <= self._last:
            self._slots = {}
        self._last = layer_id
        return self._slots


def window_list(cache: Any, batch: int, length: int) -> Any:
    """The rows each query attends to, as the text model makes it once for all layers."""
    previous = 0 if cache.window is None else cache.window.shape[1]
    indices = D._window_indices(previous=previous, length=length, window=cache.window_size)
    return mx.broadcast_to(indices, (batch, *indices.shape))


class MlxCompressor(Stateful):
    """A compressor and the rows of its unfinished group."""

    def __init__(self, compressor: Any, window: int) -> None:
        self._compressor, self._window = compressor, window
        self._cache = D.LayerCache(window)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`latent` where a group completes."""
        start = one_position(inputs["start_pos"])
        if start == 0:
            self._cache = D.LayerCache(self._window)
        latent, _ = self._compressor(to_mlx(inputs["x"]), start, self._cache)
        return {} if latent is None else {"latent": to_torch(latent)}

    def state(self) -> Mapping[str, Array]:
        """The carry."""
        return carry(self._cache, self._compressor.ratio)


class MlxAttention(Stateful):
    """One attention with its cache."""

    def __init__(self, attention: Any, layer_id: int, runtime: Runtime, batch_size: int, window: int) -> None:
        self.attention, self.layer_id = attention, layer_id
        self.runtime, self.batch_size = runtime, batch_size
        self.cache = D.LayerCache(window)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`attn_out`; queries, weighted sums and selected positions beside it."""
        x, slots, start = to_mlx(inputs["x"]), self.runtime.slots(self.layer_id), one_position(inputs["start_pos"])
        if start == 0:
            self.cache = D.LayerCache(self.cache.window_size)
        sums = D._sparse_attention
        found: dict[str, Any] = {}

        def watched(q: Any, *args: Any, **options: Any) -> Any:
            found["attn_q"], found["attn_o"] = q, sums(q, *args, **options)
            return found["attn_o"]

        with replaced(D, _sparse_attention=watched):
            found["attn_out"] = self.attention(
                x,
                start_pos=start,
                window_idx=window_list(self.cache, *x.shape[:2]),
                cache=self.cache,
                shared=slots,
            )
        taps = {name: to_torch(value) for name, value in found.items()}
        if self.attention.is_index_source and slots["topk_idx"].shape[-1]:
            taps["selected"] = in_order(to_torch(slots["topk_idx"]))
        return taps

    def state(self) -> Mapping[str, Array]:
        """The window as a ring, and what a source keeps."""
        return layer_state(self.attention, self.cache, self.batch_size)


class MlxBlock(Stateful):
    """One decoder layer with its cache."""

    def __init__(self, layer: Any, layer_id: int, runtime: Runtime, batch_size: int, window: int) -> None:
        self.layer, self.layer_id = layer, layer_id
        self.runtime, self.batch_size = runtime, batch_size
        self.cache = D.LayerCache(window)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`h_out` and `pre_out`."""
        refuse_images(inputs["image_mask"])
        h, pre = self.advance(to_mlx(inputs["h"]), to_mlx(inputs["pre"]), one_position(inputs["start_pos"]))
        return {"h_out": to_torch(h), "pre_out": to_torch(pre)}

    def advance(self, h: Any, pre: Any, start: int) -> tuple[Any, Any]:
        """The residual and the mix after the layer."""
        if start == 0:
            self.cache = D.LayerCache(self.cache.window_size)
        result: tuple[Any, Any] = self.layer(
            h,
            pre,
            start_pos=start,
            window_idx=window_list(self.cache, *h.shape[:2]),
            cache=self.cache,
            shared=self.runtime.slots(self.layer_id),
        )
        return result

    def state(self) -> Mapping[str, Array]:
        """As the attention's."""
        return layer_state(self.layer.self_attn, self.cache, self.batch_size)


class MlxStack(Stateful):
    """Consecutive layers."""

    def __init__(self, blocks: Sequence[MlxBlock]) -> None:
        self._blocks = blocks

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`h_out` and `pre_out` of the last layer."""
        refuse_images(inputs["image_mask"])
        h, pre = to_mlx(inputs["h"]), to_mlx(inputs["pre"])
        for block in self._blocks:
            h, pre = block.advance(h, pre, one_position(inputs["start_pos"]))
        return {"h_out": to_torch(h), "pre_out": to_torch(pre)}


class MlxModel(Stateful):
    """The whole text model with its caches."""

    def __init__(self, model: Any, sampler: Any, batch_size: int) -> None:
        self._model, self._sampler, self._batch_size = model, sampler, batch_size
        self._caches = model.make_cache()

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Logits of the last position and the greedy token."""
        refuse_images(inputs["image_mask"])
        start = one_position(inputs["start_pos"])
        if start == 0:
            self._caches = self._model.make_cache()
        if start != self._caches[0].offset:
            raise Unsupported(f"mlx-lm: continues at position {self._caches[0].offset}, not {start}")
        logits = self._model(to_mlx(inputs["input_ids"]), self._caches)[:, -1]
        return {"logits": to_torch(logits), "output_ids": to_torch(self._sampler(logits).astype(mx.int32))}

    def state(self) -> Mapping[str, Array]:
        """The state of every layer."""
        return {
            f"layer{number}/{name}": value
            for number, (layer, cache) in enumerate(zip(self._model.layers, self._caches, strict=True))
            for name, value in layer_state(layer.self_attn, cache, self._batch_size).items()
        }


def refuse_images(image_mask: Array | None) -> None:
    """Raises Unsupported where image tokens are."""
    if image_mask is not None and bool(image_mask.any()):
        raise Unsupported("mlx-lm: a text model, its loader drops bias_vl")


def ring(cache: Any, batch: int, width: int) -> torch.Tensor:
    """The window's rows, which mlx-lm keeps in order, at the slots of a ring [B,W,d]."""
    slots = torch.zeros((batch, cache.window_size, width), dtype=torch.bfloat16)
    if cache.window is not None:
        rows = to_torch(cache.window)
        positions = torch.arange(cache.offset - rows.shape[1], cache.offset)
        slots[:, positions % cache.window_size] = rows
    return slots


def carry(cache: Any, ratio: int) -> dict[str, torch.Tensor]:
    """The rows of the unfinished group from slot 0 on; mlx-lm keeps no others, so the rest is that of a fresh carry."""
    if ratio < 2:
        return {}
    kept = {}
    for name, rows, empty in (("carry_kv", cache.pending_kv, 0.0), ("carry_score", cache.pending_gate, -torch.inf)):
        if rows is not None:
            waiting = to_torch(rows)
            kept[name] = torch.full((waiting.shape[0], ratio, waiting.shape[-1]), empty)
            kept[name][:, : waiting.shape[1]] = waiting
    return kept


def layer_state(attention: Any, cache: Any, batch: int) -> dict[str, torch.Tensor]:
    """The state of a layer by the suite's names."""
    state = {"window": ring(cache, batch, attention.head_dim)}
    if attention.is_kv_source:
        widths = {"compressed": attention.head_dim, "index_keys": attention.indexer.head_dim}
        for name, rows in (("compressed", cache.compress_kv), ("index_keys", cache.index_k)):
            empty = torch.zeros((batch, 0, widths[name]), dtype=torch.bfloat16)
            state[name] = empty if rows is None else to_torch(rows)
        state |= carry(cache, attention.ratio)
    return state
