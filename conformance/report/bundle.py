"""A submission: a report with everything that it takes to check it, in a folder or a ZIP file.

    bundle.json         format, suite, SHA-256 and size of the others
    report.jsonl        the report, byte for byte
    lock.json           the lock of the golden sets that it was judged by
    environment.json    implementation, device, versions of libraries
    expectations.toml   only where the run had expectations

Bundles come from strangers: nothing is unpacked, only these names are read, and only up to a size.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from conformance.errors import ConformanceError
from conformance.fixtures import LOCK, MANIFEST, Fixtures
from conformance.report.reader import StoredReport
from conformance.tensors import one_line

FORMAT = 1
INDEX, REPORT, ENVIRONMENT, EXPECTATIONS = "bundle.json", "report.jsonl", "environment.json", "expectations.toml"
MEBIBYTE = 2**20
LARGEST: Mapping[str, int] = {
    INDEX: MEBIBYTE,
    REPORT: 512 * MEBIBYTE,
    LOCK: 16 * MEBIBYTE,
    ENVIRONMENT: MEBIBYTE,
    EXPECTATIONS: 16 * MEBIBYTE,
}
"""Every name that a bundle may hold, with the bytes that are read of it at most."""
REQUIRED = (INDEX, REPORT, LOCK, ENVIRONMENT)
A_LONG_TIME_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in a ZIP: the same bundle always has the same bytes."""


def make_bundle(report: StoredReport, fixtures: Fixtures, expectations: Path | None) -> Mapping[str, bytes]:
    """The files of a bundle by name.

    Raises:
        ConformanceError: the report is cut off, or was made with other fixtures or expectations than these.
    """
    header = report.header
    if report.footer is None:
        raise ConformanceError(f"{report.shown}: {report.cut_off}")
    if fixtures.lock_hash != header.fixtures["lock"]:
        raise ConformanceError(
            f"{report.shown}: judged by fixtures with lock {header.fixtures['lock'][:12]}, "
            f"not by these with {fixtures.lock_hash[:12]}; name them with --fixtures"
        )
    if (header.expectations is None) != (expectations is None):
        wanted = "no --expect" if header.expectations is None else f"--expect {one_line(header.expectations)}"
        raise ConformanceError(f"{report.shown}: was made with {wanted}")
    lock = fixtures.directory / LOCK
    environment = {
        "suite": header.suite,
        "implementation": header.implementation,
        "environment": header.environment,
    }
    files = {
        REPORT: _read(report.path),
        LOCK: _read(lock if lock.exists() else fixtures.directory / MANIFEST),
        ENVIRONMENT: (json.dumps(environment, indent=1) + "\n").encode(),
    }
    if expectations is not None:
        files[EXPECTATIONS] = _read(expectations)
    described = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)} for name, content in files.items()
    }
    index = {"format": FORMAT, "suite": header.suite, "files": described}
    return {INDEX: (json.dumps(index, indent=1) + "\n").encode(), **files}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConformanceError(f"{one_line(str(path))}: {error.strerror}") from error


def write_bundle(files: Mapping[str, bytes], out: Path) -> None:
    """Write a ZIP file where `out` ends in `.zip`, otherwise a folder, which must be new or empty.

    Raises:
        ConformanceError: it cannot be written, or the folder holds something.
    """
    shown = f"--out {one_line(str(out))}"
    try:
        if out.suffix.lower() == ".zip":
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, data in files.items():
                    archive.writestr(zipfile.ZipInfo(name, A_LONG_TIME_AGO), data, zipfile.ZIP_DEFLATED)
            out.write_bytes(content.getvalue())
            return
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConformanceError(f"{shown}: the folder is not empty")
        for name, data in files.items():
            (out / name).write_bytes(data)
    except OSError as error:
        raise ConformanceError(f"{shown}: cannot be written: {error.strerror}") from error


def read_bundle(path: Path) -> Mapping[str, bytes]:
    """The files of a bundle by name, each as its index says.

    Raises:
        ConformanceError: it is no bundle, holds anything else, or a file differs from the index; one line names it.
    """
    shown = one_line(str(path))
    files = _read_folder(path, shown) if path.is_dir() else _read_archive(path, shown)
    for name in REQUIRED:
        if name not in files:
            _refuse(shown, name, "is missing")
    index = _index(files[INDEX], shown)
    for name in {*files, *index} - {INDEX}:
        if name not in files or name not in index:
            _refuse(shown, name, f"is not in {INDEX}" if name in files else "is missing")
        if hashlib.sha256(files[name]).hexdigest() != index[name]:
            _refuse(shown, name, f"is not the file that {INDEX} describes")
    return files


def _index(content: bytes, shown: str) -> Mapping[str, str]:
    """SHA-256 by name."""
    try:
        index: Any = json.loads(content)
        if index["format"] != FORMAT:
            _refuse(shown, INDEX, f"format {one_line(repr(index['format']))}, this version reads {FORMAT}")
        return {str(name): str(entry["sha256"]) for name, entry in index["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        _refuse(shown, INDEX, "is not the index of a bundle")


def _read_folder(path: Path, shown: str) -> Mapping[str, bytes]:
    files = {}
    try:
        for entry in sorted(path.iterdir()):
            _check_name(entry.name, shown)
            # What a link shows lies elsewhere on this machine.
            if not stat.S_ISREG(entry.lstat().st_mode):
                _refuse(shown, entry.name, "is not a regular file")
            with entry.open("rb") as file:
                files[entry.name] = _limited(file, entry.name, shown)
    except OSError as error:
        raise ConformanceError(f"{shown}: {error.strerror}") from error
    return files


def _read_archive(path: Path, shown: str) -> Mapping[str, bytes]:
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                _check_name(entry.filename, shown)
                if entry.filename in files:
                    _refuse(shown, entry.filename, "is there twice")
                with archive.open(entry) as file:
                    files[entry.filename] = _limited(file, entry.filename, shown)
    except OSError as error:
        raise ConformanceError(f"{shown}: {error.strerror or 'cannot be read'}") from error
    # A password, an unknown compression, damaged data, and whatever else a made-up archive brings.
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, ValueError, zlib.error) as error:
        raise ConformanceError(f"{shown}: is not a ZIP file that can be read: {one_line(str(error))}") from None
    return files


def _check_name(name: str, shown: str) -> None:
    # Paths, absolute or with "..", are none of these names either.
    if name not in LARGEST:
        _refuse(shown, name, f"does not belong into a bundle, which holds {', '.join(LARGEST)}")


def _limited(file: IO[bytes], name: str, shown: str) -> bytes:
    # The size that an archive declares is not to be believed: a small file may unpack to anything.
    content = file.read(LARGEST[name] + 1)
    if len(content) > LARGEST[name]:
        _refuse(shown, name, f"is larger than {LARGEST[name] // MEBIBYTE} MiB")
    return content


def _refuse(shown: str, name: str, problem: str) -> NoReturn:
    raise ConformanceError(f"{shown}: {one_line(name)} {problem}")
