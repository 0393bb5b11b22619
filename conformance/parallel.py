"""Work on numbered items in several processes: results come in order, and a process that dies costs one item."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from conformance.errors import ConformanceError

T = TypeVar("T")
Work = Callable[[int], T]
Prepare = Callable[[ExitStack], Work[T]]
"""Run once in each process: what makes an item's result there.  The stack is closed when the process ends."""

GRACE = 10.0
"""Seconds that a process may take to close what it has opened."""


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: connection.Connection[Any, Any]
    item: int


def in_order(prepare: Prepare[T], count: int, jobs: int, died: Callable[[int, str], T]) -> Iterator[T]:
    """The results of the items 0 to `count` - 1, in order, worked on by up to `jobs` processes.

    `prepare` must be picklable.  `died(item, how)` is the result of an item whose process ended, in words such as "by
    signal SIGSEGV".  Closing the iterator ends the processes.

    Raises:
        ConformanceError: raised by the work on an item.
    """
    items = iter(range(count))
    done: dict[int, T] = {}
    workers: list[_Worker] = []
    finished = False
    # Whatever a process leaves behind when it dies goes with this folder.
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        try:
            for _, item in zip(range(jobs), items, strict=False):
                workers.append(_start(prepare, folder, item))
            for due in range(count):
                while due not in done:
                    _collect(workers, items, done, died, lambda item: _start(prepare, folder, item))
                yield done.pop(due)
            finished = True
        finally:
            _stop(workers, finished)


def _collect(
    workers: list[_Worker],
    items: Iterator[int],
    done: dict[int, T],
    died: Callable[[int, str], T],
    start: Callable[[int], _Worker],
) -> None:
    """Wait for a process to answer or to end, and give it, or its successor, the next item."""
    by_pipe = {worker.pipe: worker for worker in workers}
    for pipe in connection.wait(list(by_pipe)):
        worker = by_pipe[pipe]  # type: ignore[index]
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            done[worker.item] = died(worker.item, _how(worker.process.exitcode))
            workers.remove(worker)
            workers.extend(start(item) for _, item in zip(range(1), items, strict=False))
            continue
        if isinstance(answer, ConformanceError):
            raise answer
        done[worker.item] = answer
        following = next(items, None)
        if following is None:
            workers.remove(worker)
            _stop([worker], finished=True)
        else:
            worker.item = following
            worker.pipe.send(following)


def _start(prepare: Prepare[Any], folder: str, item: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(prepare, theirs, folder))
    with _interrupts_ignored():
        process.start()
    theirs.close()
    ours.send(item)
    return _Worker(process, ours, item)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """An interrupt from the keyboard reaches all processes, but only this one acts on it: children inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(workers: list[_Worker], finished: bool) -> None:
    for worker in workers:
        worker.pipe.close()
        if not finished:
            worker.process.terminate()
    for worker in workers:
        worker.process.join(GRACE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by signal {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _serve(prepare: Prepare[Any], pipe: connection.Connection[Any, Any], folder: str) -> None:
    """The life of a process: it ends when the other end of the pipe is closed, or by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tempfile.tempdir = folder
    with suppress(KeyboardInterrupt, EOFError, OSError), ExitStack() as stack:
        try:
            work = prepare(stack)
            while True:
                pipe.send(work(pipe.recv()))
        except ConformanceError as error:
            pipe.send(error)
