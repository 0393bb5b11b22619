"""Seeded weights for a model of any configuration: made by the recipe, written into the model, kept for the set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from conformance.checkpoint_layout import SCALE_DTYPE, Form, Parameter, layout, scale_name
from conformance.recipe import RecipeTensor
from conformance.recipe_weights import GAINS
from conformance.recording.convert import DTYPES, dtype_name, fill
from conformance.recording.upstream import RecordingError
from conformance.tensors import Tensor

#: Kind of the recipe by name; the first pattern that matches. Anything else goes by the type it is stored in.
KINDS: tuple[tuple[str, str], ...] = (
    (r"(.*[._])?norm\d?\.weight|.*\.engram\.[qk]_weight", "norm"),
    (r".*\.gate\.bias(_vl)?|.*hc_\w+_base|.*\.bias", "small"),
    (r".*hc_\w+_scale", "scale3"),
    (r".*\.attn_sink", "sink"),
    (r"embed\.weight|image_\w+", "input"),
    (r".*\.engram\.embed\.weight", "fp8row"),
)
KIND_OF_DTYPE: Mapping[str, str] = {"F8_E4M3": "fp8", "U8": "fp4", "I8": "fp4", "BF16": "bf16", "F32": "bf16"}
"""What is stored in fp32 without a kind of its own gets values that bf16 holds exactly."""


def fill_weights(model: Any, configuration: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Fill every parameter of a model and return them under checkpoint names, in the types in which it holds them.

    Raises:
        RecordingError: the model has a parameter that no checkpoint has, lacks one, or holds one in another shape or
            type; names it.
    """
    expected = layout(configuration, "configuration")
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    present = parameters | dict(model.named_buffers(remove_duplicate=False))
    weights: dict[str, Tensor] = {}
    for name, parameter in expected.parameters.items():
        made = _make(name, parameter, _form(name, present, parameter), seed)
        for part, value in made.items():
            _put(part, present, value)
        weights |= made
    for name in sorted(parameters.keys() - weights.keys() - expected.ties.keys()):
        raise RecordingError(f"upstream: parameter {name} is in no checkpoint of this configuration")
    return weights


def _form(name: str, present: Mapping[str, torch.Tensor], parameter: Parameter) -> Form:
    if name not in present:
        raise RecordingError(f"upstream: parameter {name} does not exist")
    found = DTYPES.get(dtype_name(present[name]))
    for form in parameter.forms:
        if form.dtype == found:
            return form
    accepted = " or ".join(form.dtype for form in parameter.forms)
    raise RecordingError(f"upstream: parameter {name} is {dtype_name(present[name])}, a checkpoint holds {accepted}")


def _make(name: str, parameter: Parameter, form: Form, seed: int) -> dict[str, Tensor]:
    kind = next((kind for pattern, kind in KINDS if re.fullmatch(pattern, name)), KIND_OF_DTYPE[form.dtype])
    owner = name.removesuffix(".weight").rpartition(".")[2]
    recipe = RecipeTensor(name, kind, parameter.shape, seed, GAINS.get(owner, 1.0))
    value = recipe.tensor()
    if value.dtype != form.dtype:
        value = Tensor.from_values(value.values(), form.dtype)
    made = {name: value}
    if form.scale_tile is not None:
        made[scale_name(name)] = recipe.scale.tensor()
    return made


def _put(name: str, present: Mapping[str, torch.Tensor], value: Tensor) -> None:
    if name not in present:
        raise RecordingError(f"upstream: parameter {name} does not exist")
    target = present[name]
    if tuple(target.shape) != value.shape or DTYPES.get(dtype_name(target)) != value.dtype:
        wanted = f"{value.dtype} {list(value.shape)}"
        hint = " (scales are E8M0)" if value.dtype == SCALE_DTYPE else ""
        raise RecordingError(
            f"upstream: parameter {name} is {dtype_name(target)} {list(target.shape)}, expected {wanted}{hint}"
        )
    fill(target, value)
