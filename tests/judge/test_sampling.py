"""The judging of draws: honest ones pass, and named mistakes are refused whatever the seed."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from conformance.cases.vectors.draws import COUNT, SPREAD, TOKENS
from conformance.judge.sampling import ALPHA, Distribution, SampledChoice, bins, chi_square_tail
from conformance.tensors import Tensor

Floats = npt.NDArray[np.float64]


def keys_to_ids(keys: Floats) -> Tensor:
    return Tensor("I32", keys.argmax(-1).astype(np.int32))


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = e / e.sum(-1, keepdims=True)
    return result


def gumbel(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    noise = generator.gumbel(size=(2, COUNT, TOKENS))
    return keys_to_ids(logits / temperature + noise)


def inverse_sum(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    """Another honest method: where a uniform number falls among the summed probabilities."""
    sums = softmax(logits / temperature).cumsum()
    return Tensor("I32", np.searchsorted(sums / sums[-1], generator.random((2, COUNT)), "right").astype(np.int32))


def uniform_noise(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    return keys_to_ids(softmax(logits / temperature) / generator.random((2, COUNT, TOKENS)))


def shared_noise(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    return keys_to_ids(logits / temperature + np.tile(generator.gumbel(size=(1, COUNT, TOKENS)), (2, 1, 1)))


def top_1(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    return Tensor("I32", np.full((2, COUNT), logits.argmax(), np.int32))


def top_half(logits: Floats, temperature: float, generator: np.random.Generator) -> Tensor:
    kept = logits >= np.median(logits)
    return gumbel(np.where(kept, logits, -np.inf), temperature, generator)


def temperature_of(change: Callable[[float], float]) -> Callable[..., Tensor]:
    return lambda logits, temperature, generator: gumbel(logits, change(temperature), generator)


DISHONEST = {
    "temperature ignored": temperature_of(lambda t: 1.0),
    "temperature inverted": temperature_of(lambda t: 1 / t),
    "temperature off by a tenth": temperature_of(lambda t: 1.1 * t),
    "uniform noise": uniform_noise,
    "noise shared by requests": shared_noise,
    "top 1": top_1,
    "lower half cut off": top_half,
}


def judged(draw: Callable[..., Tensor], temperature: float, seed: int) -> bool:
    generator = np.random.default_rng(seed)
    logits = SPREAD * generator.standard_normal(TOKENS)
    rule = Distribution("draws", np.stack([logits, logits]), temperature, COUNT)
    return rule.judge({"draws": draw(logits, temperature, generator)}).passed


# At a low temperature the cut half is hardly ever drawn; at a high one many tokens compete, and the winner's uniform
# number is so small that it is as good as exponential.
BEYOND_POWER = {("lower half cut off", 0.5), ("uniform noise", 2.0)}


@pytest.mark.parametrize(
    ("name", "temperature"), [(n, t) for n in DISHONEST for t in (0.5, 2.0) if (n, t) not in BEYOND_POWER]
)
def test_a_mistake_is_refused_whatever_the_seed(name: str, temperature: float) -> None:
    assert not any(judged(DISHONEST[name], temperature, seed) for seed in range(8))


@pytest.mark.parametrize("draw", [gumbel, inverse_sum])
def test_honest_draws_pass_whatever_the_method(draw: Callable[..., Tensor]) -> None:
    assert all(judged(draw, temperature, seed) for temperature in (0.5, 2.0) for seed in range(8))


def test_p_values_of_honest_frequencies_are_uniform() -> None:
    """The false alarm rate is what is said: of 400 p-values half are below a half, within five deviations."""
    generator = np.random.default_rng(0)
    probabilities = softmax(SPREAD * generator.standard_normal(TOKENS))
    numbers = bins(probabilities, COUNT)
    share = np.bincount(numbers, weights=probabilities)
    p_values = []
    for _ in range(400):
        observed = np.bincount(numbers, weights=generator.multinomial(COUNT, probabilities))
        statistic = float(((observed - share * COUNT) ** 2 / (share * COUNT)).sum())
        p_values.append(chi_square_tail(statistic, len(share) - 1))
    for level in (0.1, 0.5):
        assert abs(np.mean(np.asarray(p_values) < level) - level) < 5 * np.sqrt(level * (1 - level) / 400)
    assert min(p_values) > ALPHA


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    # Quantiles of the chi-square distribution at 0.05 and 0.001, as statistical tables give them.
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (18.307, 10, 0.05), (19.675, 11, 0.05), (67.505, 50, 0.05), (10.828, 1, 1e-3)],
)
def test_tail_agrees_with_tables(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)


@pytest.mark.parametrize("token", [-1, TOKENS, 3])
def test_a_draw_that_cannot_be_is_refused(token: int) -> None:
    logits = np.zeros((2, TOKENS))
    logits[:, 3] = -np.inf
    drawn = gumbel(logits[0], 1.0, np.random.default_rng(1)).data.copy()
    drawn[1, 7] = token
    verdict = Distribution("draws", logits, 1.0, COUNT).judge({"draws": Tensor("I32", drawn)})
    assert not verdict.passed
    assert str(token) in verdict.message


@pytest.mark.parametrize(("token", "passes"), [(0, True), (1, True), (2, False), (-1, False), (4, False)])
def test_keys_that_fp32_cannot_tell_apart_are_equally_good(token: int, passes: bool) -> None:
    logits = np.asarray([[1.0, 1.0 + 2.0**-24, 0.5, -3.0]])
    rule = SampledChoice("output_ids", logits, np.ones((1, 4)), 0.7)
    assert rule.judge({"output_ids": Tensor("I32", np.asarray([token], np.int32))}).passed is passes
