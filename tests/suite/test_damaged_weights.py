"""Weights that do not fit their configuration are the set's fault, in one line, before any implementation is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fixtures as shipped
from conformance.cases.catalogue import catalogue
from conformance.cases.traces import GoldenModel
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.tensors import SafetensorsFile, Tensor, write_safetensors

NAME = "layers.2.attn.wq_a.weight"
SCALE = "layers.2.attn.wq_a.scale"


def _damaged(
    directory: Path, change: Callable[[dict[str, Tensor]], None], scenario: str = "prefill-01", file: str = "weights"
) -> Fixtures:
    """A copy of the tiny set with one scenario, and the weights, or another file, changed."""
    source = Path(shipped.__file__).parent / "tiny"
    tiny = directory / "tiny"
    tiny.mkdir()
    for name in ("config.json", "weights.safetensors", f"{scenario}.safetensors"):
        shutil.copy(source / name, tiny / name)
    stored = SafetensorsFile(source / f"{file}.safetensors")
    tensors = {name: stored[name] for name in stored}
    change(tensors)
    write_safetensors(tiny / f"{file}.safetensors", tensors, dict(stored.metadata))
    manifest = json.loads((source.parent / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return Fixtures.open(directory, verify=False)


def _cut(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME][:1]


def _retyped(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = Tensor("F32", np.zeros(tensors[NAME].shape, np.float32))


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name) and None


@pytest.mark.parametrize(
    ("change", "fault"),
    [(_without(NAME), "missing"), (_cut, "calls for"), (_retyped, "calls for"), (_without(SCALE), "scales")],
)
def test_the_line_names_file_and_tensor(
    change: Callable[[dict[str, Tensor]], None], fault: str, tmp_path: Path
) -> None:
    damaged = _damaged(tmp_path, change).model("tiny")
    with pytest.raises(FixtureError) as caught:
        GoldenModel(damaged)
    message = str(caught.value)
    assert "tiny/weights.safetensors" in message
    assert NAME in message
    assert fault in message
    assert "\n" not in message


def _cut_tap(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def _no_end(tensors: dict[str, Tensor]) -> None:
    types = tensors["image/token_types"].data.copy()
    types[types == 3] = 2
    tensors["image/token_types"] = Tensor("I32", types)


TOWER = "vision.blocks.1.attn.wqkv.bias"


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("weights", _without(TOWER), f"tiny/weights.safetensors: {TOWER}: missing"),
        ("image-prefill-24", _cut_tap("image/patches"), "tiny/image-prefill-24: image/patches is [41, 3, 4, 4]"),
        ("image-prefill-24", _cut_tap("image/vit_out"), "tiny/image-prefill-24: image/vit_out is [41, 64]"),
        ("image-prefill-24", _cut_tap("image/aligner_out"), "tiny/image-prefill-24: image/aligner_out is [5, 128]"),
        ("image-prefill-24", _no_end, "image/token_types is not the span of [7, 6] patches"),
    ],
)
def test_an_image_that_does_not_fit_is_named(
    file: str, change: Callable[[dict[str, Tensor]], None], fault: str, tmp_path: Path
) -> None:
    damaged = _damaged(tmp_path, change, "image-prefill-24", file)
    with pytest.raises(FixtureError) as caught:
        catalogue(damaged)
    assert str(caught.value).startswith("tiny/")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_set_without_images_needs_no_tower(tmp_path: Path) -> None:
    assert GoldenModel(_damaged(tmp_path, _without(TOWER)).model("tiny")).traces
