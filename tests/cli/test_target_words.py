"""What is said of a target: what was meant where its name is wrong, and nothing that it did not say of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Run

from conformance.protocol.messages import decode_description
from conformance.report.terminal import runs_on


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("my_prot:Port", "No module named 'my_prot'; did you mean my_port?"),
        ("my_port:Prt", "module my_port has no Prt; did you mean Port?"),
        ("my_port:Engine", "module my_port has no Engine; did you mean Port?"),
        ("empty:Port", "module empty has no Port; nor any other subclass of conformance.Implementation"),
        ("elsewhere:Port", "No module named 'elsewhere'; it must stand in the current folder or be installed"),
        ("needy:Port", "No module named 'my_prot'"),
    ],
)
def test_a_mistyped_target_gets_a_hint(run: Run, tmp_path: Path, target: str, hint: str) -> None:
    (tmp_path / "my_port.py").write_text("import conformance\n\n\nclass Port(conformance.Implementation): ...\n")
    (tmp_path / "empty.py").write_text("from conformance import Implementation\n")
    (tmp_path / "needy.py").write_text("import my_prot\n")
    outcome = run("check", target)
    assert outcome.code == 2
    assert outcome.error.endswith(f"{hint}\n")


def test_a_harness_that_states_no_language_is_not_given_one() -> None:
    said = {"name": "mine", "version": "1", "methods": ["greedy"]}
    silent = decode_description({"description": said}, "cmd:x").description
    assert runs_on(vars(silent)) == ""
    spoken = decode_description({"description": {**said, "device": "npu:0"}}, "cmd:x").description
    assert runs_on(vars(spoken)) == " (npu:0)"
