"""From many failed cases to the few places where somebody should look.

One mistake fails hundreds of cases: a rotation that is wrong makes wrong rows, wrong attention, wrong blocks and a
wrong model.  Every result is therefore placed in the order in which results are made of one another: a failure is a
*cause* when nothing that it is made of failed, and a *consequence* otherwise, which a further mistake may still hide
behind.  Cases of one cause are ranked by which known mistake they point to.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conformance.cases.case import LEVELS
from conformance.report.records import CaseRecord, MatchRecord
from conformance.runner import FAILURES

MADE_OF: Mapping[str, tuple[str, ...]] = {
    "linear": ("quantize",),
    "window/window_rows": ("linear", "norm", "rotary", "quantize"),
    "compressor/carry_kv": ("linear",),
    "compressor/carry_score": ("linear",),
    "compressor/latent": ("linear", "norm", "compressor/carry_kv", "compressor/carry_score"),
    "compressor/compressed_rows": ("rotary", "quantize"),
    "indexer/index_keys": ("linear", "norm", "rotary", "quantize"),
    "indexer/index_q": ("linear", "rotary", "quantize"),
    "indexer/index_weights": ("linear",),
    "attention/q_latent": ("linear", "norm"),
    "attention/attn_q": ("linear", "norm", "rotary", "attention/q_latent"),
    "attention/window_rows": ("window",),
    "attention/window": ("window", "attention/window_rows"),
    "attention/carry_kv": ("compressor/carry_kv",),
    "attention/carry_score": ("compressor/carry_score",),
    "attention/latent": ("compressor/latent", "attention/carry_kv", "attention/carry_score"),
    "attention/compressed_rows": ("compressor/compressed_rows", "attention/latent"),
    "attention/compressed": ("attention/compressed_rows",),
    "attention/index_keys": ("indexer/index_keys", "attention/latent"),
    "attention/index_q": ("indexer/index_q", "attention/q_latent"),
    "attention/index_weights": ("indexer/index_weights",),
    "attention/index_score": (
        "indexer/index_score",
        "attention/index_keys",
        "attention/index_q",
        "attention/index_weights",
    ),
    "attention/selected": ("indexer/selected", "candidates", "attention/index_score"),
    "attention/attn_out": (
        "linear",
        "rotary",
        "sparse_attention",
        "attention/attn_q",
        "attention/window",
        "attention/compressed",
        "attention/selected",
    ),
    "gate": ("linear",),
    "experts": ("linear", "quantize"),
    "moe": ("gate", "experts"),
    "engram": ("linear", "norm"),
    "vision": ("linear", "norm", "rotary"),
    "block/attn_pre": ("hyper_connections",),
    "block/attn_post": ("hyper_connections",),
    "block/attn_comb": ("hyper_connections",),
    "block/attn_in": ("hyper_connections", "norm"),
    "block": ("hyper_connections", "norm", "attention/attn_out", "moe", "engram", "block/attn_in"),
    "stack": ("block",),
    "dspark": ("linear", "norm", "rotary", "window", "sparse_attention", "moe", "hyper_connections"),
    "model": ("stack", "norm", "linear", "engram", "hyper_connections", "dspark", "vision", "sampling"),
}
"""What a result is computed from, in the order of numerics.md: a component, or one of its results as `component/tap`.
Results that are not listed take the entry of their component, and what has no entry stands on its own."""

SHOWN_MISTAKES, SHOWN_TIES = 3, 6


@dataclass(frozen=True)
class Suspect:
    """A known mistake that the failures of one cause point to."""

    flag: str
    failed: int
    """Cases of the cause that reject this mistake, and failed."""
    passed: int
    """Cases of the whole run that reject it, and passed: they speak against it."""


@dataclass(frozen=True)
class Match:
    """A known mistake whose very values came back, and in how many failures of a cause."""

    best: MatchRecord
    cases: int


@dataclass(frozen=True)
class Cause:
    """Failures that look like one mistake, the simplest case first."""

    title: str
    taps: tuple[str, ...]
    """The results that were wrong, the most frequent first; none where nothing came back."""
    records: tuple[CaseRecord, ...]
    matches: tuple[Match, ...]
    """The fewest known mistakes whose values account for what can be accounted for, the most frequent first."""
    suspects: tuple[Suspect, ...]
    of_cases: int
    """Cases of the component in the run."""


@dataclass(frozen=True)
class Consequence:
    """Failures of results that are made of others that failed too."""

    component: str
    tap: str
    records: tuple[CaseRecord, ...]
    may_follow_from: tuple[str, ...]
    """Titles of causes."""


@dataclass(frozen=True)
class Diagnosis:
    """All failures of a run, each in one place."""

    causes: tuple[Cause, ...]
    consequences: tuple[Consequence, ...]


def diagnose(records: Sequence[CaseRecord]) -> Diagnosis:
    """Sort the failures of a run; causes come in the order in which the model computes them."""
    failures = [record for record in records if record.status in FAILURES]
    stopped = _grouped([record for record in failures if record.message], _said)
    wrong = _grouped([record for record in failures if not record.message], _node)
    behind = {node: [other for other in _made_of(node, wrong) if other != node] for node in wrong}
    roots = [node for node in wrong if not behind[node]]
    groups = _grouped([record for node in roots for record in wrong[node]], lambda record: record.component)
    titles: dict[str, list[str]] = {}
    for title, group in groups.items():
        for record in group:
            titles.setdefault(_node(record), []).append(title)
    causes = [_stopped(group) for group in stopped.values()]
    causes += [_cause(title, group, records, failures) for title, group in groups.items()]
    consequences = [
        Consequence(
            node.partition("/")[0],
            node.partition("/")[2],
            _simplest_first(wrong[node]),
            tuple(dict.fromkeys(title for root in roots if root in behind[node] for title in titles[root])),
        )
        for node in wrong
        if behind[node]
    ]
    return Diagnosis(tuple(causes), tuple(consequences))


def _stopped(group: Sequence[CaseRecord]) -> Cause:
    """Cases that ended alike before anything was judged wrong."""
    ordered = _simplest_first(group)
    return Cause(f"{ordered[0].status}: {ordered[0].message}", (), ordered, (), (), 0)


def _cause(
    title: str, group: Sequence[CaseRecord], records: Sequence[CaseRecord], failures: Sequence[CaseRecord]
) -> Cause:
    matches = _matches(group)
    suspects = _suspects(group, records, failures)
    flag = suspects[0].flag if suspects else ""
    taps = Counter(_node(record).partition("/")[2] for record in group)
    # A case that was made for the likeliest mistake, or has its values, says most.
    likely = {
        record.id
        for record in group
        if (matches[0].best.name in [match.name for match in _best(record)] if matches else flag in record.flags)
    }
    ordered = sorted(_simplest_first(group), key=lambda record: record.id not in likely)
    of_cases = sum(record.component == group[0].component for record in records)
    return Cause(title, tuple(tap for tap, _ in taps.most_common()), tuple(ordered), matches, suspects, of_cases)


def _grouped(records: Sequence[CaseRecord], key: Callable[[CaseRecord], str]) -> dict[str, list[CaseRecord]]:
    groups: dict[str, list[CaseRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _node(record: CaseRecord) -> str:
    """The result that was wrong first."""
    return f"{record.component}/{record.first_failure.tap if record.first_failure is not None else ''}"


def _best(record: CaseRecord) -> tuple[MatchRecord, ...]:
    """The known mistakes that fit best; several where the case cannot tell them apart."""
    return tuple(match for match in record.matched if match.rank == 1)


def _matches(group: Sequence[CaseRecord]) -> tuple[Match, ...]:
    """One mistake that fits most cases, then one that fits most of the others, and so on."""
    left = [record for record in group if _best(record)]
    found = []
    while left:
        cases = Counter((match.kind, match.name) for record in left for match in _best(record))
        (key, number), *_ = cases.most_common(1)
        fitting = [record for record in left if key in [(match.kind, match.name) for match in _best(record)]]
        best = next(match for match in _best(fitting[0]) if (match.kind, match.name) == key)
        found.append(Match(best, number))
        accounted = {record.id for record in fitting}
        left = [record for record in left if record.id not in accounted]
    return tuple(found)


def _said(record: CaseRecord) -> str:
    """Status and message without numbers: shapes and addresses differ from case to case."""
    return f"{record.status}: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', record.message)}"


def _made_of(node: str, wrong: Mapping[str, object]) -> list[str]:
    """The wrong results among those that a result is made of, however indirectly."""
    found: dict[str, None] = {}
    ahead, seen = [node], set()
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        component, _, tap = name.partition("/")
        if tap:
            entries = [name if name in MADE_OF else component]
        else:
            entries = [entry for entry in MADE_OF if entry == component or entry.startswith(f"{component}/")]
        found |= dict.fromkeys(entry for entry in wrong if entry == name or (not tap and entry.startswith(f"{name}/")))
        ahead += [part for entry in entries for part in MADE_OF.get(entry, ())]
    return list(found)


def _suspects(
    group: Sequence[CaseRecord], records: Sequence[CaseRecord], failures: Sequence[CaseRecord]
) -> tuple[Suspect, ...]:
    """The known mistakes that fit best, by the share of these failures that they explain and how few passes deny them.

    The measure is Ochiai's, from fault localisation: failed with the mistake over the root of (all failed times all
    cases with the mistake).  Between equals, the one that more failures of the whole run name.
    """
    failed = Counter(flag for record in group for flag in record.flags)
    failed_in_run = Counter(flag for record in failures for flag in record.flags)
    passed = Counter(flag for record in records if record.status == "PASS" for flag in record.flags)

    def score(flag: str) -> float:
        return failed[flag] / math.sqrt(len(group) * (failed[flag] + passed[flag]))

    ranked = sorted(failed, key=lambda flag: (-score(flag), -failed_in_run[flag], flag))
    shown = ranked[:SHOWN_MISTAKES]
    shown += [flag for flag in ranked[SHOWN_MISTAKES:SHOWN_TIES] if score(flag) == score(shown[-1])]
    return tuple(Suspect(flag, failed[flag], passed[flag]) for flag in shown)


def _simplest_first(records: Sequence[CaseRecord]) -> tuple[CaseRecord, ...]:
    """Cases of the earliest level first, then those with fewest elements: the best ones to begin with."""
    return tuple(sorted(records, key=lambda record: (LEVELS.index(record.level), record.judged)))
