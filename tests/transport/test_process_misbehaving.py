"""Harnesses that misbehave: each costs its own case, with a clear status, and nothing else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transport_sessions import OpenSession, command

from conformance.adapters import process
from conformance.adapters.process import open_process
from conformance.cases.case import Call, Case, Step
from conformance.errors import TargetError
from conformance.judge.expectations import Exact
from conformance.runner import run_case
from conformance.tensors import Tensor

X = Tensor.from_values(np.arange(1, 9, dtype=np.float64).reshape(2, 4), "BF16")
AXES = ("position", "feature")


def _call(method: str, tap: str) -> Case:
    def steps() -> Iterator[Step]:
        yield Step(Call(method, {"x": X}), lambda: [Exact(tap, X, AXES)])

    return Case(f"test/{method}/identity", "core", "exact", "Test.", "numerics.md 2", steps)


GOOD, TESTED = _call("rms_norm", "out"), _call("fake_quantize_fp8", "values")

PATIENCE = 3.0
"""Seconds for the kinds that hang; everything else answers in milliseconds and has a minute."""

ZOO = {
    "healthy": ("PASS", ""),
    "hangs": ("TIMEOUT", "call fake_quantize_fp8: no answer within 3 s"),
    "ignores-signals": ("TIMEOUT", "no answer within 3 s"),
    "dies-by-signal": ("CRASH", "ended by signal SIGSEGV"),
    "exits-midway": ("CRASH", "ended with exit code 0 instead of an answer"),
    "exits-with-a-word": ("CRASH", "exit code 3 instead of an answer\nstderr: loading\nstderr: 'out of memory: 3 GiB"),
    "junk": (
        "PROTOCOL",
        "not valid JSON: Expecting value: line 1 column 1 (char 0): 'Loading checkpoint shards: 100%'",
    ),
    "not-utf-8": ("PROTOCOL", "not valid JSON"),
    "deep-json": ("PROTOCOL", "not valid JSON: maximum recursion depth"),
    "megabytes-without-newline": ("PROTOCOL", "an answer of more than 1048576 bytes"),
    "wrong-sequence-number": ("PROTOCOL", "reply to message 4, expected one to 5"),
    "huge-sequence-number": ("PROTOCOL", "reply to message 1000"),
    "two-lines": ("PROTOCOL", """nothing but answers may be printed; the first: '{"seq": 4, "status": "ok"}'"""),
    "answers-twice": ("PROTOCOL", ""),
    "answers-again-later": ("PROTOCOL", ""),
    "unknown-status": ("PROTOCOL", "reply status: 'perhaps' is not one of"),
    "wrong-type": ("PROTOCOL", "reply results: ['values'] is not of type 'object'"),
    "closes-output": ("PROTOCOL", "closed its standard output but did not end"),
    "floods-errors": ("PASS", ""),
    "leaves-children": ("PASS", ""),
    "dies-and-leaves-children": ("CRASH", "exit code 1"),
    "symbolic-link": ("PROTOCOL", "is a symbolic link"),
    "linked-folder": ("PROTOCOL", "replaced by a symbolic link"),
    "named-pipe": ("PROTOCOL", "not a regular file"),
    "folder-instead-of-file": ("PROTOCOL", "not a regular file"),
    "writes-elsewhere": ("PROTOCOL", "their file was not written"),
    "removes-folder": ("PROTOCOL", "their file was not written"),
    "modifies-input": ("FAIL", "modified the file of its input"),
    "huge-file": ("PROTOCOL", "more than 268435456 bytes"),
    "huge-header": ("PROTOCOL", "truncated: 10 bytes, the header alone says 4611686018427387904"),
    "long-header": ("PROTOCOL", "header of 2097152 bytes, the limit is 1048576"),
    "overlapping-tensors": ("PROTOCOL", "overlaps the tensor before it"),
    "truncated-file": ("PROTOCOL", "truncated"),
    "empty-file": ("PROTOCOL", "truncated: 0 bytes"),
    "missing-tensor": ("PROTOCOL", "result values: no tensor values in the results file"),
    "wrong-dtype": ("FAIL", "wrong dtype I32, expected BF16"),
    "unknown-dtype": ("FAIL", "dtype F8_E5M2 is not one of"),
    "wrong-shape": ("FAIL", "wrong shape [8], expected [2, 4]"),
    "nan": ("FAIL", "8 of 8 elements differ"),
    "missing-result": ("FAIL", "the result is missing; returned: nothing"),
    "unsupported": ("UNSUPPORTED", "no [64] columns"),
    "error": ("CRASH", "call fake_quantize_fp8: kernel\nfailed"),
}


@pytest.mark.parametrize("trait", ZOO)
def test_one_case_is_lost_and_nothing_else(trait: str, session: OpenSession) -> None:
    status, text = ZOO[trait]
    timeout = PATIENCE if status == "TIMEOUT" else 60.0
    harness = session("misbehaving.py", trait, timeout=timeout)
    before, result, after = (run_case(case, harness) for case in (GOOD, TESTED, GOOD))
    assert (before.status, result.status, after.status) == ("PASS", status, "PASS")
    failure = result.first_failure.verdict.message if result.first_failure else ""
    assert text in result.message + failure


@pytest.mark.parametrize("trait", ["megabytes-without-newline", "floods-errors", "huge-file"])
def test_memory_does_not_grow_with_what_is_printed(trait: str, session: OpenSession) -> None:
    harness = session("misbehaving.py", trait)
    run_case(GOOD, harness)
    tracemalloc.start()
    run_case(TESTED, harness)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("trait", "text"), [("hangs-at-start", "start: no answer within 1 s"), ("no-such-trait", None)]
)
def test_a_harness_that_does_not_start_ends_the_run(trait: str, text: str | None, nothing_left: Path) -> None:
    if text is None:
        open_process(command("misbehaving.py", trait)).close()
        return
    with pytest.raises(TargetError, match=text):
        open_process(command("misbehaving.py", trait), 1.0)


def test_a_harness_that_does_not_stop_is_ended(session: OpenSession) -> None:
    assert run_case(GOOD, session("misbehaving.py", "hangs-at-stop")).status == "PASS"


def test_a_harness_that_does_not_come_back_ends_the_run(session: OpenSession, tmp_path: Path) -> None:
    harness = session("misbehaving.py", "starts-once", str(tmp_path / "started"))
    statuses = [run_case(case, harness).status for case in (GOOD, TESTED, GOOD, GOOD)]
    assert statuses == ["PASS", "CRASH", "CRASH", "CRASH"]
    with pytest.raises(TargetError, match="not restarted in 3 attempts: start: the process ended with exit code 3"):
        run_case(GOOD, harness)


def test_a_case_has_an_end_of_its_own(session: OpenSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CASE_TIMEOUTS", 0.001)
    result = run_case(TESTED, session("misbehaving.py", "hangs"))
    assert (result.status, result.message) == ("TIMEOUT", "call fake_quantize_fp8: no answer within 0.06 s")
