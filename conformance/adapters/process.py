"""Implementations that are programs: `cmd:./harness args`, asked in JSON lines (`docs/protocol.md`).

A harness that hangs, dies or does not keep to the protocol costs the case at hand; the next one begins with a new
process.  Everything that passes between the two lies in a private temporary folder, which goes with the session.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.adapters.child import GRACE, Child
from conformance.adapters.session import Answer, BadResult, Crash, ProtocolViolation, TimedOut, UnsupportedRequest
from conformance.cases.case import Advance, Call, Open, Request
from conformance.errors import ConformanceError, TargetError
from conformance.interface import Description
from conformance.protocol import messages
from conformance.protocol.messages import Capabilities, Message
from conformance.protocol.results import decode_results
from conformance.protocol.store import TemporaryStore
from conformance.protocol.values import RESET, encode_request
from conformance.tensors import Tensor

PREFIX = "cmd:"
TIMEOUT = 120.0
"""Seconds for one answer unless another time is given: many times what the reference takes for any request, since a
harness may load a model, compile kernels or wake a device before it can answer the first."""
CASE_TIMEOUTS = 5
"""A case may keep us waiting this many times as long as one answer: most ask only once or a few times, and one that
always answers just in time must not hold up a run for hours."""
START_ATTEMPTS = 3
"""A harness that could not be restarted this many times in a row will not come back."""


def open_process(target: str, timeout: float = TIMEOUT) -> ProcessSession:
    """A session with the program that follows `cmd:` in a target, split into words as a shell would, without a shell.

    Raises:
        TargetError: no program, or one that cannot be started or does not describe itself; one line.
    """
    try:
        words = shlex.split(target.removeprefix(PREFIX))
    except ValueError as error:
        raise TargetError(f"target {target!r}: {error}") from error
    if not words:
        raise TargetError(f"target {target!r}: no command after {PREFIX}")
    return ProcessSession(target, words, timeout)


class ProcessSession:
    """A conversation with a harness process, and with its successors where it does not live to the end.

    Args:
        target: what messages call it.
        words: the program and its arguments.
        timeout: seconds for one answer.
    """

    def __init__(self, target: str, words: Sequence[str], timeout: float) -> None:
        self._target, self._words, self._timeout = target, words, timeout
        self._folder = TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True)
        ours, theirs = Path(self._folder.name, "inputs"), Path(self._folder.name, "harness")
        ours.mkdir()
        theirs.mkdir()
        self._scratch = theirs
        self._store = TemporaryStore(ours)
        self._child: Child | None = None
        self._seq = 0
        self._failed_starts = 0
        self._left = timeout
        self._open_case = False
        """Whether the harness was asked anything since its last reset."""
        try:
            self._capabilities = self._begin()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise TargetError(f"target {target!r}: cannot start {words[0]}: {error.strerror}") from error
            if isinstance(error, Answer):
                raise TargetError(f"target {target!r}: {'; '.join(str(error).splitlines())}") from error
            raise
        self._store.recipe = self._capabilities.recipe

    def _begin(self) -> Capabilities:
        self._left = 2 * self._timeout
        self._start()
        return messages.decode_description(self._say("describe", messages.DESCRIBE), self._target)

    def _start(self) -> None:
        # The one before may have removed or replaced it.
        if self._scratch.is_symlink():
            self._scratch.unlink()
        self._scratch.mkdir(exist_ok=True)
        self._child = Child(self._words)
        reply = self._say("start", messages.start(self._scratch))
        if reply["status"] != "ok":
            raise Crash(f"start: {reply.get('message') or 'refused without a message'}")

    def describe(self) -> Description:
        """Name, version and conventions, as told at the beginning."""
        return self._capabilities.description

    def supports(self, method: str) -> bool:
        """Whether the description lists the method."""
        return method in self._capabilities.methods

    def reset(self) -> None:
        """The next case begins: forget objects and what an earlier case left unfinished."""
        if self._open_case:
            # A case that ended early has its result already; a process that cannot even forget it is replaced.
            with suppress(Answer):
                self._end_case()
        self._store.forget_weights()
        self._left = CASE_TIMEOUTS * self._timeout

    def finish(self) -> None:
        """The case has ended: a late answer, or changed weights, count against it."""
        self._end_case()
        if not self._store.forget_weights():
            raise BadResult("the file of a weight was modified")

    def close(self) -> None:
        """Ask the process to stop, end it if it does not, and remove the folder."""
        if self._child is not None:
            self._left = GRACE
            with suppress(Answer, OSError):
                self._say("stop", messages.STOP)
        if self._child is not None:
            self._child.end()
            self._child = None
        self._folder.cleanup()

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """Put one request to the process, a new one where the last has ended."""
        if isinstance(request, Open | Call) and not self.supports(request.method):
            raise UnsupportedRequest(f"{request.method} is not implemented")
        if self._child is None:
            self._restart()
        try:
            return self._ask(request)
        except UnsupportedRequest:
            # The state may be kept to oneself and the case goes on; after any other refusal it is over.
            if isinstance(request, Advance | Open | Call):
                self._end_case()
            raise
        except (BadResult, Crash):
            self._end_case()
            raise

    def _ask(self, request: Request) -> Mapping[str, Tensor]:
        self._open_case = True
        what = _words_for(request)
        results = self._scratch / f"results-{self._seq:06d}.safetensors"
        try:
            reply = self._say(what, messages.run(self._encoded(request), results))
            if reply["status"] == "unsupported":
                raise UnsupportedRequest(reply.get("message") or f"{what} is not supported")
            if reply["status"] == "error":
                raise Crash(f"{what}: {reply.get('message') or 'failed without a message'}")
            found = {} if isinstance(request, Open) else self._results(what, reply, results)
        finally:
            unchanged = self._store.forget_arguments()
            # A harness may have made anything of that name; what cannot be unlinked goes with the folder.
            with suppress(OSError):
                results.unlink()
        if not unchanged:
            raise BadResult(f"{what} modified the file of its input")
        return found

    def _encoded(self, request: Request) -> Message:
        try:
            return encode_request(request, self._store)
        except OSError as error:
            raise ConformanceError(f"{self._folder.name}: cannot be written: {error.strerror}") from error

    def _results(self, what: str, reply: Message, path: Path) -> Mapping[str, Tensor]:
        try:
            return decode_results(reply.get("results", {}), path)
        except ProtocolViolation as problem:
            self._kill()
            raise ProtocolViolation(f"{what}: {problem}") from None
        except BadResult as problem:
            raise BadResult(f"{what}: {problem}") from None

    def _end_case(self) -> None:
        """Let the process forget its objects.  The answer also shows that none of an earlier request is left."""
        self._open_case = False
        if self._child is None:
            return
        reply = self._say("reset", messages.run(RESET, self._scratch / "none.safetensors"))
        if reply["status"] == "error":
            self._kill()
            raise Crash(f"reset: {reply.get('message') or 'failed without a message'}")

    def _restart(self) -> None:
        """Start a new process.

        Raises:
            TargetError: not for the first time, so that the run cannot go on.
        """
        try:
            self._start()
        except (Answer, OSError) as problem:
            self._kill()
            self._failed_starts += 1
            if self._failed_starts == START_ATTEMPTS:
                attempts = f"target {self._target!r}: not restarted in {START_ATTEMPTS} attempts"
                raise TargetError(f"{attempts}: {'; '.join(str(problem).splitlines())}") from None
            if isinstance(problem, Answer):
                raise
            raise Crash(f"cannot be restarted: {problem.strerror}") from None
        self._failed_starts = 0

    def _say(self, what: str, message: Message) -> Message:
        """Send a message and return its reply, within the time that is left to an answer and to the case.

        Raises:
            TimedOut, Crash, ProtocolViolation: the process has been ended.
        """
        assert self._child is not None
        self._seq += 1
        child, self._child = self._child, None
        begun = time.monotonic()
        allowed = min(self._timeout, self._left)
        try:
            reply = messages.decode_reply(child.exchange(messages.encode(message, self._seq), allowed), self._seq)
        except ProtocolViolation as problem:
            child.kill()
            raise ProtocolViolation(f"{what}: {problem}") from None
        except (TimedOut, Crash) as problem:
            raise type(problem)(f"{what}: {problem}") from None
        self._left -= time.monotonic() - begun
        self._child = child
        return reply

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _words_for(request: Request) -> str:
    if isinstance(request, Call):
        return f"call {request.method}"
    if isinstance(request, Open):
        return f"open {request.name}"
    return f"{'step' if isinstance(request, Advance) else 'state'} of {request.name}"
