"""Names of the files of a folder, and its manifest."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, Any

import jsonschema

from conformance.errors import FixtureError, TargetError
from conformance.tensors import one_line, parse_json, write_atomically

FORMAT = 1

MANIFEST = "manifest.json"
CASES = "cases"
WEIGHTS = "weights"
RESULTS = "results"
COMMANDS = "commands.jsonl"
ARGUMENTS = "arguments.safetensors"
REPLIES = "replies.jsonl"
DESCRIPTION = "describe.json"

LARGEST_JSON = 1 << 26
"""Bytes of a manifest or of the replies of one case; those of all shipped cases together have a hundredth of it."""


def results_name(number: int) -> str:
    """The file that holds the results of a step, counted from 0."""
    return f"{number:03d}.safetensors"


@dataclass(frozen=True)
class ExportedCase:
    """A case of the folder."""

    id: str
    level: str
    reading: str | None
    """None where both readings of the index keys give the same."""
    methods: tuple[str, ...]
    """What a port needs in order to answer."""
    steps: int
    questions: str
    """What was asked, see `conformance.folder.questions`."""


@dataclass(frozen=True)
class Manifest:
    """What a folder was exported from, and what is in it."""

    suite: str
    lock: str
    """Hash of the golden sets."""
    selection: Mapping[str, Any]
    cases: Mapping[str, ExportedCase]
    """By id."""

    def write(self, folder: Path, files: Mapping[str, str]) -> None:
        """Write `manifest.json`; `files` are the SHA-256 of all other files, for whoever copies the folder."""
        content = {
            "format": FORMAT,
            "suite": self.suite,
            "lock": self.lock,
            "selection": dict(self.selection),
            "cases": [asdict(case) for case in self.cases.values()],
            "files": dict(sorted(files.items())),
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / MANIFEST, (text.encode("utf-8"),))


def read_manifest(folder: Path, target: str) -> Manifest:
    """The manifest of an exported folder.

    Raises:
        TargetError: there is none, or it is damaged; one line.
    """
    label = f"target {target!r}: {MANIFEST}"
    if not folder.is_dir():
        raise TargetError(f"target {target!r}: {one_line(str(folder))} is not a directory")
    try:
        raw = read_regular(folder / MANIFEST)
        content = None if raw is None else parse_json(raw, label)
    except (FixtureError, ValueError) as error:
        raise TargetError(str(error) if isinstance(error, FixtureError) else f"{label}: {error}") from error
    if content is None:
        raise TargetError(f"target {target!r}: no {MANIFEST}: not a folder that `conformance export` has finished")
    version = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
    if version != FORMAT:
        raise TargetError(f"{label}: format {one_line(str(version))}, this suite reads {FORMAT}")
    mismatch = jsonschema.exceptions.best_match(_schema().iter_errors(content))
    if mismatch is not None:
        place = "".join(f" {part}" for part in mismatch.absolute_path)
        raise TargetError(f"{label}:{one_line(place)} {one_line(mismatch.message)}")
    cases = [ExportedCase(**{**case, "methods": tuple(case["methods"])}) for case in content["cases"]]
    return Manifest(content["suite"], content["lock"], content["selection"], {case.id: case for case in cases})


@cache
def _schema() -> jsonschema.Draft202012Validator:
    text = resources.files("conformance.folder").joinpath("manifest.schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


def read_regular(path: Path, largest: int = LARGEST_JSON) -> bytes | None:
    """The bytes of a file that a stranger may have put there; None where there is none.

    Raises:
        ValueError: as `open_regular`, or larger than `largest`.
    """
    file = open_regular(path)
    if file is None:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"has {size} bytes, the limit is {largest}")
        return file.read(largest)


def open_regular(path: Path) -> IO[bytes] | None:
    """A file opened without following a link, and without waiting for the other end of a pipe; None if there is none.

    Raises:
        ValueError: a link, no regular file, or not readable; says which.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise ValueError(what) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is not a regular file")
    return os.fdopen(descriptor, "rb")
