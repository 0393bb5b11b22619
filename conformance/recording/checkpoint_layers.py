"""Recording layers of a real checkpoint: the reference runs on its weights, which are read when used and not kept.

The chosen layers, with the layers whose rows and selections they read before them, become a model of their own: its
layers are numbered from 0 and its configuration says only what concerns them. Where the checkpoint has layers in
between, the residual passes over them: what goes into the first layer is seeded anyway. Embedding and head stay out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.adapters.in_process import from_port, to_torch
from conformance.adapters.reference import Reference
from conformance.checkpoint import read_configuration
from conformance.checkpoint_layout import layout
from conformance.checkpoint_weights import CheckpointTensors, Excerpt
from conformance.config import ModelConfig
from conformance.fixtures import CHECKPOINT, CONFIG, LAYER_TAPS, STATE, Fixtures
from conformance.interface import Reading
from conformance.recipe import RecipeTensor, key, u
from conformance.recording.record import versions, write_manifest
from conformance.recording.upstream import RecordingError
from conformance.tensors import Tensor, one_line, write_safetensors

SET = "real"
SEED = 20260101


@dataclass(frozen=True)
class LayerScenario:
    """One prefill of `prefill` tokens, then `steps` calls of one token, for `batch` sequences."""

    name: str
    prefill: int
    steps: int
    batch: int
    reading: Reading = "intended"

    @property
    def starts(self) -> list[int]:
        """First position of each call."""
        return [0, *range(self.prefill, self.prefill + self.steps)]


SCENARIOS = (
    LayerScenario("prefill-12-then-3", 12, 3, 1),
    LayerScenario("prefill-05-then-1-batch-2", 5, 1, 2),
)
"""Short: every token may choose experts of its own, and each has to be read."""


def parse_layers(text: str) -> range:
    """`24-27`, or `24` for one layer.

    Raises:
        RecordingError: neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise RecordingError(f"--layers {one_line(text)}: expected a range of layers such as 24-27")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def record_layers(checkpoint: Path, layers: range, out: Path, progress: Callable[[str], None]) -> int:
    """Record the scenarios and write the set; returns the exit code.

    At any time one tensor of the checkpoint is in memory with what the reference decodes of it, beside the taps of the
    scenario that runs.

    Raises:
        RecordingError: `out` exists, or the layers cannot be recorded; nothing is written then.
        FixtureError: the checkpoint lacks a tensor or is damaged; nothing is written then.
    """
    if not checkpoint.is_dir():
        raise RecordingError(f"--checkpoint {one_line(str(checkpoint))}: not a directory")
    if out.exists():
        raise RecordingError(f"{one_line(str(out))}: exists already")
    mapping, configuration = read_configuration(checkpoint)
    chosen, model = excerpt_configuration(mapping, configuration, layers)
    if set(chosen) != set(layers):
        added = ", ".join(str(layer) for layer in chosen if layer not in layers)
        progress(f"with layer {added}, whose rows or selections layers {layers[0]}-{layers[-1]} read")
    tensors = CheckpointTensors(checkpoint, chosen)
    tensors.check(layout(model, configuration).parameters)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    place = partial / SET
    place.mkdir(parents=True)
    try:
        _write_json(place / CONFIG, model)
        summaries: dict[str, Any] = {}
        with _one_thread():
            for scenario in SCENARIOS:
                progress(f"{SET}/{scenario.name}")
                taps, metadata = _run(model, tensors, scenario)
                path = place / f"{scenario.name}.safetensors"
                write_safetensors(path, taps, metadata)
                summaries[f"{SET}/{scenario.name}"] = {
                    "bytes": path.stat().st_size,
                    "tensors": len(taps),
                    **metadata,
                }
        excerpt = Excerpt(tuple(chosen), tensors.headers_sha256, tensors.sha256)
        _write_json(place / CHECKPOINT, excerpt.content())
        write_manifest(partial, _provenance(excerpt, configuration, layers, summaries))
        Fixtures.open(partial, checkpoint=checkpoint)  # What was written must be readable.
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"wrote {out}: {len(tensors.sha256)} of {len(tensors.header.entries)} tensors of these layers were used")
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """The order of sums must not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)


def excerpt_configuration(
    mapping: Mapping[str, Any], origin: str, layers: Sequence[int]
) -> tuple[list[int], dict[str, Any]]:
    """The layers to record, sources included, and the configuration of the model that they make.

    Raises:
        RecordingError: a layer that the model does not have, or one with an Engram.
        FixtureError: the configuration is none.
    """
    config = ModelConfig.from_mapping(mapping, origin)
    if layers[-1] >= config.n_layers:
        raise RecordingError(f"--layers: no layer {layers[-1]}: {origin} has n_layers {config.n_layers}")
    chosen = config.with_sources(layers)
    for layer in chosen:
        if layer in config.engram_layer_ids:
            source = "" if layer in layers else f", which layers {layers[0]}-{layers[-1]} read,"
            raise RecordingError(
                f"--layers: layer {layer}{source} has an Engram, whose hashes depend on its place in the whole model"
            )
    number = {layer: place for place, layer in enumerate(chosen)}

    def renumbered(ids: Sequence[int]) -> list[int]:
        return [number[layer] for layer in ids if layer in number]

    return chosen, {
        **mapping,
        "n_layers": len(chosen),
        "compress_ratios": [config.ratio(layer) for layer in chosen],
        "kv_source_layers": renumbered(config.kv_source_layers),
        "index_source_layers": renumbered(config.index_source_layers),
        "candidate_source_layer": number.get(config.candidate_source_layer, -1),
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "n_mtp_layers": 0,
        "dspark_block_size": 0,
        "dspark_target_layer_ids": [],
        "vision_n_layers": 0,
    }


class _Streamed(Mapping[str, torch.Tensor]):
    """Weights of one layer for the reference, read at each look-up and kept by nobody."""

    def __init__(self, tensors: CheckpointTensors, prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return to_torch(self._tensors[self._prefix + name])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.within(self._prefix))

    def __len__(self) -> int:
        return len(self._tensors.within(self._prefix))


def _run(
    model: Mapping[str, Any], tensors: CheckpointTensors, scenario: LayerScenario
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a scenario, and its metadata."""
    config, reference = ModelConfig.from_mapping(model, CONFIG), Reference()
    runtime = reference.runtime(model, scenario.batch, scenario.reading)
    blocks = [
        reference.block(model, layer, _Streamed(tensors, f"layers.{layer}."), runtime, None, scenario.batch)
        for layer in range(config.n_layers)
    ]
    ids, residual, mix = _inputs(config, scenario)
    recorded: dict[str, Tensor] = {}
    for call, start in enumerate(scenario.starts):
        span = slice(start, start + (1 if call else scenario.prefill))
        start_pos = torch.full((scenario.batch,), start, dtype=torch.int64)
        recorded[f"call{call}/input_ids"] = ids[:, span]
        token_ids, h, pre = (to_torch(value[:, span]) for value in (ids, residual, mix))
        for layer, block in enumerate(blocks):
            taps = block.step(h=h, pre=pre, input_ids=token_ids, start_pos=start_pos, image_mask=None)
            h, pre = taps["h_out"], taps["pre_out"]
            for name, value in taps.items():
                # A later layer's input is the output of the one before.
                if name in LAYER_TAPS and (name != "h_in" or layer == 0):
                    recorded[f"call{call}/layer{layer}/{name}"] = from_port(value)
    for layer, block in enumerate(blocks):
        for name, value in block.state().items():
            if name in STATE:
                recorded[f"state/layer{layer}/{name}"] = from_port(value)
    metadata = {"scenario": scenario.name, "start_pos": json.dumps(scenario.starts), "reading": scenario.reading}
    return recorded, metadata


def _inputs(config: ModelConfig, scenario: LayerScenario) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids int32 [B,P], the residual bf16 [B,P,S,D] and the mix fp32 [B,P,S] that the first layer receives."""
    rows = (scenario.batch, scenario.prefill + scenario.steps)
    ids = u(key(f"{scenario.name}/input_ids", SEED), np.arange(rows[0] * rows[1])) % np.uint64(config.vocab_size)
    streams = (*rows, config.hc_mult)
    drawn = u(key(f"{scenario.name}/pre", SEED), np.arange(int(np.prod(streams))))
    # The top 24 bits: between 0 and 1, as the sigmoid that makes a mix, and exact in fp32.
    mix = (drawn >> np.uint64(40)).astype(np.float64) / (1 << 24)
    return (
        Tensor.from_values(ids.astype(np.int64).reshape(rows), "I32"),
        RecipeTensor(f"{scenario.name}/h", "input", (*streams, config.dim), SEED).tensor(),
        Tensor.from_values(mix.reshape(streams), "F32"),
    )


def _provenance(excerpt: Excerpt, configuration: str, layers: range, summaries: Mapping[str, Any]) -> dict[str, Any]:
    """Without dates or paths of this machine: the same run gives the same bytes."""
    return {
        "checkpoint": {
            "configuration": configuration,
            "layers": list(excerpt.layers),
            "headers_sha256": excerpt.headers_sha256,
            "tensors": len(excerpt.tensors),
        },
        "upstream": {"executed": False},
        "kernels": {"kind": "the suite's reference on a CPU", "exact": [], "within_rounding": []},
        **versions(),
        "device": "cpu",
        "threads": 1,
        "seed": SEED,
        "command": f"conformance record --checkpoint DIR --layers {layers[0]}-{layers[-1]} --out DIR",
        "scenarios": dict(summaries),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
