"""Engram at the released sizes: primes near 16 million, hashes of the real vocabulary, one write at full width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.released_set import Released
from conformance.cases.traces import Bools, boolean, exact
from conformance.judge.components import engram as rules_of
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

WRITE_SHAPE = (1, 16, 4, 5120)
WRITE_LAYER = 1


def cases(released: Released, stem: str) -> Iterator[Case]:
    """Layout, hashes with and without an image, the write."""
    source = f"{released.name}/{stem}"
    yield Case(
        "engram/primes-multipliers-offsets/released",
        "core",
        "exact",
        "Fails when multipliers pass through a double or a prime is used twice: rows 384,006,168 and 384,016,682.",
        "numerics.md 8",
        partial(_layout, released, stem),
        source=source,
    )
    for name, why in {
        "text": "the vocabulary map is another tokenizer's, or products are 32 bits wide",
        "image-barrier": "the look-back passes an image token, or the image token itself is hashed",
    }.items():
        yield Case(
            f"engram/hash/released-vocabulary-{name}",
            "core",
            "exact",
            f"Fails when {why}.",
            "numerics.md 8",
            partial(_hash, released, stem, name == "image-barrier"),
            source=source,
        )
    yield Case(
        "engram/write/released-width",
        "full",
        "composed",
        "Fails when the 24 fetched rows are joined in another order, or the gate's mean runs over one stream's part.",
        "numerics.md 8",
        partial(_write, released, stem),
        source=source,
    )


def _layout(released: Released, stem: str) -> Iterator[Step]:
    recorded = released.part(stem)
    axes = {
        "multipliers": ("engram layer", "shift"),
        "primes": ("engram layer", "n-gram", "head"),
        "offsets": ("engram layer", "column"),
    }

    def rules() -> list[Exact]:
        return [Exact(tap, recorded[tap], names) for tap, names in axes.items()]

    yield Step(Call("engram_layout", {"config": released.mapping}), rules)


def _image_mask(released: Released, stem: str) -> Bools:
    """The recording marks text tokens; the suite marks image tokens."""
    mask: Bools = ~released.part(stem)["token_mask"].data
    return mask


def _hash(released: Released, stem: str, masked: bool) -> Iterator[Step]:
    recorded = released.part(stem)
    for place, layer in enumerate(released.config.engram_layer_ids):
        expected = recorded["hash_masked" if masked else "hash_plain"][:, :, place]
        arguments = {
            "config": released.mapping,
            "layer_id": layer,
            "token_map": recorded["token_map"],
            "input_ids": recorded["input_ids"],
            "image_mask": boolean(_image_mask(released, stem)) if masked else None,
        }
        rule = Exact("engram_hash", expected, ("request", "position", "column"))
        positions = range(expected.shape[1])
        yield Step(Call("engram_hash", arguments), lambda rule=rule: [rule], Place(layer, [], positions))  # type: ignore[misc]


def _write(released: Released, stem: str) -> Iterator[Step]:
    """The implementation gets a table of just the rows that are read, renumbered: the whole one has 98 GB."""
    recorded, place = released.part(stem), released.config.engram_layer_ids.index(WRITE_LAYER)
    h, length = released.input("x/engram", WRITE_SHAPE), WRITE_SHAPE[1]
    rows = recorded["hash_masked"].data[:, :length, place]
    mask = _image_mask(released, stem)[:, :length]
    weights = released.parameters.within(f"layers.{WRITE_LAYER}.engram.")
    touched, renumbered = np.unique(rows, return_inverse=True)
    cut = {name: weights.rows(name, touched) for name in ("embed.weight", "embed.scale")}
    others = ("wkv.weight", "wkv.scale", "q_weight", "k_weight")
    arguments = {
        "config": {**released.mapping, "engram_num_embeddings": [len(touched)] * 2},
        "layer_id": WRITE_LAYER,
        "weights": cut | {name: weights.tensor(name) for name in others},
        "h": h,
        "rows": Tensor("I64", renumbered.reshape(rows.shape).astype(np.int64)),
        "image_mask": boolean(mask),
    }

    def rules() -> list[Within]:
        expected = rules_of.write(released.config, weights, exact(h), rows, mask)
        axes = ("request", "position", "stream", "feature")
        return [Within("engram_out", expected, "BF16", axes, recorded=recorded["write_out"])]

    yield Step(Call("engram_write", arguments), rules, Place(WRITE_LAYER, [], range(length)))
