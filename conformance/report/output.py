"""Files that are written whole when a run ends: proven writable before it begins, and never left half."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

from conformance.errors import ConformanceError
from conformance.tensors import one_line


def refuse_same_file(paths: Mapping[str, Path | None]) -> None:
    """Options that name files to write, each its own; what is no file, such as /dev/null, may be named twice.

    Raises:
        ConformanceError: two options name one file.
    """
    named: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        first = named.setdefault(path.resolve(), option)
        if first != option:
            raise ConformanceError(f"{option} {one_line(str(path))}: {first} writes to it too")


class OutputFile:
    """One such file.  An earlier file of that name stays until `write`."""

    def __init__(self, option: str, path: Path) -> None:
        """Check the path; `option` is for messages.

        Raises:
            ConformanceError: it is a directory, or cannot be written.
        """
        self._shown = f"{option} {one_line(str(path))}"
        # A link is followed, so that the file lands where it points; pipes and devices are written as they are.
        self._path = path.resolve()
        self._staged: Path | None = None
        if self._path.is_dir():
            raise ConformanceError(f"{self._shown}: is a directory")
        try:
            if not self._path.exists() or self._path.is_file():
                self._staged = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
                self._staged.touch()
            else:
                self._path.open("a").close()
        except OSError as error:
            raise self._cannot_write(error) from error

    @staticmethod
    def if_asked(option: str, path: Path | None) -> AbstractContextManager[OutputFile | None]:
        """The file of an option that may be absent, for a `with` statement."""
        return nullcontext() if path is None else OutputFile(option, path)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._staged is not None:
            with suppress(OSError):
                self._staged.unlink(missing_ok=True)

    def write(self, text: str) -> None:
        """Put the text in the file's place.

        Raises:
            ConformanceError: the file cannot be written any more.
        """
        try:
            # Not every text that a port answers with can be encoded: lone surrogates are shown by their numbers.
            (self._staged or self._path).write_text(text, encoding="utf-8", errors="backslashreplace")
            if self._staged is not None:
                self._staged.replace(self._path)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> ConformanceError:
        return ConformanceError(f"{self._shown}: cannot be written: {error.strerror}")
