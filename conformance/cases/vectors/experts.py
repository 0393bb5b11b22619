"""Hand-made vectors of the experts (numerics.md 7).

The experts here copy: `w1` hands on the features as they are, `w3` the features 32 places further, `w2` the first half
of the hidden values.  So a feature's gate and up value can be set one by one and its result read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.vectors import weights as random_weights
from conformance.cases.vectors.configuration import CONFIG, MODEL
from conformance.cases.vectors.lattice import exact_product, integers
from conformance.formats import BF16, E2M1, pack_fp4
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.experts import combined, expert
from conformance.judge.components.linear import Parameters, lattice_holds
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

AXES = ("token", "feature")
HALF = 32
ROUTED, ACTIVE, WIDTH = MODEL.n_routed_experts, MODEL.n_activated_experts, MODEL.dim
E8M0_BIAS = 127
SILU_OF_10 = 10 / (1 + np.exp(-10.0))


def copying_expert(kind: str, exponent: int) -> dict[str, Tensor]:
    """FP4 ("routed") or FP8 ("shared") matrices that copy; `w2` carries a factor 2^exponent in its scales."""
    eye = np.eye(WIDTH)
    matrices = {
        "w1": (eye, 0),
        "w3": (np.roll(eye, HALF, axis=1), 0),
        "w2": (eye * (np.arange(WIDTH) < HALF), exponent),
    }
    tensors: dict[str, Tensor] = {}
    for name, (values, power) in matrices.items():
        if kind == "routed":
            tensors[f"{name}.weight"] = Tensor("U8", pack_fp4(E2M1.encode(values)))
            shape = (WIDTH, WIDTH // 32)
        else:
            tensors[f"{name}.weight"] = Tensor.from_values(values, "F8_E4M3")
            shape = (WIDTH // 32, WIDTH // 32)
        tensors[f"{name}.scale"] = Tensor("F8_E8M0", np.full(shape, E8M0_BIAS + power, dtype=np.uint8))
    return tensors


def pairs(gates: Floats, ups: Floats) -> Floats:
    """Tokens [N, 64] from gate and up values [N, n], n up to 32; the rest is zero."""
    x = np.zeros((len(gates), WIDTH))
    x[:, : gates.shape[1]], x[:, HALF : HALF + ups.shape[1]] = gates, ups
    return x


EDGES = np.array([-30.0, -11.0, -10.0, -9.0, 9.0, 10.0, 11.0, 30.0])
"""Numbers of E4M3 under the scale that a maximum of 30 gives."""


def clamp_edges() -> Floats:
    """Every edge value of the gate, a token each, beside every edge value of the up projection."""
    return pairs(np.repeat(EDGES[:, None], EDGES.size, axis=1), np.tile(EDGES, (EDGES.size, 1)))


def beyond_the_limit() -> Floats:
    """Gates at and beyond the limit, ups that are powers of two."""
    return pairs(np.array([[30.0, 10.0, 16.0, 11.0, 10.0, 30.0]]), np.array([[1.0, 1.0, 2.0, -1.0, -4.0, 4.0]]))


def small_values() -> Floats:
    """Gates and ups of four significant bits below the limit, so that the product decides the quantiser's codes."""
    return pairs(integers(71, (6, HALF), 15) / 4, integers(72, (6, HALF), 15) / 2)


@dataclass(frozen=True)
class Single:
    """One copying expert on tokens [N, 64]."""

    variant: str
    why: str
    flags: tuple[str, ...]
    kind: str
    x: Callable[[], Floats]
    routing_weight: tuple[float, ...] | None = None
    """Repeated over the tokens."""


SINGLES = (
    Single(
        "gate-and-up-clamps/routed",
        "Fails when the gate is clamped from below, a clamp is missing, or comes after the activation.",
        ("expert-clamp", "expert-weights-swapped", "expert-activation"),
        "routed",
        clamp_edges,
        (1.0,),
    ),
    Single(
        "gate-and-up-clamps/shared",
        "Fails when the shared expert is not clamped as the routed ones are.",
        ("expert-clamp", "expert-weights-swapped", "expert-activation"),
        "shared",
        clamp_edges,
    ),
    Single(
        "clamp-before-activation/routed",
        "Fails when silu is taken first and then limited: it is 10 then and not silu(10) = 9.99955.",
        ("expert-clamp",),
        "routed",
        beyond_the_limit,
        # 10 times this is 17.063, which goes to 17.125 in bf16 and to 18 in E4M3; 9.99955 times it goes to 17 and 16.
        (1.7063,),
    ),
    Single(
        "routing-weight-before-quantiser/uneven-weights",
        "Fails when the routing weight multiplies the result: the second quantiser's codes are then others.",
        (
            "routing-weight-late",
            "routing-weight-ignored",
            "routing-weight-in-bf16",
            "expert-rounded-early",
            "bf16-truncated",
        ),
        "routed",
        small_values,
        (0.7, 1.3, 0.0390625, 0.9999, 0.123456789, 1.5),
    ),
    Single(
        "no-routing-weight/shared",
        "Fails when the activation is another one or is rounded before the product.",
        ("expert-activation", "expert-rounded-early", "bf16-truncated"),
        "shared",
        small_values,
    ),
)


@dataclass(frozen=True)
class Sum:
    """Copying experts of which each token hears some, on a lattice: every order of the sum gives the same bits.

    All gates are 10 and the routing weights are 1/silu(10) times `amounts`, so that hidden values are whole numbers.
    """

    variant: str
    why: str
    flags: tuple[str, ...]
    exponents: tuple[int, ...]
    """Of each routed expert's factor."""
    shared_exponent: int
    ups: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]
    amounts: tuple[tuple[float, ...], ...]


SUMS = (
    Sum(
        "large-and-small-parts",
        "Fails when the running sum over experts is kept in bf16, or is rounded before the shared expert is added.",
        (
            "bf16-accumulator",
            "experts-rounded-early",
            "bf16-truncated",
            "shared-expert-missing",
            "shared-expert-scaled",
        ),
        # 256 + 1 + 5 for an up value of 8: bf16 holds even numbers there, so 257 is lost and 262 is not.
        (5, -3, 5, -3, 4, -2, 5, -3),
        -4,
        (8, -8, 4, -4, 2, 1, 6, -6),
        ((0, 1), (3, 2), (4, 5), (7, 6)),
        ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),
    ),
    Sum(
        "cancelling-parts",
        "Fails when routed experts that cancel leave rounding errors where the shared expert alone must stand.",
        ("bf16-accumulator", "expert-dropped", "shared-expert-missing", "shared-expert-scaled"),
        (6, 6, 5, 5, 4, 4, 3, 3),
        -6,
        (8, -8, 7, 5, 3, 1, -1, 2),
        ((0, 1), (2, 3), (5, 4), (7, 6)),
        ((1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (0.5, -0.5)),
    ),
    Sum(
        "one-factor-per-expert",
        "Fails when an expert number is off by one, weights and experts are paired wrongly, or an expert is left out.",
        ("expert-number", "gate-weights-misplaced", "expert-dropped", "routing-weight-ignored", "scale-layout"),
        (0, 1, 2, 3, 4, 5, 6, 7),
        0,
        (8, 1, -2, 4, -6),
        ((0, 7), (7, 0), (1, 6), (5, 2), (3, 4), (6, 1)),
        ((1.0, 0.25), (1.0, 0.25), (0.5, 1.0), (1.0, 0.5), (0.25, 2.0), (1.0, 0.5)),
    ),
    Sum(
        "two-experts-for-all-tokens",
        "Fails when experts without tokens disturb the rest, or an expert's tokens beyond the first are lost.",
        ("expert-tokens-lost", "expert-number"),
        (0, 1, 2, 3, 4, 5, 6, 7),
        0,
        (8, 1, -2, 4),
        ((6, 3),) * 40,
        ((1.0, 0.5),) * 40,
    ),
    Sum(
        "one-token",
        "Fails when a single token takes another path than many.",
        ("expert-number", "expert-tokens-lost"),
        (0, 1, 2, 3, 4, 5, 6, 7),
        0,
        (8, 1, -2, 4),
        ((7, 2),),
        ((1.0, 0.5),),
    ),
)


def cases() -> Iterator[Case]:
    """Sums on a lattice, single experts, and a mixture with weights of no structure."""
    for given in SUMS:
        yield Case(
            f"experts/lattice-sum/{given.variant}",
            "core",
            "exact",
            given.why,
            "numerics.md 7",
            partial(_sum_steps, given),
            given.flags,
            "lattice",
        )
    for single in SINGLES:
        yield Case(
            f"experts/{single.variant}",
            "core",
            "composed",
            single.why,
            "numerics.md 7",
            partial(_single_steps, single),
            single.flags,
            "hand-made",
        )
    yield Case(
        "experts/random-weights/every-expert-in-turn",
        "core",
        "composed",
        "Fails when a scale is misplaced, an input is not quantised, or weights and experts are paired wrongly.",
        "numerics.md 7",
        _random_steps,
        ("scale-layout", "nibble-order", "gate-weights-misplaced", "expert-number", "bf16-truncated"),
        "hand-made",
    )


def _single_steps(single: Single) -> Iterator[Step]:
    weights = Parameters(copying_expert(single.kind, 0))
    x = Tensor.from_values(single.x(), "BF16")
    routing = None
    if single.routing_weight is not None:
        routing = Tensor.from_values(np.resize(single.routing_weight, len(x.data)), "F32")
    arguments = {"config": CONFIG, "weights": weights.mapping(), "x": x, "routing_weight": routing}

    def rules() -> list[Expectation]:
        weigh = None if routing is None else Bounded.exact(routing.values())
        return [Within("out", expert(MODEL, weights, Bounded.exact(x.values()), weigh), "BF16", AXES)]

    yield Step(Call("expert", arguments), rules)


def _sum_steps(given: Sum) -> Iterator[Step]:
    tensors: dict[str, Tensor] = _named("shared_experts.", copying_expert("shared", given.shared_exponent))
    for number, exponent in enumerate(given.exponents):
        tensors |= _named(f"experts.{number}.", copying_expert("routed", exponent))
    weights = Parameters(tensors)
    tokens = len(given.indices)
    gates = np.full((tokens, HALF), 10.0)
    x = pairs(gates, np.stack([np.roll(np.resize(given.ups, HALF), token) for token in range(tokens)]))
    routing = Tensor.from_values(np.array(given.amounts) / SILU_OF_10, "F32")
    arguments = _arguments(weights, x, routing, np.array(given.indices))

    def rules() -> list[Expectation]:
        if not lattice_holds():
            weigh = Bounded.exact(routing.values())
            bounded = combined(MODEL, weights, Bounded.exact(x), weigh, np.array(given.indices))
            return [Within("ffn_out", bounded, "BF16", AXES)]
        return [Exact("ffn_out", Tensor.from_values(_exact_sum(weights, x, routing, given.indices), "BF16"), AXES)]

    yield Step(Call("experts", arguments), rules)


def _exact_sum(weights: Parameters, x: Floats, routing: Tensor, indices: tuple[tuple[int, ...], ...]) -> Floats:
    """The sum of the parts, each of which must be certain to the bit: [N, D]."""
    result = np.zeros_like(x)
    for token, experts in enumerate(indices):
        own = Bounded.exact(x[token : token + 1])
        parts = [expert(MODEL, weights.within("shared_experts."), own, None).rounded(BF16)]
        for slot, number in enumerate(experts):
            weigh = Bounded.exact(routing.values()[token : token + 1, slot])
            parts.append(expert(MODEL, weights.within(f"experts.{number}."), own, weigh).rounded(BF16))
        if not all(part.is_exact for part in parts):
            raise ValueError(f"the experts of token {token} leave room for rounding: not a lattice")
        stacked = np.concatenate([part.value for part in parts])
        result[token] = exact_product(stacked.T, np.ones((1, len(parts))))[:, 0]
    return result


def _random_steps() -> Iterator[Step]:
    tensors = random_weights.mixture(MODEL)
    weights = Parameters({name: tensor for name, tensor in tensors.items() if not name.startswith("gate.")})
    x = random_weights.normal("experts vectors x", ROUTED, WIDTH)
    indices = (np.arange(ROUTED)[:, None] + np.arange(ACTIVE) * 3) % ROUTED
    routing = Tensor.from_values(0.25 + np.abs(random_weights.normal("experts vectors routing", ROUTED, ACTIVE)), "F32")
    x = BF16.round(x)

    def rules() -> list[Expectation]:
        expected = combined(MODEL, weights, Bounded.exact(x), Bounded.exact(routing.values()), indices)
        return [Within("ffn_out", expected, "BF16", AXES)]

    yield Step(Call("experts", _arguments(weights, x, routing, indices)), rules)


def _arguments(
    weights: Parameters, x: Floats, routing: Tensor, indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> Mapping[str, object]:
    return {
        "config": CONFIG,
        "weights": weights.mapping(),
        "x": Tensor.from_values(x, "BF16"),
        "routing_weights": routing,
        "expert_indices": Tensor("I32", indices.astype(np.int32)),
    }


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
