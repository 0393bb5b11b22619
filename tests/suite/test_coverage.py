"""`conformance coverage`: which recorded tensors the cases use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conformance.cases.catalogue import catalogue
from conformance.coverage import FileCoverage, measure, never_used, tap_of
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures


def test_what_a_case_reads_is_used_and_the_rest_is_not() -> None:
    fixtures = Fixtures.open(None, verify=False)
    cases = [case for case in catalogue(fixtures) if case.id == "dspark/main-projection/trace"]
    files = {file.file: file for file in measure(fixtures, cases, ("tiny",))}
    of_drafts = files["tiny/dspark-from-14"]
    assert {"call5/main_hidden", "call5/layer16/main_x"} <= of_drafts.used
    assert "call5/spec_logits" in of_drafts.unused
    assert of_drafts.unused_taps()["spec_logits"] == 5
    assert "logits" in never_used(list(files.values()))


def test_every_tap_of_the_small_set_is_used_by_a_case() -> None:
    fixtures = Fixtures.open(None, verify=False)
    files = measure(fixtures, catalogue(fixtures), ("tiny",))
    assert never_used(files) == []
    assert not next(file for file in files if file.file == "tiny/dspark-from-14").unused


def test_taps_are_named_without_place() -> None:
    assert tap_of("call12/layer3/attn_out") == tap_of("call0/attn_out") == "attn_out"
    assert tap_of("state/layer16/window") == "window"
    assert never_used([FileCoverage("x", ("call0/a", "call1/a", "call0/b"), frozenset({"call1/a"}))]) == ["b"]


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ConformanceError, match="no such set"):
        measure(Fixtures.open(None, verify=False), [], ("nothing",))


def test_the_command_names_an_unknown_set_in_one_line() -> None:
    command = [sys.executable, "-m", "conformance", "coverage", "--set", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "nothing" in done.stderr
