"""Reading a report back: the JSON lines that `ReportWriter` writes, also when the run was killed half-way."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jsonschema

from conformance.errors import ConformanceError
from conformance.report.records import CaseRecord, Footer, Header, Record
from conformance.report.summary import make_footer
from conformance.tensors import one_line

Kind = TypeVar("Kind")
KINDS: Mapping[str, type[Header] | type[CaseRecord] | type[Footer]] = {
    "header": Header,
    "case": CaseRecord,
    "footer": Footer,
}


@dataclass(frozen=True)
class StoredReport:
    """A report as it lies in a file."""

    path: Path
    header: Header
    records: tuple[CaseRecord, ...]
    footer: Footer | None
    """None: the run was killed."""

    @property
    def shown(self) -> str:
        """The path, for messages."""
        return one_line(str(self.path))

    @property
    def ending(self) -> Footer:
        """The footer, or what it would say of a run that was killed."""
        seconds = sum(record.seconds for record in self.records)
        return self.footer or make_footer(self.records, seconds, 0, 2, "the run was killed")

    @property
    def cut_off(self) -> str:
        """Why not all cases are there, in words; empty when they are."""
        if self.footer is None:
            return f"ends after {len(self.records)} of {self.header.cases} cases: the run was killed"
        return self.footer.stopped


def read_report(path: Path) -> StoredReport:
    """Read a report.

    Raises:
        ConformanceError: it cannot be read, or is no report; the line names the file and the line in it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConformanceError(f"{one_line(str(path))}: {error.strerror}") from error
    return parse_report(path, content)


def parse_report(path: Path, content: bytes) -> StoredReport:
    """Read the bytes of a report; `path` is for messages.

    Raises:
        ConformanceError: as `read_report` does.
    """
    shown = one_line(str(path))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConformanceError(f"{shown}: is not UTF-8 text") from None
    lines = text.split("\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(parse_record(line))
        except ValueError as error:
            if number == len(lines):
                # No line break follows it: it was being written when the run ended.
                break
            raise ConformanceError(f"{shown}: line {number} is no record of a report: {one_line(str(error))}") from None
    if not records or not isinstance(records[0], Header):
        raise ConformanceError(f"{shown}: does not begin with the header of a report")
    footer = records[-1] if isinstance(records[-1], Footer) else None
    cases: list[CaseRecord] = []
    for number, record in enumerate(records[1:] if footer is None else records[1:-1], 2):
        if not isinstance(record, CaseRecord):
            raise ConformanceError(f"{shown}: line {number} is a {record.type} among cases")
        cases.append(record)
    repeated = next((id for id, count in Counter(record.id for record in cases).items() if count > 1), None)
    if repeated is not None:
        raise ConformanceError(f"{shown}: case {one_line(repeated)} is there twice")
    return StoredReport(path, records[0], tuple(cases), footer)


def parse_record(line: str) -> Record:
    """One line of a report.

    Raises:
        ValueError: it is no JSON, or not what the schema says; the message tells where.
    """
    try:
        fields = json.loads(line, parse_constant=lambda name: _refuse(name, "JSON"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    kind = fields.get("type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError("no type of record")
    if kind != "case":
        # Most of a header is free mappings, which only the schema knows.  Cases are thousands, and all fields.
        error = next(_validator(kind).iter_errors(fields), None)
        if error is not None:
            raise ValueError(f"{'/'.join(map(str, error.absolute_path)) or kind}: {error.message[:200]}")
    record: Record = _decoder(typing.cast(Any, KINDS[kind]))(fields)
    return record


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    text = resources.files("conformance.report").joinpath("schemas/report.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator({"$defs": json.loads(text)["$defs"], "$ref": f"#/$defs/{kind}"})


class _Misfit(ValueError):
    """A value that is not of its field's type; the path grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []

    def __str__(self) -> str:
        return ": ".join(filter(None, ("/".join(reversed(self.path)), str(self.args[0]))))


Decoder = Callable[[Any], Any]


@cache
def _decoder(hint: Any) -> Decoder:
    """What makes a value of this type from JSON, made once for each type: reports hold thousands of records."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass_decoder(typing.cast(type[Any], hint))
    if isinstance(hint, types.UnionType):
        (option,) = [_decoder(option) for option in arguments if option is not types.NoneType]
        return lambda value: None if value is None else option(value)
    if origin is tuple:
        entry = _decoder(arguments[0])
        return lambda value: tuple(map(entry, _checked(value, list, "a list")))
    if origin is typing.Literal:
        return lambda value: value if value in arguments else _refuse(value, f"one of {', '.join(map(str, arguments))}")
    if hint is float:
        return _number
    if hint is Any:
        return lambda value: value
    if hint in (int, str, bool):
        named = {int: "a whole number", str: "a text", bool: "true or false"}[hint]
        return lambda value: value if type(value) is hint else _refuse(value, named)
    assert origin is Mapping
    key_decoder, value_decoder = map(_decoder, arguments)
    return lambda value: {
        key_decoder(key): value_decoder(entry) for key, entry in _checked(value, dict, "an object").items()
    }


def _dataclass_decoder(kind: type[Any]) -> Decoder:
    """Unknown fields belong to later versions and are left out; those with a default may be missing."""
    hints = typing.get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}
    required = [field.name for field in dataclasses.fields(kind) if _has_no_default(field)]

    def decode(value: Any) -> Any:
        _checked(value, dict, "an object")
        missing = next((name for name in required if name not in value), None)
        if missing is not None:
            raise _Misfit(f"{missing} is missing")
        arguments = {}
        for name, decoder in decoders.items():
            if name in value:
                try:
                    arguments[name] = decoder(value[name])
                except _Misfit as misfit:
                    misfit.path.append(name)
                    raise
        return kind(**arguments)

    return decode


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _number(value: Any) -> float:
    # "inf", "-inf" and "nan" are strings in JSON.
    if type(value) in (int, float) or value in ("inf", "-inf", "nan"):
        with suppress(OverflowError):
            return float(value)
    _refuse(value, "a number")


def _checked(value: Any, kind: type[Kind], named: str) -> Kind:
    return value if isinstance(value, kind) else _refuse(value, named)


def _refuse(value: Any, wanted: str) -> NoReturn:
    raise _Misfit(f"{str(value)[:60]!r} is not {wanted}")
