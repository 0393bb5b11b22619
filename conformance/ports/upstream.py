"""`upstream:DIR`: a checkout of the published inference code as a target, on the suite's kernels.

The code is imported and watched as `conformance record` does it, with the same declarations of what its parts are
called (`conformance/recording/upstream.py`), and runs only after the user has agreed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.adapters import upstream_kernels
from conformance.adapters.in_process import from_port, to_torch
from conformance.adapters.target import UPSTREAM_PREFIX
from conformance.checkpoint_layout import TEXT, layout, scale_name
from conformance.config import ModelConfig
from conformance.errors import ConformanceError, TargetError
from conformance.interface import Array, Config, Description, Implementation, Reading, Stateful, Unsupported, Weights
from conformance.recording import upstream
from conformance.recording.call import Call
from conformance.recording.checkout import Checkout, imported
from conformance.recording.convert import DTYPES, dtype_name, fill
from conformance.recording.kernels import WatchedKernels
from conformance.recording.record import attribute, blaming, recorded_state, torch_settings
from conformance.recording.taps import Observer, own_index_keys, submodule
from conformance.recording.upstream import RecordingError

LONGEST = 1024
"""Positions that caches are made for where a configuration does not say: more than any case has."""
NO_OTHER_PARTS = {"n_mtp_layers": 0, "vision_n_layers": 0}
"""Hand-made configurations are of the text model; the code's own defaults are the released sizes."""


def agreed_checkout(target: str, agreed: bool) -> Checkout:
    """The checkout that a target names, after showing what will be executed.

    Raises:
        TargetError: no such checkout, or the user has not agreed; nothing is executed then.
    """
    try:
        checkout = Checkout.read(Path(target.removeprefix(UPSTREAM_PREFIX)))
    except ConformanceError as error:
        raise TargetError(f"target {target!r}: {error}") from error
    for line in checkout.notice(own_kernels=True):
        print(line, file=sys.stderr)
    if not agreed:
        raise TargetError(f"target {target!r}: nothing was executed: read the code, then say --yes")
    return checkout


class Upstream(Implementation):
    """The whole model of a checkout."""

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout

    def describe(self) -> Description:
        """What is executed; the reading is that of the code as it is."""
        files = self._checkout.executed(own_kernels=True)
        return Description(
            name=upstream.REPOSITORY,
            version=next(file.sha256[:12] for file in files if file.name == f"{upstream.ENTRY}.py"),
            reading="literal",
            conventions={
                **{file.name: f"sha256 {file.sha256}, {file.standing()}" for file in files},
                "kernels": "the suite's reference on the CPU in place of kernel.py",
                "reading": "with --reading intended, sources put their own index keys in the shared slot",
            },
        )

    def runtime(self, config: Config, batch_size: int, reading: Reading) -> Any:
        """The reading; the shared slots are the code's own globals."""
        return reading

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """The model with these weights, from a fresh import: the code keeps state in globals."""
        sizes = {"max_batch_size": batch_size, "max_seq_len": LONGEST}
        return UpstreamModel(self._checkout, {**sizes, **NO_OTHER_PARTS, **config}, weights, runtime, token_map)


class UpstreamModel(Stateful):
    """The model, watched at the points that are declared for recording."""

    def __init__(
        self, checkout: Checkout, config: Config, weights: Weights, reading: Reading, token_map: torch.Tensor | None
    ) -> None:
        self._config = ModelConfig.from_mapping(config, "configuration")
        self._reading = reading
        self._kernels = WatchedKernels()
        self._call = Call(0, 0, 0)
        with blaming(), torch_settings("cpu"), imported(checkout, upstream_kernels.module(), self._kernels.module) as m:
            self._model = attribute(m, upstream.MODEL)(attribute(m, upstream.ARGUMENTS)(**config)).eval()
            self._shared = attribute(m, upstream.SHARED)
            _load(self._model, config, weights)
            for layer in self._config.engram_layer_ids:
                mapped = getattr(submodule(self._model, f"layers.{layer}.engram"), str(upstream.TOKEN_MAP))
                mapped.copy_(token_map)
        self._observer = self._new_observer()

    def _new_observer(self) -> Observer:
        """An observer watches once: one is made for every call."""
        return Observer(self._model, self._shared, self._config)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Logits, the greedy token, and every declared tap as `layer{l}/{tap}`."""
        mask = inputs["image_mask"]
        if mask is not None and bool(mask.any()):
            raise Unsupported("upstream: the model takes an image's patches, the case has its features")
        ids, starts = inputs["input_ids"], inputs["start_pos"]
        start = int(starts[0])
        if not bool((starts == start).all()) or (start and ids.shape[1] > 1):
            raise Unsupported("upstream: a prefill at 0, then one token at a time, all requests together")
        self._call = Call(ids.shape[0], ids.shape[1], start)
        self._observer = self._new_observer()
        with blaming(), torch_settings("cpu"), self._observer.watching(self._kernels):
            self._observer.begin(self._call)
            if self._reading == "intended":
                with own_index_keys(self._model, self._shared, self._config, lambda: self._call):
                    self._model(ids.long(), start)
            else:
                self._model(ids.long(), start)
            taps = {name: to_torch(tap) for name, tap in self._observer.finish().items()}
        return taps | {"output_ids": taps["logits"].argmax(-1)}

    def state(self) -> Mapping[str, Array]:
        """The declared buffers, as `layer{l}/{state}`."""
        found = recorded_state(self._model, self._observer, self._config, self._call)
        return {name.removeprefix("state/"): to_torch(value) for name, value in found.items()}


def _load(model: Any, config: Config, weights: Weights) -> None:
    """Fill every parameter of the text path; each must have the bytes that a checkpoint holds for it.

    Raises:
        RecordingError: a parameter without a weight, or of another shape or type; names it.
    """
    other_parts = {name for name, found in layout(config, "configuration").parameters.items() if found.part != TEXT}
    other_parts |= {scale_name(name) for name in other_parts}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in other_parts:
            continue
        if name not in weights:
            raise RecordingError(f"upstream: no weight for the parameter {name}")
        value = from_port(weights[name])
        if tuple(parameter.shape) != value.shape or DTYPES.get(dtype_name(parameter)) != value.dtype:
            found = f"{dtype_name(parameter)} {list(parameter.shape)}"
            raise RecordingError(f"upstream: parameter {name} is {found}, not {value.dtype} {list(value.shape)}")
        fill(parameter, value)
