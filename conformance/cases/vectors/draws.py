"""Hand-made vectors of sampling at a temperature: with given exponentials, and as a distribution (numerics.md 9).

Power of the distribution test at a false alarm rate of 1e-6, seen with 10 seeds each: at one of its three temperatures
at least it refuses every time a temperature that is ignored, inverted or a tenth too high, uniform noise for
exponential, noise shared by requests, the likeliest token alone, and tokens below the median cut off; the logarithm of
the p-value is then 11 times that of 1e-6 at least.  `tests/judge/test_sampling.py` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.vectors import weights as made
from conformance.judge.expectations import Exact, Expectation
from conformance.judge.sampling import Distribution, SampledChoice
from conformance.tensors import Tensor

SPEC = "numerics.md 9"
ROWS, VOCABULARY = 256, 512
TEMPERATURES = (0.25, 0.6, 1.0, 1.75)
TOKENS, COUNT = 48, 20_000
SEED = 20_261_130
SPREAD = 2.0
"""Standard deviation of the logits: the likeliest token has about a fifth of the probability."""

Floats = npt.NDArray[np.float32]


def cases() -> Iterator[Case]:
    """Given exponentials at several temperatures, near ties, extremes; then the port's own draws."""
    yield Case(
        "sampling/temperature/given-exponentials",
        "core",
        "choice",
        "Fails when the temperature is ignored or inverted, or exponentials multiply, are added or left out.",
        SPEC,
        _given,
        flags=("temperature-ignored", "temperature-inverted", "sampling-noise-misused", "sampling-noise-ignored"),
        source="hand-made",
    )
    yield Case(
        "sampling/temperature/near-ties",
        "core",
        "choice",
        "Fails when probabilities or keys are rounded to bf16: tokens a few thousandths apart change places.",
        SPEC,
        _near_ties,
        flags=("sampling-in-bf16",),
        source="hand-made",
    )
    yield Case(
        "sampling/temperature/extreme-logits",
        "core",
        "choice",
        "Fails when the softmax overflows, or a token of probability zero is drawn.",
        SPEC,
        _extremes,
        flags=("sampling-overflows",),
        source="hand-made",
    )
    yield Case(
        "sampling/temperature/zero-is-greedy",
        "core",
        "exact",
        "Fails when logits are divided by a temperature of zero, or the noise is heard there.",
        SPEC,
        _zero,
        flags=("temperature-zero",),
        source="hand-made",
    )
    yield Case(
        "sampling/distribution/own-draws",
        "core",
        "choice",
        "Fails when a port's own draws are not distributed as softmax(logits / temperature), or not independent.",
        SPEC,
        _own_draws,
        flags=(
            "temperature-ignored",
            "temperature-inverted",
            "sampling-noise-distribution",
            "sampling-noise-ignored",
            "sampling-draws-repeated",
        ),
        source="hand-made",
    )


def _exponentials(name: str, *shape: int) -> Floats:
    uniform = np.random.default_rng(np.frombuffer(name.encode(), np.uint8)).random(shape)
    return np.maximum(-np.log1p(-uniform), 2.0**-60).astype(np.float32)


def _logits(name: str, *shape: int) -> Floats:
    return (SPREAD * made.normal(name, *shape)).astype(np.float32)


def _sample(name: str, logits: Floats, exponentials: Floats, temperature: float) -> Step:
    arguments = {
        "logits": Tensor("F32", logits),
        "temperature": temperature,
        "exponentials": Tensor("F32", exponentials),
    }

    def rules() -> list[Expectation]:
        return [SampledChoice("output_ids", logits.astype(np.float64), exponentials.astype(np.float64), temperature)]

    return Step(Call("sample", arguments), rules, Place(None, [name]))


def _given() -> Iterator[Step]:
    for temperature in TEMPERATURES:
        name = f"temperature {temperature}"
        yield _sample(name, _logits(name, ROWS, VOCABULARY), _exponentials(name, ROWS, VOCABULARY), temperature)


def _near_ties() -> Iterator[Step]:
    """In every row two tokens lead whose keys are 2^-10 apart, in either order; the others are far behind."""
    generator = np.random.default_rng(SEED)
    for temperature in (0.6, 1.75):
        exponentials = _exponentials(f"near {temperature}", ROWS, VOCABULARY)
        logits = _logits(f"near {temperature}", ROWS, VOCABULARY).astype(np.float64)
        keys = logits / temperature - np.log(exponentials.astype(np.float64))
        for row in range(ROWS):
            first, second = generator.choice(VOCABULARY, 2, replace=False)
            top = keys[row].max() + 1.0
            logits[row, first] = temperature * (top + np.log(float(exponentials[row, first])))
            logits[row, second] = temperature * (top - 2.0**-10 + np.log(float(exponentials[row, second])))
        yield _sample(f"temperature {temperature}", logits.astype(np.float32), exponentials, temperature)


def _extremes() -> Iterator[Step]:
    rows: dict[str, tuple[list[float], float]] = {
        "beyond exp": ([3000.0, 2999.0, 2998.5, 0.0], 1.0),
        "far below zero": ([-3000.0, -2999.0, -2998.5, -1e30], 1.0),
        "minus infinity": ([-np.inf, 0.5, -np.inf, 0.25], 1.0),
        "low temperature": ([30.0, 29.0, 29.5, -40.0], 0.01),
        "high temperature": ([30.0, 29.0, 29.5, -40.0], 100.0),
    }
    for name, (row, temperature) in rows.items():
        logits = np.tile(np.asarray(row, np.float32), (64, 1))
        yield _sample(name, logits, _exponentials(name, *logits.shape), temperature)


def _zero() -> Iterator[Step]:
    logits, exponentials = _logits("zero", ROWS, VOCABULARY), _exponentials("zero", ROWS, VOCABULARY)
    arguments = {"logits": Tensor("F32", logits), "temperature": 0.0, "exponentials": Tensor("F32", exponentials)}
    expected = Exact("output_ids", Tensor("I32", logits.argmax(-1).astype(np.int32)), ("request",))
    yield Step(Call("sample", arguments), lambda: [expected])


def _own_draws() -> Iterator[Step]:
    for number, temperature in enumerate((0.5, 1.0, 2.0)):
        logits = np.repeat(_logits(f"draws {temperature}", 1, TOKENS), 2, axis=0)
        # A token that must never come, in the place where a search over sums ends when it is off by one.
        logits[:, -1] = -np.inf
        arguments = {
            "logits": Tensor("F32", logits),
            "temperature": temperature,
            "count": COUNT,
            "seed": SEED + number,
        }
        rules = partial(_distributed, logits.astype(np.float64), temperature)
        yield Step(Call("draws", arguments), rules, Place(None, [f"temperature {temperature}"]))


def _distributed(logits: npt.NDArray[np.float64], temperature: float) -> list[Expectation]:
    return [Distribution("draws", logits, temperature, COUNT)]
