"""The small configuration, weights for it, its token map."""

from __future__ import annotations

import pytest
import torch
from reference_configurations import SMALL, make_weights

from reference.config import Config


@pytest.fixture(scope="session")
def config() -> Config:
    return Config.from_mapping(SMALL)


@pytest.fixture(scope="session")
def weights(config: Config) -> dict[str, torch.Tensor]:
    return make_weights(config, seed=7)


@pytest.fixture(scope="session")
def token_map(config: Config) -> torch.Tensor:
    return (torch.arange(config.vocab_size) // 2).to(torch.int32)
