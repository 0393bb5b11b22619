"""Variants of how calls and requests are put together: prompts in chunks, batches in another order or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conformance.adapters.reference import Reference
from conformance.faults.honest.variant import HonestVariant
from conformance.interface import METHODS, Array, Config, Reading, Stateful, Weights

BY_POSITION = ("x", "h", "pre", "input_ids", "image_mask", "image_features")
"""Inputs of steps with positions along the second dimension."""


class Chunked(Stateful):
    """Prompts are worked off in chunks of `size` positions; only the required results are answered."""

    def __init__(self, inner: Any, method: str, size: int) -> None:
        self._inner, self._required, self._size = inner, METHODS[method].results, size

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Step chunk by chunk and join the results along the positions."""
        length = next(inputs[name].shape[1] for name in BY_POSITION if name in inputs)
        # What goes on after a prompt may hold drafts, of which only those of one call can be taken back.
        size = length if inputs["start_pos"].any() else self._size
        parts: dict[str, list[torch.Tensor]] = {}
        for first in range(0, length, size):
            span = slice(first, min(first + size, length))
            cut = {
                name: value[:, span] if name in BY_POSITION and value is not None else value
                for name, value in inputs.items()
            }
            cut["start_pos"] = inputs["start_pos"] + first
            for name, value in self._inner.step(**cut).items():
                if name in self._required:
                    parts.setdefault(name, []).append(value)
        return {name: self._joined(name, values) for name, values in parts.items()}

    @staticmethod
    def _joined(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return values[-1] if name in ("logits", "output_ids") else torch.cat(tuple(values), dim=1)

    def roll_back(self, end: Array) -> None:
        """Handed on."""
        self._inner.roll_back(end)

    def save_state(self) -> Any:
        """Handed on."""
        return self._inner.save_state()

    def restore_state(self, saved: Any) -> None:
        """Handed on."""
        self._inner.restore_state(saved)

    def state(self) -> Mapping[str, Array]:
        """The state as it is, except that the carry's history depends on the calls."""
        state: Mapping[str, Array] = self._inner.state()
        return state


class Reordered(Stateful):
    """The requests of a batch stand in reverse order inside."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Turn the batch round, step, and turn the results back."""
        turned = {name: None if value is None else value.flip(0) for name, value in inputs.items()}
        return self._back(self._inner.step(**turned))

    def roll_back(self, end: Array) -> None:
        """Handed on with the batch turned round."""
        self._inner.roll_back(end.flip(0))

    def save_state(self) -> Any:
        """Handed on."""
        return self._inner.save_state()

    def restore_state(self, saved: Any) -> None:
        """Handed on."""
        self._inner.restore_state(saved)

    def state(self) -> Mapping[str, Array]:
        """The state with the requests in their own order."""
        return self._back(self._inner.state())

    @staticmethod
    def _back(results: Mapping[str, Array]) -> Mapping[str, Array]:
        # Taps of the mixture hold the tokens of all requests in one dimension, which turns round token by token.
        return {name: value.flip(0) for name, value in results.items() if "gate_" not in name}


class OneByOne(Stateful):
    """Every request of a batch has objects of its own."""

    def __init__(self, inner: Sequence[Any], method: str) -> None:
        self._inner, self._required = inner, METHODS[method].results

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Step request by request and join the required results."""
        results = [
            part.step(**{name: None if v is None else v[i : i + 1] for name, v in inputs.items()})
            for i, part in enumerate(self._inner)
        ]
        return {name: torch.cat([r[name] for r in results]) for name in self._required if name in results[0]}

    def roll_back(self, end: Array) -> None:
        """Each request goes back as far as it has to."""
        for i, part in enumerate(self._inner):
            part.roll_back(end[i : i + 1])

    def save_state(self) -> Any:
        """The states of all requests."""
        return [part.save_state() for part in self._inner]

    def restore_state(self, saved: Any) -> None:
        """Each request's own."""
        for part, own in zip(self._inner, saved, strict=True):
            part.restore_state(own)

    def state(self) -> Mapping[str, Array]:
        """The states of all requests, joined."""
        states = [part.state() for part in self._inner]
        return {name: torch.cat([state[name] for state in states]) for name in states[0]}


class _Wrapped(Reference):
    """A reference whose stateful objects are wrapped."""

    def _wrap(self, inner: Stateful, method: str) -> Stateful:
        raise NotImplementedError

    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        """Wrapped."""
        return self._wrap(super().compressor(config, layer_id, weights, batch_size), "compressor")

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """Wrapped."""
        return self._wrap(super().attention(config, layer_id, weights, runtime, batch_size), "attention")

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """Wrapped."""
        return self._wrap(super().block(config, layer_id, weights, runtime, token_map, batch_size), "block")

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Wrapped."""
        return self._wrap(super().stack(config, layer_ids, weights, runtime, token_map, batch_size), "stack")

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """Wrapped."""
        return self._wrap(super().model(config, weights, runtime, token_map, batch_size), "model")


class InChunks(_Wrapped):
    """Prompts in chunks, where no other layer's slots are written in between."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def _wrap(self, inner: Stateful, method: str) -> Stateful:
        # An attention or block is stepped call by call beside the others of its runtime: chunks of one would meet the
        # slots of the others' whole call.
        return Chunked(inner, method, self.size) if method in ("compressor", "stack", "model") else inner


class BatchReversed(_Wrapped):
    """The requests of every batch in reverse order inside."""

    def _wrap(self, inner: Stateful, method: str) -> Stateful:
        return Reordered(inner)


class RequestByRequest(Reference):
    """Every request of a batch on its own."""

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """One runtime a request."""
        return [super(RequestByRequest, self).runtime(config, 1, reading) for _ in range(batch_size)]

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """One attention a request."""
        return OneByOne(
            [super(RequestByRequest, self).attention(config, layer_id, weights, r, 1) for r in runtime], "attention"
        )

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One block a request."""
        return OneByOne(
            [super(RequestByRequest, self).block(config, layer_id, weights, r, token_map, 1) for r in runtime], "block"
        )

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """One stack a request."""
        return OneByOne(
            [super(RequestByRequest, self).stack(config, layer_ids, weights, r, token_map, 1) for r in runtime], "stack"
        )

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """One model a request."""
        return OneByOne(
            [super(RequestByRequest, self).model(config, weights, r, token_map, 1) for r in runtime], "model"
        )


CHUNKS = "A prompt in chunks must give what a single call gives (numerics.md 0)."

CONVERSATIONS: tuple[HonestVariant, ...] = (
    *(
        HonestVariant(
            f"prompts-in-chunks-of-{size}",
            CHUNKS,
            options={"size": size},
            implementation=InChunks,
            both_readings=False,
        )
        for size in (7, 8)
    ),
    HonestVariant("prompts-token-by-token", CHUNKS, options={"size": 1}, implementation=InChunks, both_readings=False),
    HonestVariant(
        "batch-reversed", "Requests of a batch are independent: their order is free.", implementation=BatchReversed
    ),
    HonestVariant(
        "request-by-request",
        "Requests of a batch are independent: one by one is as good.",
        implementation=RequestByRequest,
    ),
)
