"""The image of a recorded prompt: made by the recipe, handed to the model, and seen on its way into the residual."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from conformance.config import ModelConfig
from conformance.fixtures import IMAGE, TAPS
from conformance.judge.components.images import TYPES, spans
from conformance.recipe import RecipeTensor
from conformance.recording import convert
from conformance.recording.taps import submodule
from conformance.recording.upstream import IMAGE_FIELDS, IMAGE_TAPS, IMAGES, RecordingError
from conformance.tensors import Tensor


@dataclass(frozen=True)
class DeclaredImage:
    """The first position of an image's span, and the rows and columns of its patches."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True)
class RecordedImage:
    """An image and its place: patches bf16 [n,3,P,P], token types int32 [1,T] of the prompt."""

    declared: DeclaredImage
    cells: tuple[int, int]
    patches: Tensor
    token_types: Tensor

    @property
    def span(self) -> slice:
        """Positions of the image's tokens."""
        return slice(self.declared.start, self.declared.start + int((self.token_types.data >= 0).sum()))

    @property
    def metadata(self) -> str:
        """What a scenario file says of its image (fixtures/FORMAT.md)."""
        return json.dumps(self._numbers)

    @property
    def _numbers(self) -> Mapping[str, int]:
        image = self.declared
        numbers = (image.start, image.rows, image.columns, *self.cells)
        return dict(zip(("start", "n_vit_h", "n_vit_w", "n_llm_h", "n_llm_w"), numbers, strict=True))

    def argument(self) -> dict[str, Any]:
        """What the model is called with beside ids and position."""
        patches = torch.empty(self.patches.shape, dtype=torch.bfloat16)
        convert.fill(patches, self.patches)
        types = torch.as_tensor(self.token_types.data[0, self.span].astype(np.int64))
        fields = {**self._numbers, "patches": patches, "types": types}
        return {str(IMAGES): [SimpleNamespace(**{name: fields[name] for name in IMAGE_FIELDS})]}

    def taps(self) -> dict[str, Tensor]:
        """What the model was given, under the names of a scenario file."""
        return {"image/patches": self.patches, "image/token_types": self.token_types}


def make_image(config: ModelConfig, declared: DeclaredImage, prompt: int, name: str, seed: int) -> RecordedImage:
    """The image of a prompt of `prompt` tokens; its pixels are a stream of the recipe by that name.

    Raises:
        RecordingError: the configuration has no vision tower, or the span does not fit.
    """
    if not config.vision_n_layers or config.image_token_id < 0:
        raise RecordingError(f"{name}: an image, but the set has no vision_n_layers or no image_token_id")
    grid = np.array([[declared.rows, declared.columns]])
    _, types = spans(config, np.array([config.image_token_id]), grid)
    if declared.start + types.size > prompt:
        raise RecordingError(f"{name}: an image of {types.size} tokens at {declared.start}, the prompt has {prompt}")
    token_types = np.full((1, prompt), TYPES["text"], dtype=np.int32)
    token_types[0, declared.start : declared.start + types.size] = types
    shape = (declared.rows * declared.columns, 3, config.vision_patch_size, config.vision_patch_size)
    pixels = RecipeTensor(f"{name}/patches", "input", shape, seed, 1.0).tensor()
    rows, columns = (-(-grid // config.vision_downsample_ratio))[0].tolist()
    patches = Tensor.from_values(pixels.values(), "BF16")
    return RecordedImage(declared, (rows, columns), patches, Tensor("I32", token_types))


@contextmanager
def watching_image(model: Any) -> Iterator[dict[str, Tensor]]:
    """Collects the taps of the tower, of the aligner and of what enters the first layer, under their names in a file.

    Raises:
        RecordingError: a module does not exist, or a tap was not seen or is not what a file may hold there.
    """
    seen: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for point in IMAGE_TAPS:
            module = submodule(model, point.module)

            def look(value: Any, tap: str = point.tap) -> None:
                seen.setdefault(tap, value.detach().clone() if isinstance(value, torch.Tensor) else value)

            if point.source == "input":
                hook = module.register_forward_pre_hook(lambda _, args, look=look: look(args[0]))
            else:
                hook = module.register_forward_hook(lambda _module, _args, result, look=look: look(result))
            stack.callback(hook.remove)
        yield found
    for point in IMAGE_TAPS:
        of_image = point.tap in IMAGE
        where = f"upstream: tap {point.tap}: {point}"
        if point.tap not in seen:
            raise RecordingError(f"{where}: was not seen")
        value = seen[point.tap]
        if of_image and isinstance(value, torch.Tensor) and value.dim() == 3:
            value = value.flatten(0, 1)  # Patches of one image, whether or not the code has an axis for images.
        name = f"image/{point.tap}" if of_image else f"call0/layer0/{point.tap}"
        found[name] = convert.tap(where, value, (IMAGE if of_image else TAPS)[point.tap])
