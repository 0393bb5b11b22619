"""The reference with one mistake of the catalogue in one layer only, or only in one of its calls, as a port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from conformance import Description, Implementation, Stateful
from conformance.adapters.in_process import to_torch
from conformance.adapters.reference import Reference
from conformance.cases.traces import GoldenModel
from conformance.faults.catalogue import FAULTS
from conformance.fixtures import Fixtures

BY_ID = {fault.id: fault for fault in FAULTS}


@dataclass(frozen=True)
class Planted:
    """A fault, where it is, and what a trace has to say of it."""

    fault: str
    layer: int
    component: str
    only_at: int | None = None
    """Position of the first token of the one call that goes wrong; None for every call."""


PLANTED: Mapping[str, Planted] = {
    "OutputNotTurnedBack": Planted("attention/output-not-turned-back", 8, "attention"),
    "SelectionOfKvSource": Planted("attention/selection-of-kv-source", 8, "attention"),
    "RowsOfOtherSource": Planted("attention/rows-of-first-source", 4, "attention"),
    "StaleRowInDecode": Planted("compressor/carry-lost", 2, "attention", only_at=33),
    "RingSlotOnce": Planted("window/slot-off-by-one", 12, "attention", only_at=35),
    "RoutingIgnored": Planted("experts/weight-ignored", 7, "mixture"),
    "BiasIgnored": Planted("gate/bias-ignored", 9, "gate"),
    "WriteTransposed": Planted("hyper_connections/write-transposed", 3, "write after attention"),
    "OneRoundLess": Planted("hyper_connections/sinkhorn-ends-on-rows", 11, "hyper-connection"),
    "MixNotLate": Planted("block/mixture-reads-own-mix", 6, "read before the mixture"),
    "AttentionMixHandedOn": Planted("block/attention-mix-handed-on", 5, "hyper-connection"),
    "EngramGateSign": Planted("engram/gate-without-sign", 4, "Engram"),
}


def golden() -> GoldenModel:
    return GoldenModel(Fixtures.open().model("tiny"))


class InOneLayer(Reference):
    """The mistake is made while the planted layer is stepped, or is called with that layer's weights."""

    planted: Planted

    def __init__(self) -> None:
        super().__init__()
        self._own = {
            name: to_torch(golden().layer(self.planted.layer).tensor(name))
            for name in ("ffn.gate.weight", "hc_attn_fn", "hc_ffn_fn")
        }

    def _mistaken(self, layer_id: int, start_pos: torch.Tensor | None = None) -> AbstractContextManager[None]:
        planted = self.planted
        here = layer_id == planted.layer
        if start_pos is not None and planted.only_at is not None:
            here = here and int(start_pos[0]) == planted.only_at
        return BY_ID[planted.fault].applied() if here else nullcontext()

    def _plant(self, unit: Any, layer_id: int) -> None:
        def step(*arguments: Any, **inputs: Any) -> Any:
            start_pos = inputs.get("start_pos", arguments[-2] if len(arguments) > 2 else None)
            with self._mistaken(layer_id, start_pos):
                return type(unit).step(unit, *arguments, **inputs)

        unit.step = step

    def attention(self, config: Any, layer_id: int, weights: Any, runtime: Any, batch_size: int) -> Stateful:
        made = super().attention(config, layer_id, weights, runtime, batch_size)
        self._plant(made.inner, layer_id)  # type: ignore[attr-defined]
        return made

    def block(
        self, config: Any, layer_id: int, weights: Any, runtime: Any, token_map: Any, batch_size: int
    ) -> Stateful:
        made = super().block(config, layer_id, weights, runtime, token_map, batch_size)
        self._plant(made.inner, layer_id)  # type: ignore[attr-defined]
        return made

    def model(self, config: Any, weights: Any, runtime: Any, token_map: Any, batch_size: int) -> Stateful:
        made = super().model(config, weights, runtime, token_map, batch_size)
        for layer_id, block in made.inner.stack.blocks.items():  # type: ignore[attr-defined]
            self._plant(block, layer_id)
        return made

    def _with(self, name: str, value: torch.Tensor, call: Callable[[], Any]) -> Any:
        """Components that are not told their layer are known by its weights."""
        own = self._own[name]
        with self._mistaken(self.planted.layer if own.shape == value.shape and torch.equal(own, value) else -1):
            return call()

    def gate(self, config: Any, weights: Any, x: Any, image_mask: Any) -> Any:
        call = super().gate
        return self._with("ffn.gate.weight", weights["weight"], lambda: call(config, weights, x, image_mask))

    def moe(self, config: Any, weights: Any, x: Any, image_mask: Any) -> Any:
        call = super().moe
        return self._with("ffn.gate.weight", weights["gate.weight"], lambda: call(config, weights, x, image_mask))

    def hyper_connection_coefficients(self, config: Any, h: Any, fn: Any, scale: Any, base: Any) -> Any:
        call = super().hyper_connection_coefficients
        name = "hc_attn_fn" if torch.equal(fn, self._own["hc_attn_fn"]) else "hc_ffn_fn"
        return self._with(name, fn, lambda: call(config, h, fn, scale, base))

    def engram_write(self, config: Any, layer_id: int, weights: Any, h: Any, rows: Any, image_mask: Any) -> Any:
        with self._mistaken(layer_id):
            return super().engram_write(config, layer_id, weights, h, rows, image_mask)


class LogitsOnly(InOneLayer):
    """A model that shows nothing of its layers; its blocks do, though no choices."""

    planted = PLANTED["RoutingIgnored"]

    def model(self, *arguments: Any, **named: Any) -> Stateful:
        return _Showing(super().model(*arguments, **named), ("logits", "output_ids"))

    def block(self, *arguments: Any, **named: Any) -> Stateful:
        return _Showing(super().block(*arguments, **named), ("h_out", "pre_out"))


class _Showing(Stateful):
    def __init__(self, inner: Stateful, taps: tuple[str, ...]) -> None:
        self._inner, self._taps = inner, taps

    def step(self, **inputs: Any) -> Mapping[str, Any]:
        results = self._inner.step(**inputs)
        return {tap: results[tap] for tap in self._taps}


for _name, _planted in PLANTED.items():
    globals()[_name] = type(_name, (InOneLayer,), {"planted": _planted})


class NormOnly(Implementation):
    """Nothing that a trace can run."""

    def describe(self) -> Description:
        return Description("norm only", "1")
