"""One attention on the state of a server: calls of any length give what one call gives, and state stays where it is."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conformance.faults.synthetic import make_weights
from conformance.fixtures import Fixtures
from optimized.attention import Attention
from optimized.config import Config
from optimized.runtime import Runtime
from reference.config import Config as ReferenceConfig

SHIPPED = dict(Fixtures.open(None).model("tiny").config)
MAPPING: dict[str, Any] = {
    **SHIPPED,
    "n_layers": 1,
    "window_size": 4,
    "compress_ratios": [2],
    "kv_source_layers": [0],
    "index_source_layers": [0],
    "candidate_source_layer": None,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "n_mtp_layers": 0,
    "dspark_block_size": 0,
    "dspark_target_layer_ids": [],
    "vision_n_layers": 0,
}
"""One source of ratio 2, whose window is passed soon."""
TOKENS = 9


@pytest.fixture(scope="module")
def attention() -> Attention:
    made = make_weights(ReferenceConfig.from_mapping(MAPPING), 5)
    own = {name.removeprefix("layers.0.attn."): weight.to(DEVICE) for name, weight in made.items() if ".attn." in name}
    return Attention(Config.from_mapping(MAPPING), 0, own)


@pytest.fixture(scope="module")
def x(attention: Attention) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(1, TOKENS, attention.config.dim, generator=generator).bfloat16().to(DEVICE)


@pytest.fixture(scope="module")
def whole(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    runtime = Runtime(attention.config, 1, 16, 16)
    return attention.step(runtime, runtime.begin([0], [0], TOKENS), x).float()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Lists in another order round probabilities against another maximum, and the output projection sums that up."""
    return torch.allclose(found.float(), expected, rtol=2.0**-6, atol=2.0**-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [([3, 1, 5], 0), ([3, 1, 5], 2), ([8, 1], 3), ([1, 1, 1, 6], 5)],
    ids=["chunks beside the ring", "short chunks in the ring", "prompt and step", "steps and a chunk in the ring"],
)
def test_pieces_give_what_one_call_gives(
    lengths: Sequence[int], drafts: int, attention: Attention, x: torch.Tensor, whole: torch.Tensor
) -> None:
    """In a slot that another request has used before."""
    runtime = Runtime(attention.config, 2, 16, 16, drafts)
    attention.step(runtime, runtime.begin([1], [0], TOKENS), -x)
    start, parts = 0, []
    for length in lengths:
        batch = runtime.begin([1], [start], length)
        parts.append(attention.step(runtime, batch, x[:, start : start + length]))
        start += length
    assert close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_tokens_that_are_taken_back_leave_no_trace(
    kept: int, attention: Attention, x: torch.Tensor, whole: torch.Tensor
) -> None:
    """Three drafts behind position 4, of which some are wrong; the next call begins after those that are right."""
    runtime = Runtime(attention.config, 1, 16, 16, drafts=3)
    attention.step(runtime, runtime.begin([0], [0], 4), x[:, :4])
    drafted = x[:, 4:8].clone()
    drafted[:, kept:] *= -1
    attention.step(runtime, runtime.begin([0], [4], 4), drafted)
    start = 4 + kept
    found = attention.step(runtime, runtime.begin([0], [start], TOKENS - start), x[:, start:])
    assert close(found, whole[:, start:])


def test_a_step_allocates_no_state(attention: Attention, x: torch.Tensor) -> None:
    runtime = Runtime(attention.config, 1, 16, 16)
    batch = runtime.begin([0], [0], 1)
    held = (*runtime.layers[0].tensors().values(), runtime.position, runtime.selected, runtime.candidates, batch.start)
    before = [tensor.data_ptr() for tensor in held]
    for position in range(3):
        attention.step(runtime, batch, x[:, position : position + 1])
        runtime.advance(batch)
    now = (*runtime.layers[0].tensors().values(), runtime.position, runtime.selected, runtime.candidates, batch.start)
    assert [tensor.data_ptr() for tensor in now] == before
