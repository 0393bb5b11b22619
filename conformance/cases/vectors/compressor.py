"""Hand-made vectors of `compressor`: groups, the carry, pooling, and the rows that are cached (numerics.md 6.2).

The projections pick features of the input, so that a token's kv and gate can be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Advance, Call, Case, Open, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG
from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components import compressor as rules_of
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Expectation, NoRows, Within
from conformance.tensors import Tensor

ROW_AXES = ("request", "group", "feature")
WIDTH = 32
DIM = 2 * WIDTH
RATIOS: Mapping[str, Any] = {
    **CONFIG,
    "dim": DIM,
    "head_dim": WIDTH,
    "rope_head_dim": 16,
    "n_layers": 3,
    "compress_ratios": [4, 2, 1],
    "kv_source_layers": [0, 1, 2],
    "index_source_layers": [0, 1, 2],
    "candidate_source_layer": 2,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
}
MODEL = ModelConfig.from_mapping(RATIOS, "conformance/cases/vectors/compressor.py")
LAYERS = {4: 0, 2: 1, 1: 2}
"""The layer of each ratio; 4 is a ratio of an earlier model, and shows what 2 cannot tell apart."""

Calls = Sequence[tuple[Sequence[int], int]]
"""Calls as (start position of each request, length)."""


@dataclass(frozen=True)
class Schedule:
    """A way to hand a sequence of tokens over, and the mistake that it shows."""

    why: str
    flags: tuple[str, ...]
    calls: Mapping[int, Calls]
    """By ratio."""


SCHEDULES: Mapping[str, Schedule] = {
    "one-less-than-a-group": Schedule(
        "Fails when a row comes out before its group is complete.",
        ("row-too-early",),
        {2: [([0], 1)], 4: [([0], 3)]},
    ),
    "exactly-one-group": Schedule(
        "Fails when the first row is missing or holds zeros or NaN.",
        (
            "first-row-missing",
            "pool-rounding",
            "compressor-norm",
            "compressor-weights-swapped",
            "bf16-truncated",
        ),
        {2: [([0], 2)], 4: [([0], 4)]},
    ),
    "one-more-than-a-group": Schedule(
        "Fails when the leftover token is pooled as a group of its own.",
        ("row-too-early",),
        {2: [([0], 3)], 4: [([0], 5)]},
    ),
    "leftover-then-steps": Schedule(
        "Fails when a prompt's leftover tokens are lost, or wait in another slot of the carry.",
        ("leftover-lost", "carry-slot-wrong"),
        {
            2: [([0], 5), ([5], 1), ([6], 1), ([7], 1)],
            4: [([0], 6), ([6], 1), ([7], 1), ([8], 1), ([9], 1), ([10], 1), ([11], 1)],
        },
    ),
    "steps-from-the-first-token": Schedule(
        "Fails when a completed group's tokens are pooled again, or the carry is not rotated.",
        ("leftover-lost", "carry-slot-wrong", "row-too-early"),
        {2: [([p], 1) for p in range(6)], 4: [([p], 1) for p in range(9)]},
    ),
    "second-request-of-one-token": Schedule(
        "Fails when a new request pools what the one before it left in the carry.",
        ("carry-survives-request",),
        {
            2: [([0], 5), ([0], 1), ([1], 1)],
            4: [([0], 7), ([0], 1), ([1], 1), ([2], 1), ([3], 1)],
        },
    ),
    "requests-at-different-positions": Schedule(
        "Fails when one request's position decides for the whole batch which groups are complete.",
        ("requests-mixed",),
        {
            2: [([0, 0], 5), ([5, 0], 1), ([6, 1], 1), ([7, 2], 1)],
            4: [([0, 0], 6), ([6, 0], 1), ([7, 1], 1), ([8, 2], 1), ([9, 3], 1)],
        },
    ),
    "sixteen-groups-or-more": Schedule(
        "Fails when kv, the gate or the weights are rounded to bf16 before they are pooled.",
        ("pooled-in-bf16", "gate-in-bf16"),
        {2: [([0], 64)], 4: [([0], 64)]},
    ),
    "continued-in-pieces": Schedule(
        "Fails when a piece that does not end with a group loses one, repeats one, or pools it from the piece alone.",
        ("chunk-mid-group", "leftover-lost"),
        {
            2: [([0], 3), ([3], 4), ([7], 1), ([8], 3)],
            4: [([0], 3), ([3], 4), ([7], 2), ([9], 3)],
        },
    ),
}


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    for name, schedule in SCHEDULES.items():
        for ratio, calls in schedule.calls.items():
            yield Case(
                f"compressor/groups-ratio-{ratio}/{name}",
                "core",
                "composed",
                schedule.why,
                "numerics.md 6.2",
                partial(_scheduled, ratio, calls),
                flags=schedule.flags,
                source="hand-made",
            )
    for name, (why, flags, tokens) in POOLED.items():
        yield Case(
            f"compressor/pooling/{name}",
            "core",
            "composed",
            why,
            "numerics.md 6.2",
            partial(_pooled, tokens),
            flags=flags,
            source="hand-made",
        )
    yield Case(
        "compressor/ratio-1/no-gate-and-bf16",
        "core",
        "composed",
        "Fails when a ratio-1 layer pools, waits for a second token, or keeps its projection in fp32.",
        "numerics.md 6.2",
        _ratio_one,
        flags=("ratio-1-gated", "projection-not-rounded"),
        source="hand-made",
    )
    yield Case(
        "compressor/row-position/given-positions",
        "core",
        "composed",
        "Fails when rows are turned by their number in the call instead of the position of their first token.",
        "numerics.md 4 and 6.2",
        partial(_rows, [[10], [4094]]),
        flags=("compressed-rotation",),
        source="hand-made",
    )
    yield Case(
        "compressor/row-scale-format/small-and-uneven-groups",
        "core",
        "composed",
        "Fails when rows are quantised like index keys, with a power of two per 32, or their rotary part is not.",
        "numerics.md 2 and 6.2",
        partial(_rows, [[0, 2, 4, 6], [8, 10, 12, 14]]),
        flags=(
            "rotary-part-not-quantised",
            "quantised-before-rotation",
            "compressed-not-quantised",
        ),
        source="hand-made",
    )


def _picking(layer: int) -> Parameters:
    """kv is the first half of a token's features and the gate the second, each as it is."""
    kv, gate = np.zeros((WIDTH, DIM)), np.zeros((WIDTH, DIM))
    kv[:, :WIDTH] = gate[:, WIDTH:] = np.eye(WIDTH)
    kind = "BF16" if MODEL.ratio(layer) == 1 else "F32"
    tensors = {
        **made.attention(MODEL, layer),
        "compressor.wkv.weight": Tensor.from_values(kv, kind),
        "compressor.norm.weight": Tensor.from_values(np.ones(WIDTH), "BF16"),
    }
    if MODEL.ratio(layer) > 1:
        tensors["compressor.wgate.weight"] = Tensor.from_values(gate, kind)
    return made.parameters(tensors)


def _scheduled(ratio: int, calls: Calls) -> Iterator[Step]:
    layer = LAYERS[ratio]
    yield from _stepped(layer, made.parameters(made.attention(MODEL, layer)), _tokens(ratio, calls), calls)


def _tokens(ratio: int, calls: Calls) -> list[list[Floats]]:
    """Input of each call and request [T,D]; a request that begins again has new tokens."""
    batch = len(calls[0][0])
    return [
        [
            Tensor.from_values(made.normal(f"compressor.{ratio}.{call}.{request}", length, DIM), "BF16").values()
            for request in range(batch)
        ]
        for call, (_, length) in enumerate(calls)
    ]


def _stepped(layer: int, weights: Parameters, tokens: list[list[Floats]], calls: Calls) -> Iterator[Step]:
    """Step a compressor; what each call completes is bounded from all tokens of the request so far."""
    ratio, batch = MODEL.ratio(layer), len(calls[0][0])
    arguments = {"config": RATIOS, "layer_id": layer, "weights": weights.mapping(), "batch_size": batch}
    yield Step(Open("compressor", "compressor", arguments), place=Place(layer))
    seen: list[Floats] = [np.zeros((0, DIM))] * batch
    for number, (starts, length) in enumerate(calls):
        seen = [
            np.concatenate([old[:start], new]) for old, start, new in zip(seen, starts, tokens[number], strict=True)
        ]
        inputs = {
            "x": Tensor.from_values(np.stack(tokens[number]), "BF16"),
            "start_pos": Tensor("I64", np.asarray(starts, np.int64)),
        }
        done = [slice(start // ratio, (start + length) // ratio) for start in starts]
        place = Place(layer, [f"{number} at {list(starts)}"])
        if all(part.start == part.stop for part in done):
            yield Step(Advance("compressor", inputs), lambda: [NoRows("latent")], place)
            continue
        yield Step(Advance("compressor", inputs), partial(_latents, layer, weights, list(seen), done), place)


def _latents(layer: int, weights: Parameters, seen: list[Floats], done: list[slice]) -> list[Expectation]:
    """Rows that a call completes; what a request lacks to the largest number of rows is not judged."""
    count = max(part.stop - part.start for part in done)
    value = np.zeros((len(seen), count, WIDTH))
    error = np.full_like(value, np.inf)
    for request, (x, part) in enumerate(zip(seen, done, strict=True)):
        rows = rules_of.latents(MODEL, layer, weights, exact(Tensor.from_values(x[None], "BF16")))[0, part]
        value[request, : rows.shape[0]], error[request, : rows.shape[0]] = rows.value, rows.error
    return [Within("latent", Bounded(value, error), "BF16", ROW_AXES)]


def _pooled(tokens: Callable[[], Floats]) -> Iterator[Step]:
    """One prompt through a ratio-2 compressor whose kv and gate are the halves of each token."""
    x = tokens()
    yield from _stepped(LAYERS[2], _picking(LAYERS[2]), [[x]], [([0], len(x))])


def _with_gates(gates: npt.ArrayLike) -> Floats:
    """Normal kv with gates [T,d]."""
    gate = np.broadcast_to(np.asarray(gates, np.float64), (np.shape(gates)[0], WIDTH))
    kv = made.normal("compressor.pooling", len(gate), WIDTH)
    return Tensor.from_values(np.concatenate([kv, gate], 1), "BF16").values()


def _equal_gates() -> Floats:
    return _with_gates(np.full((4, 1), 3.0))


def _one_dominant() -> Floats:
    """Every second feature is decided by the first token of a group, the others by the second."""
    gates = np.zeros((4, WIDTH))
    gates[0, 0::2] = gates[1, 1::2] = gates[2, 1::2] = gates[3, 0::2] = 30.0
    # Half of them by less: over the features of a row, these would not count.
    gates[:, WIDTH // 2 :] /= 2
    return _with_gates(gates)


def _large_gates() -> Floats:
    """exp(90) overflows fp32: the softmax must subtract the group's maximum."""
    return _with_gates([[90.0], [89.0], [-90.0], [-89.5]])


POOLED: Mapping[str, tuple[str, tuple[str, ...], Callable[[], Floats]]] = {
    "equal-gates": (
        "Fails when the two tokens of a group are added instead of averaged, or only one of them counts.",
        ("gate-not-normalised",),
        _equal_gates,
    ),
    "one-gate-dominates": (
        "Fails when the softmax is taken over the features of a row instead of the tokens of a group.",
        (
            "softmax-over-features",
            "gate-not-normalised",
            "gate-order-swapped",
            "pool-gate-ignored",
        ),
        _one_dominant,
    ),
    "gates-beyond-exp": (
        "Fails when the softmax does not subtract the group's maximum, and overflows.",
        ("gate-overflows",),
        _large_gates,
    ),
}


def _ratio_one() -> Iterator[Step]:
    """Prompt of three, then steps: every token is a row of its own."""
    layer, calls = LAYERS[1], [([0], 3), ([3], 1), ([4], 1)]
    yield from _stepped(layer, made.parameters(made.attention(MODEL, layer)), _tokens(1, calls), calls)


def _rows(positions: list[list[int]]) -> Iterator[Step]:
    """Latents whose groups of 16 have maxima from 2^-12 up to 8, in both layers that rotate."""
    first = np.asarray(positions)
    sizes = 2.0 ** np.repeat([3.0, -12.0], WIDTH // 2)
    values = made.normal("compressor.rows", *first.shape, WIDTH) * sizes
    latent = Tensor.from_values(np.where(first[..., None] % 4 == 0, values, values[..., ::-1]), "BF16")
    for layer in (LAYERS[4], LAYERS[2], LAYERS[1]):
        arguments = {"config": RATIOS, "layer_id": layer, "latent": latent, "positions": int64(first)}

        def rules(layer: int = layer) -> list[Expectation]:
            expected = rules_of.compressed_rows(MODEL, layer, exact(latent), first)
            return [Within("compressed_rows", expected, "BF16", ROW_AXES)]

        yield Step(Call("compressed_rows", arguments), rules, Place(layer))
