"""Engram: layout, hashes and the write (numerics.md 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import GoldenModel, Trace, exact
from conformance.judge.components import engram as rules_of
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

HASH_FLAGS: Mapping[str, tuple[str, ...]] = {
    "text": ("ids-not-compressed", "pad-not-compressed", "hash-added", "engram-column-order", "look-back-too-short"),
    "image-barrier": ("image-not-a-barrier", "image-token-hashed", "barrier-not-for-good"),
}
WRITE_FLAGS = ("value-before-keys", "keys-shared", "engram-rows-zero", "engram-gate-form", "engram-gate-weights")


def cases(model: GoldenModel, traces: list[Trace], all_traces: list[Trace]) -> Iterator[Case]:
    """Layout from the configuration, hashes of every scenario's ids, the write on recorded streams."""
    if not model.config.engram_layer_ids:
        return
    yield Case(
        "engram/primes-multipliers-offsets/configuration",
        "smoke",
        "exact",
        "Fails when multipliers pass through a double, a prime is used twice, or columns are ordered by head.",
        "numerics.md 8",
        partial(_layout, model),
        flags=("multipliers-narrowed", "prime-used-twice", "offsets-over-layers", "engram-multipliers"),
        source=model.name,
    )
    groups = {
        "text": [trace for trace in all_traces if trace.image_mask is None],
        "image-barrier": [trace for trace in all_traces if trace.image_mask is not None],
    }
    mistakes = {
        "text": "ids are not compressed first, the pad is not, products are 32 bits wide, or the look-back is too long",
        "image-barrier": "the look-back passes an image token, or the image token itself is hashed",
    }
    for name, group in groups.items():
        if not group:
            continue
        yield Case(
            f"engram/hash/{name}",
            "smoke" if name == "text" else "core",
            "exact",
            f"Fails when {mistakes[name]}.",
            "numerics.md 8",
            partial(_hash, model, group),
            flags=HASH_FLAGS[name],
            source=f"{model.name}/{'+'.join(trace.name for trace in group)}",
        )
        group = [trace for trace in group if trace in traces]
        if group:
            yield Case(
                f"engram/write/{name}",
                "core",
                "composed",
                "Fails when the gate's sign or floor is missing, keys and value are swapped, or images are written.",
                "numerics.md 8",
                partial(_write, model, group),
                flags=("image-written",) if name == "image-barrier" else WRITE_FLAGS,
                source=f"{model.name}/{'+'.join(trace.name for trace in group)}",
            )


def _layout(model: GoldenModel) -> Iterator[Step]:
    def rules() -> list[Exact]:
        config = model.config
        multipliers = np.stack([rules_of.multipliers(config, layer) for layer in config.engram_layer_ids])
        return [
            Exact("multipliers", Tensor("I64", multipliers), ("engram layer", "shift")),
            Exact("primes", Tensor("I64", rules_of.primes(config)), ("engram layer", "n-gram", "head")),
            Exact("offsets", Tensor("I64", rules_of.offsets(config)), ("engram layer", "column")),
        ]

    yield Step(Call("engram_layout", {"config": model.mapping}), rules)


def _hash(model: GoldenModel, traces: list[Trace]) -> Iterator[Step]:
    for trace in traces:
        for layer in model.config.engram_layer_ids:
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "token_map": model.token_map,
                "input_ids": trace.input_ids,
                "image_mask": trace.mask_part(),
            }
            expected = trace.joined("engram_hash", layer)
            yield Step(
                Call("engram_hash", arguments),
                partial(_exact_hash, expected),
                trace.place(layer),
            )


def _exact_hash(expected: Tensor) -> list[Exact]:
    return [Exact("engram_hash", expected, ("request", "position", "column"))]


def _write(model: GoldenModel, traces: list[Trace]) -> Iterator[Step]:
    for trace in traces:
        for layer in model.config.engram_layer_ids:
            weights = model.layer(layer).within("engram.")
            h, rows = trace.joined("engram_in", layer), trace.joined("engram_hash", layer)
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "weights": weights.mapping(),
                "h": h,
                "rows": rows,
                "image_mask": trace.mask_part(),
            }

            def rules(trace: Trace = trace, layer: int = layer, h: Tensor = h, rows: Tensor = rows) -> list[Within]:
                weights = model.layer(layer).within("engram.")
                expected = rules_of.write(model.config, weights, exact(h), rows.data, trace.image_mask)
                axes = ("request", "position", "stream", "feature")
                return [Within("engram_out", expected, "BF16", axes, recorded=trace.joined("engram_out", layer))]

            yield Step(Call("engram_write", arguments), rules, trace.place(layer))
