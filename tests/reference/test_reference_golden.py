"""The reference against a few golden calls; the suite itself checks all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reference.block import Block
from reference.config import Config
from reference.model import Model
from reference.parameters import Scoped
from reference.runtime import Runtime

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="no golden set")


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.from_mapping(json.loads((TINY / "config.json").read_text()))


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return load_file(TINY / "weights.safetensors")


@pytest.fixture(scope="module")
def token_map(config: Config) -> torch.Tensor:
    return (torch.arange(config.vocab_size) // 2).to(torch.int32)


def assert_near(got: torch.Tensor, golden: torch.Tensor, name: str) -> None:
    """Equal where discrete; elsewhere off by no more than a sum's order explains."""
    if not golden.is_floating_point():
        assert torch.equal(got, golden), name
        return
    assert got.shape == golden.shape, name
    got, golden = got.double(), golden.double()
    assert torch.equal(got.isinf(), golden.isinf()), name
    got, golden = got.masked_fill(got.isinf(), 0), golden.masked_fill(golden.isinf(), 0)
    assert (got - golden).norm() <= 1e-2 * golden.norm(), name


@pytest.mark.parametrize(
    ("scenario", "starts"),
    [("prefill-17", [0]), ("decode-from-13", [0, 13, 14, 15]), ("image-prefill-24", [0, 24, 25])],
)
def test_layers_fed_with_golden_inputs(
    config: Config, weights: Tensors, token_map: torch.Tensor, scenario: str, starts: list[int]
) -> None:
    golden = load_file(TINY / f"{scenario}.safetensors")
    runtime = Runtime(config, 1)
    blocks = [
        Block(config, layer, Scoped(weights, f"layers.{layer}"), runtime, token_map, 1)
        for layer in range(config.n_layers)
    ]
    compared = 0
    for call, start in enumerate(starts):
        ids = golden[f"call{call}/input_ids"]
        image_mask = golden["image/token_types"] >= 0 if call == 0 and "image/token_types" in golden else None
        h = golden[f"call{call}/embed"].unsqueeze(2).repeat(1, 1, config.hc_mult, 1)
        h = golden.get(f"call{call}/layer0/h_in", h)
        for layer, block in enumerate(blocks):
            prefix = f"call{call}/layer{layer}/"
            taps = block.step(h, golden[f"{prefix}pre_in"], ids, torch.tensor([start]), image_mask)
            for name, tensor in taps.items():
                if prefix + name in golden:
                    assert_near(tensor, golden[prefix + name], prefix + name)
                    compared += 1
            missing = {name for name in golden if name.startswith(prefix)} - {prefix + name for name in taps}
            assert not missing
            h = golden[f"{prefix}h_out"]
    assert compared > 300 * len(starts)


def test_model_runs_free(config: Config, weights: Tensors, token_map: torch.Tensor) -> None:
    """The small model is chaotic: beyond the first layers only the chosen ids are compared."""
    golden = load_file(TINY / "decode-from-01.safetensors")
    model = Model(config, weights, Runtime(config, 1), token_map, 1)
    for call in range(6):
        taps = model.step(golden[f"call{call}/input_ids"], torch.tensor([call]))
        for name in ("embed", "layer0/h_out", "layer1/engram_hash", "layer1/engram_out", "layer1/h_out"):
            assert_near(taps[name], golden[f"call{call}/{name}"], name)
        assert torch.equal(taps["output_ids"], golden[f"call{call}/output_ids"])
