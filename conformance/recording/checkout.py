"""A user's checkout of the published inference code: read once, shown before it runs, imported without leaving a trace.

The code is untrusted until the user says otherwise. What is executed is compiled from the very bytes that were hashed,
and nothing of the checkout but the declared modules can be imported by its plain name.
"""

from __future__ import annotations

import hashlib
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from conformance.recording.upstream import CONFIG_FILE, ENTRY, KERNEL, MODULES, PINNED, RecordingError
from conformance.tensors import one_line

MAX_FILE_BYTES = 4_000_000
PRIVATE_PACKAGE = "_conformance_upstream"


@dataclass(frozen=True)
class SourceFile:
    """A file of the checkout as it was read."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Hash of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    def standing(self) -> str:
        """How it relates to the pinned revision, in words."""
        if self.name not in PINNED:
            return "not pinned"
        return "as pinned" if self.sha256 == PINNED[self.name] else "DIFFERS from the pinned revision"


@dataclass(frozen=True)
class Checkout:
    """The declared files that a folder has."""

    directory: Path
    files: Mapping[str, SourceFile]

    @staticmethod
    def read(directory: Path) -> Checkout:
        """Read the files; nothing is executed.

        Raises:
            RecordingError: no such folder, or a file is missing, not regular or too large.
        """
        if not directory.is_dir():
            raise RecordingError(f"{one_line(str(directory))}: not a directory")
        files = {}
        for name in (*(f"{module}.py" for module in MODULES), CONFIG_FILE):
            path = directory / name
            try:
                mode, size = path.stat().st_mode, path.stat().st_size
                if not stat.S_ISREG(mode) or size > MAX_FILE_BYTES:
                    raise RecordingError(f"{name}: not a regular file of at most {MAX_FILE_BYTES} bytes")
                files[name] = SourceFile(name, path.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise RecordingError(f"{name}: cannot be read: {error.strerror}") from error
        for name in (f"{ENTRY}.py", CONFIG_FILE):
            if name not in files:
                raise RecordingError(f"{one_line(str(directory))}: no {name} in it")
        return Checkout(directory, files)

    def executed(self, own_kernels: bool) -> list[SourceFile]:
        """The files that recording may execute."""
        skipped = {CONFIG_FILE, f"{KERNEL}.py"} if own_kernels else {CONFIG_FILE}
        return [file for name, file in self.files.items() if name not in skipped]

    def notice(self, own_kernels: bool) -> Sequence[str]:
        """What a user should know before agreeing."""
        lines = [f"Recording executes code of {one_line(str(self.directory))} with your permissions:"]
        lines += [f"  {file.name:<20} {file.sha256}  {file.standing()}" for file in self.executed(own_kernels)]
        config = self.files[CONFIG_FILE]
        lines.append(f"and compares {config.name:<7} {config.sha256}  {config.standing()}")
        return lines


@contextmanager
def imported(
    checkout: Checkout, kernel: ModuleType | None, watched: Callable[[ModuleType], ModuleType]
) -> Iterator[ModuleType]:
    """The module `model`, freshly executed; its plain-name imports work while the context lasts, then all is as before.

    `kernel` stands in for the checkout's own module of that name; None executes that one. The code gets
    `watched(kernel)`.
    """
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    finder = _Finder(checkout)
    sys.meta_path.insert(0, finder)
    try:
        sys.modules[KERNEL] = watched(finder.execute(KERNEL) if kernel is None else kernel)
        yield finder.execute(ENTRY)
    finally:
        sys.meta_path.remove(finder)
        for name in (*MODULES, *(f"{PRIVATE_PACKAGE}.{name}" for name in MODULES)):
            sys.modules.pop(name, None)
        sys.modules.update(before)


class _Finder(MetaPathFinder, Loader):
    """Finds the declared modules in the checkout, and nothing else."""

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout

    def execute(self, name: str) -> ModuleType:
        """A module under its private name: that is what its classes and tracebacks show."""
        spec = ModuleSpec(f"{PRIVATE_PACKAGE}.{name}", self, origin=str(self._checkout.directory / f"{name}.py"))
        module = ModuleType(spec.name)
        module.__spec__ = spec
        module.__file__ = spec.origin
        sys.modules[spec.name] = module
        sys.modules[name] = module
        self.exec_module(module)
        return module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The declared modules by their plain names."""
        if fullname not in MODULES or f"{fullname}.py" not in self._checkout.files:
            return None
        return ModuleSpec(fullname, self, origin=str(self._checkout.directory / f"{fullname}.py"))

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual module."""

    def exec_module(self, module: ModuleType) -> None:
        """Compile and run the bytes that were hashed; no bytecode is written."""
        name = module.__name__.rpartition(".")[2]
        module.__file__ = str(self._checkout.directory / f"{name}.py")
        code = compile(self._checkout.files[f"{name}.py"].content, module.__file__, "exec", dont_inherit=True)
        exec(code, module.__dict__)
