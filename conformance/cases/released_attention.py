"""Attention at the released widths: source, reusing and re-indexing layers stepped through one shared runtime.

Inputs are given to every layer, so one layer's rounding does not reach the next, and few rows of the prompt are judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.attention import HEAD_AXES, ROW_AXES, state_rules
from conformance.cases.case import Advance, Case, Handle, Open, Place, ReadState, Step
from conformance.cases.released_set import Released
from conformance.cases.traces import int64
from conformance.config import ModelConfig
from conformance.errors import FixtureError
from conformance.judge.components import indexer
from conformance.judge.components.teacher_forced import LayerRows
from conformance.judge.expectations import Axes, Expectation, Within
from conformance.judge.noise import Floors
from conformance.judge.own_scores import SCORE_AXES, DistantScores, OwnCandidates, OwnSelection, SameSelection
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRows
from conformance.tensors import SafetensorsFile, Tensor

Ints = npt.NDArray[np.int64]


def cases(released: Released, stem: str, floors: Floors) -> Iterator[Case]:
    """One recording: the layers share a runtime, so they are one conversation."""
    recording = Recording(released, stem)
    prompt, steps = recording.lengths[0], len(recording.lengths) - 1
    ring = "ring-still-filling" if recording.total < released.config.window_size else "ring-wrapped"
    case_id = f"attention/every-role-at-released-widths/{ring}-prefill-{prompt}-then-{steps}"
    yield Case(
        case_id,
        "full",
        "propagated",
        "Fails when a kernel is right at small widths only: 64 heads of 512, 8 output groups, lists beyond one block.",
        "numerics.md 6",
        partial(_steps, recording, _Allowances(floors, case_id)),
        source=f"{released.name}/{stem}",
        reading=recording.reading,
    )


ONE_CODE: Mapping[str, float] = {"index_score": 0.052, "attn_out": 0.214}
"""How far a call moves when one element of every query latent lands on the next FP8 code, relative to its norm.

An honest sum over 5120 inputs does that to an element now and then, by ending on the other side of one rounding: FP4
codes of the index queries follow, then scores, then some selected positions.  The reference's honest variants happened
not to.  Measured by moving a random element of each latent through the reference: the largest call of the recording
with a prompt of 272.  The median over positions is not widened by it.
"""

CALL_OVER_MEDIAN = 2.0
"""With equal selections the honest variants' largest call was 1.3 times their median position (list blocks of 16 and
one final maximum, both recordings)."""


@dataclass(frozen=True)
class _Allowances:
    """Noise floors of one case, for results that follow from several roundings in a row."""

    floors: Floors
    case_id: str

    def near(self, tap: str, recorded: Tensor, axes: Axes) -> Propagated:
        """The rule for one tap, selections alike."""
        return Propagated(tap, recorded, self.floors.allowance(self.case_id, tap), self.floors.describe(), axes)

    def close(self, tap: str, recorded: Tensor, axes: Axes) -> Propagated:
        """The rule for one tap where selections are the recorded ones: ties in them are in the floor, not here."""
        rule = self.near(tap, recorded, axes)
        return replace(rule, allowance=rule.allowance._replace(largest=CALL_OVER_MEDIAN * rule.allowance.median))

    def around(self, tap: str, recorded: Tensor, axes: Axes) -> Propagated:
        """The rule for one tap that follows from scores or selections."""
        rule = self.near(tap, recorded, axes)
        largest = max(rule.allowance.largest, ONE_CODE[tap])
        return replace(rule, allowance=rule.allowance._replace(largest=largest))


@dataclass(frozen=True)
class Recording:
    """A recording and what its metadata says of inputs, weights, configuration and rows."""

    released: Released
    stem: str

    @cached_property
    def file(self) -> SafetensorsFile:
        """The recorded tensors."""
        return self.released.part(self.stem)

    @cached_property
    def mapping(self) -> Mapping[str, Any]:
        """The released configuration with the recording's overrides, so that selections are not trivial."""
        pairs = [pair.split() for pair in self._metadata("overrides", r"\w+ \d+(, \w+ \d+)*")[0].split(",")]
        return {**self.released.mapping, **{name: int(value) for name, value in pairs}}

    @cached_property
    def config(self) -> ModelConfig:
        """The same, read."""
        return ModelConfig.from_mapping(self.mapping, self.stem)

    @cached_property
    def layers(self) -> list[int]:
        """Layers in the order in which they are stepped."""
        return [int(layer) for layer in self._metadata("layers", r"\d+(,\d+)*")[0].split(",")]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each call."""
        prefill, steps = (int(self._metadata(name, r"\d+")[0]) for name in ("prefill", "decode_steps"))
        return (prefill, *[1] * steps)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First position of each call."""
        return tuple(sum(self.lengths[:call]) for call in range(len(self.lengths)))

    @property
    def batch(self) -> int:
        """One request: recordings have no batch axis."""
        return 1

    @property
    def total(self) -> int:
        """Positions after the last call."""
        return sum(self.lengths)

    @cached_property
    def reading(self) -> Any:
        """The reading of the shared index-key slot that was recorded."""
        return self._metadata("reading", "intended|literal")[0]

    @cached_property
    def queried(self) -> list[Ints]:
        """Positions judged in each call: those kept of the prompt, then every decoded one."""
        rows = np.asarray(json.loads(self._metadata("rows", r"\[\d+(, \d+)*\]")[0]), dtype=np.int64)
        return [rows, *[np.asarray([start]) for start in self.starts[1:]]]

    def inputs(self, layer: int) -> Tensor:
        """The layer's input at every position, bf16 [1,P,D]."""
        match = self._metadata("inputs", r"kind input, name (\S+), shape \[(\d+(?:, \d+)*)\]")
        name, shape = match[1].replace("{L}", str(layer)), tuple(int(size) for size in match[2].split(","))
        return self.released.input(name, shape)

    def recorded(self, call: int, layer: int, tap: str) -> Tensor:
        """A recorded tap with the batch axis it lacks, [1,T,...]."""
        return self.file[f"call{call}/layer{layer}/{tap}"][None]

    def state(self, layer: int, tap: str) -> Tensor | None:
        """A recorded state with its batch axis."""
        key = f"state/layer{layer}/{tap}"
        return self.file[key][None] if key in self.file else None

    @cached_property
    def rows(self) -> Mapping[int, LayerRows]:
        """What each layer derives from its inputs: rows at every position, queries at the judged ones."""
        asking = np.concatenate(self.queried)
        return {
            layer: LayerRows(
                self.config,
                layer,
                self.released.parameters.within(f"layers.{layer}.attn."),
                self.inputs(layer).values(),
                asking,
            )
            for layer in self.layers
        }

    def span(self, call: int) -> slice:
        """Where the judged positions of a call stand among those of all calls."""
        before = sum(positions.size for positions in self.queried[:call])
        return slice(before, before + self.queried[call].size)

    def _metadata(self, key: str, pattern: str) -> re.Match[str]:
        match = re.fullmatch(pattern, self.file.metadata.get(key, ""))
        if match is None:
            raise FixtureError(f"{self.file.label}: metadata {key} is missing or not of the form {pattern}")
        return match


def _steps(recording: Recording, allowances: _Allowances) -> Iterator[Step]:
    # A recording keeps what it derives, and a case may run again: the bounds must not outlive the conversation.
    recording = Recording(recording.released, recording.stem)
    config, parameters = recording.mapping, recording.released.parameters
    yield Step(Open("runtime", "runtime", {"config": config, "batch_size": 1, "reading": recording.reading}))
    for layer in recording.layers:
        arguments = {
            "config": config,
            "layer_id": layer,
            "weights": parameters.within(f"layers.{layer}.attn.").mapping(),
            "batch_size": 1,
            "runtime": Handle("runtime"),
        }
        yield Step(Open(f"layer {layer}", "attention", arguments), place=Place(layer))
    for call, (start, length) in enumerate(zip(recording.starts, recording.lengths, strict=True)):
        for layer in recording.layers:
            x = recording.inputs(layer)[:, start : start + length]
            yield Step(
                Advance(f"layer {layer}", {"x": x, "start_pos": int64([start])}),
                partial(_output_rules, recording, allowances, layer, call),
                Place(layer, [call], recording.queried[call].tolist()),
                partial(_tap_rules, recording, allowances, layer, call),
            )
    for layer in recording.layers:
        place = Place(layer, [f"state after {len(recording.lengths) - 1}"])
        yield Step(ReadState(f"layer {layer}"), partial(_state_rules, recording, layer), place)


def _rows(recording: Recording, call: int, rules: Sequence[Expectation]) -> list[Expectation]:
    rows = (recording.queried[call] - recording.starts[call]).tolist()
    return [OfRows(rule, rows, recording.lengths[call]) for rule in rules]


def _output_rules(recording: Recording, allowances: _Allowances, layer: int, call: int) -> Sequence[Expectation]:
    """The output, by its distance from the recording.

    From a layer's input to its output there are eight roundings, four of them to FP8 or FP4, and intervals grow beyond
    the values.  `released_kernels` bounds each step by itself.
    """
    recorded = recording.recorded(call, layer, "attn_out")
    # Without more rows than are selected there is nothing that a score could change.
    ratio = recording.config.ratio(layer)
    selective = ratio > 0 and recording.total // ratio > recording.config.index_topk
    rule = allowances.around if selective else allowances.near
    return _rows(recording, call, [rule("attn_out", recorded, ROW_AXES)])


def _tap_rules(recording: Recording, allowances: _Allowances, layer: int, call: int) -> Sequence[Expectation]:
    """Taps that an implementation may show: what is near the input by bounds, choices by the scores beside them."""
    config, rows, span = recording.config, recording.rows[layer], recording.span(call)
    rules: list[Expectation] = [
        Within("q_latent", rows.q_latent[:, span], "BF16", ROW_AXES),
        Within("attn_q", rows.queries[:, span], "BF16", HEAD_AXES),
    ]
    if config.indexes(layer):
        positions = rows.queried[:, span]
        scores = recording.recorded(call, layer, "index_score")
        columns = scores.shape[-1]
        visible = indexer.visibility(config, layer, positions, columns)
        decided = ~visible if config.masked_by_candidates(layer) else np.ones_like(visible)
        chosen = {"selected": recording.recorded(call, layer, "selected"), "index_score": scores}
        rules += [
            Within("index_q", rows.index_queries[:, span], "BF16", ("request", "position", "index head", "feature")),
            Within("index_weights", rows.index_weights[:, span], "BF16", ("request", "position", "index head")),
            DistantScores(allowances.around("index_score", scores, SCORE_AXES), decided),
            OwnSelection(visible, config.index_topk, chosen),
            SameSelection(
                allowances.close("attn_out", recording.recorded(call, layer, "attn_out"), ROW_AXES), chosen["selected"]
            ),
        ]
        if layer == config.candidate_source_layer:
            counts = indexer.visible_counts(config, layer, positions)
            size, blocks = config.candidate_block_size, config.candidate_topk_blocks
            published = {"candidates": recording.recorded(call, layer, "candidates"), "index_score": scores}
            rules.append(OwnCandidates(counts, columns, size, blocks, published))
    return _rows(recording, call, rules)


def _state_rules(recording: Recording, layer: int) -> Sequence[Expectation]:
    return state_rules(recording, recording.rows[layer], layer)
