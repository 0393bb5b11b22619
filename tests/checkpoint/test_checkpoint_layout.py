"""The layout against the golden set that stores a whole model, the reference, and the published counts."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import fixtures as shipped
from conformance.checkpoint import check_checkpoint
from conformance.checkpoint_counts import counts
from conformance.checkpoint_layout import STORAGES, TEXT, layout, scale_name
from conformance.errors import FixtureError
from reference.config import Config
from reference.parameters import parameter_shapes

TINY = Path(shipped.__file__).parent / "tiny"
RELEASED: dict[str, Any] = json.loads(resources.files("conformance").joinpath("configs/released.json").read_bytes())

#: numerics.md 0, the table of parameter counts.
PUBLISHED = {
    "stream weights of one sublayer (layer 24)": 491_547,
    "one norm of the block (layer 24)": 5_120,
    "attention (layer 24)": 132_024_128,
    "mixture of experts (layer 24)": 13_626_901_248,
    **{f"re-indexing layer {layer}": 13_759_918_710 for layer in (24, 28, 32, 36)},
    **{f"reusing layers {layer + 1}-{layer + 3}": 41_263_535_970 for layer in (24, 28, 32, 36)},
    **{f"group {layer}-{layer + 3}": 55_023_454_680 for layer in (24, 28, 32, 36)},
    "all groups": 220_093_818_720,
}


def test_the_golden_model_holds_exactly_the_layout(tmp_path: Path) -> None:
    """Names, shapes and types of the whole model, draft and vision included."""
    shutil.copy(TINY / "weights.safetensors", tmp_path / "model.safetensors")
    shutil.copy(TINY / "config.json", tmp_path)
    found = check_checkpoint(tmp_path)
    assert (found.problems, found.unreadable, found.configuration) == ([], [], "config.json")
    expected = set(found.layout.parameters)
    assert len(found.found) == len(expected | ({scale_name(name) for name in expected} & set(found.found)))
    parts = {name.split(".")[0] for name in found.found}
    assert {"layers", "mtp", "vision", "aligner", "image_start", "embed", "head", "norm"} <= parts


@pytest.mark.parametrize(
    "mapping", [json.loads((TINY / "config.json").read_text()), RELEASED], ids=["tiny", "released"]
)
def test_text_parameters_are_those_of_the_reference(mapping: dict[str, Any]) -> None:
    declared = layout(mapping, "config").parameters
    text = {name: parameter.shape for name, parameter in declared.items() if parameter.part == TEXT}
    assert text == parameter_shapes(Config.from_mapping(mapping))


def test_counts_of_the_released_configuration_are_the_published_ones() -> None:
    declared = layout(RELEASED, "released")
    expected = {count.unit: count.expected for count in counts(declared, {})}
    assert {unit: expected[unit] for unit in PUBLISHED} == PUBLISHED


def test_every_alternative_says_why_it_is_accepted() -> None:
    for storage, forms in STORAGES.items():
        assert all(form.reason for form in forms), storage
        assert len({form.dtype for form in forms}) == len(forms), storage


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"n_routed_experts": 10**9}, "more than 2,000,000 tensors"),
        ({"n_routed_experts": -5}, "must be at least 1"),
        ({"dspark_markov_rank": -5}, "must be a count"),
        ({"vision_n_layers": "32"}, "'vision_n_layers' must be int"),
        ({"n_mtp_layers": True}, "'n_mtp_layers' must be int"),
        ({"rope_theta": float("inf"), "dim": float("inf")}, "'dim' must be int"),
        ({"engram_num_embeddings": []}, "fewer entries"),
    ],
)
def test_a_configuration_out_of_bounds_is_refused(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(FixtureError, match=fault):
        layout({**RELEASED, **change}, "config.json")
