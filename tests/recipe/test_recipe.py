"""The recipe's generator: test vectors, random access, and the C example."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import recipe
from conformance.cases.model import released_configuration
from conformance.checkpoint_layout import layout
from conformance.config import ModelConfig
from conformance.fixtures import Fixtures, RecipeSet
from conformance.formats import BF16, E4M3
from conformance.judge.components.linear import Parameters
from conformance.lazy import LazyTensors
from conformance.recipe import RecipeTensor
from conformance.recipe_weights import RecipeWeights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded() -> RecipeSet:
    return Fixtures.open(verify=False).recipe("released")


@pytest.fixture(scope="module")
def weights(recorded: RecipeSet) -> RecipeWeights:
    config = ModelConfig.from_mapping(released_configuration(), "released")
    return RecipeWeights(config, recorded.seed)


def vectors() -> list[tuple[str, dict[str, Any]]]:
    content = json.loads((ROOT / "fixtures/released/recipe.json").read_text())
    return list(content["vectors"].items())


@pytest.mark.parametrize(("name", "expected"), vectors())
def test_vectors(recorded: RecipeSet, name: str, expected: dict[str, Any]) -> None:
    stream = recipe.key(name, recorded.seed)
    assert stream == int(expected["key"], 16)
    assert [f"0x{int(value):016x}" for value in recipe.u(stream, np.arange(3))] == expected["u"]
    assert recipe.byte(stream, np.arange(12)).tolist() == expected["bytes"]
    assert recipe.n(stream, np.arange(6)).tolist() == expected["n"]


def test_splitmix64_is_the_published_sequence() -> None:
    # First outputs of the generator's reference implementation for seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert recipe.u(1234567, np.arange(5)).tolist() == known


@pytest.mark.parametrize("shape", [(3, 64), (65, 96), (1, 32), (5, 7)])
@pytest.mark.parametrize("kind", sorted(recipe.KINDS))
def test_whole_tensor_equals_its_elements_one_by_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int]
) -> None:
    if kind == "fp4" and shape[-1] % 2:
        pytest.skip("packed pairs")
    # Pieces that end inside a word of u.
    monkeypatch.setattr(recipe, "PIECE", 13)
    tensor = RecipeTensor("t.weight", kind, shape, 3)
    whole = tensor.tensor()
    assert whole.shape == tensor.stored_shape
    assert whole.dtype == tensor.dtype
    flat = np.arange(whole.data.size)[::-1]
    assert (tensor.at(flat).data[::-1] == whole.data.reshape(-1)).all()
    rows = np.asarray([[shape[0] - 1, 0]])
    assert tensor.rows(rows).equal_bits(whole[rows])
    if tensor.quantized:
        scales = tensor.scale.tensor()
        assert tensor.scale.rows(rows % scales.shape[0]).equal_bits(scales[rows % scales.shape[0]])


def test_elements_follow_the_definition() -> None:
    n = [int(value) for value in recipe.n(recipe.key("t.weight", 3), np.arange(1000))]
    for kind, dtype, values in (
        ("fp32", "F32", [value * 2.0**-11 for value in n]),
        ("bf16", "BF16", BF16.round([value * 2.0**-11 for value in n]).tolist()),
        ("fp8", "F8_E4M3", E4M3.round([value / 2 for value in n]).tolist()),
        ("norm", "BF16", BF16.round([1 + value / 2048 for value in n]).tolist()),
        ("small", "F32", [value / 1024 for value in n]),
        ("scale3", "F32", [0.5 + value / 4096 for value in n]),
        ("sink", "F32", [value / 128 for value in n]),
        ("input", "BF16", BF16.round([value / 256 for value in n]).tolist()),
    ):
        # log2(1 / sqrt(1000/4) / 0.577) = -3.19: e is -3.
        tensor = RecipeTensor("t.weight", kind, (4, 250), 3).tensor()
        assert tensor.dtype == dtype
        assert tensor.values().reshape(-1).tolist() == values


@pytest.mark.parametrize(
    ("gain", "fan_in", "expected"), [(1.6, 5120, -5), (1.0, 1280, -4), (1.9, 8192, -5), (1.0, 1, 1)]
)
def test_exponent(gain: float, fan_in: int, expected: int) -> None:
    assert recipe.exponent(gain, fan_in, recipe.BELL_UNIT) == expected


def test_scales_are_a_stream_of_their_own_per_tile() -> None:
    tensor = RecipeTensor("t.weight", "fp8", (40, 70), 3)
    scales = tensor.scale.tensor()
    assert scales.shape == (2, 3)
    draws = recipe.u(recipe.key("t.weight.scale", 3), np.arange(6)).tolist()
    # log2(1 / sqrt(70) / 0.577) = -2.27.
    assert scales.data.reshape(-1).tolist() == [127 - 2 - 7 + draw % 3 - 1 for draw in draws]


def test_table_rows_are_those_recorded(recorded: RecipeSet, weights: RecipeWeights) -> None:
    part = recorded.parts["engram"]
    rows = part["hash_masked"].data[:, :16, 0]
    codes, scales = (weights.rows(f"layers.1.engram.embed.{name}", rows) for name in ("weight", "scale"))
    values = codes.values() * np.repeat(scales.values(), 32, -1)
    assert (BF16.round(values) == part["rows"].values()).all()


def test_names_and_shapes_are_those_of_a_checkpoint(weights: RecipeWeights) -> None:
    """The recipe covers the layers of the backbone, nothing else; both tables are written by hand."""
    declared = layout(released_configuration(), "released").parameters
    layers = {name: parameter.shape for name, parameter in declared.items() if name.startswith("layers.")}
    made = {name: weights.declaration(name).shape for name in weights if not name.endswith(".scale")}
    assert made == layers


def test_stored_types_are_accepted_by_the_checkpoint_layout(weights: RecipeWeights) -> None:
    declared = layout(released_configuration(), "released").parameters
    for name, parameter in declared.items():
        if name.startswith(("layers.1.", "layers.2.", "layers.20.", "layers.24.")):
            assert weights.declaration(name).dtype in {form.dtype for form in parameter.forms}, name


def test_look_up_makes_only_what_is_asked_for(weights: RecipeWeights) -> None:
    part = weights.within("layers.24.ffn.")
    assert "experts.383.w1.weight" in part
    assert "experts.384.w1.weight" not in part
    assert "gate.scale" not in part
    assert part["gate.bias"].shape == (384,)
    listed = weights.listing(["layers.24.ffn.experts.7.w1.weight", "layers.24.ffn.gate.bias"])
    assert list(listed.within("layers.24.ffn.")) == ["experts.7.w1.weight", "gate.bias", "experts.7.w1.scale"]
    for name in ("layers.40.attn_norm.weight", "embed.weight", "layers.3.attn.compressor.wkv.weight", "layers.x"):
        with pytest.raises(KeyError):
            weights[name]


def test_parameters_read_rows_of_a_table_that_does_not_fit(weights: RecipeWeights) -> None:
    parameters = Parameters(weights).within("layers.14.engram.")
    assert isinstance(parameters.mapping(), LazyTensors)
    assert parameters.mapping() is parameters.mapping()
    last = np.asarray([[384_016_681]])
    assert parameters.rows("embed.weight", last).shape == (1, 1, 256)
    assert parameters.rows("embed.scale", last).shape == (1, 1, 8)


def test_c_example_prints_the_same_vectors(tmp_path: Path, recorded: RecipeSet) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "recipe"
    source = ROOT / "ci/examples/recipe.c"
    subprocess.run([compiler, "-std=c99", "-Wall", "-Werror", "-O1", "-o", program, source], check=True)
    # Lengths around a SHA-256 block, where padding goes wrong.
    names = [*(name for name, _ in vectors()), *("x" * length for length in (0, 52, 53, 60, 61, 62, 117, 125, 200))]
    output = subprocess.run([program, str(recorded.seed), *names], check=True, capture_output=True, text=True).stdout
    for name, line in zip(names, output.splitlines(), strict=True):
        stream = recipe.key(name, recorded.seed)
        assert json.loads(line) == {
            "name": name,
            "key": f"0x{stream:016x}",
            "u": [f"0x{int(value):016x}" for value in recipe.u(stream, np.arange(3))],
            "bytes": recipe.byte(stream, np.arange(12)).tolist(),
            "n": recipe.n(stream, np.arange(6)).tolist(),
        }


def test_page_for_porters_has_the_same_numbers(weights: RecipeWeights) -> None:
    page = (ROOT / "fixtures/RECIPE.md").read_text(encoding="utf-8")
    for name, expected in vectors():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` | `0x"))
        numbers = " ".join(str(value) for value in expected["bytes"])
        bell = " ".join(str(value).replace("-", "−") for value in expected["n"])
        assert (
            row
            == f"| `{name}` | `{expected['key']}` | {' '.join(f'`{u}`' for u in expected['u'])} | {numbers} | {bell} |"
        )
    rows = re.findall(r"^\| `(layers\.\S+)` \| ([\d, ]+) \| (`[0-9a-f]+`.*?) \| ([\d ]*)\|$", page, re.MULTILINE)
    assert len(rows) == 10
    for name, shape, elements, scales in rows:
        tensor = weights.declaration(name)
        assert ", ".join(str(size) for size in tensor.shape) == shape
        data = tensor.at([0, 1, 2]).data
        assert " ".join(f"`{int.from_bytes(x.tobytes(), 'little'):0{2 * x.itemsize}x}`" for x in data) == elements
        if scales:
            assert scales.split() == [str(byte) for byte in tensor.scale.at([0, 1, 2]).data]
