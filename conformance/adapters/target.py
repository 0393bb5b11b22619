"""Target strings: from what the user typed to a session."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

from conformance.adapters.folder import PREFIX as FOLDER_PREFIX, open_folder
from conformance.adapters.process import PREFIX, TIMEOUT, open_process
from conformance.adapters.session import Session
from conformance.errors import TargetError, in_one_line
from conformance.interface import Description, Implementation
from conformance.ports import PORTS, installed

UPSTREAM_PREFIX = "upstream:"
SHIPPED = {
    "reference": "conformance.adapters.reference:Reference",
    "optimized": "conformance.adapters.optimized:Optimized",
    "reference-parallel": "conformance.adapters.parallel_reference:ParallelReference",
}
ENTRY_POINT_GROUP = "conformance.implementations"


def open_target(target: str, timeout: float | None = None, agreed: bool = False) -> Session:
    """Make a session for `reference`, an entry point's name, `package.module:Class`, or what a prefix stands for.

    `timeout` is how many seconds a process has for one answer; None for the default.  `agreed` says that the user
    wants the code of an `upstream:` checkout executed.

    Raises:
        TargetError: nothing by that name, an import error, a class that is not an `Implementation`, a program that
            cannot be started, or a timeout for something that is no process; one line.
    """
    if target.startswith(PREFIX):
        return open_process(target, TIMEOUT if timeout is None else timeout)
    if timeout is not None:
        raise TargetError(f"target {target!r}: --timeout is for {PREFIX}PROGRAM: nothing else can be ended")
    if target.startswith(FOLDER_PREFIX):
        return open_folder(target)
    # Imported where it is needed: it brings torch, and a mistyped target should be refused at once.
    if target.startswith(UPSTREAM_PREFIX):
        from conformance.adapters.in_process import InProcess
        from conformance.ports.upstream import Upstream, agreed_checkout

        return InProcess(Upstream(agreed_checkout(target, agreed)))
    entry_points = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    location = SHIPPED.get(target) or installed(target) or entry_points.get(target) or target
    module_name, colon, class_name = location.partition(":")
    if not colon or not module_name or not class_name:
        known = ", ".join(sorted({*SHIPPED, *PORTS, *entry_points}))
        kinds = "package.module:Class, cmd:PROGRAM, dir:FOLDER, upstream:DIR"
        raise TargetError(f"unknown target {target!r}: expected {kinds} or one of {known}")
    implementation = _instance(target, module_name, class_name)
    from conformance.adapters.in_process import InProcess

    try:
        tensor_type = implementation.tensor_type
        session = InProcess(implementation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"target {target!r}: describe() raised {in_one_line(error)}") from error
    if not isinstance(session.describe(), Description):
        raise TargetError(f"target {target!r}: describe() must return a conformance.Description")
    if tensor_type not in ("torch", "numpy"):
        raise TargetError(f"target {target!r}: tensor_type must be 'torch' or 'numpy'")
    return session


def _near_module(name: str) -> str:
    """What may have been meant by a module that does not exist, among those that stand here."""
    here = Path.cwd()
    found = {path.stem for path in here.glob("*.py")} | {path.parent.name for path in here.glob("*/__init__.py")}
    near = difflib.get_close_matches(name, sorted(found), n=1)
    return f"; did you mean {near[0]}?" if near else "; it must stand in the current folder or be installed"


def _near_class(module: ModuleType, name: str) -> str:
    """What may have been meant by a class that does not exist: an implementation of the module."""
    found = [
        known
        for known, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Implementation) and value is not Implementation
    ]
    near = difflib.get_close_matches(name, found, n=1) or found[:1]
    return f"; did you mean {near[0]}?" if near else "; nor any other subclass of conformance.Implementation"


def _instance(target: str, module_name: str, class_name: str) -> Implementation:
    # A port is often a file in the directory where the user stands; console scripts do not search there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        top = module_name.partition(".")[0]
        hint = _near_module(top) if isinstance(error, ModuleNotFoundError) and error.name == top else ""
        raise TargetError(f"target {target!r}: cannot import {module_name}: {in_one_line(error)}{hint}") from error
    found = getattr(module, class_name, None)
    if found is None:
        hint = _near_class(module, class_name)
        raise TargetError(f"target {target!r}: module {module_name} has no {class_name}{hint}")
    if not (isinstance(found, type) and issubclass(found, Implementation)):
        raise TargetError(f"target {target!r}: {class_name} is not a subclass of conformance.Implementation")
    try:
        return found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"target {target!r}: {class_name}() raised {in_one_line(error)}") from error
