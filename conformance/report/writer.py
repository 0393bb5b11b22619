"""Writing a report while the run goes on, so that a run that is killed leaves what it had found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from conformance.errors import ConformanceError
from conformance.report.records import Header, Record, as_line
from conformance.tensors import one_line


class ReportWriter:
    """Appends records to a file, each flushed at once.

    Making one proves that the file can be written, but an earlier report of that name stays until `begin`: a run that
    never starts, for want of a target say, loses nothing.
    """

    def __init__(self, path: Path) -> None:
        """Check the path.

        Raises:
            ConformanceError: it is a directory, or cannot be written.
        """
        self._shown = one_line(str(path))
        # A link is followed, so that the report lands where it points; pipes and devices are written as they are.
        self._path = path.resolve()
        self._staged: Path | None = None
        if self._path.is_dir():
            raise ConformanceError(f"--json {self._shown}: is a directory")
        if not self._path.exists() or self._path.is_file():
            self._staged = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            self._file: IO[str] = (self._staged or self._path).open("w", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Lines that could not be flushed were reported when they were written.
        with suppress(OSError):
            self._file.close()
        if self._staged is not None:
            self._staged.unlink(missing_ok=True)

    def begin(self, header: Header) -> None:
        """Write the header and put the file in its place."""
        self.write(header)
        if self._staged is not None:
            try:
                self._staged.replace(self._path)
            except OSError as error:
                raise self._cannot_write(error) from error
            self._staged = None

    def write(self, record: Record) -> None:
        """Append one record.

        Raises:
            ConformanceError: the file cannot be written any more.
        """
        try:
            self._file.write(as_line(record))
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these records in place of all that were written, at once; more may be appended.

        Only in a file: what went into a pipe or a device stays as it is.

        Raises:
            ConformanceError: the file cannot be written any more.
        """
        if not self._path.is_file():
            return
        staged = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            staged.write_text("".join(map(as_line, records)), encoding="utf-8")
            staged.replace(self._path)
            self._file.close()
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            staged.unlink(missing_ok=True)

    def _cannot_write(self, error: OSError) -> ConformanceError:
        return ConformanceError(f"--json {self._shown}: cannot be written: {error.strerror}")
