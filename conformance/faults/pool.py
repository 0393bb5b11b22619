"""Parts of a long run in processes of their own: patches hold for a whole process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

P = TypeVar("P")
T = TypeVar("T")


def one_thread() -> None:
    """For the beginning of a process: it is the processes that share the machine."""
    import torch

    torch.set_num_threads(1)


def finished(
    work: Callable[[P], T],
    parts: Sequence[P],
    jobs: int,
    begin: Callable[..., None] = one_thread,
    arguments: tuple[Any, ...] = (),
) -> Iterator[T]:
    """What `work` makes of each part, as they are finished; every process begins with `begin(*arguments)`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(1, len(parts))), context, begin, arguments) as executor:
        pending = [executor.submit(work, part) for part in parts]
        try:
            for done in as_completed(pending):
                yield done.result()
        except BaseException:
            # Who interrupts the run does not wait for what has begun.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
