"""The other commands, start-up, and the example port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from cli_ports import ATTENTION_CASE, CASES
from cli_runs import Run

from conformance.cases.case import Call, Case, Step
from conformance.judge.bounded import Bounded
from conformance.judge.expectations import Exact, Within
from conformance.report import listing
from conformance.tensors import Tensor

ROOT = Path(__file__).parents[2]


def test_list(run: Run) -> None:
    outcome = run("list", "--component", "norm", "--component", "model")
    assert outcome.code == 0
    assert "norm/identity/ones  core   composed\n    The weight is left out.\n" in outcome.out
    assert "quantize" not in outcome.out
    assert "3 cases" in outcome.out
    assert "1 case\n" in run("list", "--level", "smoke").out
    assert "-k 'zzz': selects no case" in run("list", "-k", "zzz").error


def test_show(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"bug_type": "PRECISION", "effect": "Wrong by a power of two.", "links": ["numerics.md 2"]}
    monkeypatch.setattr(listing, "_flags", lambda: {"scale-of-neighbour": entry})
    outcome = run("show", "quantize/identity/rows-1")
    assert outcome.code == 0
    for text in (
        "bug_type: PRECISION",
        "Wrong by a power of two.",
        "conformance check TARGET -k quantize/identity/rows-1\n",
        "call fake_quantize_fp8(x: BF16 [2, 4])",
        "(layer 3, call 1)",
    ):
        assert text in outcome.out


def test_show_summarises_steps(run: Run) -> None:
    out = run("show", "attention/ring/wrap", cases=[ATTENTION_CASE]).out
    assert "open runtime = runtime(config: {window_size} (1 entries)" in out
    assert "wkv.weight, …} (4 entries)" in " ".join(out.split())
    assert "step attention(x: BF16 [2, 4]) (layer 3, call 3)" in out
    assert "further steps" in out


def test_show_names_near_ids(run: Run) -> None:
    error = run("show", "quantize/identity/row-1").error
    assert "no case quantize/identity/row-1; did you mean quantize/identity/rows-1" in error


def test_show_needs_no_level(run: Run) -> None:
    assert "TARGET --level full -k norm/identity/full" in run("show", "norm/identity/full").out


def test_lock(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"data")
    assert "manifest.json: cannot be read" in run("lock", ".").error
    assert "nowhere: not a directory" in run("lock", "nowhere").error
    manifest = {"format": 1, "files": {"data.bin": sha256(b"data").hexdigest()}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert run("lock", ".").code == 0
    assert set(json.loads((tmp_path / "lock.json").read_text())["files"]) == {"data.bin", "manifest.json"}


def test_no_arguments_show_help(run: Run) -> None:
    outcome = run()
    assert outcome.code == 0
    assert outcome.out.startswith("Usage: conformance [OPTIONS] COMMAND")


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["chekc"], ["check", "--level", "huge", "x"]])
def test_start_is_light(arguments: list[str]) -> None:
    program = (
        "import sys, conformance.cli\n"
        f"sys.argv = ['conformance', *{arguments!r}]\n"
        "try:\n    conformance.cli.main()\n"
        "finally:\n    print(sorted({'torch', 'numpy', 'rich', 'safetensors'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=20)
    assert done.stdout.endswith("[]\n")


def test_is_a_module(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "conformance", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=20)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: conformance ")


def example_cases() -> list[Case]:
    rng = np.random.default_rng(5)
    x = Tensor.from_values(rng.normal(size=(3, 64)) * np.exp2(rng.integers(-9, 9, size=(3, 64))), "BF16")
    ties = Tensor.from_values(np.array([[448.0, 17.0, 19.0, -17.0, -0.0, 2.0**-10, 3 * 2.0**-10, *[0.0] * 25]]), "BF16")
    codes = np.array([[0x7E, 0x58, 0x5A, 0xD8, 0x80, 0x00, 0x02, *[0] * 25]], dtype=np.uint8)
    weight = Tensor.from_values(rng.normal(size=64), "BF16")
    values = x.values()
    norm = values / np.sqrt(np.square(values).mean(-1, keepdims=True) + 1e-20) * weight.values()
    bound = Bounded(norm, np.abs(norm) * 2.0**-21)

    def quantize_steps():
        expected = [
            Exact("codes", Tensor("F8_E4M3", codes), ("token", "feature")),
            Exact("scales", Tensor("F8_E8M0", np.array([[127]], dtype=np.uint8)), ("token", "group")),
        ]
        yield Step(Call("quantize_fp8", {"x": ties}), lambda: expected)

    def norm_steps():
        call = Call("rms_norm", {"x": x, "weight": weight, "eps": 1e-20})
        yield Step(call, lambda: [Within("out", bound, "BF16", ("token", "feature"))])

    return [
        Case("quantize/fp8/ties", "smoke", "exact", "Ties go up.", "numerics.md 2", quantize_steps),
        Case("norm/rms/random", "smoke", "composed", "The weight is left out.", "numerics.md 3", norm_steps),
    ]


def test_example_port(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "ci" / "examples")
    outcome = run("check", "two_components:Port", cases=[*example_cases(), *CASES[:1]])
    assert "conforms in what it supports: 2 of 2 supported cases passed; 1 unsupported" in outcome.out
    assert outcome.code == 0


def test_example_port_does_not_import_the_reference() -> None:
    assert "reference" not in (ROOT / "ci" / "examples" / "two_components.py").read_text(encoding="utf-8")
