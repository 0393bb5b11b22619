"""A tensor-parallel port: one process a rank, all asked the same, all answers judged.

Ranks find one another as torch.distributed does: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
before the target is imported.  Every rank returns whole results.  Choices must be equal on every rank; where other
results differ, each rank's are judged.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from conformance.adapters.session import Answer, BadResult, ByRank, Crash, TimedOut, UnsupportedRequest
from conformance.cases.case import Advance, Call, Open, Request, is_weights
from conformance.errors import ConformanceError, TargetError
from conformance.interface import Description
from conformance.judge.expectations import CODE_DTYPES
from conformance.lazy import LazyTensors
from conformance.tensors import Tensor

TIMEOUT = 120.0
"""Seconds for one answer of all ranks, and for all to start: many times what the reference takes."""
GRACE = 5.0
"""Seconds for the other ranks once one has failed: they may wait for it in a collective operation for ever."""
ANSWERS: Mapping[str, type[Answer]] = {kind.__name__: kind for kind in (UnsupportedRequest, Crash, BadResult)}


@dataclass(frozen=True)
class _Known:
    """Stands for weights that were sent before."""

    number: int


@dataclass(frozen=True)
class _Sent:
    """Weights under the number that stands for them from now on."""

    number: int
    weights: Mapping[str, Tensor]


class RanksSession:
    """A conversation with `world_size` processes, each of which has opened the target."""

    def __init__(self, target: str, world_size: int, timeout: float | None = None) -> None:
        """Start the ranks.

        Raises:
            TargetError: a rank could not open the target, or the target declares no ranks; one line.
        """
        self._target, self._size, self._timeout = target, world_size, timeout or TIMEOUT
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._weights: dict[int, tuple[int, Mapping[str, Tensor]]] = {}
        self._description: Description | None = None
        self._methods: frozenset[str] = frozenset()
        try:
            self._start()
        except Answer as error:
            self.close()
            raise TargetError(f"target {target!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._target, rank, self._size, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._description, self._methods = self._collect()[0]

    def describe(self) -> Description:
        """What rank 0 says of itself, with the number of ranks among its conventions."""
        assert self._description is not None
        conventions = {**self._description.conventions, "ranks": str(self._size)}
        return replace(self._description, conventions=conventions)

    def supports(self, method: str) -> bool:
        """Whether the target overrides the method."""
        return method in self._methods

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """Put one request to every rank; the results of all."""
        if not self._processes:
            self._start()
        self._send(("ask", self._encoded(request)))
        first, *rest = self._collect()
        others = {}
        for rank, results in enumerate(rest, start=1):
            unequal = _unequal(first, results)
            if any(name not in first or name not in results for name in unequal):
                raise BadResult(f"rank {rank} answers {', '.join(results)}, rank 0 {', '.join(first)}")
            for name in unequal:
                if first[name].dtype in CODE_DTYPES or first[name].shape != results[name].shape:
                    raise BadResult(f"rank {rank} has another {name} than rank 0: choices must be equal on every rank")
            if unequal:
                others[rank] = results
        return ByRank(first, others)

    def _encoded(self, request: Request) -> Request:
        if isinstance(request, Open | Call):
            return replace(request, arguments=self._known(request.arguments))
        return replace(request, inputs=self._known(request.inputs)) if isinstance(request, Advance) else request

    def _known(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments in which weights that the ranks have are only named."""
        encoded = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, LazyTensors):
                raise UnsupportedRequest("weights that are made when they are looked up are not sent to ranks")
            if is_weights(value):
                if id(value) in self._weights:
                    encoded[name] = _Known(self._weights[id(value)][0])
                else:
                    number = len(self._weights)
                    self._weights[id(value)] = (number, value)
                    encoded[name] = _Sent(number, dict(value))
        return encoded

    def reset(self) -> None:
        """Forget every opened object on every rank."""
        if self._processes:
            self._send(("reset", None))
            self._collect()

    def finish(self) -> None:
        """Check on every rank what only the end of a case shows."""
        if self._processes:
            self._send(("finish", None))
            self._collect()

    def _send(self, message: tuple[str, Any]) -> None:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(message)
            except OSError:
                self.close()
                raise Crash(f"rank {rank} has ended") from None

    def _collect(self) -> list[Any]:
        """The answer of every rank; where one failed, its failure.  The ranks are then ended: they are out of step."""
        deadline = time.monotonic() + self._timeout
        answers: dict[int, tuple[str, Any]] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        failed: Answer | None = None
        while pending:
            # Whichever is ready first: a rank that has failed may be what the others wait for.
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = failed or TimedOut(f"rank {min(pending.values())}: no answer within {self._timeout:.3g} s")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    failed = failed or Crash(f"rank {rank} has ended")
                else:
                    kind, content = answers[rank]
                    if kind != "results":
                        failed = failed or ANSWERS[kind](f"rank {rank}: {content}")
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failed is not None:
            if len(answers) < self._size or not isinstance(failed, UnsupportedRequest):
                self.close()
            raise failed
        return [answers[rank][1] for rank in range(self._size)]

    def close(self) -> None:
        """End every rank."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections, self._weights = [], [], {}


def _unequal(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of results that are not the same bits."""
    return [
        name
        for name in {**first, **other}
        if name not in first
        or name not in other
        or first[name].dtype != other[name].dtype
        or first[name].data.tobytes() != other[name].data.tobytes()
        or first[name].shape != other[name].shape
    ]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _serve(connection: Connection, target: str, rank: int, world_size: int, port: int) -> None:
    """One rank: open the target and answer until the connection ends."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from conformance.adapters.in_process import InProcess
    from conformance.adapters.target import open_target
    from conformance.interface import METHODS

    weights: dict[int, Mapping[str, Tensor]] = {}

    def decoded(value: Any) -> Any:
        if isinstance(value, _Sent):
            weights[value.number] = value.weights
        return weights[value.number] if isinstance(value, _Sent | _Known) else value

    with suppress(EOFError, OSError, KeyboardInterrupt):
        try:
            session = open_target(target)
            if not isinstance(session, InProcess) or not session.parallel:
                raise TargetError("it does not declare parallel = True, as --world-size asks for")
            methods = frozenset(method for method in METHODS if session.supports(method))
            connection.send(("results", (session.describe(), methods)))
        except ConformanceError as error:
            connection.send(("Crash", str(error).removeprefix(f"target {target!r}: ")))
            return
        except SystemExit as error:
            connection.send(("Crash", f"it tried to end the process with exit code {error.code}"))
            return
        while True:
            what, request = connection.recv()
            try:
                results: Mapping[str, Tensor] = {}
                if what == "ask":
                    if isinstance(request, Open | Call):
                        arguments = {name: decoded(value) for name, value in request.arguments.items()}
                        request = replace(request, arguments=arguments)
                    if isinstance(request, Advance):
                        request = replace(request, inputs={n: decoded(v) for n, v in request.inputs.items()})
                    results = dict(session.ask(request))
                elif what == "reset":
                    session.reset()
                else:
                    session.finish()
                connection.send(("results", results))
            except Answer as answer:
                kind = next((name for name, known in ANSWERS.items() if isinstance(answer, known)), "Crash")
                connection.send((kind, str(answer)))
