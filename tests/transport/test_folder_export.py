"""What `conformance export` writes: the questions, all of them, the same bytes each time, and no answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from folders import NORM, SEVERAL, STEPS, case_of, commands, everything, export_cases
from referencing import Registry, Resource

from conformance.cases.case import Advance, Arguments, Call, Open, Request, is_weights
from conformance.errors import ConformanceError
from conformance.folder.export import ExportOptions, export
from conformance.protocol.messages import schema
from conformance.recipe import key, n
from conformance.selection import Selection
from conformance.tensors import SafetensorsFile, Tensor

RELEASED = "window/rows/released-width"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def references(value: Any) -> Iterator[dict[str, Any]]:
    """Every tensor that a JSON value refers to."""
    if isinstance(value, dict):
        if {"file", "offset"} <= value.keys():
            yield value
        else:
            for entry in value.values():
                yield from references(entry)


def arguments_of(request: Request) -> Arguments:
    if isinstance(request, Call | Open):
        return request.arguments
    return request.inputs if isinstance(request, Advance) else {}


def tensor_arguments(request: Request) -> dict[str, Tensor]:
    return {name: value for name, value in arguments_of(request).items() if isinstance(value, Tensor)}


def read(folder: Path, reference: dict[str, Any]) -> Tensor:
    """A tensor as a port reads it: so many bytes from that byte."""
    raw = (folder / reference["file"]).read_bytes()[reference["offset"] :][: reference["bytes"]]
    return Tensor.from_bytes(raw, reference["dtype"], reference["shape"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_cases(tmp_path_factory.mktemp("export") / "questions", *SEVERAL)


@pytest.mark.parametrize("case_id", SEVERAL)
def test_commands_are_the_steps_with_their_arguments(folder: Path, case_id: str) -> None:
    lines = commands(folder, case_id)
    requests = [step.request for step in case_of(case_id).steps()]
    assert [line["seq"] for line in lines] == list(range(len(requests) + 1))
    assert lines.pop()["request"] == {"kind": "reset"}
    for line, request in zip(lines, requests, strict=True):
        assert line["results"] == f"results/{case_id}/{line['seq']:03d}.safetensors"
        arguments = arguments_of(request)
        found = line["request"].get("arguments", {})
        assert found.keys() == arguments.keys()
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                assert read(folder, found[name]["tensor"]).equal_bits(value)
            elif is_weights(value):
                assert found[name]["weights"].keys() == value.keys()
                for weight, tensor in value.items():
                    assert read(folder, found[name]["weights"][weight]).equal_bits(tensor)


@pytest.mark.parametrize("case_id", SEVERAL)
def test_commands_are_those_of_the_process_protocol(folder: Path, case_id: str) -> None:
    registry = Registry().with_resource("urn:conformance:request", Resource.from_contents(schema("request")))
    validator = jsonschema.Draft202012Validator(schema("command"), registry=registry)
    for line in commands(folder, case_id):
        validator.validate(line)


def test_two_exports_are_equal_bytes(folder: Path, tmp_path: Path) -> None:
    assert files(export_cases(tmp_path / "again", *SEVERAL)) == files(folder)


def test_files_hold_what_is_referred_to_and_nothing_else(folder: Path) -> None:
    """A tensor that no request mentions would be an answer."""
    mentioned = {(r["file"], r["name"]) for case_id in SEVERAL for r in references({"all": _merged(folder, case_id)})}
    stored = {
        (str(path.relative_to(folder)), name)
        for path in folder.rglob("*.safetensors")
        for name in SafetensorsFile(path)
    }
    assert stored == mentioned
    assert not any((folder / "results").rglob("*.safetensors"))


def _merged(folder: Path, case_id: str) -> dict[str, Any]:
    return {str(line["seq"]): line for line in commands(folder, case_id)}


@pytest.mark.parametrize(
    "case_id",
    [
        "rotary/tables-up-to-a-million/released-window",
        "hyper_connections/write-comb-orientation/attention",
        "window/rows-quantised-after-rotation/trace",
        "compressor/carry-ratio-2/decode-from-first-token",
        "indexer/keys-from-unrotated-latent/trace",
        "sparse_attention/sink-and-listed-rows/decode-from-first-token",
    ],
)
def test_no_recorded_result_is_among_the_questions(case_id: str, tmp_path: Path) -> None:
    """Each case by itself: what one component is given may be what another one answers."""
    written = b"".join(files(export_cases(tmp_path / "questions", case_id)).values())
    recorded = [
        tensor
        for step in case_of(case_id).steps()
        for rule in step.rules()
        for tensor in rule.golden.values()
        # A few bytes, or zeros, may be found anywhere.
        if tensor.data.nbytes >= 32 and np.unique(tensor.data).size > 4
    ]
    assert recorded
    assert not any(tensor.bits() in written for tensor in recorded)
    given = [tensor for step in case_of(case_id).steps() for tensor in tensor_arguments(step.request).values()]
    assert all(tensor.bits() in written for tensor in given)


def test_a_weight_is_written_once_however_many_cases_need_it(tmp_path: Path) -> None:
    layers = ("attention/query-latent/trace", "attention/queries-rotated-by-layer-kind/trace")
    folder = export_cases(tmp_path / "questions", *layers)
    tensors = [tensor for path in folder.glob("weights/*") for tensor in SafetensorsFile(path).values()]
    assert len(tensors) == len({(tensor.shape, tensor.bits()) for tensor in tensors})
    latent, queries = ({(r["file"], r["name"]) for r in references(_merged(folder, case_id))} for case_id in layers)
    assert any(file.startswith("weights/") for file, _ in latent & queries)


def test_manifest_names_suite_fixtures_selection_and_files(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["lock"] == everything()[0].lock_hash
    assert manifest["selection"]["expression"] == " or ".join(SEVERAL)
    by_id = {case["id"]: case for case in manifest["cases"]}
    assert by_id.keys() == set(SEVERAL)
    assert by_id[STEPS]["methods"] == ["runtime", "attention"]
    assert by_id[STEPS]["steps"] == len(commands(folder, STEPS)) - 1
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in files(folder).items() if name != "manifest.json"}
    assert manifest["files"] == hashes


def test_weights_of_the_recipe_are_named_not_written(tmp_path: Path) -> None:
    folder = export_cases(tmp_path / "questions", RELEASED)
    weights = commands(folder, RELEASED)[0]["request"]["arguments"]["weights"]["weights"]
    assert all("recipe" in made for made in weights.values())
    assert (folder / "RECIPE.md").is_file()
    assert not (folder / "weights").exists()


def test_materialised_weights_are_those_that_the_recipe_makes(tmp_path: Path) -> None:
    named = commands(export_cases(tmp_path / "named", RELEASED), RELEASED)[0]
    folder = export_cases(tmp_path / "made", RELEASED, materialize=True)
    written = commands(folder, RELEASED)[0]["request"]["arguments"]["weights"]["weights"]
    made = named["request"]["arguments"]["weights"]["weights"]
    assert {name: made[name]["shape"] for name in made} == {name: written[name]["shape"] for name in written}
    norm = read(folder, written["kv_norm.weight"])
    recipe = made["kv_norm.weight"]["recipe"]
    bell = n(key(recipe["name"], recipe["seed"]), np.arange(norm.data.size))
    expected = Tensor.from_values(1 + bell / 2048, "BF16")
    assert norm.equal_bits(expected)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConformanceError, match="exists already and is not an empty folder"):
        export(ExportOptions(tmp_path, Selection("core", NORM)), print)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_an_empty_selection_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="selects no case"):
        export(ExportOptions(tmp_path / "questions", Selection("core", "no-such-case")), print)
    assert not (tmp_path / "questions").exists()
