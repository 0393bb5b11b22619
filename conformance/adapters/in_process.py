"""Implementations that are Python classes in this process."""

from __future__ import annotations

import copy
import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from conformance.adapters.session import BadResult, Crash, UnsupportedRequest
from conformance.cases.case import Advance, Call, Handle, Open, Request, is_weights
from conformance.errors import FixtureError, in_one_line
from conformance.interface import METHODS, Description, Implementation, Stateful, Unsupported
from conformance.lazy import LazyTensors
from conformance.tensors import Tensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
LARGEST_RESULT = 1 << 28
LARGEST_KEPT = 1 << 31
"""Bytes of weights made at their look-up that are kept during a case: a layer's experts alone have 7 GB."""
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A torch tensor of the logical dtype with its own memory."""
    data = torch.from_numpy(np.array(tensor.data, order="C", copy=True))
    dtype = TORCH_DTYPES[tensor.dtype]
    return data if data.dtype == dtype else data.view(dtype)


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A numpy array with its own memory: bf16 widened to float32, 8-bit types as codes."""
    if tensor.dtype == "BF16":
        return tensor.values().astype(np.float32)
    return np.array(tensor.data, order="C", copy=True)


def from_port(value: Any) -> Tensor:
    """A port's tensor (torch, numpy, DLPack) as the suite's; raises TypeError for anything else.

    A tensor that claims more than `LARGEST_RESULT` elements, as one that repeats a single element may, is not copied.
    """
    count = math.prod(getattr(value, "shape", ()))
    if count > LARGEST_RESULT:
        raise TypeError(f"{count} elements are more than any result has")
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    if not isinstance(value, torch.Tensor):
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"a {type(value).__name__} is neither torch, numpy nor DLPack")
        value = torch.utils.dlpack.from_dlpack(value)
    value = value.detach().cpu().contiguous()
    if value.dtype not in DTYPE_NAMES:
        raise TypeError(f"dtype {value.dtype} is not one of the suite's")
    name = DTYPE_NAMES[value.dtype]
    if name == "BF16":
        return Tensor(name, value.view(torch.int16).numpy().view(np.uint16).copy())
    if name in ("F8_E4M3", "F8_E8M0"):
        return Tensor(name, value.view(torch.uint8).numpy().copy())
    return Tensor(name, value.numpy().copy())


def _from_numpy(value: np.ndarray[Any, Any]) -> Tensor:
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "uint8": "U8", "int32": "I32", "int64": "I64"}
    name = "BOOL" if value.dtype == np.bool_ else names.get(value.dtype.name)
    if name is None:
        raise TypeError(f"numpy dtype {value.dtype} is not one of the suite's")
    return Tensor(name, np.array(value, order="C", copy=True))


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        # A tensor without elements may have strides that no view of other elements accepts.
        value = value.view(torch.uint8).numpy() if value.ndim and value.numel() else value.double().numpy()
    return np.ascontiguousarray(value).tobytes()


class KeptWeights:
    """Weights that were converted at their look-up: the least recently used go when all take more than `limit` bytes.

    Attributes:
        failure: what went wrong when a weight was read; whoever implements the model has no part in it.
    """

    def __init__(self, limit: int = LARGEST_KEPT) -> None:
        self.failure: FixtureError | None = None
        self._limit, self._bytes = limit, 0
        self._values: OrderedDict[tuple[int, str], tuple[ConvertedLazily, Any]] = OrderedDict()

    def value(self, owner: ConvertedLazily, name: str, make: Callable[[], Any]) -> Any:
        """The weight `name` of `owner`, made if it is not kept."""
        key = (id(owner), name)
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][1]
        try:
            # A tensor made in inference mode would not count its changes, and a port may be in it.
            with torch.inference_mode(False):
                value = _read_only(make())
        except FixtureError as error:
            self.failure = error
            raise
        self._values[key] = (owner, value)
        self._bytes += value.nbytes
        while self._bytes > self._limit and len(self._values) > 1:
            (_, dropped), (holder, old) = self._values.popitem(last=False)
            self._bytes -= old.nbytes
            holder.changed = holder.changed or _changed({dropped: old})
        return value

    def changed(self, owner: ConvertedLazily) -> str:
        """Name of a kept weight of `owner` that was written to, empty if none was."""
        return _changed({name: value for (_, name), (holder, value) in self._values.items() if holder is owner})

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._bytes, self.failure = 0, None


class ConvertedLazily(Mapping[str, Any]):
    """Weights converted when they are looked up and kept as long as there is room.

    Attributes:
        changed: name of a weight that is kept no longer and had been written to, empty if there is none.
    """

    def __init__(self, tensors: LazyTensors, convert: Callable[[Tensor], Any], kept: KeptWeights) -> None:
        self._tensors, self._convert, self._kept = tensors, convert, kept
        self.changed = ""

    def first_changed(self) -> str:
        """Name of a weight that was written to after it was handed out, empty if none was."""
        return self.changed or self._kept.changed(self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._tensors:
            raise KeyError(name)
        return self._kept.value(self, name, lambda: self._convert(self._tensors[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class InProcess:
    """A session with an `Implementation` object."""

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation
        # Asked once: what a port says of itself decides how it is judged and must not change on the way.
        self._description = implementation.describe()
        self._convert: Callable[[Tensor], Any] = to_torch if implementation.tensor_type == "torch" else to_numpy
        self._objects: dict[str, Any] = {}
        # Weights are converted once: the suite hands over the same mapping object for every step of a set.
        self._weights: dict[int, tuple[Mapping[str, Tensor], Mapping[str, Any]]] = {}
        self._used: set[int] = set()
        self._kept = KeptWeights()

    def describe(self) -> Description:
        """Name, version and conventions."""
        return self._description

    @property
    def implementation(self) -> Implementation:
        """The object itself, for those who time it."""
        return self._implementation

    @property
    def parallel(self) -> bool:
        """Whether the implementation can be one rank of several."""
        return self._implementation.parallel

    def supports(self, method: str) -> bool:
        """A method is supported when the class overrides it."""
        return getattr(type(self._implementation), method) is not getattr(Implementation, method)

    def reset(self) -> None:
        """Forget every opened object, and weights too large to be kept from one case to the next."""
        self._objects.clear()
        self._discard_changed()
        self._used.clear()
        self._kept.clear()
        self._weights = {key: pair for key, pair in self._weights.items() if not isinstance(pair[0], LazyTensors)}

    def finish(self) -> None:
        """Make sure that the case left its weights as they were; changed ones are made anew for the next case."""
        changed = self._discard_changed()
        if changed:
            raise BadResult(f"the weight {changed} was modified in place")

    def _discard_changed(self) -> str:
        """Forget the units whose weights were written to; the name of one such weight, empty if there is none."""
        found = {key: _changed(self._weights[key][1]) for key in self._used if key in self._weights}
        for key in (key for key, name in found.items() if name):
            del self._weights[key]
        return next(filter(None, found.values()), "")

    def close(self) -> None:
        """Nothing outlives the object."""
        self._objects.clear()
        self._weights.clear()
        self._kept.clear()

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """Put one request to the object; whatever it raises becomes an answer."""
        if isinstance(request, Open | Call) and not self.supports(request.method):
            raise UnsupportedRequest(f"{request.method} is not implemented")
        if isinstance(request, Call):
            arguments = self._arguments(request.arguments)
            results = self._guarded(request.method, getattr(self._implementation, request.method), arguments)
            return named_results(request.method, results)
        if isinstance(request, Open):
            arguments = self._arguments(request.arguments)
            opened = self._guarded(request.method, getattr(self._implementation, request.method), arguments)
            if request.method not in ("runtime", "save_state") and not callable(getattr(opened, "step", None)):
                raise BadResult(f"{request.method}: expected an object with step(), got {type(opened).__name__}")
            self._objects[request.name] = opened
            return {}
        target: Stateful = self._objects[request.name]
        if isinstance(request, Advance):
            results = self._guarded(f"{request.name} step", target.step, self._arguments(request.inputs))
        else:
            results = self._guarded(f"{request.name} state", target.state, {})
        return _by_name(request.name, results)

    def _guarded(self, what: str, function: Any, arguments: dict[str, Any]) -> Any:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor | np.ndarray)}
        before = {name: _bytes(value) for name, value in tensors.items()}
        try:
            results = function(**arguments)
        except Unsupported as reason:
            raise UnsupportedRequest(str(reason) or f"{what} is not supported") from reason
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._kept.failure is not None:
                raise self._kept.failure from error
            raise Crash(f"{what} raised {in_one_line(error)}{_innermost(error)}") from error
        if self._kept.failure is not None:
            raise self._kept.failure
        changed = [name for name, value in tensors.items() if _bytes(value) != before[name]]
        if changed:
            raise BadResult(f"{what} modified its input {changed[0]}")
        return results

    def _arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._argument(value) for name, value in arguments.items()}

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return self._objects[value.name]
        if isinstance(value, Tensor):
            return self._convert(value)
        if is_weights(value):
            known = self._weights.get(id(value))
            if known is None or known[0] is not value:
                known = (value, self._converted(value))
                self._weights[id(value)] = known
            self._used.add(id(value))
            return known[1]
        # Anything else that can be changed is handed over as a copy.
        return copy.deepcopy(value)

    def _converted(self, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        if isinstance(weights, LazyTensors):
            return ConvertedLazily(weights, self._convert, self._kept)
        return MappingProxyType({name: _read_only(self._convert(tensor)) for name, tensor in weights.items()})


def _read_only(value: Any) -> Any:
    """A weight as it is handed over: numpy can refuse changes, torch counts them."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    return value


def _changed(weights: Mapping[str, Any]) -> str:
    """Name of a weight that was written to since its conversion, empty if none was.

    torch counts the in-place changes of a tensor, and a converted one has had none; numpy arrays are handed over
    read-only.
    """
    if isinstance(weights, ConvertedLazily):
        return weights.first_changed()
    return next((n for n, value in weights.items() if isinstance(value, torch.Tensor) and value._version), "")


def _innermost(error: BaseException) -> str:
    """Where in the port an exception came from."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def named_results(method: str, results: Any) -> dict[str, Tensor]:
    """Name the results of a stateless method in the order of `METHODS`."""
    names: Sequence[str] = METHODS[method].results
    if not names:
        return {}
    if method == "parameter_counts":
        return _counts(results)
    values = results if isinstance(results, tuple | list) else (results,)
    if len(values) != len(names):
        raise BadResult(f"{method}: expected {len(names)} results ({', '.join(names)}), got {len(values)}")
    return {name: _tensor(method, name, value) for name, value in zip(names, values, strict=True)}


def _counts(results: Any) -> dict[str, Tensor]:
    try:
        return {str(name): Tensor("I64", np.asarray(int(count), np.int64)) for name, count in dict(results).items()}
    except Exception as error:
        raise BadResult(f"parameter_counts: expected whole numbers by name: {in_one_line(error)}") from error


def _by_name(what: str, results: Any) -> dict[str, Tensor]:
    if not isinstance(results, Mapping):
        raise BadResult(f"{what}: expected results by name, got {type(results).__name__}")
    try:
        items = [(str(name), value) for name, value in results.items() if value is not None]
    except Exception as error:
        raise BadResult(f"{what}: results cannot be listed: {in_one_line(error)}") from error
    return {name: _tensor(what, name, value) for name, value in items}


def _tensor(what: str, name: str, value: Any) -> Tensor:
    try:
        return from_port(value)
    except Exception as error:
        raise BadResult(f"{what}: result {name}: {in_one_line(error)}") from error
