"""Ports for `--against`: right for as long as the shipped recordings are, wrong beyond."""

from __future__ import annotations

from typing import Any

import torch

from conformance.adapters.reference import Reference, ReferenceStateful
from conformance.interface import Stateful
from reference.attention import Attention
from reference.model import Model

LAST_RIGHT = 64
"""Calls from here on are beyond every recording of the shipped tiny set."""


def forgetful(attention: Attention) -> Attention:
    """It forgets half of its ring before each call that begins at position 64 or later."""
    shipped = attention.step

    def step(x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        if int(start_pos.min()) >= LAST_RIGHT:
            attention.window = attention.window.clone()
            attention.window[:, ::2] = 0
        return shipped(x, start_pos)

    attention.step = step  # type: ignore[method-assign]
    return attention


class LongAttention(Reference):
    """Its attentions forget."""

    def attention(self, config: Any, layer_id: int, weights: Any, runtime: Any, batch_size: int) -> Stateful:
        return ReferenceStateful(forgetful(Attention(self._read(config), layer_id, weights, runtime, batch_size)))


class LongModel(Reference):
    """The first layer of its model forgets, and nothing else does."""

    def model(self, config: Any, weights: Any, runtime: Any, token_map: Any, batch_size: int) -> Stateful:
        made = Model(self._read(config), weights, runtime, token_map, batch_size)
        first = made.stack.blocks[0].attention
        assert isinstance(first, Attention)
        forgetful(first)
        return ReferenceStateful(made)
