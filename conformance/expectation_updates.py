"""Bringing an expectations file up to date with a report: as text, so that comments, order and links stay.

Failures without an entry get one, with the issue that was given.  Entries whose cases all pass are removed; of an entry
some of whose cases pass, a copy for each other case stays.  Whole-line comments are never removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cases.case import Case
from conformance.errors import ConformanceError
from conformance.expectations import Entry, Expectations, Run, parse_expectations
from conformance.report.reader import StoredReport
from conformance.report.records import CaseRecord
from conformance.runner import FAILURES
from conformance.tensors import one_line

ENTRY = re.compile(r"^\s*\[\[\s*expect\s*\]\]\s*(#.*)?$")
PATTERN = re.compile(r"""^(\s*pattern\s*=\s*)("(?:[^"\\]|\\.)+"|'[^']+')(\s*(?:#.*)?)$""")
COMMENT = re.compile(r"^\s*(#.*)?$")
PLATFORM = "platform"


@dataclass
class Update:
    """The new text of a file and what was done to it, in words."""

    text: str
    done: list[str] = field(default_factory=list)


def update(text: str, path: Path, catalogue: Sequence[Case], report: StoredReport, url: str | None) -> Update:
    """The text of an expectations file after a report.

    Raises:
        ConformanceError: the file is damaged or cannot be edited line by line, or new entries need an issue.
    """
    expectations = parse_expectations(path, text)
    blocks = _Blocks.split(text, expectations)
    matching = expectations.matching(catalogue)
    run = _run_of(report)
    counted = expectations.of_run(catalogue, run)
    passed = {record.id for record in report.records if record.status in ("PASS", "XPASS")}
    unsupported = {record.id for record in report.records if record.status == "UNSUPPORTED"}
    result = Update("")
    for entry in expectations.entries:
        mine = {case.id for case in matching[entry.number]}
        stale = {case_id for case_id in passed & mine if counted.get(case_id) is entry}
        # A quarantined case was not launched by this suite's doing, so that a pass is one of a run without the file.
        if not stale or not entry.holds_in(run):
            continue
        # What the target does not have cannot fail either.
        gone = stale | unsupported if entry.status == "xfail" else stale
        kept = [case.id for case in matching[entry.number] if case.id not in gone]
        blocks.replace(entry, kept)
        done = f"narrowed to {len(kept)} of {len(mine)} cases" if kept else "removed"
        result.done.append(f"{done}: {entry.pattern} ({entry.url}): {len(stale)} passed")
    new = [record for record in report.records if record.status in FAILURES and record.id not in counted]
    if new and url is None:
        names = ", ".join(record.id for record in new[:3]) + (", ..." if len(new) > 3 else "")
        raise ConformanceError(f"--url ISSUE is needed: {len(new)} failures have no entry: {names}")
    for pattern, records in _grouped(new, catalogue).items():
        blocks.append(_entry_text(pattern, _reason(records[0]), url or ""))
        result.done.append(f"added: {pattern} ({url}): {len(records)} failed")
    for record in report.records:
        entry_of = counted.get(record.id)
        if record.status in FAILURES and entry_of is not None and entry_of.status == "unsupported":
            result.done.append(f"left alone: {record.id} fails, although {entry_of} says unsupported")
    result.text = blocks.text()
    # What is about to be written must be what a run will read.
    parse_expectations(path, result.text).matching(catalogue)
    return result


def _run_of(report: StoredReport) -> Run:
    header = report.header
    implementation = header.implementation
    return Run(
        implementation["device"],
        implementation["version"],
        header.reading,
        implementation["accumulator"],
        header.environment.get(PLATFORM, ""),
    )


def _grouped(records: Sequence[CaseRecord], catalogue: Sequence[Case]) -> Mapping[str, Sequence[CaseRecord]]:
    """Failures by pattern: `component/behaviour/*` where every case of the behaviour failed, else each by its id."""
    failed = {record.id for record in records}
    behaviours: dict[str, set[str]] = {}
    for case in catalogue:
        behaviours.setdefault(_behaviour(case.id), set()).add(case.id)
    grouped: dict[str, list[CaseRecord]] = {}
    for record in records:
        family = behaviours.get(_behaviour(record.id), {record.id})
        whole = len(family) > 1 and family <= failed
        grouped.setdefault(f"{_behaviour(record.id)}/*" if whole else record.id, []).append(record)
    return grouped


def _behaviour(case_id: str) -> str:
    return "/".join(case_id.split("/")[:2])


def _reason(record: CaseRecord) -> str:
    """What is wrong, without the numbers of one run: they would be out of date with the next."""
    named = [match for match in record.matched if match.rank == 1]
    if named:
        return f"{named[0].words.rstrip('.')} ({named[0].flag or named[0].name})"
    if record.message or record.first_failure is None:
        return f"{record.status}: {record.message}"
    return f"{record.first_failure.tap} is wrong ({record.first_failure.mode})"


def _entry_text(pattern: str, reason: str, url: str) -> list[str]:
    # JSON's strings are TOML's basic strings, once what is above ASCII is left as it is or escaped by four digits.
    fields = {"pattern": pattern, "status": "xfail", "reason": one_line(reason), "url": url}
    return ["[[expect]]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())]


def _with_pattern(line: str, value: str) -> str:
    """The line with another pattern, if it is the one that has it."""
    found = PATTERN.match(line)
    return line if found is None else f"{found[1]}{value}{found[3]}"


class _Blocks:
    """The lines of a file, cut where entries begin."""

    def __init__(self, lines: list[list[str]]) -> None:
        self._lines = lines
        self._edited = False

    @classmethod
    def split(cls, text: str, expectations: Expectations) -> _Blocks:
        """Block 0 is what stands before the first entry.

        Raises:
            ConformanceError: the blocks are not the entries one by one, as with a header inside a long string.
        """
        blocks: list[list[str]] = [[]]
        for line in text.splitlines():
            if ENTRY.match(line):
                blocks.append([])
            blocks[-1].append(line)
        path = expectations.path
        problem = f"--expect {one_line(str(path))}: cannot be edited line by line; write every entry as [[expect]]"
        try:
            found = [parse_expectations(path, "\n".join(block)).entries for block in blocks]
        except ConformanceError:
            raise ConformanceError(problem) from None
        facts = [(entry.pattern, entry.status, entry.reason, entry.url) for entry in expectations.entries]
        alone = [[(e.pattern, e.status, e.reason, e.url) for e in entries] for entries in found]
        if alone != [[], *([fact] for fact in facts)]:
            raise ConformanceError(problem)
        return cls(blocks)

    def replace(self, entry: Entry, patterns: Sequence[str]) -> None:
        """Put copies for these ids in an entry's place; its whole-line comments stay once."""
        self._edited = True
        block = self._lines[entry.number]
        keys = [line for line in block if not COMMENT.match(line)]
        end = max(number for number, line in enumerate(block) if not COMMENT.match(line)) + 1
        # What stands behind the keys is, more often than not, about the entry that follows.
        body, behind = block[:end], block[end:]
        if not patterns:
            comments = [line for line in body if line.strip() and COMMENT.match(line)]
            while behind and not comments and not behind[0].strip():
                behind = behind[1:]
            self._lines[entry.number] = [*comments, *behind]
            return
        if sum(bool(PATTERN.match(line)) for line in keys) != 1:
            raise ConformanceError(f"{entry}: its pattern must stand on a line of its own to be narrowed")
        copies: list[str] = []
        for number, pattern in enumerate(patterns):
            value = json.dumps(pattern, ensure_ascii=False)
            named = [_with_pattern(line, value) for line in keys]
            # The first copy stands where the entry stood, comments among its keys included.
            rest = iter(named)
            copies += ["", *named] if number else [line if COMMENT.match(line) else next(rest) for line in body]
        self._lines[entry.number] = [*copies, *behind]

    def append(self, lines: list[str]) -> None:
        """Add an entry at the end."""
        last = next((block for block in reversed(self._lines) if block), [])
        self._lines.append([*([""] if last and last[-1].strip() else []), *lines])

    def text(self) -> str:
        """The file; removals leave no blank lines at its end."""
        lines = [line for block in self._lines for line in block]
        while self._edited and lines and not lines[-1].strip():
            del lines[-1]
        return "".join(f"{line}\n" for line in lines)
