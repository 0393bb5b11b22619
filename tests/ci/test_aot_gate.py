"""The ahead-of-time gate: its rules, and that the tables which are checked in keep to them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("aot_gate", ROOT / "ci" / "aot" / "gate.py")
assert SPEC is not None
assert SPEC.loader is not None
gate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gate)


def line(**changed: Any) -> dict[str, Any]:
    """A product of 64 rows as sm_90 should compile it."""
    constants = {"ROWS": 64, "PRECISE": False}
    made = {"kernel": "linear._plain_kernel", "plan": "linear_bf16/64", "constants": constants}
    return made | {"registers": 80, "stack": 0, "shared": 1024, "matrix": ["HGMMA.64x64x16.F32.BF16"]} | changed


def test_a_good_kernel_breaks_no_rule() -> None:
    assert list(gate.broken_rules("sm_90", line())) == []
    # Few rows and fp32 operands have no wide instruction.
    assert list(gate.broken_rules("sm_90", line(constants={"ROWS": 16}, matrix=["HMMA.16816.F32.BF16"]))) == []
    assert list(gate.broken_rules("sm_90", line(constants={"ROWS": 64, "PRECISE": True}, matrix=[]))) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stack": 8}, "8 bytes of registers spill"),
        ({"shared": 300_000}, "300000 bytes of shared memory, of 232448"),
        ({"matrix": []}, "no HGMMA instruction, but none"),
        ({"matrix": ["HMMA.16816.F32.BF16"]}, "no HGMMA instruction, but HMMA.16816.F32.BF16"),
        ({"error": "CompilationError: no"}, "does not compile: CompilationError: no"),
    ],
)
def test_a_broken_rule_is_named(changed: dict[str, Any], message: str) -> None:
    assert list(gate.broken_rules("sm_90", line(**changed))) == [message]


def test_a_declared_spill_is_allowed_up_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = {
        "kernel": "linear._plain_kernel",
        "plan": "linear_bf16/64",
        "targets": ["sm_90"],
        "bytes": 8,
        "reason": "r",
    }
    monkeypatch.setitem(gate.RULES, "spill", [spill])
    assert list(gate.broken_rules("sm_90", line(stack=8))) == []
    assert list(gate.broken_rules("sm_90", line(stack=16))) == ["16 bytes of registers spill"]
    assert list(gate.broken_rules("sm_90", line())) == ["spills nothing, but a spill is declared"]
    assert list(gate.broken_rules("sm_100", line(stack=8, matrix=["UTCHMMA"]))) == ["8 bytes of registers spill"]


@pytest.mark.parametrize("target", gate.TARGETS)
def test_tables_that_are_checked_in_keep_to_the_rules(target: str) -> None:
    kept = json.loads((ROOT / "ci" / "aot" / "tables" / f"{target}.json").read_text())
    assert (kept["target"], kept["shared_limit"]) == (target, gate.RULES["shared_memory"][target])
    assert len(kept["specialisations"]) > 50
    for label, found in kept["specialisations"].items():
        if "unsupported" in found:
            continue
        assert not found["stack"] or found.get("reason"), label
        assert found["shared"] <= kept["shared_limit"], label


def test_drift_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HERE", tmp_path)
    (tmp_path / "tables").mkdir()
    assert gate.judge("sm_90", [line()], "3.9.0", update=True) == []
    assert gate.judge("sm_90", [line()], "3.9.0", update=False) == []
    drifted = gate.judge("sm_90", [line(registers=96)], "3.9.0", update=False)
    assert [text for text in drifted if '"registers": 80' in text and text.startswith("-")]
    assert [text for text in drifted if '"registers": 96' in text and text.startswith("+")]
    # Another compiler assigns registers differently: only the rules hold.
    assert gate.judge("sm_90", [line(registers=96)], "3.6.0", update=False) == []
    assert gate.judge("sm_90", [line(stack=96)], "3.6.0", update=False)


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gate.py", "sm_91"])
    with pytest.raises(SystemExit) as caught:
        gate.main()
    assert caught.value.code == 2
    assert "unknown target 'sm_91'" in capsys.readouterr().err
