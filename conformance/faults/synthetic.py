"""Complete golden sets for any configuration: seeded random weights, run through the reference, in FORMAT.md's form.

Such a set says nothing about the published code, but everything about the suite: whatever configuration it is made for,
the catalogue must give rise to cases that hold and that the reference passes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from conformance.adapters.in_process import from_port
from conformance.fixtures import CALL_TAPS, LAYER_TAPS, STATE
from conformance.tensors import Tensor, write_safetensors
from reference.config import Config
from reference.images import image_spans, merge_images
from reference.model import Model, embed
from reference.parameters import Scoped, parameter_shapes
from reference.runtime import Runtime
from reference.vision import aligner, vision, vision_shapes

Tensors = dict[str, torch.Tensor]

GAINS: Mapping[str, float] = {
    "wq_a": 1.6,
    "wkv": 1.8,
    "wo_a": 1.6,
    "wo_b": 1.9,
    "gate": 2.9,
    "w1": 1.8,
    "w2": 1.2,
    "w3": 1.8,
}
"""Chosen so that attention and gates stay out of their degenerate corners; 1 elsewhere."""

CODE_DEVIATION = 74.0
"""Standard deviation of E4M3 codes."""
GRID_DEVIATION = 2.926
"""Standard deviation of uniformly drawn E2M1 codes."""


@dataclass(frozen=True)
class Run:
    """One scenario: a prefill, then one-token calls; `image` is the first and the last image token, if any.

    With `grid`, rows and columns of patches, the image is one that the vision tower sees; it begins at its first token.
    """

    name: str
    prefill: int
    steps: int = 0
    batch: int = 1
    reading: Literal["intended", "literal"] = "intended"
    image: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None

    @property
    def starts(self) -> list[int]:
        """First position of each call."""
        return [0, *range(self.prefill, self.prefill + self.steps)]


def make_weights(config: Config, seed: int, stored_wo_a: Literal["bf16", "fp8"] = "bf16") -> Tensors:
    """Random weights under checkpoint names, of the types and magnitudes of the published ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(config)
    weights: Tensors = {}

    def normal(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=generator)

    def scales(shape: Sequence[int], exponent: int) -> torch.Tensor:
        jitter = torch.randint(-1, 2, tuple(shape), generator=generator)
        return (jitter + (127 + exponent)).to(torch.uint8).view(torch.float8_e8m0fnu)

    for name, shape in (vision_shapes(config) if config.vision_n_layers else {}).items():
        value = normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else normal(shape)
        weights[name] = 1 + 0.1 * value if "norm" in name else value.bfloat16()

    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        owner = stem.rpartition(".")[2]
        deviation = GAINS.get(owner, 1.0) * shape[-1] ** -0.5
        if ".ffn.experts." in name:
            rows, columns = shape
            weights[name] = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
            exponent = round(math.log2(deviation / GRID_DEVIATION))
            weights[f"{stem}.scale"] = scales((rows, columns // 32), exponent)
        elif name.endswith(".engram.embed.weight"):
            weights[name] = (normal(shape) * CODE_DEVIATION).to(torch.float8_e4m3fn)
            weights[f"{stem}.scale"] = scales((shape[0], math.ceil(shape[1] / 32)), -7)
        elif _is_fp8(name, owner, stored_wo_a):
            weights[name] = (normal(shape) * CODE_DEVIATION).clamp(-448, 448).to(torch.float8_e4m3fn)
            exponent = round(math.log2(deviation / CODE_DEVIATION))
            weights[f"{stem}.scale"] = scales([math.ceil(size / 32) for size in shape], exponent)
        elif "norm" in owner or last in ("q_weight", "k_weight"):
            weights[name] = (1 + 0.072 * normal(shape)).bfloat16()
        elif owner == "embed":
            weights[name] = normal(shape).bfloat16()
        elif last.startswith("hc_") and last.endswith("_fn"):
            weights[name] = normal(shape) * deviation
        elif last.endswith("_scale"):
            weights[name] = 0.5 + 0.036 * normal(shape)
        elif last in ("bias", "bias_vl") or last.endswith("_base"):
            weights[name] = 0.144 * normal(shape)
        elif last == "attn_sink":
            weights[name] = 1.15 * normal(shape)
        else:
            fp32 = f"{stem.rpartition('.')[0]}.wgate.weight" in shapes
            weights[name] = (normal(shape) * deviation).to(torch.float32 if fp32 else torch.bfloat16)
    return weights


def _is_fp8(name: str, owner: str, stored_wo_a: str) -> bool:
    if owner == "wo_a":
        return stored_wo_a == "fp8"
    return owner in ("wq_a", "wq_b", "wkv", "wo_b", "w1", "w2", "w3") and ".compressor." not in name


def make_golden_sets(
    directory: Path,
    name: str,
    mapping: Mapping[str, Any],
    runs: Sequence[Run],
    seed: int = 1,
    stored_wo_a: Literal["bf16", "fp8"] = "bf16",
) -> Path:
    """Write a directory with one model set and its manifest; returns the directory."""
    config = Config.from_mapping(mapping)
    weights = make_weights(config, seed, stored_wo_a)
    place = directory / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"n_mtp_layers": 0, **mapping}), encoding="utf-8")
    write_safetensors(place / "weights.safetensors", {key: from_port(value) for key, value in weights.items()})
    for number, run in enumerate(runs):
        tensors, metadata = record(config, weights, run, seed + 1 + number)
        write_safetensors(place / f"{run.name}.safetensors", tensors, metadata)
    files = {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.iterdir())
    }
    (directory / "manifest.json").write_text(json.dumps({"format": 1, "files": files}), encoding="utf-8")
    return directory


def record(config: Config, weights: Tensors, run: Run, seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of one scenario file, every tap that FORMAT.md names and that happened."""
    generator = torch.Generator().manual_seed(seed)
    compressed = max(1, config.engram_compressed_vocab_size)
    token_map = (torch.arange(config.vocab_size) * compressed // config.vocab_size).to(torch.int32)
    model = Model(config, weights, Runtime(config, run.batch, run.reading), token_map, run.batch)
    metadata = {"scenario": run.name, "start_pos": json.dumps(run.starts), "reading": run.reading}
    tensors: dict[str, Tensor] = {}
    for call, start in enumerate(run.starts):
        length = 1 if call else run.prefill
        ids = torch.randint(0, config.vocab_size, (run.batch, length), generator=generator, dtype=torch.int32)
        image_mask, image_features = None, None
        if run.image is not None and call == 0:
            first, last = run.image
            types = torch.full((run.batch, length), -1, dtype=torch.int32)
            types[:, first : last + 1] = 1
            image_features = torch.randn(run.batch, length, config.dim, generator=generator).bfloat16()
            rows, columns = run.grid or (1, 1)
            cells = [-(-side // config.vision_downsample_ratio) for side in (rows, columns)]
            if run.grid is not None:
                size, grids = config.vision_patch_size, torch.tensor([run.grid])
                prompt = torch.cat((ids[0, :first], torch.tensor([config.image_token_id]), ids[0, last + 1 :]))
                ids, types = (part.unsqueeze(0) for part in image_spans(config, prompt.int(), grids))
                patches = torch.randn(rows * columns, 3, size, size, generator=generator).bfloat16()
                tower = vision(config, Scoped(weights, "vision"), patches, grids)
                aligned = aligner(config, Scoped(weights, "aligner"), tower, grids)
                image_features = merge_images(config, weights, embed(weights["embed.weight"], ids), types, aligned)
                seen = {"patches": patches, "vit_out": tower, "aligner_out": aligned}
                tensors |= {f"image/{tap}": from_port(value) for tap, value in seen.items()}
            image_mask = types >= 0
            tensors["image/token_types"] = from_port(types)
            names = ("start", "n_vit_h", "n_vit_w", "n_llm_h", "n_llm_w")
            metadata["image"] = json.dumps(dict(zip(names, (first, rows, columns, *cells), strict=True)))
        start_pos = torch.full((run.batch,), start, dtype=torch.int64)
        taps = model.step(ids, start_pos, image_mask, image_features)
        for key, value in {"input_ids": ids, **taps}.items():
            layer, _, tap = key.rpartition("/")
            if tap in (LAYER_TAPS if layer else CALL_TAPS):
                tensors[f"call{call}/{key}"] = from_port(value)
    for key, value in model.state().items():
        assert key.rpartition("/")[2] in STATE
        tensors[f"state/{key}"] = from_port(value)
    return tensors, metadata
