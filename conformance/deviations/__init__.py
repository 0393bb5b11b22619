"""Declared deviations: what a port may do differently on purpose, as `deviations.toml` lists it.

A port that declares one is judged against the same equations with that step left out, on the same inputs, and its
verdict says so.  Whoever declares a deviation must do it: there is no rule that accepts both.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from conformance.errors import ConformanceError
from conformance.interface import METHODS

FILE = "conformance/deviations/deviations.toml"


@dataclass(frozen=True)
class Deviation:
    """One entry of the list."""

    name: str
    words: str
    """What is done instead, to be read after "your values equal ours with"."""
    spec: str
    """The line of the specification that is not followed."""
    methods: frozenset[str]
    """Interface methods whose results change."""
    own_noise: bool
    """Whether honest implementations with it are farther apart than those of the recording."""


def parse_deviations(text: str) -> Mapping[str, Deviation]:
    """Deviations by name from the text of a file.

    Raises:
        ConformanceError: the text is not as this module says; names the deviation and the key.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConformanceError(f"{FILE}: {error}") from error
    return {name: _deviation(name, table) for name, table in tables.items()}


def _deviation(name: str, table: Any) -> Deviation:
    keys = {"words", "spec", "methods", "own_noise"}
    if not isinstance(table, Mapping) or set(table) != keys:
        raise ConformanceError(f"{FILE}: [{name}] must be a table of exactly {', '.join(sorted(keys))}")
    for key in ("words", "spec"):
        if not isinstance(table[key], str) or not table[key].strip():
            raise ConformanceError(f"{FILE}: [{name}] {key} must be text")
    if not isinstance(table["own_noise"], bool):
        raise ConformanceError(f"{FILE}: [{name}] own_noise must be true or false")
    methods = table["methods"]
    unknown = [m for m in methods if m not in METHODS] if isinstance(methods, list) else [methods]
    if unknown or not methods:
        raise ConformanceError(f"{FILE}: [{name}] methods must be a list of interface methods; see {unknown}")
    return Deviation(name, table["words"], table["spec"], frozenset(methods), table["own_noise"])


DEVIATIONS: Mapping[str, Deviation] = parse_deviations(
    resources.files("conformance.deviations").joinpath("deviations.toml").read_text(encoding="utf-8")
)
"""The closed list."""


def unknown_deviations(declared: object) -> str:
    """What is wrong with a port's declaration, in words; empty when nothing is."""
    known = ", ".join(DEVIATIONS)
    if isinstance(declared, str) or not isinstance(declared, Collection):
        return f"deviations that are not a tuple of names (known: {known})"
    wrong = [name for name in declared if not isinstance(name, str) or name not in DEVIATIONS]
    return f"the deviation {wrong[0]!r}, which is none of {known}" if wrong else ""


def touching(declared: Collection[str], method: str) -> tuple[str, ...]:
    """Those of the declared deviations that change what a method gives, in the order of the list."""
    return tuple(name for name, known in DEVIATIONS.items() if name in declared and method in known.methods)
