"""Which cases of the catalogue a command is about: components, set, `-k` expression, level, reading, shard.

A selection that is empty is an error that names the argument which emptied it: a run that silently judged nothing
would look like success.
"""

from __future__ import annotations

import difflib
import heapq
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from conformance.cases.case import LEVELS, Case, Level
from conformance.errors import ConformanceError
from conformance.interface import Reading
from conformance.tensors import one_line

Matcher = Callable[[str], bool]


@dataclass(frozen=True)
class Selection:
    """What the user asked for on the command line; `level` is cumulative."""

    level: Level
    expression: str | None = None
    components: tuple[str, ...] = ()
    set_name: str | None = None


def select(cases: Sequence[Case], selection: Selection) -> list[Case]:
    """The cases asked for, in the order of the catalogue.

    Raises:
        ConformanceError: an argument selects nothing, or the expression cannot be read.
    """
    chosen = list(cases)
    if selection.components:
        known = list(dict.fromkeys(case.component for case in cases))
        require_components(selection.components, known)
        chosen = [case for case in chosen if case.component in selection.components]
    if selection.set_name is not None:
        chosen = [case for case in chosen if is_from_set(case, selection.set_name)]
        _require(chosen, f"--set {one_line(selection.set_name)}")
    if selection.expression is not None:
        matches = parse_expression(selection.expression, {case.id for case in cases})
        chosen = [case for case in chosen if matches(case.id)]
        _require(chosen, f"-k {one_line(selection.expression)!r}")
    levels = LEVELS[: LEVELS.index(selection.level) + 1]
    at_level = [case for case in chosen if case.level in levels]
    if not at_level:
        lowest = min((case.level for case in chosen), key=LEVELS.index, default=None)
        hint = "" if lowest is None else f"; use --level {lowest} for the {len(chosen)} that it leaves out"
        raise ConformanceError(f"--level {selection.level}: selects no case{hint}")
    return at_level


def require_components(names: Sequence[str], known: Sequence[str]) -> None:
    """Make sure that components exist.

    Raises:
        ConformanceError: one does not.
    """
    for name in names:
        if name not in known:
            raise ConformanceError(f"--component {one_line(name)}: no such component; there are {', '.join(known)}")


def is_from_set(case: Case, set_name: str) -> bool:
    """Whether the inputs of a case come from this golden set."""
    # Sources read "tiny/prefill-17" or "tiny: all calls"; a set named "tiny-2" must not answer to "tiny".
    return re.match(re.escape(set_name) + r"(?![\w-])", case.source) is not None


def _require(chosen: Sequence[Case], argument: str) -> None:
    if not chosen:
        raise ConformanceError(f"{argument}: selects no case; `conformance list` shows them all")


def of_reading(cases: Sequence[Case], reading: Reading) -> list[Case]:
    """The cases that apply to a reading of the shared index-key slot.

    Raises:
        ConformanceError: none does.
    """
    kept = [case for case in cases if case.reading in (None, reading)]
    if not kept:
        raise ConformanceError(f"--reading {reading}: all {len(cases)} selected cases belong to the other reading")
    return kept


def shard(cases: Sequence[Case], which: str | None, durations: Mapping[str, float]) -> list[Case]:
    """Part `i` of `n` for `which` "i/n", in the order of the catalogue.

    The longest cases are dealt first, each to the part that has least to do, so that the parts take about equally long;
    which case falls where depends on the selection, `n` and the durations alone.  `durations` are seconds by id; cases
    without one count as the median of those that have one.

    Raises:
        ConformanceError: not of that form, or no case falls into the part.
    """
    if which is None:
        return list(cases)
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", which)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConformanceError(f"--shard {one_line(which)}: expected i/n with 1 <= i <= n, such as 1/4")
    part, parts = int(match[1]), int(match[2])
    known = [durations[case.id] for case in cases if case.id in durations]
    usual = statistics.median(known) if known else 1.0
    seconds = [durations.get(case.id, usual) for case in cases]
    loads = [(0.0, 0, number) for number in range(1, parts + 1)]
    mine: list[int] = []
    for index in sorted(range(len(cases)), key=lambda index: (-seconds[index], index)):
        # Of parts with equal loads the one with fewer cases, so that cases without a length are dealt evenly as well.
        load, count, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + seconds[index], count + 1, number))
        if number == part:
            mine.append(index)
    if not mine:
        raise ConformanceError(f"--shard {which}: empty, only {len(cases)} cases are selected")
    return [cases[index] for index in sorted(mine)]


def find_case(cases: Sequence[Case], case_id: str) -> Case:
    """The case of exactly that id.

    Raises:
        ConformanceError: there is none; names the ids most like it.
    """
    for case in cases:
        if case.id == case_id:
            return case
    near = difflib.get_close_matches(case_id, [case.id for case in cases], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `conformance list` shows them all"
    raise ConformanceError(f"no case {one_line(case_id)}{hint}")


def parse_expression(text: str, ids: Collection[str]) -> Matcher:
    """A `-k` expression: words joined by `and`, `or`, `not` and parentheses, `and` binding tighter than `or`.

    A word matches the ids that contain it, whatever the case of its letters.  A word that is a whole id matches that
    id alone, so that `.../position-1` does not also run `.../position-10`.

    Raises:
        ConformanceError: the expression cannot be read.
    """
    try:
        return _Parser(text, ids).parse()
    except RecursionError:
        raise ConformanceError(f"-k {one_line(text)!r}: nested too deeply") from None


class _Parser:
    """Recursive descent over the tokens `(`, `)` and words."""

    def __init__(self, text: str, ids: Collection[str]) -> None:
        self._text = text
        self._ids = ids
        self._tokens = re.findall(r"[()]|[^\s()]+", text)
        self._next = 0

    def parse(self) -> Matcher:
        matcher = self._any()
        if self._next < len(self._tokens):
            raise self._error("'and', 'or' or the end")
        return matcher

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _accept(self, token: str) -> bool:
        found = self._peek().lower() == token
        self._next += found
        return found

    def _any(self) -> Matcher:
        parts = [self._all()]
        while self._accept("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else lambda case_id: any(part(case_id) for part in parts)

    def _all(self) -> Matcher:
        parts = [self._negation()]
        while self._accept("and"):
            parts.append(self._negation())
        return parts[0] if len(parts) == 1 else lambda case_id: all(part(case_id) for part in parts)

    def _negation(self) -> Matcher:
        negated = False
        while self._accept("not"):
            negated = not negated
        matcher = self._atom()
        return (lambda case_id: not matcher(case_id)) if negated else matcher

    def _atom(self) -> Matcher:
        if self._accept("("):
            matcher = self._any()
            if not self._accept(")"):
                raise self._error("')'")
            return matcher
        word = self._peek()
        if word.lower() in ("", ")", "and", "or"):
            raise self._error("a word")
        self._next += 1
        if word in self._ids:
            return lambda case_id: case_id == word
        return lambda case_id: word.lower() in case_id.lower()

    def _error(self, expected: str) -> ConformanceError:
        found = one_line(self._peek()) if self._peek() else "the end"
        return ConformanceError(f"-k {one_line(self._text)!r}: expected {expected}, found {found}")
