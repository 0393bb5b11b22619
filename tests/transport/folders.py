"""What tests of folders share: exporting a few cases, and answering them as a right port would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conformance.adapters.folder import open_folder
from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case, Open
from conformance.cases.catalogue import catalogue
from conformance.fixtures import Fixtures
from conformance.folder.export import ExportOptions, export
from conformance.runner import CaseResult, run_case
from conformance.selection import Selection, find_case
from conformance.tensors import Tensor, write_safetensors

NORM = "norm/rms-vectors/fp32-weight"
"""One call."""
PACKED = "quantize/fp4-e4m3-nibbles/all-codes"
"""One call with codes and scales."""
STEPS = "attention/window-only/decode-from-first-token"
"""Objects that share a runtime, many steps, and states at the end."""
SEVERAL = (NORM, PACKED, STEPS)


@cache
def everything() -> tuple[Fixtures, Sequence[Case]]:
    """The shipped fixtures and all cases."""
    fixtures = Fixtures.open(None)
    return fixtures, catalogue(fixtures)


def case_of(case_id: str) -> Case:
    return find_case(everything()[1], case_id)


def export_cases(folder: Path, *case_ids: str, materialize: bool = False) -> Path:
    """A folder that asks these cases."""
    expression = " or ".join(case_ids)
    assert export(ExportOptions(folder, Selection("full", expression), materialize=materialize), lambda line: None) == 0
    return folder


def answer(folder: Path, *case_ids: str) -> None:
    """Write the reference's results."""
    session = InProcess(Reference())
    for case_id in case_ids:
        session.reset()
        for number, step in enumerate(case_of(case_id).steps()):
            results = session.ask(step.request)
            if not isinstance(step.request, Open):
                write_results(folder, case_id, number, results)


def results_path(folder: Path, case_id: str, number: int = 0) -> Path:
    return folder / "results" / case_id / f"{number:03d}.safetensors"


def write_results(folder: Path, case_id: str, number: int, results: Mapping[str, Tensor]) -> None:
    write_safetensors(results_path(folder, case_id, number), results)


def write_replies(folder: Path, case_id: str, *replies: Mapping[str, Any]) -> None:
    path = folder / "results" / case_id / "replies.jsonl"
    path.write_text("".join(json.dumps({"seq": number, **reply}) + "\n" for number, reply in enumerate(replies)))


def judge(folder: Path, case_id: str) -> CaseResult:
    """The verdict on one case of a folder."""
    fixtures, cases = everything()
    session = open_folder(f"dir:{folder}")
    return run_case(find_case(session.answered(fixtures, cases), case_id), session)


def commands(folder: Path, case_id: str) -> list[dict[str, Any]]:
    lines = (folder / "cases" / case_id / "commands.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
