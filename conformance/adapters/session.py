"""The one way the suite talks to an implementation, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from conformance.cases.case import Request
from conformance.interface import Description
from conformance.tensors import Tensor


class Answer(Exception):
    """Why a request has no results; `status` is what the report shows."""

    status = "ERROR"


class UnsupportedRequest(Answer):
    """The implementation does not have this method or these arguments."""

    status = "UNSUPPORTED"


class Crash(Answer):
    """The implementation raised an exception or its process died."""

    status = "CRASH"


class TimedOut(Answer):
    """The implementation's process did not answer in time and was ended."""

    status = "TIMEOUT"


class ProtocolViolation(Answer):
    """The implementation's process, or its folder, does not follow `docs/protocol.md`."""

    status = "PROTOCOL"


class BadResult(Answer):
    """The implementation answered with something that is not a result: wrong names, types or values."""

    status = "FAIL"


class ByRank(dict[str, Tensor]):
    """Results of rank 0, and of each other rank whose results are not the same bits."""

    def __init__(self, results: Mapping[str, Tensor], others: Mapping[int, Mapping[str, Tensor]]) -> None:
        super().__init__(results)
        self.others = others


class Session(Protocol):
    """A conversation with one implementation.  Objects opened in it live until `reset`."""

    def describe(self) -> Description:
        """Name, version and conventions."""

    def supports(self, method: str) -> bool:
        """Whether the implementation claims to have the interface method."""

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """Put one request; raises an `Answer` where there are no results."""

    def reset(self) -> None:
        """Forget every opened object: the next case starts afresh."""

    def finish(self) -> None:
        """Check what only the end of a case shows; raises an `Answer` as `ask` does."""

    def close(self) -> None:
        """End the conversation."""
