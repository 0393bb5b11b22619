"""Saved states: everything that a request keeps, as a copy, and refused where they do not belong."""

import pytest
import torch

from reference.config import Config
from reference.model import Model
from reference.runtime import Runtime
from reference.saving import restore, save
from reference.stack import Stack

Weights = dict[str, torch.Tensor]


def model(config: Config, weights: Weights, token_map: torch.Tensor, batch_size: int = 1) -> Model:
    return Model(config, weights, Runtime(config, batch_size), token_map, batch_size)


def step(of: Model, ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return of.step(ids[:, start : start + length], torch.tensor([start]))["logits"]


@pytest.mark.parametrize("saved_at", [6, 7, 8, 9])
def test_a_resumed_request_gives_the_same_bits(
    config: Config, weights: Weights, token_map: torch.Tensor, saved_at: int
) -> None:
    ids = torch.arange(16).unsqueeze(0) * 7 % config.vocab_size
    first, second = (model(config, weights, token_map) for _ in range(2))
    step(first, ids, 0, saved_at)
    saved = save(first)
    onward = [step(first, ids, position, 1) for position in range(saved_at, 16)]
    step(second, ids.flip(1), 0, 9)
    for resumed in (first, second):
        restore(resumed, saved)
        again = [step(resumed, ids, position, 1) for position in range(saved_at, 16)]
        assert all(torch.equal(left, right) for left, right in zip(onward, again, strict=True))


def test_a_state_of_another_batch_or_layer_is_refused(
    config: Config, weights: Weights, token_map: torch.Tensor
) -> None:
    saved = save(model(config, weights, token_map, batch_size=2))
    with pytest.raises(ValueError, match="window of the saved state does not belong to this Attention"):
        restore(model(config, weights, token_map), saved)
    part = Stack(config, [0, 1], weights, Runtime(config, 2), token_map, 2)
    with pytest.raises(ValueError, match="blocks of the saved state does not belong to this Stack"):
        restore(part, saved["stack"])
