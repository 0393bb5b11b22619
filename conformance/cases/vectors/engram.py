"""Hand-made vectors of `engram`: released layout, look-backs written out, the gate near zero (numerics.md 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.model import released_configuration
from conformance.cases.traces import exact
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG, MODEL
from conformance.config import ModelConfig
from conformance.formats import E8M0
from conformance.judge.components import engram as rules_of
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
STREAM_AXES = ("request", "position", "stream", "feature")

MULTIPLIERS: Mapping[int, Sequence[int]] = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
"""Released multipliers by layer, one a shift; the largest takes 47 bits, and its products with ids 63."""

PRIME_STEPS: Mapping[int, Sequence[Sequence[int]]] = {
    1: (
        (57, 79, 81, 97, 121, 129, 133, 183),
        (189, 207, 211, 253, 277, 289, 307, 321),
        (339, 381, 393, 399, 403, 409, 447, 463),
    ),
    14: (
        (477, 487, 499, 507, 511, 573, 609, 627),
        (667, 669, 693, 697, 711, 729, 759, 769),
        (781, 799, 813, 819, 841, 877, 879, 889),
    ),
}
"""Released moduli less 16,000,000, by layer, n-gram size and head."""

PRIMES = {layer: np.asarray(steps, np.int64) + 16_000_000 for layer, steps in PRIME_STEPS.items()}
ROW_TOTALS = {1: 384_006_168, 14: 384_016_682}
"""Rows of the released tables: the sums of the moduli."""

VOCABULARY, COMPRESSED, PAD_TOKEN = 129_280, 99_092, 2


def offsets(layer: int) -> Ints:
    """First row of each column: the running sum of the moduli before it."""
    flat = PRIMES[layer].reshape(-1)
    return np.cumsum(flat) - flat


def token_map() -> Ints:
    """A map that sends token t to the compressed id 7 t + 6, so that no token keeps its number: token 2 becomes 20."""
    return (np.arange(VOCABULARY) * 7 + 6) % COMPRESSED


LARGEST_ID_TOKEN = 14_155
"""The token whose compressed id is the largest: 7 x 14,155 + 6 = 99,091."""

Names = Sequence[str]
TOKENS: Mapping[str, int] = {
    "a": 5,
    "b": LARGEST_ID_TOKEN,
    "c": 129_279,
    "d": 0,
    "e": 77_777,
    "f": 31_415,
    "g": PAD_TOKEN,
    "I": 129_264,
}
"""Token ids by the names used below; I is an image token, g the pad token in the text."""


@dataclass(frozen=True)
class LookBack:
    """A text and, position by position, the four tokens that are hashed there, newest first; `-` is the pad."""

    name: str
    why: str
    flags: tuple[str, ...]
    text: str
    hashed: Names
    images: bool = False


LOOK_BACKS = (
    LookBack(
        "first-positions",
        "Fails when what is missing before the first token is 0, the token 2 itself, or the first token again.",
        (
            "pad-not-compressed",
            "look-back-too-short",
            "ids-not-compressed",
            "engram-start",
            "engram-column-order",
            "engram-modulo",
        ),
        "abcdef",
        ("a---", "ba--", "cba-", "dcba", "edcb", "fedc"),
    ),
    LookBack(
        "products-beyond-32-bits",
        "Fails when products are 32 bits wide, pass through a double, or are added instead of combined by xor.",
        ("hash-32-bit", "hash-through-double", "hash-added", "multiplier-order"),
        "bbbbcbcb",
        ("b---", "bb--", "bbb-", "bbbb", "cbbb", "bcbb", "cbcb", "bcbc"),
    ),
    LookBack(
        "pad-token-in-text",
        "Fails when a pad token in the text is taken for an absent one, or stops the look-back.",
        ("pad-token-stops",),
        "agbgc",
        ("a---", "ga--", "bga-", "gbga", "cgbg"),
    ),
    LookBack(
        "image-token-stops-for-good",
        "Fails when the look-back passes an image token, resumes behind it, or the image token itself is hashed.",
        ("image-not-a-barrier", "barrier-not-for-good", "image-token-hashed"),
        "abIcdef",
        ("a---", "ba--", "----", "c---", "dc--", "edc-", "fedc"),
        images=True,
    ),
    LookBack(
        "image-span-at-start-and-end",
        "Fails when a span of several images resets only at its first token.",
        ("image-not-a-barrier", "image-token-hashed"),
        "IIabIIIc",
        ("----", "----", "a---", "ba--", "----", "----", "----", "c---"),
        images=True,
    ),
)


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    yield Case(
        "engram/layout/released",
        "core",
        "exact",
        "Fails when a multiplier of 47 bits is cut to 32, a prime is used twice, or the search restarts elsewhere.",
        "numerics.md 8",
        _layout,
        flags=(
            "multipliers-narrowed",
            "prime-used-twice",
            "offsets-over-layers",
            "engram-multipliers",
            "engram-offsets",
        ),
        source="released configuration",
    )
    yield Case(
        "engram/layout/table-size-prime",
        "core",
        "exact",
        "Fails when the search for primes leaves out a table size that is a prime itself, or begins below it.",
        "numerics.md 8",
        _prime_table,
        flags=("prime-search-not-restarted",),
        source="hand-made",
    )
    for vector in LOOK_BACKS:
        yield Case(
            f"engram/look-back/{vector.name}",
            "core",
            "exact",
            vector.why,
            "numerics.md 8",
            partial(_hashed, vector),
            flags=vector.flags,
            source="hand-made",
        )
    yield Case(
        "engram/look-back/requests-of-a-batch",
        "core",
        "exact",
        "Fails when a request looks back into the one before it, or both share one image mask.",
        "numerics.md 8",
        _batch,
        flags=("requests-mixed", "image-not-a-barrier"),
        source="hand-made",
    )
    yield Case(
        "engram/gate/dot-near-zero",
        "core",
        "composed",
        "Fails when the gate lacks the floor of 1e-6 under the root or the sign before it, or zero has a sign.",
        "numerics.md 8",
        _gate,
        flags=(
            "gate-floor-missing",
            "gate-sign-missing",
            "gate-zero-signed",
            "gate-root-missing",
            "norm-eps",
            "engram-gate-in-bf16",
        ),
        source="hand-made",
    )
    yield Case(
        "engram/write/zero-rows",
        "core",
        "composed",
        "Fails when rows of zeros give NaN, for want of an epsilon, or change the residual.",
        "numerics.md 8",
        partial(_write, True),
        flags=("engram-eps-missing",),
        source="hand-made",
    )
    yield Case(
        "engram/write/keys-then-value",
        "core",
        "composed",
        "Fails when nothing is written, the value is read before the keys, streams share a key, or images are written.",
        "numerics.md 8",
        partial(_write, False),
        flags=(
            "engram-rows-zero",
            "value-before-keys",
            "keys-shared",
            "image-written",
            "engram-norm-over-streams",
            "engram-gate-form",
            "engram-gate-norm",
            "engram-gate-weights",
            "engram-write",
            "scale-layout",
            "bf16-truncated",
        ),
        source="hand-made",
    )


def _layout() -> Iterator[Step]:
    rules = [
        Exact("multipliers", Tensor("I64", np.asarray(list(MULTIPLIERS.values()), np.int64)), ("layer", "shift")),
        Exact("primes", Tensor("I64", np.stack(list(PRIMES.values()))), ("layer", "n-gram", "head")),
        Exact("offsets", Tensor("I64", np.stack([offsets(layer) for layer in PRIMES])), ("layer", "column")),
    ]
    yield Step(Call("engram_layout", {"config": released_configuration()}), lambda: rules)


def _prime_table() -> Iterator[Step]:
    """Tables of 101 rows or more: 101 is the first modulus, and no later one is used twice; of 102, it is too small."""
    from_101 = [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157]
    for size, primes in ((101, from_101), (102, [*from_101[1:], 163])):
        expected = np.asarray(primes, np.int64).reshape(2, 3, 2)
        rule = Exact("primes", Tensor("I64", expected), ("layer", "n-gram", "head"))
        yield Step(Call("engram_layout", {"config": {**CONFIG, "engram_vocab_size": size}}), partial(_one, rule))


def rows_by_hand(layer: int, hashed: Names) -> Ints:
    """Table rows [T,24] of look-backs, in whole numbers of any size: h xor id times multiplier, modulo each prime."""
    compressed = token_map()
    result = []
    for names in hashed:
        ids = [int(compressed[PAD_TOKEN if name == "-" else TOKENS[name]]) for name in names]
        products = [number * factor for number, factor in zip(ids, MULTIPLIERS[layer], strict=True)]
        mixed, columns = products[0], []
        for primes, product in zip(PRIMES[layer], products[1:], strict=True):
            mixed ^= product
            columns += [mixed % int(prime) for prime in primes]
        result.append(columns)
    return np.asarray(result, np.int64) + offsets(layer)


def _hashed(vector: LookBack) -> Iterator[Step]:
    yield from _ask([vector.text], [vector.hashed], vector.images)


def _batch() -> Iterator[Step]:
    first, second = LOOK_BACKS[3], "cdebIfa"
    hashed = ("c---", "dc--", "edc-", "bedc", "----", "f---", "af--")
    yield from _ask([first.text, second], [first.hashed, hashed], True)


def _ask(texts: Sequence[str], hashed: Sequence[Names], images: bool) -> Iterator[Step]:
    ids = np.asarray([[TOKENS[name] for name in text] for text in texts])
    mask = np.asarray([[name == "I" for name in text] for text in texts])
    for layer in MULTIPLIERS:
        arguments = {
            "config": released_configuration(),
            "layer_id": layer,
            "token_map": Tensor("I32", token_map().astype(np.int32)),
            "input_ids": Tensor("I32", ids.astype(np.int32)),
            "image_mask": Tensor("BOOL", mask) if images else None,
        }
        expected = Tensor("I64", np.stack([rows_by_hand(layer, names) for names in hashed]))
        rule = Exact("engram_hash", expected, ("request", "position", "column"))
        yield Step(Call("engram_hash", arguments), partial(_one, rule), Place(layer, [" ".join(texts)]))


def _one(rule: Expectation) -> list[Expectation]:
    return [rule]


LAYER = MODEL.engram_layer_ids[0]
TWO_SCALES: Mapping[str, Any] = {**CONFIG, "engram_head_dim": 64}
"""Table rows of 64 features have two scales each."""
WIDE = ModelConfig.from_mapping(TWO_SCALES, "conformance/cases/vectors/engram.py")


def _asked_write(
    weights: Parameters, h: Tensor, rows: Ints, mask: npt.NDArray[np.bool_] | None, place: Place
) -> Iterator[Step]:
    arguments: dict[str, Any] = {
        "config": TWO_SCALES,
        "layer_id": LAYER,
        "weights": weights.mapping(),
        "h": h,
        "rows": Tensor("I64", rows),
        "image_mask": None if mask is None else Tensor("BOOL", mask),
    }

    def rules() -> list[Expectation]:
        expected = rules_of.write(WIDE, weights, exact(h), rows, mask)
        return [Within("engram_out", expected, "BF16", STREAM_AXES)]

    yield Step(Call("engram_write", arguments), rules, place)


def _gate() -> Iterator[Step]:
    """Streams whose dot product with the key is 0, 1e-8, -1e-8 and about -7.

    The table's row is one in its first feature, the key one in its first feature, the value two everywhere.  The
    residual is 2^-8 and a little: 1 + 2^-8 lies half way between two bf16 numbers, so whether h + gate x 2 is rounded
    up tells, over features that step through that little, the gate to five digits.
    """
    width, streams = MODEL.dim, MODEL.hc_mult
    tensors = made.engram(WIDE, LAYER)
    table = np.zeros(tensors["embed.weight"].shape)
    table[0, 0] = 1.0
    projection = np.zeros(tensors["wkv.weight"].shape)
    projection[np.arange(streams) * width, 0] = 1.0
    projection[streams * width :, 0] = 2.0
    ones = Tensor.from_values(np.ones((streams, width)), "BF16")
    weights = made.parameters(
        {
            "embed.weight": Tensor.from_values(table, "F8_E4M3"),
            "embed.scale": _unit_scales(tensors["embed.scale"].shape),
            "wkv.weight": Tensor.from_values(projection, "F8_E4M3"),
            "wkv.scale": _unit_scales(tensors["wkv.scale"].shape),
            "q_weight": ones,
            "k_weight": ones,
        }
    )
    rows = np.full((1, 1, MODEL.engram_columns), 1)
    rows[..., 0] = 0
    h = np.zeros((1, 1, streams, width))
    h[...] = 2.0**-8 + np.linspace(-8e-4, 8e-4, width)
    root = float(np.sqrt((h[0, 0, 0] ** 2).mean()))
    h[0, 0, :, 0] = [0.0, 1e-8 * root, -1e-8 * root, -0.05]
    yield from _asked_write(weights, Tensor.from_values(h, "BF16"), rows, None, Place(LAYER))


def _unit_scales(shape: tuple[int, ...]) -> Tensor:
    return Tensor("F8_E8M0", E8M0.encode(np.ones(shape)).astype(np.uint8))


def _write(zero: bool) -> Iterator[Step]:
    """Two requests; an image token stands in the second one."""
    tensors = made.engram(WIDE, LAYER)
    weights = made.parameters(made.with_zeros(tensors, "embed.weight") if zero else tensors)
    h = made.bf16("engram.h", 2, 3, MODEL.hc_mult, MODEL.dim)
    rows = np.arange(2 * 3 * MODEL.engram_columns).reshape(2, 3, -1) * 17 % MODEL.engram_num_embeddings[0]
    mask = np.asarray([[False, False, False], [False, True, False]])
    yield from _asked_write(weights, h, rows, mask, Place(LAYER, ["with an image token"]))
    yield from _asked_write(weights, h, rows, None, Place(LAYER, ["text"]))
