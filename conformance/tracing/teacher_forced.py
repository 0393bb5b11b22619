"""The target's components on the recorded inputs of single layers: the cases of the catalogue, read layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conformance.adapters.session import Session
from conformance.cases.case import Case
from conformance.cases.catalogue import cases_of
from conformance.cases.traces import GoldenModel, Trace
from conformance.judge.noise import Floors
from conformance.runner import FAILURES, CaseResult, run_case

COMPONENTS: tuple[tuple[str, str], ...] = (
    ("engram/", "Engram"),
    ("hyper_connections/", "hyper-connection"),
    ("attention/", "attention"),
    ("gate/", "gate"),
    ("moe/", "mixture"),
    ("block/mix-", "block"),
)
"""Beginnings of case ids and what their verdict speaks of, in the order of computation."""


@dataclass(frozen=True)
class Forced:
    """The verdict on one component of one layer, given recorded inputs."""

    layer: int
    component: str
    passed: bool | None
    """None where the target does not have the component."""
    case: str
    """The case that failed, or else the last one that was run."""
    tap: str = ""
    """The first tap that failed."""
    ratio: float = 0.0
    message: str = ""


def teacher_forced(
    golden: GoldenModel, trace: Trace, session: Session, floors: Floors, layers: Sequence[int]
) -> list[Forced]:
    """Run every component case that judges these layers, with the inputs of `trace` where it is about one scenario.

    Returns one verdict for each layer and component that a case judges, in the order of computation.
    """
    roles = {golden.config.role(layer) for layer in layers}
    chosen = [case for case in cases_of(golden, floors) if _concerns(case, trace, roles)]
    verdicts: dict[tuple[int, str], Forced] = {}
    for case in chosen:
        component = next(words for prefix, words in COMPONENTS if case.id.startswith(prefix))
        result = run_case(_narrowed(case, layers), session)
        for verdict in _by_layer(result, golden, component, layers):
            key = (verdict.layer, component)
            known = verdicts.get(key)
            if known is None or (known.passed is not False and verdict.passed is not None):
                verdicts[key] = verdict
    order = [words for _, words in COMPONENTS]
    return sorted(verdicts.values(), key=lambda verdict: (verdict.layer, order.index(verdict.component)))


def _concerns(case: Case, trace: Trace, roles: set[str]) -> bool:
    """Cases on recorded inputs; those of a role only in the scenario at hand."""
    if not any(case.id.startswith(prefix) for prefix, _ in COMPONENTS) or not case.source.startswith(
        f"{trace.model.name}/"
    ):
        return False
    if case.reading not in (None, trace.scenario.reading) or "-of-draft-" in case.id:
        return False
    behaviour = case.id.split("/")[1]
    if case.source == trace.source:
        return any(behaviour in (role, f"mix-one-sublayer-late-{role}", f"{role}-stale-index-keys") for role in roles)
    if case.id.startswith(("attention/", "block/")):
        return "joined" in case.source
    return "joined" in case.source or trace.name in case.source.partition("/")[2].split("+")


def _narrowed(case: Case, layers: Sequence[int]) -> Case:
    """A case whose steps do not depend on one another, with the steps of these layers alone."""
    if case.id.startswith(("attention/", "block/")):
        return case
    return replace(case, steps=lambda: (step for step in case.steps() if step.place.layer in (None, *layers)))


def _by_layer(result: CaseResult, golden: GoldenModel, component: str, layers: Sequence[int]) -> list[Forced]:
    found = []
    about = {entry.layer for tap in result.taps for entry in tap.layers}
    if not about:
        about = {layer for layer in layers if component != "Engram" or layer in golden.config.engram_layer_ids}
        if result.case.source.count("joined") == 0 and component in ("attention", "block"):
            about = {layer for layer in about if golden.config.role(layer) in result.case.id}
    for layer in sorted(about & set(layers)):
        entries = [(tap, entry) for tap in result.taps for entry in tap.layers if entry.layer == layer]
        failed = next(((tap, entry) for tap, entry in entries if not entry.passed), None)
        if failed is not None:
            tap, entry = failed
            message = tap.worst.verdict.message if tap.worst.layer == layer else ""
            found.append(Forced(layer, component, False, result.case.id, tap.tap, entry.ratio, message))
        elif entries:
            ratio = max(entry.ratio for _, entry in entries)
            found.append(Forced(layer, component, True, result.case.id, ratio=ratio))
        elif result.status == "UNSUPPORTED":
            found.append(Forced(layer, component, None, result.case.id, message=result.message))
        elif result.status in FAILURES:
            found.append(Forced(layer, component, False, result.case.id, message=f"{result.status}: {result.message}"))
    return found
