"""The model on a server's state: a decode step asks the device nothing, and requests do not notice each other."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.faults.synthetic import make_weights
from conformance.fixtures import Fixtures
from optimized.block import look_back
from optimized.config import Config
from optimized.engram import engram_hash, hash_behind
from optimized.model import Model
from optimized.runtime import Runtime
from reference.config import Config as ReferenceConfig

SHIPPED = dict(Fixtures.open(None, verify=False).model("tiny").config)
MAPPING: dict[str, Any] = {
    **SHIPPED,
    "n_layers": 3,
    "n_routed_experts": 3,
    "n_activated_experts": 2,
    "compress_ratios": [2, 1, 1],
    "kv_source_layers": [0, 1],
    "index_source_layers": [0, 1, 2],
    "candidate_source_layer": 1,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [660],
    "n_mtp_layers": 0,
    "dspark_block_size": 0,
    "dspark_target_layer_ids": [],
    "vision_n_layers": 0,
}
"""A source of each ratio, a layer that selects among candidates, an Engram."""
ASKING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
}
"""Operations whose result, or whose shape, the host must wait for."""


@pytest.fixture(scope="module")
def model() -> Model:
    reference = ReferenceConfig.from_mapping(MAPPING)
    weights = {name: weight.to(DEVICE) for name, weight in make_weights(reference, 5).items()}
    config = Config.from_mapping(MAPPING)
    token_map = (torch.arange(config.vocab_size) % config.engram_compressed_vocab_size).int().to(DEVICE)
    return Model(config, weights, token_map)


def ids(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, MAPPING["vocab_size"] - 1, shape, generator=generator, dtype=torch.int32).to(DEVICE)


class Watch(TorchDispatchMode):
    """Raises where the host would wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in ASKING or (name == "aten::index" and _by_mask(args)):
            raise AssertionError(f"{name} asks the device for a number")
        if name == "aten::_to_copy" and torch.device((kwargs or {}).get("device") or DEVICE) != DEVICE:
            raise AssertionError("a tensor moves to the host")
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@dataclass(frozen=True)
class Unwatched:
    """Around a kernel's launch, where the interpreter itself reads tensors as the host."""

    run: Any

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return self.run(*arguments, **keywords)


@pytest.fixture
def kernels_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    shipped = GridExecutor.__call__
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *given, **named: Unwatched(shipped)(self, *given, **named)
    )


def test_a_decode_step_asks_the_device_nothing(model: Model, kernels_unwatched: None) -> None:
    runtime = Runtime(model.config, 2, 64, 8)
    model.step(runtime, runtime.begin([1, 0], [0, 0], 4), ids(2, 4))
    batch = runtime.begin([1, 0], [4, 3], 1)
    with Watch():
        tokens = model.generate(runtime, batch, ids(2), 2)
    assert tokens.shape == (2, 2)
    assert runtime.position.tolist() == [5, 6]


def test_the_watch_sees_what_it_is_for() -> None:
    with Watch(), pytest.raises(AssertionError, match="asks the device"):
        torch.ones(1, device=DEVICE).item()
    with Watch(), pytest.raises(AssertionError, match="asks the device"):
        torch.ones(2, device=DEVICE)[torch.tensor([True, False], device=DEVICE)]


def test_requests_at_different_positions_do_not_notice_each_other(model: Model) -> None:
    """Two requests side by side in slots 2 and 0 answer what each answers alone in another slot."""
    prompts = ids(2, 6)
    together = Runtime(model.config, 3, 64, 16)
    # The slots have had other requests before.
    model.step(together, together.begin([0, 2], [0, 0], 6), ids(2, 6) + 1)
    model.step(together, together.begin([2], [0], 4), prompts[:1, :4])
    model.step(together, together.begin([0], [0], 3), prompts[1:, :3])
    logits = model.step(together, together.begin([2, 0], [4, 3], 2), torch.stack((prompts[0, 4:], prompts[1, 3:5])))
    for request, (first, rest) in enumerate([(4, 2), (3, 2)]):
        alone = Runtime(model.config, 1, 64, 8)
        one = prompts[request : request + 1]
        model.step(alone, alone.begin([0], [0], first), one[:, :first])
        expected = model.step(alone, alone.begin([0], [first], rest), one[:, first : first + rest])
        assert torch.equal(logits[request], expected[0])


def test_a_look_back_in_pieces_is_that_of_the_whole_request(model: Model) -> None:
    """In slots that others have used, with an image in the middle, and with tokens that were taken back."""
    config, layer_id = model.config, model.config.engram_layer_ids[0]
    token_map = model.stack.blocks[layer_id].token_map
    assert token_map is not None
    runtime = Runtime(config, 2, 64, 32, drafts=2)
    ring = runtime.layers[layer_id].look_back
    assert ring is not None
    ring.fill_(7)
    whole, images = ids(2, 12), torch.zeros(2, 12, dtype=torch.bool, device=DEVICE)
    images[1, 4:6] = True
    expected = engram_hash(config, layer_id, token_map, whole, images)
    # The second of the calls at 7 replaces tokens that the first one brought.
    for start, length, wrong in ((0, 1, 0), (1, 4, 0), (5, 2, 0), (7, 3, 2), (8, 2, 0), (10, 1, 0), (11, 1, 0)):
        span = slice(start, start + length)
        tokens = whole[:, span].clone()
        tokens[:, length - wrong :] += 1
        batch = runtime.begin([1, 0], [start, start], length)
        ids_behind, barrier = look_back(config, ring, batch, tokens, images[:, span])
        found = hash_behind(config, layer_id, token_map, ids_behind, barrier)
        assert torch.equal(found[:, : length - wrong], expected[:, span][:, : length - wrong])


def test_generation_is_decoding_step_by_step(model: Model) -> None:
    prompt, steps = ids(1, 5), 2
    runtime = Runtime(model.config, 1, 64, 8)
    tokens = model.step(runtime, runtime.begin([0], [0], 5), prompt).argmax(-1).int()
    generated = model.generate(runtime, runtime.begin([0], [5], 1), tokens, steps)
    again = Runtime(model.config, 1, 64, 8)
    token = model.step(again, again.begin([0], [0], 5), prompt).argmax(-1).int()
    for step in range(steps):
        token = model.step(again, again.begin([0], [5 + step], 1), token.view(1, 1)).argmax(-1).int()
        assert token.tolist() == generated[:, step].tolist()


def test_generation_takes_calls_of_one_token(model: Model) -> None:
    runtime = Runtime(model.config, 1, 64, 8)
    with pytest.raises(ValueError, match=r"batch: expected calls of 1 token, got 2"):
        model.generate(runtime, runtime.begin([0], [0], 2), ids(1), 1)
