"""Requests as JSON.

A value is one of four: `{"tensor": REFERENCE}`, `{"weights": {name: REFERENCE}}`, `{"object": NAME}` for an object
opened before, and `{"value": JSON}` for everything else.  A reference says where a tensor lies in a file:

    {"file": PATH, "name": KEY, "dtype": LOGICAL, "shape": [...], "offset": BYTE, "bytes": COUNT}

`dtype` is what the tensor means.  The file holds 8-bit floats as U8 and everything else under its own name, BF16
included.  `offset` counts from the beginning of the file, so that a reader needs nothing of the safetensors header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conformance.cases.case import Advance, Arguments, Call, Handle, Open, Request, is_weights
from conformance.interface import METHODS
from conformance.tensors import Tensor

Reference = Mapping[str, Any]
"""A tensor as JSON: where it lies, or how it is made."""


class Store(Protocol):
    """Where the tensors of arguments go."""

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """Write the tensor arguments of one request; references by the same names."""

    def weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """Write the weights of a unit, once for a mapping however often it is asked for."""


def encode_request(request: Request, store: Store) -> dict[str, Any]:
    """A request as JSON, its tensors written to `store`.  `schemas/request.json` describes what comes out."""
    if isinstance(request, Call):
        head: dict[str, Any] = {"kind": "call", "method": request.method, "returns": returned(request.method)}
        return {**head, "arguments": encode_arguments(request.arguments, store)}
    if isinstance(request, Open):
        head = {"kind": "open", "object": request.name, "method": request.method, "returns": returned(request.method)}
        return {**head, "arguments": encode_arguments(request.arguments, store)}
    if isinstance(request, Advance):
        return {"kind": "step", "object": request.name, "arguments": encode_arguments(request.inputs, store)}
    return {"kind": "state", "object": request.name}


RESET: Mapping[str, Any] = {"kind": "reset"}
"""Forget every object: what follows belongs to another case."""


def returned(method: str) -> list[str]:
    """Names of the results that a call of the method must have, or each step of the object that it opens.

    Empty for `runtime`, which has none, and for `parameter_counts`, whose results are named after units.
    """
    return [] if method in ("runtime", "parameter_counts") else list(METHODS[method].results)


def encode_arguments(arguments: Arguments, store: Store) -> dict[str, Any]:
    """Arguments by name as values."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    references = store.tensors(tensors) if tensors else {}
    return {
        name: {"tensor": references[name]} if name in references else _encode(value, store)
        for name, value in arguments.items()
    }


def _encode(value: Any, store: Store) -> dict[str, Any]:
    if isinstance(value, Handle):
        return {"object": value.name}
    if is_weights(value):
        return {"weights": store.weights(value)}
    return {"value": _plain(value)}


def _plain(value: Any) -> Any:
    """Read-only mappings and tuples as what `json` knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
