"""The harness printed in docs/protocol.md is one that works, and its limits and defaults are those of the code."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from conformance.adapters.child import LARGEST_LINE
from conformance.adapters.process import CASE_TIMEOUTS, START_ATTEMPTS, TIMEOUT, open_process
from conformance.cases import catalogue
from conformance.fixtures import Fixtures
from conformance.protocol.results import LARGEST_HEADER, LARGEST_RESULTS
from conformance.runner import run_case

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_printed_harness_conforms(nothing_left: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "greedy.py").write_text(script)
    session = open_process("cmd:" + shlex.join([sys.executable, "-S", str(tmp_path / "greedy.py")]))
    cases = catalogue.catalogue(Fixtures.open(verify=False))
    statuses = {run_case(case, session).status for case in cases if case.id.startswith("sampling/greedy")}
    session.close()
    assert statuses == {"PASS"}


def test_the_printed_numbers_are_those_of_the_code() -> None:
    assert f"`--timeout` seconds, {TIMEOUT:g} unless given" in PAGE
    assert (CASE_TIMEOUTS, "five times as many" in PAGE) == (5, True)
    assert (START_ATTEMPTS, "three attempts" in PAGE) == (3, True)
    assert (LARGEST_LINE, LARGEST_HEADER, LARGEST_RESULTS) == (1 << 20, 1 << 20, 1 << 28)
    assert "up to 256 MiB, with a header of up to 1 MiB" in PAGE
    assert "more than 1 MiB" in PAGE
