"""Small, named, temporary changes to the reference."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def patched(changes: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes named `module.attribute` while the context lasts.

    A name that does not exist raises AttributeError: a change that changes nothing must not go unnoticed.
    """
    with ExitStack() as stack:
        for target, value in changes.items():
            module_name, _, attribute = target.rpartition(".")
            stack.enter_context(mock.patch.object(importlib.import_module(module_name), attribute, value))
        yield
