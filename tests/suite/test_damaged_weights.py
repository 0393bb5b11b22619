"""Weights that do not fit their configuration are the set's fault, in one line, before any implementation is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fixtures as shipped
from conformance.cases.traces import GoldenModel
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.tensors import SafetensorsFile, Tensor, write_safetensors

NAME = "layers.2.attn.wq_a.weight"
SCALE = "layers.2.attn.wq_a.scale"


def _damaged(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Fixtures:
    """A copy of the tiny set with one scenario and changed weights."""
    source = Path(shipped.__file__).parent / "tiny"
    tiny = directory / "tiny"
    tiny.mkdir()
    for name in ("config.json", "prefill-01.safetensors"):
        shutil.copy(source / name, tiny / name)
    stored = SafetensorsFile(source / "weights.safetensors")
    tensors = {name: stored[name] for name in stored}
    change(tensors)
    write_safetensors(tiny / "weights.safetensors", tensors, dict(stored.metadata))
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
