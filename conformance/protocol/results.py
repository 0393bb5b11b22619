"""Reading results that a port has written: the file is untrusted, and its writer may still be at work.

Only a regular file is opened, never a link; it is bounded in size, and nothing in its header is believed before it was
checked against that size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from conformance.adapters.session import BadResult, ProtocolViolation
from conformance.errors import FixtureError
from conformance.tensors import FILE_DTYPES, NUMPY_TYPES, Entry, Tensor, one_line, parse_header

LARGEST_RESULTS = 1 << 28
"""Bytes of one results file.  The largest result at level core, 1.9 million elements over all steps of its case, has 15
MB in fp64."""
LARGEST_HEADER = 1 << 20
"""Bytes of its header: room for ten thousand results."""

STORED_DTYPES: Mapping[str, int] = {
    **FILE_DTYPES,
    **dict.fromkeys(("U64",), 64),
    **dict.fromkeys(("U32",), 32),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("F8_E5M2", "I8"), 8),
}
"""Element types that a file may hold, and their bits: more than results may have, so that a wrong type is reported as a
wrong result rather than as an unreadable file."""
BITS = frozenset({"U8", "U16", "U32", "U64"})
"""Stored types that may stand for any other of the same width."""


def decode_results(results: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The results of a reply, `{tap: {"name": KEY, "dtype": LOGICAL}}`, read from the file they were written to.

    `name` is the tap's own name and `dtype` that of the file where they are left out.  A logical dtype is needed where
    the file holds the bits of another type, such as E4M3 codes as U8 or bf16 as U16.

    Raises:
        ProtocolViolation: no such file, no regular file, no valid safetensors file, too large, or a tensor missing.
        BadResult: a dtype that no result has, or bits that are not valid for it.
    """
    if not results:
        return {}
    with _open(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_RESULTS:
            raise ProtocolViolation(f"the results file has more than {LARGEST_RESULTS} bytes")
        try:
            entries = parse_header(file, "results file", STORED_DTYPES, LARGEST_HEADER).entries
            return {tap: _read(file, tap, place, entries) for tap, place in results.items()}
        except FixtureError as error:
            raise ProtocolViolation(str(error)) from error
        except OSError as error:
            raise ProtocolViolation(f"the results file cannot be read: {error.strerror}") from error


def _open(path: Path) -> IO[bytes]:
    """Opened without following a link, and without waiting for the other end of a pipe."""
    if path.parent.is_symlink():
        raise ProtocolViolation("the folder for results was replaced by a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProtocolViolation("results were listed but their file was not written") from None
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise ProtocolViolation(f"the results file {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProtocolViolation("the results file is not a regular file")
    return os.fdopen(descriptor, "rb")


def _read(file: IO[bytes], tap: str, place: Mapping[str, Any], entries: Mapping[str, Entry]) -> Tensor:
    name = place.get("name", tap)
    entry = entries.get(name)
    if entry is None:
        raise ProtocolViolation(f"result {one_line(tap)}: no tensor {one_line(name)} in the results file")
    logical = place.get("dtype", entry.dtype)
    where = f"result {one_line(tap)}"
    if logical not in NUMPY_TYPES:
        raise BadResult(f"{where}: dtype {one_line(logical)} is not one of {', '.join(NUMPY_TYPES)}")
    same_width = STORED_DTYPES[entry.dtype] == NUMPY_TYPES[logical].itemsize * 8
    if logical != entry.dtype and not (entry.dtype in BITS and same_width):
        raise BadResult(f"{where}: stored as {entry.dtype}, which does not hold the bits of {logical}")
    file.seek(entry.begin)
    raw = file.read(entry.end - entry.begin)
    if len(raw) != entry.end - entry.begin:
        raise ProtocolViolation("the results file was changed after the reply")
    try:
        return Tensor.from_bytes(raw, logical, entry.shape)
    except ValueError as error:
        raise BadResult(f"{where}: {error}") from error
