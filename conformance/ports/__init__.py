"""Adapters for implementations that others publish: thin calls into installed packages, none of their code."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from conformance.errors import TargetError


@dataclass(frozen=True)
class Port:
    """An adapter and what it needs; importing the adapter imports those packages."""

    location: str
    packages: tuple[str, ...]
    """What the adapter imports."""
    requirements: tuple[str, ...]
    """What pip is asked for."""
    options: tuple[str, ...] = ()
    """What else pip is told."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What pip is called with."""
        return ("install", *self.options, *self.requirements)

    @property
    def install(self) -> str:
        """How a user gets the packages."""
        return shlex.join(["pip", *self.arguments])

    def missing(self) -> str | None:
        """The first package that is not installed."""
        return next((name for name in self.packages if importlib.util.find_spec(name) is None), None)


WITHOUT_DEPENDENCIES = ("--no-deps",)
"""For engines that would bring CUDA: what the adapter executes of them needs torch, triton and what is named."""

PORTS: Mapping[str, Port] = {
    "mlx-lm": Port("conformance.ports.mlx_lm.implementation:MlxLm", ("mlx", "mlx_lm"), ("mlx[cpu]", "mlx-lm")),
    "transformers": Port("conformance.ports.transformers:Transformers", ("transformers",), ("transformers",)),
    "sglang": Port(
        "conformance.ports.sglang.implementation:SGLang",
        ("sglang", "msgspec"),
        ("sglang", "msgspec"),
        WITHOUT_DEPENDENCIES,
    ),
    "vllm": Port("conformance.ports.vllm.implementation:Vllm", ("vllm",), ("vllm",), WITHOUT_DEPENDENCIES),
}
"""By the name of the target."""


def installed(target: str) -> str | None:
    """Where the adapter of a target is; None for a target that is no port.

    Raises:
        TargetError: a package that it needs is not installed.
    """
    port = PORTS.get(target)
    if port is None:
        return None
    package = port.missing()
    if package is not None:
        raise TargetError(f"target {target!r}: the package {package} is not installed; {port.install}")
    return port.location
