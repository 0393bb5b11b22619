"""What a target computed in one scenario, tap by tap; blanks where it showed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.cases.traces import Trace
from conformance.fixtures import CALL_TAPS as CALL_SPECS, LAYER_TAPS as LAYER_SPECS
from conformance.judge.deviations import score_format
from conformance.judge.expectations import Verdict, formed
from conformance.tensors import Tensor
from conformance.tracing.taps import CALL_TAPS, LAYER_TAPS, named

Key = tuple[int, int | None, str]
"""Call, layer (None outside layers), tap."""


@dataclass(frozen=True)
class Malformed:
    """A tap whose shape or dtype is wrong."""

    call: int
    layer: int | None
    tap: str
    message: str


@dataclass
class Run:
    """One free-running pass.  Tensors have the dtype that FORMAT.md names, and the recorded shape where one is known.

    Taps per token that may come flat ([B·T, k]) are kept as [B, T, k].
    """

    trace: Trace
    how: str
    """By what the pass was made, such as "model" or "blocks, one after the other"."""
    taps: dict[Key, Tensor] = field(default_factory=dict)
    malformed: list[Malformed] = field(default_factory=list)
    ended: str = ""
    """Why the pass ended early, empty if it did not."""

    def add(self, call: int, results: Mapping[str, Tensor]) -> None:
        """Keep what `results` shows of a call, by the names of FORMAT.md; other names are nobody's business."""
        layers = range(self.trace.model.config.n_layers)
        names: list[tuple[int | None, str]] = [(None, tap) for tap in CALL_TAPS]
        names += [(layer, tap) for layer in layers for tap in LAYER_TAPS]
        for layer, tap in names:
            found = results.get(named(layer, tap))
            if found is not None:
                self.keep(call, layer, tap, found)

    def dumped(self, call: int, layer: int | None, tap: str, tensor: Tensor) -> None:
        """Keep one tap if a trace looks at it."""
        if tap in (CALL_TAPS if layer is None else LAYER_TAPS):
            self.keep(call, layer, tap, tensor)

    def keep(self, call: int, layer: int | None, tap: str, tensor: Tensor) -> None:
        """Keep one tap if it is well formed, and remember that it is not otherwise."""
        spec = (CALL_SPECS if layer is None else LAYER_SPECS)[tap]
        dtype = score_format().name if tap == "index_score" else spec.dtype
        batch, length = self.trace.batch, self.trace.lengths[call]
        if tap in ("gate_weights", "gate_indices") and tensor.shape[:-1] == (batch * length,):
            tensor = tensor.reshape(batch, length, tensor.shape[-1])
        shape = tensor.shape
        if self.trace.scenario.has(call, tap, layer):
            shape = self.trace.part(call, tap, layer).shape
        elif len(tensor.shape) not in spec.ranks or tensor.shape[:1] != (batch,):
            shape = (batch, length)
        kept = formed(tap, "exact", tensor, dtype, shape)
        if isinstance(kept, Verdict):
            self.malformed.append(Malformed(call, layer, tap, kept.message))
        else:
            self.taps[call, layer, tap] = kept

    def get(self, call: int, tap: str, layer: int | None = None) -> Tensor | None:
        """A tap, None where the target showed none."""
        return self.taps.get((call, layer, tap))

    def stream(self, call: int, layer: int) -> Tensor | None:
        """The residual that the target's attention coefficients were computed from, [B,T,S,D]."""
        found = self.get(call, "engram_out", layer) or self.get(call, "h_in", layer)
        if found is None and layer and layer not in self.trace.model.config.engram_layer_ids:
            found = self.get(call, "h_out", layer - 1)
        return found

    def mix(self, call: int, layer: int) -> Tensor | None:
        """The mix that the target's attention read with, [B,T,S]."""
        found = self.get(call, "pre_in", layer)
        return self.get(call, "pre_out", layer - 1) if found is None and layer else found
