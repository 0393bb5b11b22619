"""The lines of a report: a header, one record a case, a footer; `schemas/report.json` describes each.

Numbers that JSON does not have are written as the strings "inf", "-inf" and "nan".  Readers must ignore fields that
they do not know: fields may be added, never changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from conformance.cases.case import Level
from conformance.expectations import Entry
from conformance.judge.expectations import Mode, Verdict
from conformance.runner import CaseResult, Finding, Status, TapSummary

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Header:
    """What was run against what; written before the first case."""

    suite: str
    started: str
    target: str
    implementation: Mapping[str, Any]
    """The target's `Description`."""
    reading: str
    selection: Mapping[str, Any]
    left_out: int
    """Selected cases that belong to the other reading."""
    fixtures: Mapping[str, Any]
    cases: int
    environment: Mapping[str, str]
    expectations: str | None = None
    """The expectations file, as typed."""
    type: Literal["header"] = "header"
    format: int = FORMAT_VERSION


@dataclass(frozen=True)
class ElementRecord:
    """One element of one result: where it stands, what it is and what it should be."""

    where: str
    tap: str
    mode: Mode
    message: str
    ratio: float
    actual: float | None
    expected: float | None
    bound: float | None
    actual_bits: str
    expected_bits: str
    index: tuple[int, ...] = ()
    """In the result of one step, row-major; empty where no single element is meant."""


@dataclass(frozen=True)
class LayerRecord:
    """One result in one layer of the model."""

    layer: int
    passed: bool
    ratio: float


@dataclass(frozen=True)
class TapRecord:
    """One result over all steps of a case."""

    tap: str
    mode: Mode
    judged: int
    wrong: int
    ratio: float
    bias: float | None
    note: str
    worst: ElementRecord
    layers: tuple[LayerRecord, ...] = ()
    """By layer, where steps belong to layers; ascending."""
    histogram: Mapping[str, int] = field(default_factory=dict)
    """Elements by error over bound, where each has a bound of its own; bins of `conformance/judge/histogram.py`."""


@dataclass(frozen=True)
class ExpectationRecord:
    """The entry of an expectations file that a case falls under."""

    pattern: str
    status: str
    reason: str
    url: str


@dataclass(frozen=True)
class MatchRecord:
    """A known mistake, or a deviation, whose values are those that came back."""

    kind: Literal["fault", "deviation", "declared deviation"]
    name: str
    """Of `conformance/faults/catalogue/` or `conformance/deviations/deviations.toml`."""
    flag: str
    """The mistake's name in `conformance/cases/flags.toml`; empty for a deviation."""
    words: str
    rank: int
    """1 for the best match; several of one rank cannot be told apart by the cases that failed."""
    explained: int
    """Wrong elements (queries of a choice, whole tensors of propagated results) whose values it gives."""
    wrong: int
    nearness: float
    """Mean distance to its values over the distance to the expected ones; 0 where the bits are equal."""


@dataclass(frozen=True)
class CaseRecord:
    """What became of one case."""

    id: str
    component: str
    level: Level
    mode: Mode
    status: Status
    seconds: float
    judged: int
    ratio: float
    """Worst error over bound of any tap."""
    taps: tuple[TapRecord, ...]
    first_failure: ElementRecord | None
    message: str
    reached: str
    """Where the conversation ended, if it ended early."""
    why: str
    spec: str
    flags: tuple[str, ...]
    source: str
    rerun: str
    """The command that runs this case alone."""
    deviations: tuple[str, ...] = ()
    """Declared deviations that the case was judged with."""
    expectation: ExpectationRecord | None = None
    """What was expected of the case, where anything was."""
    matched: tuple[MatchRecord, ...] = ()
    """Known mistakes whose values these are, the best first; looked for in failed cases only, for a bounded time."""
    type: Literal["case"] = "case"


@dataclass(frozen=True)
class Footer:
    """How the run ended.  A report without a footer was killed."""

    counts: Mapping[str, int]
    seconds: float
    peak_memory_bytes: int
    exit_code: int
    stopped: str = ""
    """Why not every case was run: "interrupted", "fail-fast", or the error that ended the run."""
    type: Literal["footer"] = "footer"


Record = Header | CaseRecord | Footer


def case_record(result: CaseResult, rerun: str) -> CaseRecord:
    """The record of a result."""
    case = result.case
    return CaseRecord(
        id=case.id,
        component=case.component,
        level=case.level,
        mode=case.mode,
        status=result.status,
        seconds=result.seconds,
        judged=result.judged,
        ratio=result.ratio,
        taps=tuple(_tap_record(tap) for tap in result.taps),
        first_failure=None if result.first_failure is None else _element_record(result.first_failure),
        message=result.message,
        reached=result.reached,
        why=case.why,
        spec=case.spec,
        flags=case.flags,
        source=case.source,
        rerun=rerun,
        deviations=result.deviations,
        expectation=None if result.expectation is None else _expectation_record(result.expectation),
    )


def _expectation_record(entry: Entry) -> ExpectationRecord:
    return ExpectationRecord(entry.pattern, entry.status, entry.reason, entry.url)


def _tap_record(tap: TapSummary) -> TapRecord:
    return TapRecord(
        tap.tap,
        tap.mode,
        tap.judged,
        tap.wrong,
        tap.ratio,
        tap.bias,
        tap.note,
        _element_record(tap.worst),
        tuple(LayerRecord(entry.layer, entry.passed, entry.ratio) for entry in tap.layers),
        tap.histogram,
    )


def _element_record(finding: Finding) -> ElementRecord:
    verdict: Verdict = finding.verdict
    return ElementRecord(
        finding.where,
        verdict.tap,
        verdict.mode,
        verdict.message,
        verdict.ratio,
        verdict.actual,
        verdict.expected,
        verdict.bound,
        verdict.actual_bits,
        verdict.expected_bits,
        verdict.index,
    )


def as_line(record: Record) -> str:
    """The record as one line of strict JSON, `type` first."""
    fields = asdict(record)
    return json.dumps(_strict({"type": fields.pop("type"), **fields}), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_strict(entry) for entry in value]
    return value
