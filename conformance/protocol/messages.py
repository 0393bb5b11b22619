"""The lines of a conversation with a process: what is sent, and what may come back.

`schemas/command.json` and `schemas/reply.json` describe them for the other side; replies are held against the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

from conformance.adapters.session import ProtocolViolation
from conformance.errors import FixtureError, TargetError
from conformance.interface import METHODS, Description
from conformance.protocol import VERSION
from conformance.tensors import one_line, parse_json

Message = Mapping[str, Any]

METHOD_NAMES: frozenset[str] = frozenset({*METHODS, "runtime"})
"""Everything that a harness may list as implemented."""


def start(directory: Path) -> Message:
    """The first command: which version of the protocol, and the folder that is the harness's own."""
    return {"command": "start", "protocol": VERSION, "directory": str(directory)}


DESCRIBE: Message = {"command": "describe"}
STOP: Message = {"command": "stop"}


def run(request: Mapping[str, Any], results: Path) -> Message:
    """One encoded request, and where its results go."""
    return {"command": "run", "request": request, "results": str(results)}


def encode(message: Message, seq: int) -> bytes:
    """A message as a line."""
    return json.dumps({"seq": seq, **message}, allow_nan=False).encode() + b"\n"


@cache
def schema(name: str) -> Mapping[str, Any]:
    """One of the shipped schemas: `request`, `command` or `reply`."""
    text = resources.files("conformance.protocol").joinpath(f"schemas/{name}.json").read_text(encoding="utf-8")
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


@cache
def _replies() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema("reply"))


def decode_reply(line: bytes, seq: int) -> Message:
    """The reply to message `seq`.

    Raises:
        ProtocolViolation: not JSON, not of the schema, or the reply to another message.
    """
    try:
        reply = parse_json(line, "reply")
    except FixtureError as error:
        raise ProtocolViolation(f"{error}: {one_line(line[:80].decode('utf-8', 'replace').rstrip())!r}") from error
    mismatch = jsonschema.exceptions.best_match(_replies().iter_errors(reply))
    if mismatch is not None:
        place = "".join(f" {part}" for part in mismatch.absolute_path)
        raise ProtocolViolation(f"reply{one_line(place)}: {one_line(mismatch.message)}")
    if reply["seq"] != seq:
        raise ProtocolViolation(f"reply to message {one_line(str(reply['seq']))}, expected one to {seq}")
    found: Message = reply
    return found


@dataclass(frozen=True)
class Capabilities:
    """What a harness says of itself."""

    description: Description
    methods: frozenset[str]
    recipe: bool = False
    """Whether weights of the recipe may come by name."""


def decode_description(reply: Message, target: str) -> Capabilities:
    """The reply to `describe`.

    Raises:
        TargetError: there is no description in it, or it lists a method that does not exist.
    """
    said = reply.get("description")
    if not isinstance(said, Mapping):
        raise TargetError(f"target {target!r}: the reply to describe has no description")
    unknown = sorted(set(said["methods"]) - METHOD_NAMES)
    if unknown:
        raise TargetError(f"target {target!r}: describes a method {one_line(unknown[0])} that does not exist")
    known = {field.name for field in fields(Description)}
    # What is not said is not known: the defaults are those of a port written in Python.
    stated = {"language": "", "device": "", **{name: _tuples(value) for name, value in said.items() if name in known}}
    description = Description(**stated)
    return Capabilities(description, frozenset(said["methods"]), said.get("recipe", False))


def _tuples(value: Any) -> Any:
    """Lists of a description as what a frozen dataclass holds."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
