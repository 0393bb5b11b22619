"""Target strings: from what the user typed to a session."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

from conformance.adapters.session import Session
from conformance.errors import TargetError
from conformance.interface import Description, Implementation

SHIPPED = {"reference": "conformance.adapters.reference:Reference"}
ENTRY_POINT_GROUP = "conformance.implementations"


def open_target(target: str) -> Session:
    """Make a session for `reference`, an entry point's name, or `package.module:Class`.

    Raises:
        TargetError: nothing by that name, an import error, or a class that is not an `Implementation`; one line.
    """
    from conformance.adapters.in_process import InProcess

    entry_points = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    location = SHIPPED.get(target) or entry_points.get(target) or target
    module_name, colon, class_name = location.partition(":")
    if not colon or not module_name or not class_name:
        known = ", ".join(sorted({*SHIPPED, *entry_points}))
        raise TargetError(f"unknown target {target!r}: expected package.module:Class or one of {known}")
    implementation = _instance(target, module_name, class_name)
    session = InProcess(implementation)
    try:
        description = session.describe()
    except (Exception, SystemExit) as error:
        raise TargetError(f"target {target!r}: describe() raised {_one_line(error)}") from error
    if not isinstance(description, Description):
        raise TargetError(f"target {target!r}: describe() must return a conformance.Description")
    return session


def _instance(target: str, module_name: str, class_name: str) -> Implementation:
    # A port is often a file in the directory where the user stands; console scripts do not search there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise TargetError(f"target {target!r}: cannot import {module_name}: {_one_line(error)}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise TargetError(f"target {target!r}: module {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, Implementation)):
        raise TargetError(f"target {target!r}: {class_name} is not a subclass of conformance.Implementation")
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise TargetError(f"target {target!r}: {class_name}() raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
