"""Parts of a checkout's model: made as the code makes them, with a whole model, then filled and called one by one.

What the parts are called and how they are called is declared in `conformance/recording/upstream.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from conformance.adapters import upstream_kernels
from conformance.adapters.in_process import from_port, to_torch
from conformance.checkpoint_layout import TEXT, layout, scale_name
from conformance.config import ModelConfig
from conformance.interface import Array, Config, Reading, Stateful, Unsupported, Weights
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
LARGEST_MODEL = 1 << 30
"""Parameters beyond which no model is made for the sake of a part of it."""


class Made:
    """A model from an import of its own, since the code keeps state in globals, with its shared slots."""

    def __init__(self, checkout: Checkout, config: Config, batch_size: int, reading: Reading) -> None:
        """Parameters are not filled yet.

        Raises:
            Unsupported: the model is too large.
        """
        self.batch = batch_size
        sizes = {"max_batch_size": batch_size, "max_seq_len": LONGEST}
        self.mapping = {**sizes, **NO_OTHER_PARTS, **config}
        count = sum(parameter.elements for parameter in layout(self.mapping, "configuration").parameters.values())
        if count > LARGEST_MODEL:
            raise Unsupported(f"upstream: the code makes parts with a whole model, here of {count:,} parameters")
        self.config = ModelConfig.from_mapping(self.mapping, "configuration")
        self._reading = reading
        self._kernels = WatchedKernels()
        with blaming(), torch_settings("cpu"), imported(checkout, upstream_kernels.module(), self._kernels.module) as m:
            self.model = attribute(m, upstream.MODEL)(attribute(m, upstream.ARGUMENTS)(**self.mapping)).eval()
            self._shared = attribute(m, upstream.SHARED)

    def fill_text_model(self, weights: Weights) -> None:
        """Fill every parameter of the text path.

        Raises:
            RecordingError: as `fill_part` does.
        """
        parameters = layout(self.mapping, "configuration").parameters
        others = {name for name, found in parameters.items() if found.part != TEXT}
        self.fill_part("", weights, others | {scale_name(name) for name in others})

    def fill_part(self, path: str, weights: Weights, left_out: Collection[str] = ()) -> None:
        """Fill every parameter of a module; each must have the bytes that a checkpoint holds for it.

        `left_out` are parameters, or modules, whose values do not matter.

        Raises:
            RecordingError: a parameter without a weight, or of another shape or type; names it.
        """
        for name, parameter in submodule(self.model, path).named_parameters(remove_duplicate=False):
            if name in left_out or name.partition(".")[0] in left_out:
                continue
            full = f"{path}.{name}".removeprefix(".")
            if name not in weights:
                raise RecordingError(f"upstream: no weight for the parameter {full}")
            value = from_port(weights[name])
            if tuple(parameter.shape) != value.shape or DTYPES.get(dtype_name(parameter)) != value.dtype:
                found = f"{dtype_name(parameter)} {list(parameter.shape)}"
                raise RecordingError(f"upstream: parameter {full} is {found}, not {value.dtype} {list(value.shape)}")
            fill(parameter, value)

    def clear_part(self, path: str) -> None:
        """Zeros for every parameter of a module: whatever it computes, it runs."""
        for parameter in submodule(self.model, path).parameters():
            parameter.data.view(torch.uint8).zero_()

    def fill_token_maps(self, token_map: torch.Tensor | None, layers: Sequence[int]) -> None:
        """Give the token map to those of the layers that have an Engram."""
        for layer in (layer for layer in layers if layer in self.config.engram_layer_ids):
            path = upstream.PARTS["engram"].module.format(l=layer)
            with torch.inference_mode():
                getattr(submodule(self.model, path), str(upstream.TOKEN_MAP)).copy_(token_map)

    def call(self, name: str, layer: int, **arguments: Any) -> Any:
        """Call a part of PARTS with its declared arguments; what the code raises becomes one line.

        Raises:
            RecordingError: the part cannot be called so, or raises.
        """
        part = upstream.PARTS[name]
        module = submodule(self.model, part.module.format(l=layer))
        values = [arguments[argument] for argument in part.arguments]
        try:
            inspect.signature(module.forward).bind(*values)
        except TypeError as error:
            raise RecordingError(f"upstream: {name}: {part}: {error}") from None
        with blaming(), torch_settings("cpu"):
            return module(*values)

    @contextmanager
    def replacing(self, name: str, layer: int, result: Any) -> Iterator[None]:
        """What a part of PARTS gives is replaced while the context lasts."""
        module = submodule(self.model, upstream.PARTS[name].module.format(l=layer))
        hook = module.register_forward_hook(lambda _module, _args, _result: result)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def given(self, name: str, layer: int, look: Callable[[tuple[Any, ...]], Any]) -> Iterator[None]:
        """`look` sees the positional arguments of a part of PARTS, and may return others, while the context lasts."""
        module = submodule(self.model, upstream.PARTS[name].module.format(l=layer))
        hook = module.register_forward_pre_hook(lambda _module, arguments: look(arguments))
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def watched(self, call: Call, part: str) -> Iterator[Observer]:
        """The declared taps of the part that runs are collected, in the reading that was asked for."""
        # An observer watches once: one is made for every call.
        observer = Observer(self.model, self._shared, self.config, part)
        with observer.watching(self._kernels):
            observer.begin(call)
            if self._reading == "intended":
                with own_index_keys(self.model, self._shared, self.config, lambda: call):
                    yield observer
            else:
                yield observer


class Part(Stateful):
    """One layer's block, attention or compressor, watched at the points that are declared for recording."""

    def __init__(
        self, name: str, made: Made, layer: int, weights: Weights, token_map: torch.Tensor | None = None
    ) -> None:
        self._name, self._made, self._layer = name, made, layer
        self._path = upstream.PARTS[name].module.format(l=layer)
        made.fill_part(self._path, weights)
        if name == "block":
            made.fill_token_maps(token_map, [layer])
        self._call = Call(0, 0, 0)
        self._observer: Observer | None = None

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Every declared tap of the part, its results among them."""
        main = inputs["h"] if "h" in inputs else inputs["x"]
        self._call = call_of(main, inputs["start_pos"])
        with self._made.watched(self._call, self._path) as self._observer:
            self._made.call(self._name, self._layer, **{**own_copies(inputs), "start_pos": self._call.start})
        prefix = f"layer{self._layer}/"
        return {name.removeprefix(prefix): to_torch(tap) for name, tap in self._observer.finish().items()}

    def state(self) -> Mapping[str, Array]:
        """The declared buffers of the part."""
        assert self._observer is not None
        found = recorded_state(self._made.model, self._observer, self._made.config, self._call, self._path)
        return {name.removeprefix(f"state/layer{self._layer}/"): to_torch(value) for name, value in found.items()}


class Stack(Stateful):
    """Consecutive blocks, each given what the one before returned."""

    def __init__(self, made: Made, layers: Sequence[int], weights: Weights, token_map: torch.Tensor | None) -> None:
        self._blocks = []
        for layer in layers:
            prefix = f"{upstream.PARTS['block'].module.format(l=layer)}."
            own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
            self._blocks.append(Part("block", made, layer, own, token_map))

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """The residual and the mix after the last block."""
        for block in self._blocks:
            taps = block.step(**inputs)
            inputs |= {"h": taps["h_out"], "pre": taps["pre_out"]}
        return {name: inputs[given] for name, given in (("h_out", "h"), ("pre_out", "pre"))}


class WholeModel(Stateful):
    """The model, watched at the points that are declared for recording."""

    def __init__(self, made: Made, weights: Weights, token_map: torch.Tensor | None) -> None:
        self._made = made
        made.fill_text_model(weights)
        made.fill_token_maps(token_map, range(made.config.n_layers))
        self._call = Call(0, 0, 0)
        self._observer: Observer | None = None

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """Logits, the greedy token, and every declared tap as `layer{l}/{tap}`."""
        mask = inputs["image_mask"]
        if mask is not None and bool(mask.any()):
            raise Unsupported("upstream: the model takes an image's patches, the case has its features")
        ids = inputs["input_ids"]
        self._call = call_of(ids, inputs["start_pos"])
        with blaming(), torch_settings("cpu"), self._made.watched(self._call, "") as self._observer:
            self._made.model(ids.long(), self._call.start)
        taps = {name: to_torch(tap) for name, tap in self._observer.finish().items()}
        return taps | {"output_ids": taps["logits"].argmax(-1)}

    def state(self) -> Mapping[str, Array]:
        """The declared buffers, as `layer{l}/{state}`."""
        assert self._observer is not None
        found = recorded_state(self._made.model, self._observer, self._made.config, self._call)
        return {name.removeprefix("state/"): to_torch(value) for name, value in found.items()}


def call_of(x: torch.Tensor, start_pos: torch.Tensor) -> Call:
    """The call [B,T,...] at these positions.

    Raises:
        Unsupported: the published code has no such call.
    """
    start = int(start_pos[0])
    if not bool((start_pos == start).all()) or (start and x.shape[1] > 1):
        raise Unsupported("upstream: a prefill at 0, then one token at a time, all requests together")
    return Call(x.shape[0], x.shape[1], start)


def own_copies(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors that the code may write to; its token ids are 64 bits wide."""
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    if "input_ids" in copies:
        copies["input_ids"] = copies["input_ids"].long()
    return copies
