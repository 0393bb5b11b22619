"""Where noise floors come from: stored beside the fixtures, or measured by running the reference's honest variants."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from conformance import __version__
from conformance.adapters.session import Session
from conformance.cases.case import Case
from conformance.cases.traces import GoldenModel
from conformance.errors import ConformanceError
from conformance.fixtures import NOISE_FLOOR, Fixtures
from conformance.judge.noise import BySet, Distance, Distances, Floors, NoiseFloors, UnitFloors, read, write

CasesOf = Callable[[Floors], Iterable[Case]]
"""The cases of one golden set, judged by given floors."""


def floors_of(fixtures: Fixtures, golden: GoldenModel) -> NoiseFloors:
    """The stored floors of a golden set; cases that are not stored are measured when they are judged."""
    return _floors(fixtures, golden.name, _model_cases(golden))


def recipe_floors(fixtures: Fixtures, name: str) -> NoiseFloors:
    """The same for a recipe set."""
    return _floors(fixtures, name, _recipe_cases(fixtures, name))


def _floors(fixtures: Fixtures, name: str, cases: CasesOf) -> NoiseFloors:
    stored = read(fixtures.directory / NOISE_FLOOR, fixtures.lock_hash).get(name, {})
    origin = f"stored in {NOISE_FLOOR}" if stored else "measured in this run"
    return NoiseFloors(lambda case_id: measure(cases, case_id), dict(stored), origin)


def _model_cases(golden: GoldenModel) -> CasesOf:
    # Imported late, here and below: a case's floors are measured by running the case, whose own module asks for floors.
    from conformance.cases.catalogue import cases_of

    return lambda floors: cases_of(golden, floors)


def _recipe_cases(fixtures: Fixtures, name: str) -> CasesOf:
    from conformance.cases.released import cases

    return lambda floors: cases(fixtures.recipe(name), floors)


def measure(cases: CasesOf, case_id: str) -> Distances:
    """Largest distance of each tap over the honest variants.

    Raises:
        ConformanceError: a variant could not run the case: then nothing is known of its noise.
    """
    from conformance.faults.honest import NOISE_VARIANTS

    case = next(case for case in cases(UnitFloors()) if case.id == case_id)
    return farthest_of(case, {variant.name: variant.session() for variant in NOISE_VARIANTS})


def farthest_of(case: Case, variants: Mapping[str, AbstractContextManager[Session]]) -> Distances:
    """Largest distance of each `propagated` tap over some implementations, where the case allows a distance of one.

    Raises:
        ConformanceError: one of them could not run the case: then nothing is known of its noise.
    """
    from conformance.runner import run_once

    farthest: dict[str, Distance] = {}
    for name, opened in variants.items():
        with opened as session:
            result = run_once(case, session)
        if result.status not in ("PASS", "FAIL"):
            raise ConformanceError(f"noise floor of {case.id}: {name}: {result.status}: {result.message}")
        for tap in result.taps:
            if tap.mode == "propagated" and not math.isfinite(tap.ratio):
                raise ConformanceError(f"noise floor of {case.id}: {name}: {tap.worst.verdict.message}")
            if tap.mode == "propagated":
                known = farthest.get(tap.tap, Distance(0.0, 0.0, 0.0))
                seen = Distance(tap.ratio, tap.median_distance, tap.scale)
                farthest[tap.tap] = Distance(*map(max, known, seen))
    return farthest


def store(fixtures: Fixtures, progress: Callable[[str], None], only_missing: bool = False) -> Path:
    """Measure every `propagated` case of every set and store the distances beside the fixtures.

    `only_missing` keeps what is stored, which other variants may have been measured with, and adds cases that are not.
    """
    from conformance.faults.honest import NOISE_VARIANTS

    path = fixtures.directory / NOISE_FLOOR
    distances: BySet = read(path, fixtures.lock_hash) if only_missing else {}
    for name in fixtures.sets:
        if fixtures.kind(name) == "model":
            cases = _model_cases(GoldenModel(fixtures.model(name)))
        else:
            cases = _recipe_cases(fixtures, name)
        known = distances.setdefault(name, {})
        for case in cases(UnitFloors()):
            if case.mode == "propagated" and case.id not in known:
                progress(case.id)
                known[case.id] = measure(cases, case.id)
    made = {
        "by": f"conformance {__version__}",
        "torch": importlib.metadata.version("torch"),
        "machine": platform.machine(),
        "variants": {variant.name: variant.why for variant in NOISE_VARIANTS},
    }
    write(path, fixtures.lock_hash, made, distances)
    return path
