"""Golden traces seen as whole sequences: what each component was given and gave, over all calls of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Place
from conformance.checkpoint_layout import layout
from conformance.checkpoint_weights import CheckpointTensors, check_parameters
from conformance.config import ModelConfig
from conformance.fixtures import ModelSet, Scenario
from conformance.judge.bounded import Bounded
from conformance.judge.components.linear import Parameters
from conformance.tensors import Tensor, concatenate

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class RecordedCalls(Protocol):
    """The calls of a recording and the state after the last one."""

    @property
    def batch(self) -> int:
        """Requests."""

    @property
    def starts(self) -> Sequence[int]:
        """First position of each call."""

    @property
    def lengths(self) -> Sequence[int]:
        """Positions of each call."""

    @property
    def total(self) -> int:
        """Positions after the last call."""

    def state(self, layer: int, tap: str) -> Tensor | None:
        """A recorded state after the last call, if there is one."""


class GoldenModel:
    """A golden set with its weights and scenarios."""

    def __init__(self, model: ModelSet) -> None:
        self.name = model.name
        self.mapping: Mapping[str, Any] = model.config
        """The configuration as an implementation gets it."""
        self.config = ModelConfig.from_mapping(model.config, f"{model.name}/config.json")
        self.whole = model.excerpt is None
        """Whether the set has embedding and head, rather than layers alone."""
        check_weights(model)
        self.parameters = Parameters(model.weights)
        self.traces = [Trace(self, scenario) for scenario in model.scenarios.values()]

    def layer(self, layer: int) -> Parameters:
        """Parameters of a block."""
        return self.parameters.within(f"layers.{layer}.")

    @cached_property
    def token_map(self) -> Tensor:
        """Compressed id of every token, int32 [vocabulary]: equal runs of ids where the set names no other map."""
        config = self.config
        ids = np.arange(config.vocab_size, dtype=np.int64)
        return Tensor("I32", (ids * config.engram_compressed_vocab_size // config.vocab_size).astype(np.int32))


def check_weights(model: ModelSet) -> None:
    """Hold the weights' header against what the configuration calls for: a damaged set is no implementation's fault.

    Raises:
        FixtureError: a tensor of the text path, or of a draft head or a vision tower that was recorded, is missing, or
            has another shape or type; names file and tensor.
    """
    judged = dict(model.config)
    if not any("image/patches" in scenario.file for scenario in model.scenarios.values()):
        judged["vision_n_layers"] = 0
    if not any(scenario.drafts for scenario in model.scenarios.values()):
        judged["n_mtp_layers"] = judged["dspark_block_size"] = 0
    parameters = layout(judged, f"{model.name}/config.json").parameters
    weights = model.weights
    if isinstance(weights, CheckpointTensors):
        weights.check(parameters)
    else:
        check_parameters(parameters, weights.header.entries, lambda name: f"{model.name}/weights.safetensors: {name}")


class Trace:
    """One scenario: taps of all calls joined along the positions."""

    def __init__(self, model: GoldenModel, scenario: Scenario) -> None:
        self.model = model
        self.scenario = scenario
        self.name = scenario.name
        self.batch = scenario.batch
        self.starts = scenario.start_positions
        self.lengths = scenario.lengths
        self._joined: dict[tuple[str, int | None], Tensor] = {}

    @property
    def source(self) -> str:
        """Set and scenario, as reports name them."""
        return f"{self.model.name}/{self.name}"

    @property
    def total(self) -> int:
        """Positions after the last call."""
        return self.starts[-1] + self.lengths[-1]

    @cached_property
    def positions(self) -> Ints:
        """Every position for every request, [B, P]."""
        return np.broadcast_to(np.arange(self.total), (self.batch, self.total))

    @cached_property
    def calls(self) -> list[int]:
        """The call that each position belongs to."""
        return [call for call, length in enumerate(self.lengths) for _ in range(length)]

    def place(self, layer: int | None = None, call: int | None = None) -> Place:
        """Where a step over the whole sequence, or over one call, stands."""
        if call is None:
            return Place(layer, self.calls, range(self.total))
        return Place(layer, [call], self.span(call))

    def span(self, call: int) -> range:
        """The positions of a call."""
        return range(self.starts[call], self.starts[call] + self.lengths[call])

    def has(self, tap: str, layer: int | None = None) -> bool:
        """Whether every call recorded the tap."""
        return all(self.scenario.has(call, tap, layer) for call in range(len(self.starts)))

    def joined(self, tap: str, layer: int | None = None) -> Tensor:
        """A tap of every call, [B, P, ...]."""
        key = (tap, layer)
        if key not in self._joined:
            parts = [self.part(call, tap, layer) for call in range(len(self.starts))]
            self._joined[key] = concatenate(parts, axis=1)
        return self._joined[key]

    def part(self, call: int, tap: str, layer: int | None = None) -> Tensor:
        """A tap of one call as [B, T, ...], also where it was recorded token by token."""
        tensor = self.scenario.tap(call, tap, layer)
        if tap in ("gate_weights", "gate_indices"):
            return tensor.reshape(self.batch, self.lengths[call], -1)
        return tensor

    def produced(self, tap: str, layer: int) -> Tensor:
        """A tap that only calls which complete a group have (`latent`, `compressed_rows`, `index_keys`), joined."""
        calls = [call for call in range(len(self.starts)) if self.scenario.has(call, tap, layer)]
        return concatenate([self.scenario.tap(call, tap, layer) for call in calls], axis=1)

    def block_input(self, layer: int) -> Tensor:
        """The residual that a block receives, before its Engram: [B, P, S, D]."""
        if self.has("engram_in", layer):
            return self.joined("engram_in", layer)
        return self._residual(layer)

    def attention_stream(self, layer: int) -> Tensor:
        """The residual that the attention's coefficients are computed from, after Engram: [B, P, S, D]."""
        if self.has("engram_out", layer):
            return self.joined("engram_out", layer)
        return self._residual(layer)

    def _residual(self, layer: int) -> Tensor:
        key = ("h_in", layer)
        if key not in self._joined:
            parts = []
            for call in range(len(self.starts)):
                if self.scenario.has(call, "h_in", layer):
                    parts.append(self.scenario.tap(call, "h_in", layer))
                    continue
                if layer:
                    parts.append(self.scenario.tap(call, "h_out", layer - 1))
                    continue
                embed = self.scenario.tap(call, "embed")
                streams = self.model.config.hc_mult
                parts.append(Tensor(embed.dtype, np.repeat(embed.data[:, :, None], streams, axis=2)))
            self._joined[key] = concatenate(parts, axis=1)
        return self._joined[key]

    @cached_property
    def input_ids(self) -> Tensor:
        """Token ids, int32 [B, P]."""
        return self.joined("input_ids")

    @cached_property
    def image_mask(self) -> Bools | None:
        """True at image tokens, [B, P]; None for a text-only scenario."""
        if self.scenario.image is None:
            return None
        types = self.scenario.extra("image/token_types").data
        mask = np.zeros((self.batch, self.total), dtype=np.bool_)
        mask[:, : types.shape[1]] = types >= 0
        return mask

    def mask_part(self, call: int | None = None) -> Tensor | None:
        """The image mask as an argument, of one call or of the whole sequence."""
        if self.image_mask is None:
            return None
        part = self.image_mask if call is None else self.image_mask[:, list(self.span(call))]
        return Tensor("BOOL", np.ascontiguousarray(part))

    def state(self, layer: int, tap: str) -> Tensor | None:
        """A recorded state after the last call, if there is one."""
        return self.scenario.state(layer, tap) if tap in self.scenario.state_names(layer) else None

    def start_pos(self, call: int) -> Tensor:
        """Start position of each request, int64 [B]."""
        return Tensor("I64", np.full(self.batch, self.starts[call], dtype=np.int64))


class Joined:
    """Several traces seen as one sequence of independent tokens, for components without state.

    Requests of a batch follow one another: everything is [1, N, ...] with N the tokens of all traces.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = traces
        self.positions: Ints = np.concatenate([trace.positions.reshape(1, -1) for trace in traces], axis=1)
        self._calls = [f"{trace.name}/{call}" for trace in traces for call in trace.calls * trace.batch]
        self._taps: dict[tuple[str, int | None], Tensor] = {}

    @property
    def source(self) -> str:
        """Set and number of scenarios, as reports name them."""
        return f"{self.traces[0].model.name}/{len(self.traces)} scenarios joined"

    def place(self, layer: int | None = None) -> Place:
        """Where a step over all tokens stands."""
        return Place(layer, self._calls, self.positions[0].tolist())

    def tap(self, name: str, layer: int | None = None) -> Tensor:
        """A tap of all traces, [1, N, ...]."""
        return self._join((name, layer), lambda trace: trace.joined(name, layer))

    def attention_stream(self, layer: int) -> Tensor:
        """The residual that the attention's coefficients are computed from, [1, N, S, D]."""
        return self._join(("attention_stream", layer), lambda trace: trace.attention_stream(layer))

    def image_mask(self) -> Bools | None:
        """True at image tokens, [1, N]; None when no trace has any."""
        if all(trace.image_mask is None for trace in self.traces):
            return None
        masks = [np.zeros(t.positions.shape, np.bool_) if t.image_mask is None else t.image_mask for t in self.traces]
        return np.concatenate([mask.reshape(1, -1) for mask in masks], axis=1)

    def _join(self, key: tuple[str, int | None], tap: Callable[[Trace], Tensor]) -> Tensor:
        if key not in self._taps:
            parts = [tap(trace) for trace in self.traces]
            self._taps[key] = concatenate([p.reshape(1, p.shape[0] * p.shape[1], *p.shape[2:]) for p in parts], axis=1)
        return self._taps[key]


def exact(tensor: Tensor) -> Bounded:
    """A recorded tensor as an exact value."""
    return Bounded.exact(tensor.values())


def int64(array: npt.ArrayLike) -> Tensor:
    """An int64 argument."""
    return Tensor("I64", np.ascontiguousarray(array, dtype=np.int64))


def boolean(mask: Bools | None) -> Tensor | None:
    """A mask as an argument, None kept."""
    return None if mask is None else Tensor("BOOL", np.ascontiguousarray(mask))


def bf16(value: Bounded) -> Tensor:
    """The nominal value of something that is stored in bf16."""
    return Tensor.from_values(value.value, "BF16")
