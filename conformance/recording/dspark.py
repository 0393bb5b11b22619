"""The draft head of a recorded model: called after every call of the model, and watched by hooks and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from conformance.config import ModelConfig
from conformance.fixtures import CALL_TAPS, LAYER_TAPS, STATE
from conformance.recording import convert
from conformance.recording.kernels import WatchedKernels
from conformance.recording.taps import submodule
from conformance.recording.upstream import DRAFT, DRAFT_HEAD_TAPS, DRAFT_TAPS, DRAFT_WINDOW, RecordingError, TapPoint
from conformance.tensors import Tensor

RESULTS = ("spec_ids", "spec_logits", "spec_confidence")
SEEDING = ("attn_out", "h_out", "pre_in", "pre_out")
"""Taps of a draft block in a prefill, where it only seeds its ring."""
_POINTS: Mapping[str, TapPoint] = {point.tap: point for point in (*DRAFT_HEAD_TAPS, *DRAFT_TAPS)}

Key = tuple[str, int | None]


class DraftObserver:
    """Collects the taps of the draft head, call by call."""

    def __init__(self, model: Any, config: ModelConfig, kernels: WatchedKernels) -> None:
        if not config.n_mtp_layers or not config.dspark_block_size:
            raise RecordingError("drafts, but the set has no n_mtp_layers or no dspark_block_size")
        self._model, self._config, self._kernels = model, config, kernels
        self._seen: dict[Key, Any] = {}
        #: Watched blocks and attentions that are running, innermost last, and how often each called each kernel.
        self._running: list[str] = []
        self._times: Counter[tuple[str, str]] = Counter()
        self._kernel_points: dict[tuple[str, str], list[tuple[TapPoint, Key]]] = {}

    def draft(self, output_ids: Any, start: int) -> dict[str, Tensor]:
        """Run the draft head after a call of the model at `start` and return its taps under their names in a file.

        Raises:
            RecordingError: there is no such method or module, or a tap was not seen or is not what a file may hold.
        """
        method = getattr(self._model, str(DRAFT), None)
        if not callable(method):
            raise RecordingError(f"upstream: {DRAFT} of the model does not exist ({DRAFT.evidence})")
        self._seen.clear()
        self._times.clear()
        with self._watching():
            results = method(torch.as_tensor(np.array(output_ids)), start)
        if start:
            if not isinstance(results, tuple) or len(results) != len(RESULTS):
                raise RecordingError(f"upstream: {DRAFT} returned no {', '.join(RESULTS)}")
            self._seen |= {(tap, None): value for tap, value in zip(RESULTS, results, strict=True)}
        return dict(self._found(start))

    def _found(self, start: int) -> Iterator[tuple[str, Tensor]]:
        """Each tap that the call must have left."""
        layers = self._config.draft_layers
        expected: list[Key] = [("main_hidden", None), *((tap, None) for tap in RESULTS if start)]
        expected += [("main_x", layer) for layer in layers]
        taps = [point.tap for point in DRAFT_TAPS if start or point.tap in SEEDING]
        expected += [(tap, layer) for layer in layers for tap in taps]
        for tap, layer in expected:
            name = tap if layer is None else f"layer{layer}/{tap}"
            where = f"upstream: tap {name}: {_POINTS.get(tap, DRAFT)}"
            # Made once, for all draft blocks.
            key = (tap, None) if tap == "main_x" else (tap, layer)
            if key not in self._seen:
                raise RecordingError(f"{where}: was not seen")
            value = self._seen[key]
            if tap.startswith("gate_") and isinstance(value, torch.Tensor):
                value = value.flatten(0, -2)
            yield name, convert.tap(where, value, (CALL_TAPS if layer is None else LAYER_TAPS)[tap])

    def state(self, batch: int) -> dict[str, Tensor]:
        """The rings after the last call, as `state/layer{l}/window`.

        Raises:
            RecordingError: a declared buffer does not exist or is not what a file may hold.
        """
        state = {}
        for block, layer in enumerate(self._config.draft_layers):
            path = DRAFT_WINDOW.module.format(l=block)
            ring = getattr(submodule(self._model, path), str(DRAFT_WINDOW.attribute), None)
            label = f"upstream: {path}.{DRAFT_WINDOW.attribute}"
            if not isinstance(ring, torch.Tensor):
                raise RecordingError(f"{label} does not exist (state window)")
            cut = ring[:batch, : self._config.window_size]
            state[f"state/layer{layer}/window"] = convert.tap(label, cut, STATE["window"])
        return state

    def kernel(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """A kernel is called: run it and keep what a point asks for."""
        result = run()
        for path in self._running:
            time = self._times[path, name]
            self._times[path, name] += 1
            for point, key in self._kernel_points.get((path, name), ()):
                if point.occurrence == time:
                    self._see(key, result[point.item] if isinstance(result, tuple) else result)
        return result

    def _see(self, key: Key, value: Any) -> None:
        self._seen[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    @contextmanager
    def _watching(self) -> Iterator[None]:
        before = self._kernels.observer
        with ExitStack() as stack:
            stack.callback(setattr, self._kernels, "observer", before)
            self._kernels.observer = self
            for point in DRAFT_HEAD_TAPS:
                self._install(stack, point, point.module, (point.tap, None))
            for block, layer in enumerate(self._config.draft_layers):
                for point in DRAFT_TAPS:
                    self._install(stack, point, point.module.format(l=block), (point.tap, layer))
            stack.callback(self._kernel_points.clear)
            yield

    def _install(self, stack: ExitStack, point: TapPoint, path: str, key: Key) -> None:
        module = submodule(self._model, path)

        def item(found: Any) -> Any:
            return found[point.item] if isinstance(found, tuple) else found

        if point.source == "input":
            hook = module.register_forward_pre_hook(lambda _, args: self._see(key, args[point.item]))
            stack.callback(hook.remove)
        elif point.source == "output":
            stack.callback(
                module.register_forward_hook(lambda _module, _args, found: self._see(key, item(found))).remove
            )
        elif point.source == "method result":
            self._watch_method(stack, module, path, point, key)
        else:
            if path not in {known for known, _ in self._kernel_points}:
                enter = module.register_forward_pre_hook(lambda _, args: self._running.append(path))
                leave = module.register_forward_hook(lambda _module, _args, _found: self._leave(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            self._kernel_points.setdefault((path, point.function), []).append((point, key))

    def _leave(self) -> None:
        self._running.pop()

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
