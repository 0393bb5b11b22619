"""Small, named, temporary changes to the reference.

A change is data: either one place of one function's source (`Edit`, read like a line of a diff) or one attribute
(`Replace`).  What it changes is changed wherever a `reference` module has imported it, and a change that would change
nothing is refused: a fault that silently is none would count as a hole of the suite.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

# The adapter imports every module of the reference: what is patched must be patched everywhere.
import conformance.adapters.reference
from conformance.faults import arithmetic

PACKAGE = "reference"
HELPERS = "arithmetic"
"""The name under which the new source of an edit finds `conformance.faults.arithmetic`."""


@dataclass(frozen=True)
class Edit:
    """One place in the source of a function: `old`, which must occur exactly once, becomes `new`.

    `target` is a function or method below `reference`, such as "norm.rms_norm" or "block.Block.step".  The new source
    may use what the module imports, and the helpers of `conformance.faults.arithmetic` under that name.
    """

    target: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.target}: {_one_line(self.old)} -> {_one_line(self.new) or 'nothing'}"


@dataclass(frozen=True)
class Replace:
    """One attribute below `reference`, such as "quantize.FP8_AMAX_FLOOR", gets another value."""

    target: str
    value: Any

    def __str__(self) -> str:
        return f"{self.target} = {self.value!r}"


Change = Edit | Replace


class ChangesNothing(ValueError):
    """A change whose result is what was there before."""


@contextmanager
def patched(changes: Sequence[Change]) -> Iterator[None]:
    """Apply changes while the context lasts, in their order; everything is as before afterwards.

    Raises:
        AttributeError: a target that does not exist.
        ChangesNothing: the old text is not there, or the change is none.
    """
    with ExitStack() as stack:
        stack.callback(_forget_cached)
        for change in changes:
            owner, name = _locate(change.target)
            before = vars(owner)[name]
            if isinstance(change, Replace):
                after = change.value
            else:
                module = _module(owner)
                stack.enter_context(mock.patch.object(module, HELPERS, arithmetic, create=True))
                after = _edited(module, before, change)
            if after is before or (isinstance(change, Replace) and type(after) is type(before) and after == before):
                raise ChangesNothing(f"{change.target} already is {before!r}")
            for place in _places(owner, name, before):
                stack.enter_context(mock.patch.object(place, name, after))
        _forget_cached()
        yield


def _locate(target: str) -> tuple[ModuleType | type, str]:
    module_name, *path = target.split(".")
    owner: Any = importlib.import_module(f"{PACKAGE}.{module_name}")
    for name in path[:-1]:
        owner = getattr(owner, name)
    if path[-1] not in vars(owner):
        raise AttributeError(f"{PACKAGE}.{target} does not exist")
    return owner, path[-1]


def _places(owner: ModuleType | type, name: str, value: Any) -> list[ModuleType | type]:
    """The owner, and every module of the reference that imported the very thing by its name."""
    if isinstance(owner, type):
        return [owner]
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith(f"{PACKAGE}.")]
    return [owner, *(m for m in modules if m is not owner and vars(m).get(name) is value)]


def _module(owner: ModuleType | type) -> ModuleType:
    return owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]


def _edited(module: ModuleType, function: Any, change: Edit) -> Any:
    """The function compiled from its edited source, in the namespace of its module."""
    source: str = getattr(function, "edited_source", "") or textwrap.dedent(inspect.getsource(function))
    found = source.count(change.old)
    if found != 1:
        raise ChangesNothing(f"{change.target}: {change.old!r} occurs {found} times, not once")
    edited = source.replace(change.old, change.new)
    if ast.dump(ast.parse(edited)) == ast.dump(ast.parse(source)):
        raise ChangesNothing(f"{change.target}: {change.new!r} means the same as {change.old!r}")
    after = compiled(module, edited, f"<{change.target} edited>")
    after.edited_source = edited
    return after


def compiled(module: ModuleType, source: str, title: str) -> Any:
    """The one function that a source defines, in the namespace of a module; `title` stands in tracebacks."""
    made: dict[str, Any] = {}
    exec(compile(source, title, "exec", flags=__future__.annotations.compiler_flag), vars(module), made)
    (function,) = made.values()
    return function


def _forget_cached() -> None:
    """Tables computed by a changed function must not outlive the change, nor those of before survive into it."""
    for key, module in list(sys.modules.items()):
        if key.startswith(f"{PACKAGE}."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _one_line(text: str) -> str:
    return " ".join(text.split())


assert conformance.adapters.reference  # imported for its imports
