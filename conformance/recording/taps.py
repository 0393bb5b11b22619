"""Watching a model at the declared points without changing a value: hooks, watched kernels, watched torch functions.

Everything is copied when it is seen, so later changes in place do not reach a recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.config import ModelConfig
from conformance.fixtures import TAPS as FORMAT
from conformance.recording import convert
from conformance.recording.call import Call, attention_taps, expected_taps, happens
from conformance.recording.kernels import WatchedKernels
from conformance.recording.upstream import (
    ATTENTION_ROWS,
    INDEX_KEYS,
    KERNELS,
    OWN_INDEX_KEYS,
    SHARED,
    TAPS,
    RecordingError,
    TapPoint,
    has,
)
from conformance.tensors import Tensor

Key = tuple[str, int | None]
"""Tap and layer."""

_POINTS = {point.tap: point for point in TAPS}
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__"})


class Observer:
    """Collects the taps of one model, call by call."""

    def __init__(self, model: Any, shared: Any, config: ModelConfig, part: str = "") -> None:
        """`shared` is the object whose attributes are the shared slots; `part` is the path of the module that runs."""
        self._model = model
        self._shared = shared
        self._config = config
        self._part = part
        self._call = Call(0, 0, 0)
        self._seen: dict[Key, Any] = {}
        self._compressed: dict[int, torch.Tensor] = {}
        #: Watched modules that are running, innermost last, and how often each has called each kernel.
        self._running: list[str] = []
        self._times: Counter[tuple[str, str]] = Counter()
        #: Results that a point of source `scaled` waits for, by identity; kept, so that no other takes the identity.
        self._unscaled: dict[int, tuple[torch.Tensor, Key]] = {}
        self._kernel_points: dict[tuple[str, str], list[tuple[TapPoint, Key]]] = {}
        self._top_k: dict[str, Key] = {}
        self._tracked: set[str] = set()

    @contextmanager
    def watching(self, kernels: WatchedKernels) -> Iterator[None]:
        """Hooks are in place while the context lasts.

        Raises:
            RecordingError: a module or method of the table does not exist.
        """
        with ExitStack() as stack:
            for point in (*TAPS, ATTENTION_ROWS):
                for layer in range(self._config.n_layers) if point.per_layer else (None,):
                    there = layer is None or has(self._config, layer, point.where)
                    if there and self._runs(point, layer):
                        self._install(stack, point, layer)
            stack.enter_context(_TorchFunctions(self))
            stack.callback(setattr, kernels, "observer", None)
            kernels.observer = self
            yield

    def begin(self, call: Call) -> None:
        """Forget the call before."""
        self._call = call
        self._seen.clear()
        self._times.clear()
        self._unscaled.clear()

    def finish(self) -> dict[str, Tensor]:
        """What the call left, as `{tap}` and `layer{l}/{tap}`.

        Raises:
            RecordingError: a tap was not seen, or is not what a file may hold there.
        """
        seen = dict(self._seen)
        for layer in range(self._config.n_layers):
            if not self._runs(ATTENTION_ROWS, layer):
                continue
            rows, listed = seen.get(("rows", layer)), seen.get(("attn_list", layer))
            if not isinstance(rows, torch.Tensor) or not isinstance(listed, torch.Tensor):
                raise RecordingError(f"upstream: rows of layer {layer} were not seen: {ATTENTION_ROWS}")
            derived = attention_taps(self._config, layer, self._call, rows, listed)
            self._compressed[layer] = derived.pop("compressed")
            seen |= {(tap, layer): value for tap, value in derived.items()}
        found: dict[str, Tensor] = {}
        for tap, at in expected_taps(self._config, self._call):
            if not self._runs(_POINTS.get(tap, ATTENTION_ROWS), at):
                continue
            name = tap if at is None else f"layer{at}/{tap}"
            where = f"upstream: tap {name}: {_POINTS.get(tap, ATTENTION_ROWS)}"
            if (tap, at) not in seen:
                raise RecordingError(f"{where}: was not seen")
            value = seen[tap, at]
            if tap.startswith("gate_") and isinstance(value, torch.Tensor):
                value = value.flatten(0, -2)  # Tokens of all sequences in one axis, whether or not the code had two.
            found[name] = convert.tap(where, value, FORMAT[tap])
        return found

    def compressed(self, layer: int) -> Tensor:
        """All compressed rows of a layer that makes them, as its attention saw them last."""
        return convert.tensor(self._compressed[layer])

    # What is reported to the observer -------------------------------------------------------------------------------

    def kernel(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """A kernel is called: look at its arguments, run it, look at its result."""
        hits = []
        for path in self._running:
            time = self._times[path, name]
            self._times[path, name] += 1
            points = self._kernel_points.get((path, name), ())
            hits += [(p, key) for p, key in points if p.source == "quantised" or p.occurrence == time]
        parameters = KERNELS[name].parameters
        for point, key in hits:
            if point.source == "kernel argument":
                self._see(key, arguments.get(parameters[point.item]))
        result = run()
        for point, key in hits:
            if point.source == "kernel result":
                self._see(key, _item(point, result))
            elif point.source == "quantised" and arguments[parameters[0]].dim() == point.item:
                self._see(key, result if isinstance(result, torch.Tensor) else arguments[parameters[0]])
        return result

    def torch_function(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """A torch function was called; of interest are those of watched modules."""
        if not self._running or not arguments:
            return
        if name == "topk" and self._running[-1] in self._top_k:
            key = self._top_k[self._running[-1]]
            if key[1] is not None and arguments[0].shape[-1] == self._call.rows(self._config, key[1]):
                self._see(key, arguments[0])
        elif name in _PRODUCTS and id(arguments[0]) in self._unscaled:
            self._see(self._unscaled[id(arguments[0])][1], result)

    def _see(self, key: Key, value: Any) -> None:
        self._seen[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def _see_slot(self, point: TapPoint, layer: int) -> None:
        """A shared slot, cut to this batch and to the rows that exist; of index keys, to those of this call."""
        call, rows = self._call, self._call.rows(self._config, layer)
        if not happens(self._config, layer, call, point.tap):
            return
        slot = getattr(self._shared, point.function, None)
        if not isinstance(slot, torch.Tensor):
            raise RecordingError(f"upstream: {SHARED}.{point.function} does not exist")
        batch = slot[: call.batch]
        if point.tap == "index_keys":
            self._see((point.tap, layer), batch[:, call.first_row(self._config, layer) : rows])
        else:
            self._see((point.tap, layer), batch[..., :rows])

    def _runs(self, point: TapPoint, layer: int | None) -> bool:
        """Whether a point lies in the part that runs."""
        return within(point.module.format(l=layer), self._part)

    # Installing -----------------------------------------------------------------------------------------------------

    def _install(self, stack: ExitStack, point: TapPoint, layer: int | None) -> None:
        path = point.module.format(l=layer)
        module = submodule(self._model, path)
        key = (point.tap, layer)

        def after(look: Callable[[Any], None]) -> None:
            stack.callback(module.register_forward_hook(lambda _module, _args, result: look(result)).remove)

        if point.source == "input":
            hook = module.register_forward_pre_hook(lambda _, args: self._see(key, _positional(point, args)))
            stack.callback(hook.remove)
        elif point.source == "output":
            after(lambda result: self._see(key, _item(point, result)))
        elif point.source == "shared slot":
            assert layer is not None
            after(lambda _: self._see_slot(point, layer))
        elif point.source == "scaled":
            after(lambda result: self._unscaled.update({id(result): (result, key)}))
        elif point.source == "method result":
            self._watch_method(stack, module, path, point, key)
        else:
            if point.source == "top-k input":
                self._top_k[path] = key
            else:
                self._kernel_points.setdefault((path, point.function), []).append((point, key))
            self._track(stack, module, path)

    def _track(self, stack: ExitStack, module: Any, path: str) -> None:
        """Know when a module is running."""
        if path in self._tracked:
            return
        self._tracked.add(path)
        stack.callback(module.register_forward_pre_hook(lambda _, args: self._running.append(path)).remove)
        leave = module.register_forward_hook(lambda _module, _args, _result: _drop(self._running), always_call=True)
        stack.callback(leave.remove)

    def _watch_method(self, stack: ExitStack, module: Any, path: str, point: TapPoint, key: Key) -> None:
        method = getattr(module, point.function, None)
        if not callable(method):
            raise RecordingError(f"upstream: {path}.{point.function} does not exist (tap {point.tap})")

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if self._times[path, point.function] == point.occurrence:
                self._see(key, result)
            self._times[path, point.function] += 1
            return result

        setattr(module, point.function, watched)
        stack.callback(delattr, module, point.function)


class _TorchFunctions(TorchFunctionMode):
    """Reports every torch function to the observer after it ran."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer.torch_function(getattr(func, "__name__", ""), args, result)
        return result


def within(path: str, part: str) -> bool:
    """Whether a module is a part of the model, or in it; everything is in the model, whose path is empty."""
    return part in ("", path) or path.startswith(f"{part}.")


def submodule(model: Any, path: str) -> Any:
    """A module by its path below the model.

    Raises:
        RecordingError: it does not exist.
    """
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise RecordingError(f"upstream: module {path} does not exist") from None


@contextmanager
def own_index_keys(model: Any, shared: Any, config: ModelConfig, current: Callable[[], Call]) -> Iterator[None]:
    """The intended reading: before a source's indexer runs without a new row, its own keys are put in the shared slot.

    The published code leaves there what was published last (numerics.md 6.4, `stale-index-keys`).
    """

    def publish(layer: int, indexer: Any) -> None:
        call = current()
        if call.rows(config, layer) and not call.completes(config, layer):
            setattr(shared, str(INDEX_KEYS), indexer_keys(indexer, layer)[: call.batch, : call.rows(config, layer)])

    with ExitStack() as stack:
        for layer in (layer for layer in range(config.n_layers) if config.compresses(layer)):
            module = submodule(model, f"layers.{layer}.attn.indexer")
            hook = module.register_forward_pre_hook(lambda module, _args, layer=layer: publish(layer, module))
            stack.callback(hook.remove)
        yield


def indexer_keys(indexer: Any, layer: int) -> torch.Tensor:
    """The keys that an indexer owns.

    Raises:
        RecordingError: there is no such tensor.
    """
    keys = getattr(indexer, str(OWN_INDEX_KEYS), None)
    if not isinstance(keys, torch.Tensor):
        raise RecordingError(f"upstream: layers.{layer}.attn.indexer.{OWN_INDEX_KEYS} does not exist")
    return keys


def _drop(running: list[str]) -> None:
    running.pop()


def _positional(point: TapPoint, args: tuple[Any, ...]) -> Any:
    if point.item >= len(args):
        raise RecordingError(f"upstream: tap {point.tap}: {point}: not passed by position")
    return args[point.item]


def _item(point: TapPoint, result: Any) -> Any:
    if isinstance(result, tuple):
        if point.item >= len(result):
            raise RecordingError(f"upstream: tap {point.tap}: {point}: only {len(result)} results")
        return result[point.item]
    if point.item:
        raise RecordingError(f"upstream: tap {point.tap}: {point}: one result only")
    return result
