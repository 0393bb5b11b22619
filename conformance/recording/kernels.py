"""The module `kernel` as the published code gets it: every declared function reports its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from conformance.recording.upstream import KERNELS, RecordingError


class KernelObserver(Protocol):
    """Who wants to know."""

    def kernel(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Called instead of a kernel, with its arguments by name: returns what `run` returns."""


class WatchedKernels:
    """Makes the module; `observer` is set while a model is watched."""

    def __init__(self) -> None:
        self.observer: KernelObserver | None = None

    def module(self, kernel: ModuleType) -> ModuleType:
        """A module with everything that `kernel` has, its declared functions watched.

        Raises:
            RecordingError: a declared function is not in it.
        """
        watched = ModuleType(kernel.__name__)
        vars(watched).update({name: value for name, value in vars(kernel).items() if not name.startswith("__")})
        for name in KERNELS:
            function = vars(kernel).get(name)
            if not callable(function):
                raise RecordingError(f"upstream: kernel.{name} does not exist")
            setattr(watched, name, self._watched(name, function))
        return watched

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = KERNELS[name].parameters

        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = [key for key in kwargs if key not in parameters]
            if len(args) > len(parameters) or unknown:
                found = f"parameter {unknown[0]}" if unknown else f"{len(args)} positional arguments"
                raise RecordingError(
                    f"upstream: kernel.{name} is called with {found}, declared are {', '.join(parameters)}"
                )
            if self.observer is None:
                return function(*args, **kwargs)
            bound = dict(zip(parameters, args, strict=False)) | kwargs
            return self.observer.kernel(name, bound, lambda: function(*args, **kwargs))

        return call
