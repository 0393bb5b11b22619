"""What was recorded: reproducible, readable, unchanged by watching, and judged as any golden set."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import DECLARATIONS, STANDIN, options

import reference.model
from conformance.adapters import upstream_kernels
from conformance.check import CheckOptions, check
from conformance.fixtures import Fixtures, Scenario
from conformance.interface import Reading
from conformance.recording.checkout import Checkout, imported
from conformance.recording.convert import tensor
from conformance.recording.record import _model, _settings, record
from conformance.recording.scenarios import read_plan
from conformance.selection import Selection
from reference.config import Config
from reference.runtime import Runtime

SHA256 = {name: hashlib.sha256((STANDIN / name).read_bytes()).hexdigest() for name in ("model.py", "engram.py")}


def hashes(directory: Path) -> dict[str, str]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_two_runs_give_the_same_bytes(recorded: Path, tmp_path: Path) -> None:
    record(options(tmp_path / "again"), lambda line: None)
    assert hashes(tmp_path / "again") == hashes(recorded)
    assert len(hashes(recorded)) == 6


def test_a_recorded_set_is_a_golden_set(recorded: Path) -> None:
    golden = Fixtures.open(recorded)
    assert golden.sets == ("roles",)
    scenarios = golden.model("roles").scenarios
    assert {name: (s.batch, s.start_positions, s.reading) for name, s in scenarios.items()} == {
        "prefill-05-batch2": (2, (0,), "intended"),
        "decode-from-03": (1, (0, 3, 4, 5, 6, 7, 8), "intended"),
        "decode-from-03-literal": (1, (0, 3, 4, 5, 6, 7, 8), "literal"),
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


@pytest.mark.parametrize("reading", get_args(Reading))
def test_the_reference_conforms_to_it(recorded: Path, reading: Reading, capsys: pytest.CaptureFixture[str]) -> None:
    selection = Selection("core", set_name="roles")
    code = check(CheckOptions("reference", selection, fixtures=recorded, reading=reading, fail_fast=True))
    out = capsys.readouterr().out
    assert code == 0, out
    assert "roles" in out


def test_a_literal_recording_shows_the_stale_keys(recorded: Path) -> None:
    """The reference follows it with the same reading, and not with the other."""
    model_set = Fixtures.open(recorded).model("roles")
    scenario = model_set.scenarios["decode-from-03-literal"]
    distances = {}
    for reading in get_args(Reading):
        found = free_running(model_set, scenario, reading)
        recorded_logits = [scenario.tap(call, "logits").values() for call in range(len(found))]
        distances[reading] = max(np.abs(a - b).max() for a, b in zip(found, recorded_logits, strict=True))
    assert distances["literal"] == 0
    assert distances["intended"] > 0


def free_running(model_set: object, scenario: Scenario, reading: Reading) -> list[np.ndarray]:
    config = Config.from_mapping(model_set.config)
    weights = {name: as_torch(model_set.weights[name]) for name in model_set.weights}
    token_map = torch.arange(config.vocab_size) * config.engram_compressed_vocab_size // config.vocab_size
    model = reference.model.Model(config, weights, Runtime(config, scenario.batch, reading), token_map.int(), 1)
    logits = []
    for call, start in enumerate(scenario.start_positions):
        ids = torch.tensor(scenario.tap(call, "input_ids").data)
        logits.append(model.step(ids, torch.tensor([start]))["logits"].double().numpy())
    return logits


def as_torch(value: object) -> torch.Tensor:
    types = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "U8": "uint8", "I8": "uint8"}
    raw = torch.frombuffer(bytearray(value.bits()), dtype=torch.uint8)
    return raw.view(getattr(torch, types[value.dtype])).reshape(value.shape)


def test_watching_changes_nothing(recorded: Path) -> None:
    """The same run without a hook or a watched kernel gives the same logits."""
    plan = read_plan(DECLARATIONS)
    scenario = Fixtures.open(recorded).model("roles").scenarios["prefill-05-batch2"]
    checkout = Checkout.read(STANDIN)
    with _settings("cpu"), imported(checkout, upstream_kernels.module(), lambda kernel: kernel) as module:
        model, _ = _model(module, plan.configurations["roles"], plan.seed)
        logits = model(torch.tensor(scenario.tap(0, "input_ids").data), 0)
    assert tensor(logits).equal_bits(scenario.tap(0, "logits"))


def test_nothing_stays_imported(recorded: Path) -> None:
    assert not {"model", "engram", "kernel"} & set(sys.modules)
    assert not [name for name in sys.modules if name.startswith("_conformance_upstream")]
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("conformance")]
    assert torch.get_default_dtype() == torch.float32
