"""How far a free-running pass is from the recording, tap by tap, and whether noise can have brought it there.

Noise grows.  A position of a tap is *beyond* when it is farther than `LEAST` and than `GROWTH` times the farthest
residual that any earlier layer handed on at this position or before it.  Where the target and the recording chose
differently (experts, compressed positions), everything behind that choice has *parted*: it is as far as a wrong result
would be, and its distance says nothing.  What a component made of its own inputs is then judged by `own_inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from conformance.cases.traces import GoldenModel, exact
from conformance.judge.bounded import Floats
from conformance.judge.components import gate
from conformance.judge.noise import LEAST_FREE_RUNNING
from conformance.judge.propagated import relative_distances
from conformance.tensors import Tensor
from conformance.tracing.run import Run
from conformance.tracing.taps import AFTER, BEFORE, LAYER_TAPS

Bools = npt.NDArray[np.bool_]
State = Literal["same", "within", "beyond", "shown", "parted", "tie", "choice", "malformed"]

LEAST = 2 * LEAST_FREE_RUNNING.largest
"""Twice the step of an FP8 code, relative to its element: attention weighs a few rows, and the FP4 codes of compressed
rows have larger steps.  Honest variants of the reference moved `attn_out` by 0.14 where no residual before it had moved
by more than 0.05.
"""
GROWTH = 8.0
"""How many times the farthest residual before it a tap may be away.  Measured, not derived: fourteen honest variants in
three scenarios reached 0.71 of the floor that this and `LEAST` make, in positions where no choice had parted.
"""

NOT_JUDGED = ("index_weights", "index_score", "gate_weights")
"""Small differences of large terms: their relative distance is no measure of noise, so it is only shown."""


@dataclass(frozen=True)
class Cell:
    """One tap in one layer and call."""

    call: int
    layer: int | None
    tap: str
    state: State
    distance: float
    """Largest relative distance of a position; for choices, the share of positions that chose differently."""
    floor: float
    """At the worst position that was judged; 0 where none was."""
    ratio: float
    """Largest distance over its floor where distances were judged."""
    position: int | None
    """Of the worst position."""
    message: str = ""

    @property
    def diverges(self) -> bool:
        """Whether noise cannot have done this."""
        return self.state in ("beyond", "choice", "malformed")


class Comparison:
    """Walks a run in the order of computation and keeps what may be expected of each position.

    Args:
        own: taps that were judged by their own inputs, with the call of the first failure, None if there was none.
        comparable: False for targets that deviate on purpose: their distances are shown and not judged.
    """

    def __init__(
        self, golden: GoldenModel, run: Run, own: Mapping[tuple[int | None, str], int | None], comparable: bool
    ) -> None:
        self._golden, self._run, self._own, self._comparable = golden, run, own, comparable
        layers, shape = golden.config.n_layers, (run.trace.batch, run.trace.total)
        self._came: Floats = np.zeros((layers + 1, *shape))
        """Distance of the residual that each layer received."""
        self._parted: Bools = np.zeros((layers + 1, *shape), np.bool_)
        """Where a choice of each layer differs, or is not known."""

    def cells(self) -> Iterator[Cell]:
        """Every tap that was shown and recorded, call by call, in the order of computation."""
        trace = self._run.trace
        for call in range(len(trace.starts)):
            for tap in BEFORE:
                yield from self._cell(call, None, tap, 0)
            for layer in range(self._golden.config.n_layers):
                for tap in LAYER_TAPS:
                    yield from self._cell(call, layer, tap, layer)
                self._close(call, layer)
            for tap in AFTER:
                yield from self._cell(call, None, tap, self._golden.config.n_layers)

    def _cell(self, call: int, layer: int | None, tap: str, depth: int) -> Iterator[Cell]:
        wrong = next((m for m in self._run.malformed if (m.call, m.layer, m.tap) == (call, layer, tap)), None)
        if wrong is not None:
            yield Cell(call, layer, tap, "malformed", np.inf, 0.0, np.inf, None, wrong.message)
            return
        got = self._run.get(call, tap, layer)
        if got is None or not self._run.trace.scenario.has(call, tap, layer):
            return
        expected = self._run.trace.part(call, tap, layer)
        kind = "values" if layer is None else LAYER_TAPS[tap].kind
        if kind == "values":
            yield self._distance(call, layer, tap, depth, got, expected)
        elif kind == "exact":
            different: Bools = (got.data != expected.data).any(-1)
            yield self._choice(call, layer, tap, different, "choice", "rows of the table differ")
        else:
            assert layer is not None
            yield self._chosen(call, layer, tap, kind, got, expected)

    # Distances --------------------------------------------------------------------------------------------------------

    def _distance(self, call: int, layer: int | None, tap: str, depth: int, got: Tensor, expected: Tensor) -> Cell:
        a, e = got.values(), expected.values()
        positions = self._positions(call, layer, tap, a.shape)
        rows = (a.shape[0], len(positions), -1)
        a, e = a.reshape(rows), e.reshape(rows)
        strange: Bools = (np.isfinite(a) != np.isfinite(e)).any(-1)
        finite = np.isfinite(a) & np.isfinite(e)
        distance = relative_distances(np.where(finite, a, 0.0), np.where(finite, e, 0.0))
        distance = np.where(strange, np.inf, distance)
        if not distance.size:
            return Cell(call, layer, tap, "same", 0.0, 0.0, 0.0, None)
        reach = np.maximum.accumulate(self._came[: depth + 1].max(0), axis=1)[:, positions]
        parted = self._behind(depth)[:, positions]
        if layer is not None:
            parted = parted | self._parted[layer][:, positions]
        floor = np.maximum(LEAST, GROWTH * reach)
        # A NaN is noise nowhere; -inf in scores stands for what is masked, which follows from choices before.
        masked = tap == "index_score" and not np.isnan(a).any()
        judged = (~parted if self._comparable and tap not in NOT_JUDGED else np.zeros_like(parted)) | np.isnan(a).any(
            -1
        )
        ratio = np.where(judged, np.where(distance > LEAST, distance / floor, np.minimum(distance / floor, 1.0)), 0.0)
        worst = np.unravel_index(np.argmax(np.where(judged, ratio, -1.0) if judged.any() else distance), distance.shape)
        state: State = "within"
        if ratio.max() > 1.0 and not masked:
            state = "beyond"
        elif not distance.any():
            state = "same"
        elif not judged.any():
            state = "parted" if parted.any() else "shown"
        message = "not finite where the recording is" if strange[worst] and not masked else ""
        return Cell(
            call,
            layer,
            tap,
            state,
            float(np.where(np.isfinite(distance), distance, 0.0).max()) if masked else float(distance[worst]),
            float(floor[worst]) if judged[worst] else 0.0,
            float(ratio[worst]) if state != "shown" else 0.0,
            int(positions[int(worst[1])]),
            message,
        )

    def _positions(self, call: int, layer: int | None, tap: str, shape: tuple[int, ...]) -> list[int]:
        """The token that each row of a tap belongs to; of a group, its last."""
        trace = self._run.trace
        if tap == "logits":
            return [trace.span(call)[-1]]
        if tap in ("latent", "compressed_rows", "index_keys") and layer is not None:
            ratio = self._golden.config.ratio(layer)
            return [(trace.starts[call] // ratio + row + 1) * ratio - 1 for row in range(shape[1])]
        return list(trace.span(call))

    def _behind(self, depth: int) -> Bools:
        """Positions that see a choice of an earlier layer that differs."""
        if depth == 0:
            return np.zeros(self._parted.shape[1:], np.bool_)
        return np.maximum.accumulate(self._parted[:depth].any(0), axis=1)

    def _close(self, call: int, layer: int) -> None:
        """Note how far the residual is that the next layer receives, and whether the layer's choices are known."""
        span = list(self._run.trace.span(call))
        config, run = self._golden.config, self._run
        needed = ["gate_indices", "h_out"]
        if config.indexes(layer) and run.trace.scenario.has(call, "selected", layer):
            needed.append("selected")
        known = all(
            run.get(call, tap, layer) is not None and run.trace.scenario.has(call, tap, layer) for tap in needed
        )
        if not known:
            self._parted[layer][:, span] = True
            return
        got, expected = run.taps[call, layer, "h_out"].values(), run.trace.part(call, "h_out", layer).values()
        rows = (*got.shape[:2], -1)
        with np.errstate(invalid="ignore"):
            distance = relative_distances(got.reshape(rows), expected.reshape(rows))
        self._came[layer + 1][:, span] = np.where(np.isfinite(distance), distance, 2.0)

    # Choices ----------------------------------------------------------------------------------------------------------

    def _chosen(self, call: int, layer: int, tap: str, kind: str, got: Tensor, expected: Tensor) -> Cell:
        mine, theirs = self._members(got, kind), self._members(expected, kind)
        width = max(mine.shape[-1], theirs.shape[-1])
        mine, theirs = (np.pad(m, ((0, 0), (0, 0), (0, width - m.shape[-1]))) for m in (mine, theirs))
        different: Bools = (mine != theirs).any(-1)
        state: State = "tie"
        message = "as its own scores have it" if (layer, tap) in self._own else "among scores as near as noise"
        if (layer, tap) in self._own:
            if self._own[layer, tap] == call:
                state, message = "choice", "not the best by its own scores"
        elif (different & ~self._behind(layer)[:, list(self._run.trace.span(call))]).any():
            apart = self._apart(call, layer, tap, mine, theirs)
            if (apart & ~self._behind(layer)[:, list(self._run.trace.span(call))]).any():
                state, message = "choice", "the recorded scores are too far apart for a tie"
        cell = self._choice(call, layer, tap, different, state, message)
        self._parted[layer][:, list(self._run.trace.span(call))] |= different
        return cell

    def _choice(self, call: int, layer: int | None, tap: str, different: Bools, state: State, message: str) -> Cell:
        positions = self._run.trace.span(call)
        if not different.any():
            return Cell(call, layer, tap, "same", 0.0, 0.0, 0.0, None)
        first = int(np.argmax(different.any(0)))
        parted = state == "tie" and layer is not None and self._behind(layer)[:, list(positions)][different].all()
        ratio = np.inf if state == "choice" else 0.0
        shown: State = "parted" if parted else state
        return Cell(call, layer, tap, shown, float(different.mean()), 0.0, ratio, positions[first], message)

    @staticmethod
    def _members(tensor: Tensor, kind: str) -> Bools:
        """Choices as sets: [B, T, members]."""
        if kind == "mask":
            return tensor.data.astype(np.bool_)
        chosen = tensor.data.astype(np.int64)
        members = np.zeros((*chosen.shape[:2], int(np.clip(chosen.max(initial=0), 0, 1 << 20)) + 1), np.bool_)
        valid = (chosen >= 0) & (chosen < members.shape[-1])
        rows = np.indices(chosen.shape)
        np.logical_or.at(members, (rows[0], rows[1], np.where(valid, chosen, 0)), valid)
        return members

    def _apart(self, call: int, layer: int, tap: str, mine: Bools, theirs: Bools) -> Bools:
        """Where what was left out beats what was kept instead, by the recorded scores and by more than noise: [B,T]."""
        trace, span = self._run.trace, list(self._run.trace.span(call))
        nowhere: Bools = np.zeros(mine.shape[:2], np.bool_)
        if tap == "selected" and trace.scenario.has(call, "index_score", layer):
            scores = trace.part(call, "index_score", layer).values()
        elif tap == "gate_indices" and trace.scenario.has(call, "ffn_in", layer):
            x = exact(trace.part(call, "ffn_in", layer))
            mask = None if trace.image_mask is None else trace.image_mask[:, span].reshape(-1)
            weights = self._golden.layer(layer).within("ffn.gate.")
            flat = gate.scores(weights, x.reshape(-1, x.shape[-1]), mask)[1].value
            scores = flat.reshape(*mine.shape[:2], -1)
        else:
            return nowhere
        width = scores.shape[-1]
        if mine[..., width:].any() or theirs[..., width:].any():
            return np.logical_or(nowhere, (mine[..., width:] | theirs[..., width:]).any(-1))
        mine, theirs = (
            np.pad(m, ((0, 0), (0, 0), (0, width - m.shape[-1]))) if m.shape[-1] < width else m[..., :width]
            for m in (mine, theirs)
        )
        lost = np.where(theirs & ~mine, scores, -np.inf).max(-1)
        won = np.where(mine & ~theirs, scores, np.inf).min(-1)
        finite = np.where(np.isfinite(scores), scores, 0.0)
        reach = np.maximum.accumulate(self._came[: layer + 1].max(0), axis=1)[:, span]
        noise = np.maximum(LEAST, GROWTH * reach) * np.abs(finite).max(-1)
        with np.errstate(invalid="ignore"):
            apart: Bools = lost - won > 2 * noise
        return apart
