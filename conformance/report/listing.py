"""What the catalogue looks like to a person: `conformance list` and `conformance show`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import islice
from typing import Any

from rich.console import Console

from conformance.cases.case import Call, Case, Handle, Open, ReadState, Request
from conformance.errors import ConformanceError
from conformance.report.terminal import cases_in_words, print_fields
from conformance.tensors import Tensor, one_line

SHOWN_STEPS = 6
SHOWN_NAMES = 3


def print_list(console: Console, cases: Sequence[Case]) -> None:
    """Two lines a case: what it is, and which mistake it is for."""
    width = max(len(case.id) for case in cases)
    for case in cases:
        console.print(f"{case.id:<{width}}  {case.level:<5}  {case.mode}", soft_wrap=True)
        console.print(f"    {case.why}", style="dim", soft_wrap=True)
    console.print()
    console.print(cases_in_words(len(cases)))


def print_details(console: Console, case: Case, rerun: str) -> None:
    """Everything known of a case without running an implementation."""
    console.print(case.id, style="bold", soft_wrap=True)
    fields = {"level": case.level, "mode": case.mode, "why": case.why, "spec": case.spec}
    if case.source:
        fields["inputs"] = case.source
    if case.reading is not None:
        fields["reading"] = f"{case.reading} only"
    known = _flags() if case.flags else {}
    for flag in case.flags:
        fields[f"flag {flag}"] = "\n".join(f"{name}: {_words(text)}" for name, text in known.get(flag, {}).items())
    fields["run"] = rerun
    print_fields(console, fields, copyable="run")
    console.print()
    steps = list(islice(case.steps(), SHOWN_STEPS + 1))
    for number, step in enumerate(steps[:SHOWN_STEPS], 1):
        place = step.place.describe((), ())
        print_fields(console, {f"step {number}": _request(step.request) + (f" ({place})" if place else "")})
    if len(steps) > SHOWN_STEPS:
        console.print("  and further steps of the same kind")


def _flags() -> Mapping[str, Mapping[str, Any]]:
    """The entries of flags.toml by flag."""
    text = resources.files("conformance.cases").joinpath("flags.toml").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConformanceError(f"conformance/cases/flags.toml: {error}") from error


def _words(value: Any) -> str:
    return ", ".join(str(entry) for entry in value) if isinstance(value, list) else str(value)


def _request(request: Request) -> str:
    if isinstance(request, Call):
        return f"call {request.method}({_arguments(request.arguments)})"
    if isinstance(request, Open):
        return f"open {request.name} = {request.method}({_arguments(request.arguments)})"
    if isinstance(request, ReadState):
        return f"read the state of {request.name}"
    return f"step {request.name}({_arguments(request.inputs)})"


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_argument(value)}" for name, value in arguments.items())


def _argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Handle):
        return value.name
    if isinstance(value, Mapping):
        # Names only: the values may be whole weights, read when touched.
        names = ", ".join(islice(value, SHOWN_NAMES))
        return f"{{{names}{', …' if len(value) > SHOWN_NAMES else ''}}} ({len(value)} entries)"
    return one_line(repr(value))
