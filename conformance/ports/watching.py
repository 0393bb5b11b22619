"""Taking a value out of the middle of a port's function, and putting something else in place of what it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of a module or an object for a while."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Watched:
    """A module with some functions replaced, for a port's module that calls it by its name."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.__dict__.update(functions)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Seen(Exception):
    """Carries a value out of the middle of the port's code: nothing after that point is of interest."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def seen(function: Callable[[], Any]) -> Any:
    """Run something that ends in `Seen`."""
    try:
        function()
    except Seen as found:
        return found.value
    raise RuntimeError("the port's code no longer passes the point where a value is taken out")


def stop(*values: Any, **_: Any) -> Any:
    """A function that ends a `seen` with its first argument."""
    raise Seen(values[0])
