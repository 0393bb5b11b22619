"""Mutants: small changes of a module's functions, made by rule from its source.

The catalogue of faults holds the mistakes that somebody thought of; a mutant is one that nobody did.  One that no case
rejects is either no mistake (another way to write the same, a value that is never reached) or a hole of the suite.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from conformance.faults.mutation_rules import Change, changes_in


@dataclass(frozen=True)
class Mutant:
    """A function of the reference with one change.

    `target` is the function or method below `reference`, such as "rotary.yarn_range"; `line` is the line of the file,
    `number` counts the mutants of this line, `text` is the line as it was, `source` the whole function as it is now.
    """

    target: str
    line: int
    number: int
    change: str
    text: str
    source: str

    @property
    def id(self) -> str:
        """Such as "rotary.yarn_range:34/2"."""
        return f"{self.target}:{self.line}/{self.number}"


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of the functions and methods of a module, in the order of the file; no two mean the same."""
    lines = source.splitlines()
    found: list[Mutant] = []
    for target, function in _functions(ast.parse(source)):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        before = lines[first - 1 : function.end_lineno]
        seen = {_meaning(before)}
        numbers: Counter[int] = Counter()
        for change in sorted(changes_in(function), key=lambda change: change.place.lineno):
            after = _replaced(before, first, change)
            if (meaning := _meaning(after)) in seen:
                continue
            seen.add(meaning)
            line = change.place.lineno
            numbers[line] += 1
            text = lines[line - 1].strip()
            found.append(Mutant(f"{module}.{target}", line, numbers[line], change.words, text, _dedented(after)))
    return found


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their names; those inside another function are parts of it."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, ast.FunctionDef))


def _replaced(lines: list[str], first: int, change: Change) -> list[str]:
    """The lines, of which the first has the number `first`, after a change."""
    place = change.place
    assert place.end_lineno is not None
    # Columns of the syntax tree count bytes.
    head = lines[place.lineno - first].encode()[: place.col_offset].decode()
    tail = lines[place.end_lineno - first].encode()[place.end_col_offset :].decode()
    whole = isinstance(place, ast.stmt | ast.Slice)
    changed = change.new if whole else f"({change.new})"
    return [*lines[: place.lineno - first], f"{head}{changed}{tail}", *lines[place.end_lineno - first + 1 :]]


def _dedented(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)) + "\n"


def _meaning(lines: list[str]) -> str:
    return ast.dump(ast.parse(_dedented(lines)))
