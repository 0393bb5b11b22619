"""Layers of a real checkpoint: what is recorded, what is read for it, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layer_checkpoints import CONFIG, write_checkpoint

from conformance.adapters import in_process
from conformance.check import CheckOptions, check
from conformance.checkpoint import INDEX
from conformance.checkpoint_weights import CheckpointTensors
from conformance.errors import ConformanceError, FixtureError
from conformance.fixtures import Fixtures
from conformance.recording import checkpoint_layers
from conformance.recording.checkpoint_layers import parse_layers, record_layers
from conformance.selection import Selection
from conformance.tensors import SafetensorsFile, Tensor, write_safetensors

LAYERS = range(6, 8)
"""They read rows and candidates of layer 4."""


def quiet(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def recorded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded") / "golden"
    assert record_layers(checkpoint, LAYERS, out, quiet) == 0
    return out


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Callable[[str, Callable[[Tensor], Tensor | None]], Path]:
    """A copy of the checkpoint with one tensor replaced, or left out."""

    def damage(name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
        directory = tmp_path / "damaged"
        shutil.copytree(checkpoint, directory)
        shard = directory / json.loads((directory / INDEX).read_text())["weight_map"][name]
        tensors = dict(SafetensorsFile(shard))
        changed = change(tensors.pop(name))
        write_safetensors(shard, tensors if changed is None else {**tensors, name: changed})
        return directory

    return damage


def hashes(directory: Path) -> dict[str, str]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_two_runs_give_the_same_bytes(checkpoint: Path, recorded: Path, tmp_path: Path) -> None:
    record_layers(checkpoint, LAYERS, tmp_path / "again", quiet)
    assert hashes(tmp_path / "again") == hashes(recorded)


def test_the_source_of_the_layers_is_recorded_with_them(checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    record_layers(checkpoint, LAYERS, tmp_path / "out", lines.append)
    assert lines[0] == "with layer 4, whose rows or selections layers 6-7 read"
    model = Fixtures.open(tmp_path / "out").model("real")
    assert model.excerpt is not None
    assert model.excerpt.layers == (4, 6, 7)
    assert [model.config[key] for key in ("n_layers", "compress_ratios")] == [3, [1, 1, 1]]
    assert [model.config[f"{kind}_source_layers"] for kind in ("kv", "index")] == [[0], [0, 1]]


def test_provenance(checkpoint: Path, recorded: Path) -> None:
    text = (recorded / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["checkpoint"]["layers"] == [4, 6, 7]
    assert (manifest["device"], manifest["threads"], manifest["upstream"]["executed"]) == ("cpu", 1, False)
    assert manifest["command"] == "conformance record --checkpoint DIR --layers 6-7 --out DIR"
    assert manifest["versions"]["numpy"] == np.__version__
    assert str(checkpoint) not in text


def test_the_reference_conforms_to_it(checkpoint: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = CheckOptions("reference", Selection("full", set_name="real"), fixtures=recorded, checkpoint=checkpoint)
    code = check(options)
    out = capsys.readouterr().out
    assert code == 0, out
    assert {"block", "stack", "candidates", "attention"} <= {line.split(" ")[0] for line in out.splitlines()}
    assert not {"model", "engram"} & {line.split(" ")[0] for line in out.splitlines()}


def test_experts_that_no_token_chose_are_listed_only_by_themselves(checkpoint: Path, recorded: Path) -> None:
    """A target in another process is given what is listed, in files."""
    model = Fixtures.open(recorded, checkpoint=checkpoint).model("real")
    weights, excerpt = model.weights, model.excerpt
    assert isinstance(weights, CheckpointTensors)
    assert excerpt is not None
    chosen = {int(name.split(".")[4]) for name in excerpt.tensors if name.startswith("layers.7.ffn.experts.")}
    left_out = min(set(range(CONFIG["n_routed_experts"])) - chosen)
    parts = {name.split(".")[1] for name in weights.within("layers.2.ffn.") if name.startswith("experts.")}
    assert parts == {str(number) for number in chosen}
    alone = weights.within(f"layers.2.ffn.experts.{left_out}.")
    assert set(alone) == {f"w{i}.{part}" for i in (1, 2, 3) for part in ("weight", "scale")}


def test_only_what_is_used_is_read_and_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than the largest weight and small vectors beside the inputs, however many experts there are."""
    largest = 4 * 24 * 4 * CONFIG["dim"]  # The fp32 projection of a hyper-connection.
    inputs = 12 * (2 * 4 * CONFIG["dim"] + 4 * 4 + 4)  # Residual, mix and ids of the longest prefill.
    for experts in (16, 128):
        peak, used = _recorded_with(experts, tmp_path / str(experts), monkeypatch)
        assert largest < peak <= largest + inputs + 1024
        assert 0 < used <= min(experts, 60)


def _recorded_with(experts: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most bytes of weights alive at once while layers are recorded, and how many experts of layer 7 were read."""
    alive = most = 0

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(tensor: Tensor) -> torch.Tensor:
        nonlocal alive, most
        value = in_process.to_torch(tensor)
        alive += value.nbytes
        most = max(most, alive)
        weakref.finalize(value, freed, value.nbytes)
        return value

    folder = write_checkpoint(directory / "model", {"n_routed_experts": experts})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_layers, "to_torch", counted)
        record_layers(folder, LAYERS, directory / "out", quiet)
    excerpt = Fixtures.open(directory / "out").model("real").excerpt
    assert excerpt is not None
    names = [name for name in excerpt.tensors if name.startswith("layers.7.ffn.experts.")]
    return most, len({name.split(".")[4] for name in names})


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ("2-3", "--layers: layer 3 has an Engram"),
        ("6-9", "--layers: no layer 9: config.json has n_layers 8"),
        ("7-6", "--layers 7-6: expected a range of layers such as 24-27"),
        ("-1", "--layers -1: expected a range"),
    ],
)
def test_layers_that_cannot_be_recorded(checkpoint: Path, tmp_path: Path, layers: str, fault: str) -> None:
    with pytest.raises(ConformanceError, match=fault):
        record_layers(checkpoint, parse_layers(layers), tmp_path / "out", quiet)
    assert not list(tmp_path.iterdir())


def test_a_missing_tensor_is_named_before_anything_runs(
    damaged: Callable[[str, Callable[[Tensor], Tensor | None]], Path], tmp_path: Path
) -> None:
    folder = damaged("layers.6.ffn.experts.63.w2.weight", lambda tensor: None)
    with pytest.raises(FixtureError, match=r"tensor layers\.6\.ffn\.experts\.63\.w2\.weight: missing"):
        record_layers(folder, LAYERS, tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_values_is_no_fault_of_the_target(
    damaged: Callable[[str, Callable[[Tensor], Tensor | None]], Path], recorded: Path
) -> None:
    name = "layers.6.attn.wq_a.weight"
    folder = damaged(name, lambda tensor: Tensor(tensor.dtype, tensor.data ^ 1))
    selection = Selection("full", "query-latent/trace", set_name="real")
    with pytest.raises(FixtureError, match=rf"tensor {name}: other values than were recorded"):
        check(CheckOptions("reference", selection, fixtures=recorded, checkpoint=folder))


@pytest.mark.parametrize("name", ["layers.4.attn.wkv.weight", "layers.7.ffn.experts.63.w1.scale"])
def test_a_checkpoint_of_other_shapes(
    damaged: Callable[[str, Callable[[Tensor], Tensor | None]], Path], recorded: Path, name: str
) -> None:
    folder = damaged(name, lambda tensor: tensor.reshape(1, -1))
    with pytest.raises(FixtureError, match="are not those recorded"):
        Fixtures.open(recorded, checkpoint=folder)


def test_without_the_checkpoint_one_line_says_so(recorded: Path, tmp_path: Path) -> None:
    selection = Selection("full", set_name="real")
    with pytest.raises(FixtureError, match=r"real: recorded from a checkpoint: name it by --checkpoint DIR"):
        check(CheckOptions("reference", selection, fixtures=recorded))
    with pytest.raises(FixtureError, match="not a directory"):
        Fixtures.open(recorded, checkpoint=tmp_path / "absent")
    with pytest.raises(FixtureError, match="no set here was recorded from a checkpoint"):
        Fixtures.open(verify=False, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"layers": [6, 4, 7]}, "layers is not an ascending list"),
        ({"layers": [4, 6]}, "lists 2 layers, the configuration has 3"),
        ({"layers": [True, 6, 7]}, "layers is not an ascending list"),
        ({"headers_sha256": "0"}, "headers_sha256 is not a SHA-256"),
        ({"tensors": {"layers.4.attn.wkv.weight": 1}}, "tensors is not an object from tensor to SHA-256"),
        ({"tensors": {"layers.5.attn.wkv.weight": "0" * 64}}, r"tensor layers\.5\.attn\.wkv\.weight: missing"),
    ],
)
def test_a_damaged_reference_to_the_checkpoint(
    checkpoint: Path, recorded: Path, tmp_path: Path, change: Mapping[str, Any], fault: str
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(recorded, copied)
    path = copied / "real" / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FixtureError, match=fault):
        Fixtures.open(copied, verify=False, checkpoint=checkpoint)


def test_an_index_that_leads_out_of_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    index = tmp_path / "model" / INDEX
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**placed, "layers.6.attn.wkv.weight": "../secret"}}))
    with pytest.raises(FixtureError, match=r"\.\./secret: not the plain name of a file"):
        CheckpointTensors(tmp_path / "model", [6])
