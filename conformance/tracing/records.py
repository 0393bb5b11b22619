"""A trace as JSON: everything that was compared, for other tools."""

from __future__ import annotations

import json
import math
from typing import Any

import conformance
from conformance.tracing.compare import Cell
from conformance.tracing.finding import Finding
from conformance.tracing.own_inputs import Introduced
from conformance.tracing.trace import Traced

FORMAT = 1


def trace_json(traced: Traced) -> str:
    """The whole trace.  Infinite numbers are the strings "inf" and "nan": JSON has none."""
    content = {
        "format": FORMAT,
        "suite": conformance.__version__,
        "target": traced.target,
        "implementation": {"name": traced.description.name, "version": traced.description.version},
        "set": traced.set_name,
        "lock": traced.lock,
        "diverges": traced.first is not None,
        "scenarios": [_scenario(finding) for finding in traced.findings],
        "seconds": round(traced.seconds, 3),
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _scenario(finding: Finding) -> dict[str, Any]:
    divergence, wrong = finding.divergence, finding.wrong
    return {
        "scenario": finding.run.trace.name,
        "pass": finding.run.how,
        "ended": finding.run.ended,
        "diverges": finding.diverges,
        "sentences": finding.sentences(),
        "first_divergence": None if divergence is None else _cell(divergence),
        "first_wrong_on_own_inputs": None if wrong is None else _introduced(wrong),
        "on_recorded_inputs": [
            {
                "layer": forced.layer,
                "component": forced.component,
                "passed": forced.passed,
                "case": forced.case,
                "tap": forced.tap,
                "ratio": _number(forced.ratio),
            }
            for forced in finding.forced
        ],
        "wrong_on_own_inputs": [_introduced(v) for v in finding.introduced if not v.verdict.passed],
        "judged_on_own_inputs": len(finding.introduced),
        "cells": [_cell(cell) for cell in finding.cells],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "call": cell.call,
        "layer": cell.layer,
        "tap": cell.tap,
        "state": cell.state,
        "distance": _number(cell.distance),
        "floor": _number(cell.floor),
        "ratio": _number(cell.ratio),
        "position": cell.position,
        "message": cell.message,
    }


def _introduced(found: Introduced) -> dict[str, Any]:
    return {
        "call": found.call,
        "layer": found.layer,
        "tap": found.tap,
        "component": found.component,
        "position": found.position,
        "ratio": _number(found.verdict.ratio),
        "message": found.verdict.message,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf")
