"""What is known of one implementation: failures with an issue, cases not to launch, parts that it does not have.

A TOML file, one for each implementation, with entries of this form:

    [[expect]]
    pattern = "gate/ties/*"          # a glob over whole case ids; `*` also crosses slashes
    status = "xfail"                 # or "quarantine" or "unsupported"
    reason = "ties go to the higher expert"
    url = "https://example.org/issues/12"
    condition = { device = "cuda*" } # optional; every key must hold; a value may be a list of alternatives

`xfail` runs the case and turns its failure into XFAIL.  `unsupported` says that the port does not have the case.  Under
both a pass is XPASS, which fails the run: the entry is out of date.  `quarantine` is for cases that must not be
launched because they hang or take the process down.  The first entry that matches a case, and whose condition holds,
counts.

Patterns are matched against the whole catalogue, not the cases of one run, so that an entry which matches nothing is an
error whatever `-k` or `--shard` leave.
"""

from __future__ import annotations

import difflib
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from conformance.cases.case import Case, Level
from conformance.errors import ConformanceError, printable
from conformance.interface import AccumulatorName, Reading
from conformance.judge.expectations import Mode
from conformance.runner import FAILURES, CaseResult
from conformance.selection import is_from_set
from conformance.tensors import one_line

ExpectedStatus = Literal["xfail", "quarantine", "unsupported"]

RUN_KEYS: Mapping[str, tuple[str, ...] | None] = {
    "device": None,
    "version": None,
    "platform": None,
    "reading": get_args(Reading),
    "accumulator": get_args(AccumulatorName),
}
"""Conditions on a run, with the values that there are; None: a glob over what the port declares, or for `platform` over
what Python says of the system, such as "Linux-6.1-x86_64"."""
CASE_KEYS: Mapping[str, tuple[str, ...] | None] = {"set": None, "level": get_args(Level), "mode": get_args(Mode)}
"""Conditions on a case, with the values that there are; `set` is the name of a golden set."""
REQUIRED = ("pattern", "status", "reason", "url")


@dataclass(frozen=True)
class Run:
    """What conditions may ask of a run."""

    device: str
    version: str
    reading: str
    accumulator: str
    platform: str = platform.platform()


@dataclass(frozen=True)
class Entry:
    """One `[[expect]]` of a file."""

    number: int
    """Counted from 1, for messages."""
    pattern: str
    status: ExpectedStatus
    reason: str
    url: str
    condition: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def covers(self, case: Case) -> bool:
        """Whether the entry is about this case, in whatever run."""
        return fnmatchcase(case.id, self.pattern) and all(
            any(self._case_has(case, key, value) for value in self.condition[key])
            for key in CASE_KEYS
            if key in self.condition
        )

    def holds_in(self, run: Run) -> bool:
        """Whether the entry counts in this run."""
        return all(
            any(fnmatchcase(getattr(run, key), value) for value in self.condition[key])
            for key in RUN_KEYS
            if key in self.condition
        )

    @property
    def always(self) -> bool:
        """Whether the entry counts in every run."""
        return not any(key in self.condition for key in RUN_KEYS)

    def __str__(self) -> str:
        return f"entry {self.number} (pattern {one_line(self.pattern)!r})"

    @staticmethod
    def _case_has(case: Case, key: str, value: str) -> bool:
        return is_from_set(case, value) if key == "set" else getattr(case, key) == value


@dataclass(frozen=True)
class Expectations:
    """The entries of a file, in its order."""

    path: Path
    entries: tuple[Entry, ...]

    def matching(self, catalogue: Sequence[Case]) -> Mapping[int, Sequence[Case]]:
        """The cases that each entry is about, by the entry's number.

        Raises:
            ConformanceError: an entry is about no case, or about none that an earlier one leaves.
        """
        result: dict[int, Sequence[Case]] = {}
        taken: set[str] = set()
        for entry in self.entries:
            cases = [case for case in catalogue if entry.covers(case)]
            if not cases:
                raise _error(self.path, f"{entry}: matches no case{_near(entry, catalogue)}")
            if all(case.id in taken for case in cases):
                raise _error(self.path, f"{entry}: every case that it matches is taken by an earlier entry")
            if entry.always:
                taken.update(case.id for case in cases)
            result[entry.number] = cases
        return result

    def of_run(self, catalogue: Sequence[Case], run: Run) -> Mapping[str, Entry]:
        """The entry that counts, by the id of the case.

        Raises:
            ConformanceError: as `matching` does.
        """
        found: dict[str, Entry] = {}
        matching = self.matching(catalogue)
        for entry in self.entries:
            if entry.holds_in(run):
                for case in matching[entry.number]:
                    found.setdefault(case.id, entry)
        return found


def read_expectations(path: Path) -> Expectations:
    """Read a file.

    Raises:
        ConformanceError: it is missing, no TOML, or an entry is not of the documented form; the line names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except UnicodeDecodeError:
        raise _error(path, "is not UTF-8 text") from None
    return parse_expectations(path, text)


def parse_expectations(path: Path, text: str) -> Expectations:
    """Read the text of a file; `path` is for messages.

    Raises:
        ConformanceError: as `read_expectations` does.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _error(path, f"is not TOML: {one_line(str(error))}") from error
    if unknown := sorted(set(data) - {"expect"}):
        raise _error(path, f"unknown key {one_line(unknown[0])!r}; a file holds [[expect]] entries")
    entries = data.get("expect", [])
    if not isinstance(entries, list):
        raise _error(path, "'expect' must be entries, written [[expect]]")
    return Expectations(path, tuple(_entry(path, number, raw) for number, raw in enumerate(entries, 1)))


def _entry(path: Path, number: int, raw: Any) -> Entry:
    def refuse(problem: str) -> ConformanceError:
        pattern = raw.get("pattern") if isinstance(raw, dict) else None
        named = f" (pattern {one_line(pattern)!r})" if isinstance(pattern, str) else ""
        return _error(path, f"entry {number}{named}: {problem}")

    if not isinstance(raw, dict):
        raise refuse("is not a table")
    if unknown := sorted(set(raw) - {*REQUIRED, "condition"}):
        raise refuse(f"unknown key {one_line(unknown[0])!r}; there are {', '.join(REQUIRED)} and condition")
    for key in REQUIRED:
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise refuse(f"{key} is missing, empty or no text")
    if raw["status"] not in get_args(ExpectedStatus):
        raise refuse(f"status {one_line(raw['status'])!r} is none of {', '.join(get_args(ExpectedStatus))}")
    if not _is_issue_url(raw["url"]):
        raise refuse(f"url {one_line(raw['url'])!r} is not the address of an issue (https://host/path)")
    condition = raw.get("condition", {})
    if not isinstance(condition, dict):
        raise refuse("condition must be a table such as { device = 'cuda*' }")
    checked = {}
    for key, value in condition.items():
        values = tuple(value) if isinstance(value, list) else (value,)
        known = {**RUN_KEYS, **CASE_KEYS}
        if key not in known:
            raise refuse(f"unknown condition {one_line(key)!r}; there are {', '.join(known)}")
        if not values or not all(isinstance(text, str) and text for text in values):
            raise refuse(f"condition {key} must be a text or a list of texts")
        choices = known[key]
        for text in values:
            if choices is not None and text not in choices:
                raise refuse(f"condition {key} = {one_line(text)!r} never holds; there are {', '.join(choices)}")
        checked[key] = values
    return Entry(number, raw["pattern"], raw["status"], printable(raw["reason"]), printable(raw["url"]), checked)


def _is_issue_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    unbroken = not any(character.isspace() for character in url)
    return unbroken and parts.scheme in ("http", "https") and bool(parts.netloc) and len(parts.path) > 1


def _near(entry: Entry, catalogue: Sequence[Case]) -> str:
    if any(fnmatchcase(case.id, entry.pattern) for case in catalogue):
        return " that its condition admits"
    near = difflib.get_close_matches(entry.pattern, [case.id for case in catalogue], n=1)
    return f"; did you mean {near[0]}?" if near else "; `conformance list` shows them all"


def _error(path: Path, problem: str) -> ConformanceError:
    return ConformanceError(f"--expect {one_line(str(path))}: {problem}")


def is_launched(entry: Entry | None) -> bool:
    """Whether a case with this entry is run at all."""
    return entry is None or entry.status != "quarantine"


def not_launched(case: Case, entry: Entry) -> CaseResult:
    """The result of a quarantined case."""
    return CaseResult(case, "QUARANTINE", 0.0, message=entry.reason, expectation=entry)


def as_expected(result: CaseResult, entry: Entry | None) -> CaseResult:
    """The result in the light of what was expected."""
    if entry is None:
        return result
    result = replace(result, expectation=entry)
    if result.status == "PASS":
        message = f"passes, but {entry} expects {entry.status}: remove or narrow it"
        return replace(result, status="XPASS", message=message)
    if entry.status == "xfail" and result.status in FAILURES:
        return replace(result, status="XFAIL")
    return result
