"""Named modules of a large package, run without the rest of it.

An engine's modules import the engine: its scheduler, its collectives, packages of several gigabytes.  Here the modules
that an adapter calls are executed as they are installed, and every other module of the package is an empty stand-in
whose names can be imported and not used.  Nothing is copied or changed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.errors import in_one_line
from conformance.interface import Unsupported


class LeftOut(ImportError):
    """A stand-in was used for more than its name."""


class StandIn:
    """What a name of a module that is left out stands for; it can be passed on, and a class can derive from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raises LeftOut."""
        raise LeftOut(f"{self._name} is called, which is in a part of the package that is left out")

    def __or__(self, other: Any) -> StandIn:
        """An annotation stays one."""
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


@dataclass(frozen=True)
class Parts:
    """What of an installed package is executed."""

    package: str
    modules: tuple[str, ...]
    """Modules that run as they are, by full name.  The packages above them are folders only: no `__init__` runs."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """What names of modules that are left out stand for, where importing the others asks for their values."""

    def module(self, name: str) -> Any:
        """One of the modules.

        Raises:
            Unsupported: the installed version has no such module, or it does not run without a part that is left out.
        """
        self._install()
        try:
            return importlib.import_module(name)
        except Exception as reason:
            raise Unsupported(f"{self.package}: {name}: {in_one_line(reason)}") from reason

    def function(self, module: str, name: str) -> Any:
        """A function or class of one of the modules.

        Raises:
            Unsupported: as `module`, or the installed version has no such name in it, or has it from elsewhere.
        """
        found = getattr(self.module(module), name, None)
        if found is None or isinstance(found, StandIn):
            raise Unsupported(f"{self.package}: {module} has no {name}")
        return found

    def _install(self) -> None:
        if not any(isinstance(finder, _Finder) and finder.parts is self for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Decides for every module of the package whether it is executed, a folder, or a stand-in."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        found = importlib.machinery.PathFinder.find_spec(parts.package)
        if found is None or not found.submodule_search_locations:
            raise Unsupported(f"{parts.package} is not installed")
        self._root = Path(next(iter(found.submodule_search_locations)))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The installed module where it is listed, else an empty one; None for other packages."""
        if fullname.partition(".")[0] != self.parts.package:
            return None
        if fullname in self.parts.modules:
            return importlib.machinery.PathFinder.find_spec(fullname, path)
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if self._leads_to_a_part(fullname):
            spec.submodule_search_locations = [str(self._root.joinpath(*fullname.split(".")[1:]))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module whose unknown names are stand-ins."""
        module = ModuleType(spec.name)

        def unknown(name: str) -> Any:
            full = f"{spec.name}.{name}"
            # A module below this one is found by the import that asked for it.
            if name.startswith("__") or full in self.parts.modules or self._leads_to_a_part(full):
                raise AttributeError(name)
            return self.parts.answers.get(full, StandIn(full))

        module.__dict__["__getattr__"] = unknown
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed."""

    def _leads_to_a_part(self, fullname: str) -> bool:
        return any(module.startswith(f"{fullname}.") for module in self.parts.modules)
