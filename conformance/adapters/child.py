"""A child process that answers one line with one line: no shell, bounded memory, a deadline for every answer.

Nothing that the child does is trusted: it may hang, die, flood either stream, close them, or leave children of its own.
POSIX only, for process groups and non-blocking pipes.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from conformance.adapters.session import Answer, Crash, ProtocolViolation, TimedOut
from conformance.tensors import one_line

LARGEST_LINE = 1 << 20
"""Bytes of an answer: many times what the longest one needs, the state of a whole model by name."""
PIECE = 1 << 16
"""Bytes read or written at once: what a pipe holds."""
KEPT_ERROR_BYTES = 1 << 13
KEPT_ERROR_LINES = 6
HEARTBEAT = 0.1
"""Seconds between looks at whether the process is still there."""
GRACE = 2.0
"""Seconds that a child may take to end once it has nothing more to do, before it is killed: time to close files."""
MARK = "CONFORMANCE_CHILD"
"""Environment variable, a random text for each child, by which descendants are found that left its process group."""


class Child:
    """One running process."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start `words[0]` with the rest as its arguments, in a process group of its own.

        Raises:
            OSError: there is no such program, or it cannot be executed.
        """
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A group for killing all of it, and so that an interrupt from the keyboard does not reach it before us.
            start_new_session=True,
            env={**os.environ, MARK: self._mark},
        )
        self._errors = bytearray()
        for stream in self._streams():
            os.set_blocking(stream.fileno(), False)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the line that answers it, both with their newlines.

        Whatever is raised, the child has been ended with all its descendants.

        Raises:
            TimedOut: no complete answer within `seconds`.
            Crash: the process ended instead.
            ProtocolViolation: a line too long, more than one line, or the output was closed.
        """
        try:
            return self._exchange(memoryview(line), time.monotonic() + seconds)
        except TimeoutError:
            self.kill()
            raise TimedOut(f"no answer within {seconds:.3g} s{self._last_words()}") from None
        except EOFError:
            raise self._ended() from None
        except BaseException as problem:
            self.kill()
            if isinstance(problem, Answer):
                raise type(problem)(f"{problem}{self._last_words()}") from None
            raise

    def _exchange(self, unsent: memoryview, deadline: float) -> bytes:
        stdin, stdout, stderr = self._streams()
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            selector.register(stdin, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                # Asked first, so that whatever the process wrote before its end is in the pipe.
                gone = self._process.poll() is not None
                ready = [key for key, _ in selector.select(min(left, HEARTBEAT))]
                # Its output alone does not show the end: children of its own may hold it open.
                if gone and all(key.fileobj is not stdout for key in ready):
                    raise EOFError
                # Written first: what it says before it was asked must not depend on which pipe was ready sooner.
                for key in sorted(ready, key=lambda key: key.fileobj is not stdin):
                    if key.fileobj is stdin:
                        unsent = unsent[self._write(unsent) :]
                        if not unsent:
                            selector.unregister(stdin)
                    if key.fileobj is stderr and not self._read_errors():
                        selector.unregister(stderr)
                    if key.fileobj is stdout:
                        received += _read(stdout)
                        complete = _complete(received)
                        if complete and unsent:
                            raise ProtocolViolation("it answered before it had read the whole message")
                        if complete:
                            return bytes(received)

    def _streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def _write(self, unsent: memoryview) -> int:
        """How many bytes were taken; all of them where nobody reads any more, which the output will show."""
        try:
            return os.write(self._streams()[0].fileno(), unsent[:PIECE])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return len(unsent)

    def _read_errors(self) -> bool:
        """Read a piece of standard error and keep its end; whether there may be more."""
        try:
            piece = os.read(self._streams()[2].fileno(), PIECE)
        except BlockingIOError:
            return True
        self._errors = (self._errors + piece)[-KEPT_ERROR_BYTES:]
        return bool(piece)

    def _ended(self) -> Answer:
        """The output is closed: what became of the process, which is gone afterwards."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            return ProtocolViolation(f"it closed its standard output but did not end{self._last_words()}")
        self.kill()
        how = f"with exit code {code}" if code >= 0 else f"by signal {_signal_name(-code)}"
        return Crash(f"the process ended {how} instead of an answer{self._last_words()}")

    def _last_words(self) -> str:
        """The end of standard error, for the message of a failure; the process has been killed."""
        lines = [one_line(line) for line in self._errors.decode("utf-8", "replace").splitlines() if line.strip()]
        return "".join(f"\nstderr: {line}" for line in lines[-KEPT_ERROR_LINES:])

    def end(self) -> None:
        """Close the input, wait a little for the process to end by itself, and kill what is left."""
        if self._process.returncode is None:
            with suppress(OSError):
                self._streams()[0].close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all its descendants.  Nothing of them is left when this returns."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process may be stuck in a driver, where no signal reaches it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self._kill_escaped()
        # What was written before the end; a bounded number of pieces, although nobody is left to write more.
        for _ in range(16):
            if self._streams()[2].closed or not self._read_errors():
                break
        for stream in self._streams():
            with suppress(OSError):
                stream.close()

    def _kill_escaped(self) -> None:
        """Kill descendants in other process groups, where the system shows the environment of a process."""
        mark, deadline = f"{MARK}={self._mark}".encode(), time.monotonic() + GRACE
        while time.monotonic() < deadline:
            # One that is just being made may be missed in one pass, but not its parent.
            if not [pid for pid in _processes() if _kill_marked(pid, mark)]:
                return


def _read(stdout: IO[bytes]) -> bytes:
    try:
        piece = os.read(stdout.fileno(), PIECE)
    except BlockingIOError:
        return b""
    if not piece:
        raise EOFError
    return piece


def _complete(received: bytearray) -> bool:
    """Whether a whole answer is there, and nothing else."""
    end = received.find(b"\n")
    if end < 0 and len(received) <= LARGEST_LINE:
        return False
    if end < 0 or end > LARGEST_LINE:
        raise ProtocolViolation(f"an answer of more than {LARGEST_LINE} bytes")
    if end + 1 < len(received):
        first = received[: min(end, 80)].decode("utf-8", "replace").rstrip()
        raise ProtocolViolation(
            f"more than one line for one message, nothing but answers may be printed; the first: {one_line(first)!r}"
        )
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _processes() -> Iterator[int]:
    """Ids of all processes, none where there is no /proc."""
    proc = Path("/proc")
    if proc.is_dir() and hasattr(os, "pidfd_open"):
        yield from (int(path.name) for path in proc.iterdir() if path.name.isdigit())


def _kill_marked(pid: int, mark: bytes) -> bool:
    """Kill a process whose environment holds `mark`; whether it was one."""
    try:
        # Held by a descriptor, so that the number cannot have passed to another process in between.
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
