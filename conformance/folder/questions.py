"""What a case asks, as a hash: a folder may come from another version of the suite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from conformance.cases.case import Request
from conformance.lazy import LazyTensors
from conformance.protocol.store import recipe_reference
from conformance.protocol.values import Reference, encode_request
from conformance.tensors import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256, in hex, of dtype, shape and bits."""
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + tensor.bits()).hexdigest()


def questions_digest(requests: Iterable[Request]) -> str:
    """SHA-256, in hex, of the requests of a case, wherever their tensors lie."""
    store = _Digests()
    digest = hashlib.sha256()
    for request in requests:
        digest.update(json.dumps(encode_request(request, store), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class _Digests:
    """A store that keeps nothing: its references are the hashes of the tensors."""

    def __init__(self) -> None:
        # The weights are kept beside their references, so that an id stays that of one object.
        self._weights: dict[int, tuple[Mapping[str, Tensor], Mapping[str, Reference]]] = {}

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        return {name: {"sha256": tensor_digest(tensor)} for name, tensor in tensors.items()}

    def weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        if id(weights) not in self._weights:
            self._weights[id(weights)] = (weights, {name: _weight(weights, name) for name in weights})
        return self._weights[id(weights)][1]


def _weight(weights: Mapping[str, Tensor], name: str) -> Reference:
    """Weights of the recipe by their recipe: to make them would take longer than all the rest."""
    made = weights.recipe(name) if isinstance(weights, LazyTensors) else None
    return {"sha256": tensor_digest(weights[name])} if made is None else recipe_reference(made)
