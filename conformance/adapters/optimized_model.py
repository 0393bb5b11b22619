"""Blocks, stacks and the model of `optimized` behind the suite's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import optimized.block
import optimized.model
import optimized.stack
from conformance.adapters.optimized_state import LayerStateful, SavedLayer, begin
from conformance.interface import Array, Stateful, Weights
from optimized.block import Taps
from optimized.config import Config
from optimized.device import DEVICE
from optimized.runtime import Batch, Runtime
from optimized.sampling import greedy


def there(value: Array | None) -> torch.Tensor | None:
    """An input on the kernels' device."""
    return None if value is None else value.to(DEVICE)


class BlockStateful(LayerStateful):
    """One layer."""

    def __init__(
        self, config: Config, layer_id: int, weights: Weights, runtime: Runtime, token_map: Array | None
    ) -> None:
        super().__init__(runtime, layer_id)
        self.block = optimized.block.Block(config, layer_id, weights, there(token_map))

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Every tap of a call."""
        h = inputs["h"].to(DEVICE)
        batch = self.begin(inputs["start_pos"], h.shape[1])
        taps: Taps = {}
        ids, mask = inputs["input_ids"].to(DEVICE), there(inputs["image_mask"])
        self.block.step(self.runtime, batch, h, inputs["pre"].to(DEVICE), ids, mask, taps)
        return taps


class LayersStateful(Stateful):
    """Several layers' parts of a runtime."""

    def __init__(self, runtime: Runtime, layer_ids: Sequence[int]) -> None:
        self.runtime = runtime
        self.layers = {layer_id: LayerStateful(runtime, layer_id) for layer_id in layer_ids}

    def begin(self, start_pos: Array, length: int) -> Batch:
        """The next call, one batch for all layers."""
        batch = begin(self.runtime, start_pos, length)
        for layer in self.layers.values():
            layer.ends = (start_pos + length).tolist()
        return batch

    def roll_back(self, end: Array) -> None:
        """Go back in every layer."""
        for layer in self.layers.values():
            layer.roll_back(end)

    def save_state(self) -> dict[int, SavedLayer]:
        """A copy of what every layer keeps."""
        return {layer_id: layer.save_state() for layer_id, layer in self.layers.items()}

    def restore_state(self, saved: Mapping[int, SavedLayer]) -> None:
        """Back to what was kept."""
        for layer_id, layer in self.layers.items():
            layer.restore_state(saved[layer_id])

    def state(self) -> Mapping[str, Array]:
        """The state of every layer as `layer{l}/{name}`."""
        return {
            f"layer{layer_id}/{name}": tensor
            for layer_id, layer in self.layers.items()
            for name, tensor in layer.state().items()
        }


class StackStateful(LayersStateful):
    """Consecutive layers."""

    def __init__(
        self, config: Config, layer_ids: Sequence[int], weights: Weights, runtime: Runtime, token_map: Array | None
    ) -> None:
        super().__init__(runtime, layer_ids)
        self.stack = optimized.stack.Stack(config, layer_ids, weights, there(token_map))

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Every tap of a call."""
        h = inputs["h"].to(DEVICE)
        batch = self.begin(inputs["start_pos"], h.shape[1])
        taps: Taps = {}
        ids, mask = inputs["input_ids"].to(DEVICE), there(inputs["image_mask"])
        h, pre = self.stack.step(self.runtime, batch, h, inputs["pre"].to(DEVICE), ids, mask, taps)
        return {**taps, "h_out": h, "pre_out": pre}


class ModelStateful(LayersStateful):
    """The whole text model."""

    def __init__(self, config: Config, weights: Weights, runtime: Runtime, token_map: Array | None) -> None:
        super().__init__(runtime, range(config.n_layers))
        self.model = optimized.model.Model(config, weights, there(token_map))

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Logits, the chosen tokens, and every tap of a call."""
        ids = inputs["input_ids"].to(DEVICE)
        batch = self.begin(inputs["start_pos"], ids.shape[1])
        taps: Taps = {}
        images = there(inputs["image_mask"]), there(inputs["image_features"])
        logits = self.model.step(self.runtime, batch, ids, *images, taps)
        return {**taps, "logits": logits, "output_ids": greedy(logits)}
