"""Answers that lie in a folder: `dir:DIR`, written by `conformance export` and filled in by a port, anywhere.

Everything in the folder is untrusted, and may be there in part: a case is judged when each of its steps has an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import conformance
from conformance.adapters.session import BadResult, Crash, ProtocolViolation, UnsupportedRequest
from conformance.cases.case import Call, Case, Open, Request, Step
from conformance.errors import FixtureError, TargetError
from conformance.fixtures import Fixtures
from conformance.folder.layout import (
    DESCRIPTION,
    REPLIES,
    RESULTS,
    open_regular,
    read_manifest,
    read_regular,
    results_name,
)
from conformance.folder.questions import questions_digest
from conformance.interface import Description
from conformance.protocol import messages
from conformance.protocol.messages import Capabilities, Message
from conformance.protocol.results import LARGEST_HEADER, STORED_DTYPES, decode_results
from conformance.tensors import Tensor, one_line, parse_header, parse_json

PREFIX = "dir:"


def open_folder(target: str) -> FolderSession:
    """A session with the folder that follows `dir:` in a target.

    Raises:
        TargetError: not a folder that was exported, or one without an answer; one line.
    """
    name = target.removeprefix(PREFIX)
    if not name:
        raise TargetError(f"target {target!r}: no folder after {PREFIX}")
    return FolderSession(target, Path(name))


class FolderSession:
    """A conversation whose questions were asked before; `answered` says which cases they belong to.

    Args:
        target: what messages call it.
        folder: an exported folder.
    """

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self._results = folder / RESULTS
        self.manifest = read_manifest(folder, target)
        if self._results.is_symlink():
            raise TargetError(f"target {target!r}: {one_line(str(self._results))} is a symbolic link")
        if not _has_answers(self._results):
            raise TargetError(f"target {target!r}: no answers yet: {one_line(str(self._results))} has no file in it")
        self._capabilities = self._read_description(folder.resolve().name)
        self._case = ""
        self._number = 0
        self._replies: Sequence[Message] | None = None

    def answered(self, fixtures: Fixtures, cases: Sequence[Case]) -> list[Case]:
        """The cases among these that the folder asks, to be judged by its answers.

        Raises:
            TargetError: the folder was exported from other golden sets, or it asks none of them.
        """
        if self.manifest.lock != fixtures.lock_hash:
            raise TargetError(
                f"target {self._target!r}: exported from fixtures with lock {one_line(self.manifest.lock)}, "
                f"these have lock {fixtures.lock_hash}"
            )
        found = [replace(case, steps=partial(self._steps, case)) for case in cases if case.id in self.manifest.cases]
        if not found:
            raise TargetError(f"target {self._target!r}: none of the {len(cases)} selected cases is in the folder")
        return found

    def describe(self) -> Description:
        """What `describe.json` says, and where the questions are from."""
        said = self._capabilities.description
        return replace(said, conventions={**said.conventions, "exported": self._origin()})

    def _origin(self) -> str:
        asked = {name: value for name, value in self.manifest.selection.items() if value}
        selection = ", ".join(f"{name} {_words(value)}" for name, value in asked.items())
        return one_line(f"{len(self.manifest.cases)} cases by suite {self.manifest.suite}: {selection}")

    def supports(self, method: str) -> bool:
        """Whether the description lists the method; without a description nothing is ruled out."""
        return method in self._capabilities.methods

    def reset(self) -> None:
        """Nothing is kept: each case begins with its steps."""

    def finish(self) -> None:
        """Nothing can have changed."""

    def close(self) -> None:
        """Nothing is open."""

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """The answer to the step at hand, which must be this request."""
        if self._replies is not None and self._number >= len(self._replies):
            raise UnsupportedRequest(f"no reply to step {self._number}")
        reply = None if self._replies is None else self._replies[self._number]
        if reply is not None and reply["status"] == "unsupported":
            raise UnsupportedRequest(reply.get("message") or f"step {self._number} is not supported")
        if reply is not None and reply["status"] == "error":
            raise Crash(f"step {self._number}: {reply.get('message') or 'failed without a message'}")
        if isinstance(request, Open):
            return {}
        path = self._path(results_name(self._number))
        try:
            listed = _every_tensor(path) if reply is None else reply.get("results", {})
            return decode_results(listed, path)
        except (ProtocolViolation, BadResult) as problem:
            raise type(problem)(f"{self._shown(path)}: {problem}") from None

    def _steps(self, case: Case) -> Iterator[Step]:
        """The steps of a case, provided that the folder asks the same and has an answer to each."""
        steps = list(case.steps())
        requests = [step.request for step in steps]
        self._case = case.id
        self._number, self._replies = 0, None
        for request in requests:
            if isinstance(request, Call | Open) and not self.supports(request.method):
                raise UnsupportedRequest(f"{request.method} is not implemented")
        if self.manifest.cases[case.id].questions != questions_digest(requests):
            versions = f"{one_line(self.manifest.suite)}, this is {conformance.__version__}"
            raise UnsupportedRequest(f"other questions than those in the folder, exported by suite {versions}")
        self._replies = self._read_replies(len(steps))
        self._require_answers(requests)
        for self._number, step in enumerate(steps):
            yield step

    def _require_answers(self, requests: Sequence[Request]) -> None:
        """See that no answer is missing up to the one that ends the conversation.

        Raises:
            UnsupportedRequest: one is; the message says which.
        """
        missing: list[str] = []
        for number, request in enumerate(requests):
            path = self._path(results_name(number))
            if self._replies is None:
                answered = isinstance(request, Open) or _exists(path)
            elif number >= len(self._replies):
                answered = False
            elif self._replies[number]["status"] != "ok":
                break
            else:
                answered = not self._replies[number].get("results") or _exists(path)
            if not answered:
                missing.append(self._shown(path))
        if len(missing) == len([request for request in requests if not isinstance(request, Open)]):
            raise UnsupportedRequest("no result in the folder")
        if missing:
            raise UnsupportedRequest(f"no result {missing[0]}, and {len(missing) - 1} more of {len(requests)} steps")

    def _read_replies(self, steps: int) -> Sequence[Message] | None:
        """The lines of `replies.jsonl`, None without the file: results then go by their own names.

        Raises:
            ProtocolViolation: it is damaged, or has more lines than there are commands.
        """
        path = self._path(REPLIES)
        try:
            raw = read_regular(path)
        except ValueError as error:
            raise ProtocolViolation(f"{self._shown(path)}: {error}") from error
        if raw is None:
            return None
        lines = raw.splitlines()
        # The last command lets go of all objects; its reply may be there or not.
        if len(lines) > steps + 1:
            raise ProtocolViolation(f"{self._shown(path)}: {len(lines)} replies to {steps + 1} commands")
        try:
            return [messages.decode_reply(line, number) for number, line in enumerate(lines)]
        except ProtocolViolation as problem:
            raise ProtocolViolation(f"{self._shown(path)}: {problem}") from None

    def _path(self, name: str) -> Path:
        """A file with answers to the case at hand; its folders are ours, and no links to elsewhere.

        Raises:
            ProtocolViolation: a folder on the way is a link.
        """
        folder = self._results / self._case
        for part in (folder, *folder.parents[: self._case.count("/") + 1]):
            if part.is_symlink():
                raise ProtocolViolation(f"{self._shown(part)} is a symbolic link")
        return folder / name

    def _shown(self, path: Path) -> str:
        return path.relative_to(self._results.parent).as_posix()

    def _read_description(self, name: str) -> Capabilities:
        where = f"target {self._target!r}: {RESULTS}/{DESCRIPTION}"
        try:
            raw = read_regular(self._results / DESCRIPTION)
            said: Any = parse_json(raw, "description") if raw is not None else {}
            default = {"name": name, "version": "unknown", "methods": sorted(messages.METHOD_NAMES)}
            reply = {"seq": 0, "status": "ok", "description": {**default, **said} if isinstance(said, dict) else said}
            return messages.decode_description(messages.decode_reply(json.dumps(reply).encode(), 0), self._target)
        except (ValueError, FixtureError, ProtocolViolation) as error:
            raise TargetError(f"{where}: {error}") from error


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _exists(path: Path) -> bool:
    """Whether anything of that name is there; links and the like are reported when they are read."""
    return path.is_symlink() or path.exists()


def _has_answers(results: Path) -> bool:
    return any(path.is_file() for path in results.rglob("*.safetensors")) or any(results.rglob(REPLIES))


def _every_tensor(path: Path) -> Mapping[str, Any]:
    """All tensors of a file under their own names.

    Raises:
        ProtocolViolation: it cannot be read.
    """
    try:
        file = open_regular(path)
        if file is None:
            return {}
        with file:
            return {name: {} for name in parse_header(file, "results file", STORED_DTYPES, LARGEST_HEADER).entries}
    except (ValueError, FixtureError) as error:
        raise ProtocolViolation(str(error)) from error
    except OSError as error:
        raise ProtocolViolation(f"cannot be read: {error.strerror}") from error
