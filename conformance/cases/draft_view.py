"""The draft blocks seen as a small model of their own, so that the cases of single components apply to them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.cases import attention, experts, gate, hyper_connections, moe, norm
from conformance.cases.case import Case, Place
from conformance.cases.traces import Bools, GoldenModel, Ints, Joined, Trace
from conformance.config import ModelConfig
from conformance.errors import FixtureError
from conformance.judge.components.linear import Parameters
from conformance.tensors import Tensor, concatenate

OF_THE_MODEL = ("candidate_", "dspark_", "engram_", "vision_")
"""Keys that say nothing of draft blocks."""


def drafts_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the draft blocks, counted from 0: window only, experts of their own number."""
    return replace(
        config,
        n_layers=config.n_mtp_layers,
        n_mtp_layers=0,
        compress_ratios=(0,) * config.n_mtp_layers,
        kv_source_layers=(),
        index_source_layers=(),
        candidate_source_layer=-1,
        engram_layer_ids=(),
        n_routed_experts=config.dspark_n_routed_experts,
        n_activated_experts=config.dspark_n_activated_experts,
    )


def _drafts_mapping(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {name: value for name, value in mapping.items() if not name.startswith(OF_THE_MODEL)}
    return {
        **kept,
        "n_layers": mapping["n_mtp_layers"],
        "n_mtp_layers": 0,
        "compress_ratios": [0] * mapping["n_mtp_layers"],
        "kv_source_layers": [],
        "index_source_layers": [],
        "n_routed_experts": mapping["dspark_n_routed_experts"],
        "n_activated_experts": mapping["dspark_n_activated_experts"],
    }


class DraftModel(GoldenModel):
    """The draft blocks of a golden model as its layers 0, 1, ...; their weights have been checked with the model's."""

    def __init__(self, model: GoldenModel) -> None:
        self.name = model.name
        self.mapping = _drafts_mapping(model.mapping)
        self.config = drafts_config(model.config)
        self.parameters = model.parameters
        self.traces = []

    def layer(self, layer: int) -> Parameters:
        """Parameters of a draft block."""
        return self.parameters.within(f"mtp.{layer}.")


class Drafts:
    """What one scenario recorded of the draft blocks: the calls that drafted, and what each block was given."""

    def __init__(self, model: GoldenModel, trace: Trace) -> None:
        """See the class.

        Raises:
            FixtureError: the drafts are not as many as the configuration says.
        """
        self.model, self.trace = model, trace
        scenario = trace.scenario
        self.calls = [call for call in range(len(trace.starts)) if scenario.has(call, "spec_ids")]
        expected = (trace.batch, 1 + model.config.dspark_block_size)
        for call in self.calls:
            found = scenario.tap(call, "spec_ids").shape
            if tuple(found) != expected or model.config.n_mtp_layers < 1:
                raise FixtureError(
                    f"{trace.source}: tensor call{call}/spec_ids: shape {list(found)}, the configuration with "
                    f"n_mtp_layers {model.config.n_mtp_layers} calls for {list(expected)}"
                )

    def first(self, call: int) -> int:
        """Position of the first draft of a call."""
        return self.trace.starts[call] + self.trace.lengths[call]

    def embedding(self, call: int) -> Tensor:
        """What the drafts of a call begin as, [B,n,D]: the model's newest token, then noise."""
        config, table = self.model.config, self.model.parameters.tensor("embed.weight")
        ids = np.full((self.trace.batch, config.dspark_block_size), config.dspark_noise_token_id)
        ids[:, 0] = self.trace.scenario.tap(call, "output_ids").data
        return table[ids]

    def stream(self, block: int, call: int) -> Tensor:
        """The residual that a draft block received in a call, [B,n,S,D]."""
        if block:
            return self.tap("h_out", block - 1, call)
        embedded = self.embedding(call)
        streams = self.model.config.hc_mult
        return Tensor(embedded.dtype, np.repeat(embedded.data[:, :, None], streams, axis=2))

    def tap(self, name: str, block: int, call: int) -> Tensor:
        """A tap of a draft block in a call, [B,n,...] also where it was recorded token by token."""
        tensor = self.trace.scenario.tap(call, name, self.model.config.draft_layers[block])
        if name in ("gate_weights", "gate_indices"):
            return tensor.reshape(self.trace.batch, self.model.config.dspark_block_size, -1)
        return tensor

    def place(self, block: int | None, call: int) -> Place:
        """Where a step of a call stands."""
        layer = None if block is None else self.model.config.draft_layers[block]
        first = self.first(call)
        return Place(layer, [call], range(first, first + self.model.config.dspark_block_size))


class JoinedDrafts(Joined):
    """All drafts of all scenarios as one sequence of independent tokens, [1, N, ...]."""

    def __init__(self, drafts: Sequence[Drafts]) -> None:
        super().__init__([of.trace for of in drafts])
        self._drafts = drafts
        self._offset = drafts[0].model.config.n_layers
        size = drafts[0].model.config.dspark_block_size
        self._found = [(of, call) for of in drafts for call in of.calls]
        positions = [np.tile(of.first(call) + np.arange(size), of.trace.batch) for of, call in self._found]
        self.positions: Ints = np.concatenate(positions).reshape(1, -1).astype(np.int64)
        self._draft_calls = [
            f"{of.trace.name}/{call}" for of, call in self._found for _ in range(size * of.trace.batch)
        ]

    def place(self, layer: int | None = None) -> Place:
        """Where a step over all drafts stands; the layer by its number in the model."""
        number = None if layer is None else layer + self._offset
        return Place(number, self._draft_calls, self.positions[0].tolist())

    def tap(self, name: str, layer: int | None = None) -> Tensor:
        """A tap of a draft block, [1, N, ...]."""
        assert layer is not None
        return _flat([of.tap(name, layer, call) for of, call in self._found])

    def attention_stream(self, layer: int) -> Tensor:
        """The residual that a draft block received, [1, N, S, D]."""
        return _flat([of.stream(layer, call) for of, call in self._found])

    def image_mask(self) -> Bools | None:
        """Drafts are text."""
        return None


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return concatenate([p.reshape(1, p.shape[0] * p.shape[1], *p.shape[2:]) for p in parts], axis=1)


def drafting(model: GoldenModel) -> list[Drafts]:
    """The scenarios in which the draft head ran."""
    return [of for trace in model.traces for of in [Drafts(model, trace)] if of.calls]


def cases(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Case]:
    """The parts that draft blocks share with the model's layers, on what the draft blocks were given."""
    view, joined = DraftModel(model), JoinedDrafts(drafts)
    parts = (
        *(case for case in norm.cases(view, joined) if case.mode == "composed"),
        *hyper_connections.cases(view, joined),
        *attention.cases(view, [], joined),
        *gate.cases(view, joined, None),
        *experts.cases(view, joined),
        *moe.cases(view, joined),
    )
    for case in parts:
        component, behaviour, variant = case.id.split("/")
        yield replace(case, id=f"{component}/{behaviour}-of-draft-blocks/{variant}", level="core")
