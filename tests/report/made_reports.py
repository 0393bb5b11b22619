"""Reports made by hand, and written to files as runs write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.report.reader import StoredReport, read_report
from conformance.report.records import (
    CaseRecord,
    ElementRecord,
    Footer,
    Header,
    LayerRecord,
    TapRecord,
    as_line,
)
from conformance.report.summary import make_footer
from conformance.runner import exit_code

LOCK = "0123456789abcdef" * 4
INFINITY = float("inf")


def header(cases: int = 1, **changes: Any) -> Header:
    """The header of a run at level core; `implementation` and `selection` are merged."""
    implementation = {
        "name": "my engine",
        "version": "1.0",
        "language": "C++",
        "device": "cuda",
        "homepage": "https://example.org",
        "reading": "intended",
        "accumulator": "fp32",
        "deviations": [],
        "conventions": {"top-k ties": "lowest index"},
        **changes.pop("implementation", {}),
    }
    selection = {
        "level": "core",
        "expression": None,
        "components": [],
        "set": None,
        "shard": None,
        **changes.pop("selection", {}),
    }
    fields: dict[str, Any] = {
        "suite": "0.1.0",
        "started": "2026-01-02T03:04:05+00:00",
        "target": "my_port:Port",
        "implementation": implementation,
        "reading": "intended",
        "selection": selection,
        "left_out": 0,
        "fixtures": {"directory": "shipped", "lock": LOCK, "sets": ["tiny", "released"], "seeds": {"recording": 1}},
        "cases": cases,
        "environment": {"python": "3.11.0", "platform": "Linux-6"},
    }
    return Header(**{**fields, **changes})


def element(tap: str = "out", ratio: float = 4.0, **changes: Any) -> ElementRecord:
    """A wrong bf16 element."""
    fields: dict[str, Any] = {
        "where": "layer 3, call 1, position 2, feature 5",
        "tap": tap,
        "mode": "composed",
        "message": "3 of 8 elements beyond their bound",
        "ratio": ratio,
        "actual": 1.5,
        "expected": 1.25,
        "bound": 0.0625,
        "actual_bits": "0x3fc0",
        "expected_bits": "0x3fa0",
        "index": (1, 2, 5),
    }
    return ElementRecord(**{**fields, **changes})


def tap(name: str = "out", ratio: float = 0.5, layers: Sequence[int] = (3,), mode: Any = "composed") -> TapRecord:
    """A result of eight elements, three of them wrong where the ratio is above 1."""
    passed = ratio <= 1
    worst = element(name, ratio, message="" if passed else "3 of 8 elements beyond their bound")
    histogram = {"0.5": 8} if passed else {"0.5": 5, "4": 3}
    layer_records = tuple(LayerRecord(layer, passed, ratio) for layer in layers)
    return TapRecord(name, mode, 8, 0 if passed else 3, ratio, None, "", worst, layer_records, histogram)


def record(case_id: str, status: Any = "PASS", **changes: Any) -> CaseRecord:
    """A case with one result, `tap`, which is wrong where the status is FAIL or XFAIL."""
    failed = status in ("FAIL", "XFAIL")
    name = changes.pop("tap", "out")
    judged = status in ("PASS", "FAIL", "XFAIL", "XPASS")
    taps = (tap(name, changes.pop("ratio", 4.0 if failed else 0.5)),) if judged else ()
    fields: dict[str, Any] = {
        "id": case_id,
        "component": case_id.split("/")[0],
        "level": "core",
        "mode": "composed",
        "status": status,
        "seconds": 0.25,
        "judged": sum(entry.judged for entry in taps),
        "ratio": max((entry.ratio for entry in taps), default=0.0),
        "taps": taps,
        "first_failure": element(name) if failed else None,
        "message": "" if judged else "rms_norm is not implemented",
        "reached": "",
        "why": "Fails when the mean is taken in bf16.",
        "spec": "numerics.md 3",
        "flags": ("norm-sum-in-bf16",),
        "source": "tiny/prefill-17",
        "rerun": f"conformance check my_port:Port -k {case_id}",
    }
    return CaseRecord(**{**fields, **changes})


def footer(records: Sequence[CaseRecord]) -> Footer:
    """The footer of a run that was not stopped."""
    return make_footer(records, 1.5, 2**20, exit_code(records), "")


def text(records: Sequence[CaseRecord], killed: bool = False, **changes: Any) -> str:
    """A report as JSON lines."""
    changes.setdefault("cases", len(records))
    ending = [] if killed else [footer(records)]
    return "".join(as_line(line) for line in (header(**changes), *records, *ending))


def stored(path: Path, *records: CaseRecord, **changes: Any) -> StoredReport:
    """A report written to a file and read again."""
    path.write_text(text(records, **changes), encoding="utf-8")
    return read_report(path)
