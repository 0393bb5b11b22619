"""The mistakes that cases are for: `flags.toml`, read and checked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args

from conformance.errors import ConformanceError

BugType = Literal[
    "LAYOUT",
    "ROUNDING",
    "ORDER",
    "MASK",
    "POSITION",
    "PRECISION",
    "BOUNDARY",
    "STALE",
    "CONVENTION",
    "UPSTREAM",
]
BUG_TYPES: tuple[BugType, ...] = get_args(BugType)
FILE = "conformance/cases/flags.toml"


@dataclass(frozen=True)
class Flag:
    """One mistake."""

    name: str
    bug_type: BugType
    effect: str
    """One sentence: what somebody who made the mistake sees."""
    description: str
    links: tuple[str, ...]
    """Public threads and documents, and the line of the specification."""


def load_flags() -> Mapping[str, Flag]:
    """All flags by name.

    Raises:
        ConformanceError: the file is not as this module says; names the flag and the key.
    """
    return parse_flags(resources.files("conformance.cases").joinpath("flags.toml").read_text(encoding="utf-8"))


def parse_flags(text: str) -> Mapping[str, Flag]:
    """Flags by name from the text of a file; raises as `load_flags`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConformanceError(f"{FILE}: {error}") from error
    return {name: _flag(name, table) for name, table in tables.items()}


def _flag(name: str, table: Any) -> Flag:
    if not isinstance(table, Mapping):
        raise ConformanceError(f"{FILE}: {name} is not a table")
    keys = {"bug_type", "effect", "description", "links"}
    if set(table) != keys:
        wrong = sorted(keys.symmetric_difference(table))
        raise ConformanceError(f"{FILE}: [{name}] must have exactly {', '.join(sorted(keys))}; see {', '.join(wrong)}")
    if table["bug_type"] not in BUG_TYPES:
        raise ConformanceError(f"{FILE}: [{name}] bug_type {table['bug_type']!r} is not one of {', '.join(BUG_TYPES)}")
    for key in ("effect", "description"):
        if not isinstance(table[key], str) or not table[key].strip():
            raise ConformanceError(f"{FILE}: [{name}] {key} must be text")
    links = table["links"]
    if not isinstance(links, list) or not links or not all(isinstance(link, str) and link for link in links):
        raise ConformanceError(f"{FILE}: [{name}] links must be a list of texts, at least one")
    return Flag(name, table["bug_type"], table["effect"], table["description"], tuple(links))
