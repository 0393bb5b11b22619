"""What was recorded: reproducible, readable, unchanged by watching, and judged as any golden set."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from recording_options import DECLARATIONS, STANDIN, options

import reference.model
from conformance.adapters import upstream_kernels
from conformance.cases.catalogue import catalogue
from conformance.check import CheckOptions, check
from conformance.fixtures import Fixtures, ModelSet, Scenario
from conformance.interface import COMPONENTS, Reading
from conformance.recording import record as recording
from conformance.recording.checkout import Checkout, imported
from conformance.recording.convert import fill, tensor
from conformance.recording.record import build_model, record, torch_settings
from conformance.recording.scenarios import read_plan
from conformance.selection import Selection
from conformance.tensors import Tensor
from reference.config import Config
from reference.runtime import Runtime

TORCH_TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
SHA256 = {name: hashlib.sha256((STANDIN / name).read_bytes()).hexdigest() for name in ("model.py", "engram.py")}


def hashes(directory: Path) -> dict[str, str]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_two_runs_give_the_same_bytes(recorded: Path, tmp_path: Path) -> None:
    record(options(tmp_path / "again"), lambda line: None)
    assert hashes(tmp_path / "again") == hashes(recorded)
    assert len(hashes(recorded)) == 8


def test_a_recorded_set_is_a_golden_set(recorded: Path) -> None:
    golden = Fixtures.open(recorded)
    assert golden.sets == ("roles",)
    scenarios = golden.model("roles").scenarios
    assert {name: (s.batch, s.start_positions, s.reading) for name, s in scenarios.items()} == {
        "prefill-05-batch2": (2, (0,), "intended"),
        "decode-from-03": (1, (0, 3, 4, 5, 6, 7, 8), "intended"),
        "decode-from-09-literal": (1, (0, 9, 10, 11, 12, 13, 14), "literal"),
        "image-prefill-13": (1, (0, 13, 14), "intended"),
        "drafts-from-03": (2, (0, 3, 4, 5), "intended"),
    }


def test_provenance(recorded: Path) -> None:
    text = (recorded / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["upstream"]["model_py_sha256"] == SHA256["model.py"]
    assert manifest["upstream"]["files"].items() >= SHA256.items()
    assert (manifest["upstream"]["revision"], manifest["upstream"]["pinned"]) == ("stand-in", False)
    assert (manifest["seed"], manifest["device"], manifest["threads"]) == (7, "cpu", 1)
    assert manifest["declarations_sha256"] == hashlib.sha256(DECLARATIONS.read_bytes()).hexdigest()
    assert "--kernels reference" in manifest["command"]
    assert manifest["versions"]["numpy"] == np.__version__
    assert str(Path.cwd()) not in text


@pytest.mark.parametrize(("reading", "expression"), [("intended", None), ("literal", "literal")])
def test_the_reference_conforms_to_it(
    recorded: Path, reading: Reading, expression: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cases of the set, and those of the other reading.

    Without `block` and `stack`: their noise floors would have to be measured first, and the whole model is judged.
    """
    present = {case.component for case in catalogue(Fixtures.open(recorded))}
    components = tuple(name for name in COMPONENTS if name in present - {"block", "stack"})
    selection = Selection("core", expression, components, set_name="roles")
    code = check(CheckOptions("reference", selection, fixtures=recorded, reading=reading, fail_fast=True))
    out = capsys.readouterr().out
    assert code == 0, out
    assert "roles" in out


def test_a_set_recorded_from_wrong_code_does_not_conform(
    changed: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is recorded is what the code computed, not what it should have."""
    checkout = changed("hyper_connection_write(y, h, post, comb)", "hyper_connection_write(y, h, post, comb.mT)")
    record(options(tmp_path / "out", checkout), lambda line: None)
    selection = Selection("core", components=("hyper_connections",), set_name="roles")
    assert check(CheckOptions("reference", selection, fixtures=tmp_path / "out")) == 1
    assert "hyper_connections/write-comb-orientation" in capsys.readouterr().out


def test_a_literal_recording_shows_the_stale_keys(recorded: Path) -> None:
    """The reference follows it with the same reading, and not with the other."""
    model_set = Fixtures.open(recorded).model("roles")
    scenario = model_set.scenarios["decode-from-09-literal"]
    distances = {}
    for reading in get_args(Reading):
        found = free_running(model_set, scenario, reading)
        recorded_logits = [scenario.tap(call, "logits").values() for call in range(len(found))]
        distances[reading] = max(np.abs(a - b).max() for a, b in zip(found, recorded_logits, strict=True))
    assert distances["literal"] == 0
    assert distances["intended"] > 0


def free_running(model_set: ModelSet, scenario: Scenario, reading: Reading) -> list[npt.NDArray[np.float64]]:
    config = Config.from_mapping(model_set.config)
    weights = {name: as_torch(model_set.weights[name]) for name in model_set.weights}
    token_map = torch.arange(config.vocab_size) * config.engram_compressed_vocab_size // config.vocab_size
    model = reference.model.Model(config, weights, Runtime(config, scenario.batch, reading), token_map.int(), 1)
    logits = []
    for call, start in enumerate(scenario.start_positions):
        ids = torch.tensor(scenario.tap(call, "input_ids").data)
        logits.append(model.step(ids, torch.tensor([start]))["logits"].double().numpy())
    return logits


def as_torch(value: Tensor) -> torch.Tensor:
    empty = torch.empty(value.shape, dtype=TORCH_TYPES[value.dtype])
    fill(empty, value)
    return empty


def test_watching_changes_nothing(recorded: Path) -> None:
    """The same run without a hook or a watched kernel gives the same logits."""
    plan = read_plan(DECLARATIONS)
    scenario = Fixtures.open(recorded).model("roles").scenarios["prefill-05-batch2"]
    checkout = Checkout.read(STANDIN)
    with torch_settings("cpu"), imported(checkout, upstream_kernels.module(), lambda kernel: kernel) as module:
        model, _ = build_model(module, plan.configurations["roles"], plan.seed)
        logits = model(torch.tensor(scenario.tap(0, "input_ids").data), 0)
    assert tensor(logits).equal_bits(scenario.tap(0, "logits"))


def test_kernels_of_the_checkout(
    recorded: Path, changed: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own kernel.py is executed and watched; here it is the suite's, on a CPU in place of the GPU."""
    checkout = changed("class Transformer", "class Transformer")
    (checkout / "kernel.py").write_text(
        "from conformance.adapters.upstream_kernels import module\nglobals().update(vars(module()))\n"
    )
    settings = recording.torch_settings
    monkeypatch.setattr(recording, "torch_settings", lambda device: settings("cpu"))
    record(replace(options(tmp_path / "out", checkout), kernels="upstream"), lambda line: None)
    of_sets = {name: value for name, value in hashes(recorded).items() if name != "manifest.json"}
    assert hashes(tmp_path / "out").items() >= of_sets.items()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["kernels"]["kind"] == "kernel.py of the checkout"
    assert "kernel.py" in manifest["upstream"]["files"]


def test_nothing_stays_imported(recorded: Path) -> None:
    assert not {"model", "engram", "kernel"} & set(sys.modules)
    assert not [name for name in sys.modules if name.startswith("_conformance_upstream")]
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("conformance")]
    assert torch.get_default_dtype() == torch.float32
