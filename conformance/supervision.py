"""The command line in a child process, so that a target that ends its process does not choose the exit code.

A library of the target that calls `exit(0)` would otherwise end a run in the middle and look like a pass.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from conformance.cli import main
from conformance.errors import COULD_NOT_RUN

ORDERLY = b"."


def run() -> None:
    """Run the command line and exit as it does; a process that was ended under it is exit code 2 and one line."""
    if not hasattr(os, "fork"):
        main()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        # An interrupt of the terminal reaches the parent alone, which hands it on: once, not twice.
        os.setpgid(0, 0)
        _end_with_parent()
        try:
            main()
        finally:
            # Reached by every way out that Python knows, and by none that goes around it.
            os.write(writable, ORDERLY)
    os.close(writable)
    for handed_on in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handed_on, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if os.read(readable, len(ORDERLY)) == ORDERLY:
        sys.exit(code)
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    print(f"conformance: the process was ended {how} in the middle of the run, perhaps by the target", file=sys.stderr)
    sys.exit(COULD_NOT_RUN)


def _end_with_parent() -> None:
    """Have the system kill this process when its parent dies; where it cannot, the run goes on to its end."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
