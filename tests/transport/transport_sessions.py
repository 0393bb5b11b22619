"""What tests of transports share: target strings of the scripts here, and what processes are left."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from conformance.adapters.process import ProcessSession

HERE = Path(__file__).parent
OpenSession = Callable[..., ProcessSession]


def command(script: str, *arguments: str) -> str:
    """The target string for a script of this folder."""
    # Those without a library start ten times as fast without looking for installed packages.
    options = [] if script == "healthy.py" else ["-S"]
    return "cmd:" + shlex.join([sys.executable, *options, str(HERE / script), *arguments])


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes, this one aside, whose environment or command line holds `mark`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_text()
                if mark in words or mark.encode() in (process / "environ").read_bytes():
                    found.append(words)
            except OSError:
                continue
    return found
