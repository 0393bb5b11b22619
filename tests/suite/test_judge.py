"""The arithmetic of bounds against brute force, and every way of comparing against results that are right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from conformance.formats import BF16, E4M3, FP32
from conformance.judge.bounded import Bounded, concatenate, dot, hull, sum_roundoff, take_rows, where
from conformance.judge.choices import CandidateBlocks, GateChoice, RowSets, Selection
from conformance.judge.components.hyper_connections import sinkhorn
from conformance.judge.components.indexer import membership
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.quantize import FP4_E4M3, FP4_E8M0, FP8, Quantizer
from conformance.judge.components.sparse_attention import attend, counts_of
from conformance.judge.expectations import Exact, OwnArgmax, Ulp, Verdict, Within
from conformance.judge.noise import Distance
from conformance.judge.propagated import Propagated
from conformance.tensors import Tensor

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
derandomized = settings(derandomize=True, max_examples=60, deadline=None)

seeds = st.integers(0, 2**32 - 1)


def numbers(seed: int, *shape: int, decades: float = 2.0) -> Float32s:
    """fp32 numbers of both signs over some decades."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-decades, decades, shape)).astype(np.float32)


def uncertain(seed: int, exact: Float32s, relative: float = 1e-3) -> tuple[Bounded, Float32s]:
    """A value with an error, and an fp32 number somewhere inside it."""
    rng = np.random.default_rng(seed + 1)
    error = np.abs(exact.astype(np.float64)) * relative * rng.uniform(0, 1, exact.shape)
    inside = (exact + error * rng.uniform(-1, 1, exact.shape)).astype(np.float32)
    # The number was rounded into fp32 and may have left an interval that is narrower than that.
    error = np.maximum(error, np.abs(inside.astype(np.float64) - exact))
    return Bounded(exact.astype(np.float64), error), inside


def assert_inside(got: npt.NDArray[np.floating], expected: Bounded) -> None:
    wide = got.astype(np.float64)
    assert ((wide >= expected.low) & (wide <= expected.high)).all()


def shuffled_sum(rng: np.random.Generator, terms: Float32s) -> np.float32:
    """An fp32 sum in a random order, by a random tree."""
    parts = list(terms[rng.permutation(len(terms))])
    while len(parts) > 1:
        at = int(rng.integers(len(parts) - 1))
        parts[at : at + 2] = [np.float32(parts[at] + parts[at + 1])]
    return np.float32(parts[0])


ELEMENTWISE: dict[str, tuple[Callable[[Bounded, Bounded], Bounded], Callable[[Float32s, Float32s], Float32s]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "subtract": (lambda a, b: a - b, lambda a, b: a - b),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b),
    "divide": (lambda a, b: a / b, lambda a, b: a / b),
    "negate": (lambda a, b: -a, lambda a, b: -a),
    "times-a-constant": (lambda a, b: a * 0.3, lambda a, b: a * np.float32(0.3)),
    "plus-a-constant": (lambda a, b: a + 1e-6, lambda a, b: a + np.float32(1e-6)),
    "scaled": (lambda a, b: a.scaled(0.25), lambda a, b: a * np.float32(0.25)),
    "exp": (lambda a, b: a.clamp(-50, 50).exp(), lambda a, b: np.exp(np.clip(a, -50, 50))),
    "exp-as-exp2": (
        lambda a, b: a.clamp(-50, 50).exp(),
        lambda a, b: np.exp2(np.clip(a, -50, 50) * np.float32(np.log2(np.e))),
    ),
    "sqrt": (lambda a, b: a.clamp(low=0.0).sqrt(), lambda a, b: np.sqrt(np.maximum(a, 0))),
    "rsqrt": (lambda a, b: (a * a + 1e-3).rsqrt(), lambda a, b: 1 / np.sqrt(a * a + np.float32(1e-3))),
    "clamp": (lambda a, b: a.clamp(-1.5, 2.0), lambda a, b: np.clip(a, np.float32(-1.5), np.float32(2.0))),
}


@pytest.mark.parametrize("relative", [0.0, 1e-3], ids=["exact-operands", "uncertain-operands"])
@pytest.mark.parametrize("name", ELEMENTWISE)
@given(seed=seeds)
@derandomized
def test_fp32_arithmetic_stays_inside(name: str, relative: float, seed: int) -> None:
    on_bounds, on_numbers = ELEMENTWISE[name]
    a, a_inside = uncertain(seed, numbers(seed, 200), relative)
    b, b_inside = uncertain(seed + 7, numbers(seed + 3, 200), relative)
    assert_inside(on_numbers(a_inside, b_inside), on_bounds(a, b))


@given(seed=seeds, count=st.integers(1, 90), relative=st.sampled_from([0.0, 1e-4]))
@derandomized
def test_sums_in_any_order_stay_inside(seed: int, count: int, relative: float) -> None:
    rng = np.random.default_rng(seed)
    terms, inside = uncertain(seed, numbers(seed, count), relative)
    total = terms.sum(0)
    for _ in range(5):
        assert_inside(np.asarray(shuffled_sum(rng, inside)), total)


@given(seed=seeds, count=st.integers(1, 90), relative=st.sampled_from([0.0, 1e-4]))
@derandomized
def test_dot_products_in_any_order_stay_inside(seed: int, count: int, relative: float) -> None:
    rng = np.random.default_rng(seed)
    a, a_inside = uncertain(seed, numbers(seed, 2, count), relative)
    b, b_inside = uncertain(seed + 5, numbers(seed + 1, 3, count), relative)
    expected = dot(a, b)
    for m, n in np.ndindex(2, 3):
        assert_inside(np.asarray(shuffled_sum(rng, a_inside[m] * b_inside[n])), expected[m, n])


def test_the_roundoff_of_a_sum_grows_with_its_length_and_never_beyond_the_worst_case() -> None:
    factors = [sum_roundoff(count) for count in (1, 2, 16, 17, 256, 1024, 65536)]
    assert factors == sorted(factors)
    assert all(
        factor <= count * 2.0**-24 for factor, count in zip(factors, (1, 2, 16, 17, 256, 1024, 65536), strict=True)
    )
    assert factors[-1] == 256 * 2.0**-24


def test_a_zero_bound_means_an_exact_zero() -> None:
    zeros = Bounded.exact(np.zeros((1, 8)))
    result = dot(zeros, Bounded.exact(np.ones((1, 8)) * 1e30))
    assert result.is_exact
    assert (result.value == 0).all()
    rule = Within("x", result, "F32", ())
    assert rule.judge({"x": Tensor.from_values([[0.0]], "F32")}).passed
    assert rule.judge({"x": Tensor.from_values([[-0.0]], "F32")}).passed
    assert not rule.judge({"x": Tensor.from_values([[1e-45]], "F32")}).passed


@given(seed=seeds)
@derandomized
def test_rounding_points_are_followed_exactly(seed: int) -> None:
    values, inside = uncertain(seed, numbers(seed, 300), 2.0**-9)
    rounded = values.rounded(BF16)
    assert_inside(BF16.round(inside), rounded)
    assert (rounded.value == BF16.round(values.value)).all()
    # What cannot reach a boundary leaves without an error, what can has its neighbour inside.
    same = BF16.round(values.low) == BF16.round(values.high)
    assert (rounded.error[same] == 0).all()
    assert (rounded.error[~same] > 0).all()
    assert Bounded.exact(inside.astype(np.float64)).rounded(BF16).is_exact


@given(seed=seeds)
@derandomized
def test_rounding_midpoints_go_to_even(seed: int) -> None:
    base = BF16.round(np.abs(numbers(seed, 50).astype(np.float64)))
    spacing = BF16.spacing(base)
    middle = Bounded.exact(base + spacing / 2).rounded(BF16)
    assert middle.is_exact
    assert np.isin(middle.value - base, [0.0, *np.unique(spacing)]).all()
    touched = Bounded(base + spacing / 2, spacing * 1e-6).rounded(BF16)
    assert (touched.error > 0).all()
    assert ((touched.low <= base) & (touched.high >= base + spacing)).all()


def test_an_interval_around_zero_divides_to_no_bound_at_all() -> None:
    result = Bounded.exact(np.ones(1)) / Bounded(np.asarray([1e-3]), np.asarray([2e-3]))
    assert np.isposinf(result.error).all()


def test_joining_choosing_and_gathering_keep_values_with_their_errors() -> None:
    a = Bounded(np.arange(6.0).reshape(1, 3, 2), np.arange(6.0).reshape(1, 3, 2) / 8)
    b = Bounded(-a.value, a.error * 2)
    joined = concatenate([a, b], 1)
    assert joined.shape == (1, 6, 2)
    assert (joined[:, 3:].error == b.error).all()
    chosen = where(np.asarray([[[True, False]]]), a, b)
    assert (chosen.value[..., 1] == b.value[..., 1]).all()
    assert (chosen.error[..., 0] == a.error[..., 0]).all()
    rows = take_rows(joined, np.asarray([[[5, 0]]]))
    assert (rows.value == joined.value[:, [[5, 0]]]).all()
    around = hull([a, b])
    assert ((around.low <= np.minimum(a.low, b.low)) & (around.high >= np.maximum(a.high, b.high))).all()
    assert (around.value == a.value).all()


@pytest.mark.parametrize("quantizer", [FP8, FP4_E8M0, FP4_E4M3], ids=lambda quantizer: quantizer.name)
@given(seed=seeds)
@derandomized
def test_fake_quantised_uncertain_values_hold_every_honest_result(quantizer: Quantizer, seed: int) -> None:
    exact = BF16.round(numbers(seed, 6, 64, decades=0.5).astype(np.float64)).astype(np.float32)
    around = Bounded(exact.astype(np.float64), 0.02 * np.abs(exact))
    rng = np.random.default_rng(seed)
    for _ in range(4):
        inside = around.value + around.error * rng.uniform(-1, 1, around.shape)
        assert_inside(quantizer.fake(Bounded.exact(inside)).value, quantizer.fake(around))


@given(seed=seeds, streams=st.integers(1, 5), rounds=st.integers(1, 20))
@derandomized
def test_sinkhorn_in_fp32_stays_inside(seed: int, streams: int, rounds: int) -> None:
    logits = numbers(seed, 20, streams, streams, decades=0.5)
    eps = np.float32(1e-6)
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + eps
    c = c / (c.sum(-2, keepdims=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(-1, keepdims=True) + eps)
        c = c / (c.sum(-2, keepdims=True) + eps)
    assert c.dtype == np.float32
    assert_inside(c, sinkhorn(Bounded.exact(logits), rounds, 1e-6))


@given(seed=seeds, width=st.integers(1, 100))
@derandomized
def test_a_norm_in_fp32_stays_inside(seed: int, width: int) -> None:
    x, weight = numbers(seed, 5, width), numbers(seed + 1, width, decades=0.2)
    mean = np.square(x).sum(-1, keepdims=True) / np.float32(width)
    got = x * (1 / np.sqrt(mean + np.float32(1e-20))) * weight
    assert_inside(got, rms_norm(Bounded.exact(x), weight.astype(np.float64), 1e-20))


@given(seed=seeds, block=st.sampled_from([1, 3, 64]))
@derandomized
def test_attention_with_any_running_maximum_stays_inside(seed: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    q = BF16.round(rng.standard_normal((1, 2, 3, 16)) * 2).astype(np.float32)
    kv = BF16.round(rng.standard_normal((1, 9, 16))).astype(np.float32)
    sink = rng.standard_normal(3).astype(np.float32)
    indices = rng.integers(-1, 9, (1, 2, 7))
    expected = attend(Bounded.exact(q), Bounded.exact(kv), counts_of(indices, 9), None, sink.astype(np.float64), 0.25)
    for t, head in np.ndindex(2, 3):
        top, denominator, numerator = np.float32(-1e30), np.float32(0), np.zeros(16, np.float32)
        listed = indices[0, t][indices[0, t] >= 0]
        for start in range(0, len(listed), block):
            rows = kv[0, listed[start : start + block]]
            scores = (rows @ q[0, t, head]) * np.float32(0.25)
            new_top = max(top, scores.max())
            weights = np.exp(scores - new_top)
            denominator = denominator * np.exp(top - new_top) + weights.sum()
            numerator = numerator * np.exp(top - new_top) + BF16.round(weights).astype(np.float32) @ rows
            top = new_top
        with np.errstate(over="ignore"):
            got = numerator / (denominator + np.exp(sink[head] - top))
        assert_inside(got, expected[0, t, head])


def brute_force_membership(low: Float64s, high: Float64s, k: int) -> tuple[set[int], set[int]]:
    """Entries in every, and in some, top-k over scores at the ends of their intervals with any tie-breaking."""
    always, ever = set(range(len(low))), set()
    for pattern in np.ndindex(*[2] * len(low)):
        scores = np.where(np.asarray(pattern) == 1, high, low)
        kth = np.sort(scores)[::-1][min(k, len(scores)) - 1]
        certain = {i for i, s in enumerate(scores) if (scores >= s).sum() <= k}
        ever |= {i for i, s in enumerate(scores) if s >= kth}
        always &= certain
    return always, ever


@given(seed=seeds, count=st.integers(1, 6), k=st.integers(1, 7))
@derandomized
def test_membership_of_a_top_k_against_every_outcome(seed: int, count: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 6, count).astype(np.float64)
    high = low + rng.integers(0, 3, count)
    surely, maybe = membership(low, high, k)
    always, ever = brute_force_membership(low, high, k)
    assert set(np.flatnonzero(surely)) == always
    assert set(np.flatnonzero(surely | maybe)) == ever


# Verdicts


def judged(rule: Exact | Within | Ulp | Propagated, values: object, dtype: str) -> Verdict:
    return rule.judge({rule.tap: Tensor.from_values(np.asarray(values), dtype)})


def test_exact_compares_numbers_in_floats_and_bits_in_codes() -> None:
    rule = Exact("x", Tensor.from_values([0.0, np.nan, np.inf, 1.0], "F32"), ("feature",))
    assert judged(rule, [-0.0, np.nan, np.inf, 1.0], "F32").passed
    wrong = judged(rule, [0.0, 0.0, np.inf, 2.0], "F32")
    assert not wrong.passed
    assert (wrong.wrong, wrong.index, wrong.ratio) == (2, (1,), np.inf)
    codes = Exact("x", Tensor("F8_E4M3", np.asarray([0x00], np.uint8)), ())
    assert codes.judge({"x": Tensor("U8", np.asarray([0x00], np.uint8))}).passed
    assert not codes.judge({"x": Tensor("F8_E4M3", np.asarray([0x80], np.uint8))}).passed


def test_results_of_another_shape_or_type_are_named() -> None:
    rule = Within("x", Bounded.exact(np.ones((2, 3))), "BF16", ())
    malformed = judged(rule, np.ones((3, 2)), "BF16")
    assert malformed.message == "wrong shape [3, 2], expected [2, 3]"
    assert malformed.ratio == np.inf
    assert "wrong dtype I32" in rule.judge({"x": Tensor("I32", np.ones((2, 3), np.int32))}).message
    assert judged(rule, np.ones((2, 3)), "F32").passed
    unrounded = judged(rule, np.full((2, 3), 1 + 2.0**-12), "F32")
    assert not unrounded.passed
    assert "not rounded to BF16" in unrounded.message
    integers = Exact("x", Tensor("I32", np.asarray([3], np.int32)), ())
    assert integers.judge({"x": Tensor("I64", np.asarray([3], np.int64))}).passed
    assert not integers.judge({"x": Tensor("I64", np.asarray([2**32 + 3], np.int64))}).passed


EMPTY_RULES = [
    Exact("x", Tensor("F32", np.zeros((0, 4), np.float32)), ()),
    Within("x", Bounded.exact(np.zeros((0, 4))), "F32", ()),
    Within("x", Bounded.exact(np.zeros((0, 4))), "F32", (), "dot"),
    Ulp("x", np.zeros((0, 4)), "F32", 1, ()),
    Propagated("x", Tensor("F32", np.zeros((0, 4), np.float32)), Distance(1.0, 1.0, 1.0), "", ()),
]


@pytest.mark.parametrize("rule", EMPTY_RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_nothing_is_neither_wrong_nor_an_accident(rule: Exact | Within | Ulp | Propagated) -> None:
    verdict = judged(rule, np.zeros((0, 4)), "F32")
    assert verdict.passed
    assert verdict.count == 0
    assert not judged(rule, np.zeros((1, 4)), "F32").passed


FLOAT_RULES = [
    Within("x", Bounded(np.linspace(1, 2, 8), np.full(8, 1e-6)), "F32", ("feature",)),
    Ulp("x", np.linspace(1, 2, 8), "F32", 2, ("feature",)),
    Exact("x", Tensor.from_values(np.linspace(1, 2, 8), "F32"), ("feature",)),
    Propagated("x", Tensor.from_values(np.linspace(1, 2, 8), "F32"), Distance(0.01, 0.01, 0.01), "", ("feature",)),
]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, 3e38])
@pytest.mark.parametrize("rule", FLOAT_RULES, ids=lambda rule: type(rule).__name__)
def test_one_bad_element_fails_every_rule_and_is_pointed_at(
    rule: Exact | Within | Ulp | Propagated, bad: float
) -> None:
    good = np.linspace(1, 2, 8)
    assert judged(rule, good, "F32").passed
    spoiled = good.copy()
    spoiled[5] = bad
    verdict = judged(rule, spoiled, "F32")
    assert not verdict.passed
    assert verdict.index == (5,)
    assert verdict.ratio > 1


def test_infinite_expectations_must_be_met_exactly() -> None:
    rule = Within("x", Bounded(np.asarray([-np.inf, 1.0]), np.asarray([0.0, 0.1])), "BF16", ())
    assert judged(rule, [-np.inf, 1.0], "BF16").passed
    for value in (0.0, np.inf, np.nan, float(BF16.largest) * -1):
        assert not judged(rule, [value, 1.0], "BF16").passed


def test_an_undecidable_element_allows_everything_but_nan() -> None:
    rule = Within("x", Bounded(np.asarray([2.0]), np.asarray([np.inf])), "BF16", ())
    assert judged(rule, [-np.inf], "BF16").passed
    assert judged(rule, [100.0], "BF16").passed
    assert not judged(rule, [np.nan], "BF16").passed


@given(seed=seeds)
@derandomized
def test_within_allows_exactly_the_rounded_ends(seed: int) -> None:
    value = numbers(seed, 40).astype(np.float64)
    expected = Bounded(value, np.abs(value) * 0.01)
    rule = Within("x", expected, "BF16", ())
    low, high = BF16.round(expected.low), BF16.round(expected.high)
    for end, outward in ((low, -1), (high, 1)):
        assert judged(rule, end, "BF16").passed
        beyond = BF16.round(end + outward * 1.01 * BF16.spacing(end))
        assert judged(rule, beyond, "BF16").wrong == 40


def test_truncation_to_bf16_is_caught() -> None:
    """Where no error is allowed before the rounding by the elements themselves, where it is by their bias."""
    value = np.random.default_rng(3).uniform(1, 2, 4000)
    truncated = np.floor(value * 128) / 128
    exact = judged(Within("x", Bounded.exact(value), "BF16", (), "dot"), truncated, "BF16")
    assert not exact.passed
    assert exact.wrong > 1000
    loose = Within("x", Bounded(value, np.full(4000, 2.0**-7)), "BF16", (), "dot")
    biased = judged(loose, truncated, "BF16")
    assert biased.wrong == 0
    assert not biased.passed
    assert biased.bias is not None
    assert biased.bias < -5
    assert "one side" in biased.message
    assert judged(loose, BF16.round(value), "BF16").passed
    # The same in fp32 under the bound of a sum.
    wide = Within("x", Bounded(value, np.full(4000, 64 * 2.0**-24)), "F32", (), "dot")
    assert judged(wide, FP32.round(value), "F32").passed
    leaning = FP32.round(value - np.random.default_rng(4).uniform(0, 20 * 2.0**-24, 4000))
    assert not judged(wide, leaning, "F32").passed


def test_repeated_elements_do_not_make_a_bias() -> None:
    value = np.repeat(np.random.default_rng(5).uniform(1, 2, 100), 50)
    verdict = judged(Within("x", Bounded(value, np.full(5000, 0.01)), "BF16", (), "dot"), BF16.round(value), "BF16")
    assert verdict.bias is None
    assert verdict.passed


def test_ulps_are_counted_in_the_output_format() -> None:
    expected = np.asarray([1.0, 1000.0])
    rule = Ulp("x", expected, "F32", 2, ())
    spacing = FP32.spacing(expected)
    assert judged(rule, expected + 2 * spacing, "F32").passed
    assert judged(rule, expected + 3 * spacing, "F32").wrong == 2
    assert judged(replace(rule, expected=np.asarray([448.0, 1.0]), dtype="F8_E4M3"), [448.0, 1.0], "F8_E4M3").passed
    assert E4M3.largest == 448.0


def select(chosen: object, scores: list[float], visible: int, topk: int, error: float = 0.0) -> Verdict:
    values = np.asarray([[scores]])
    seen = np.arange(len(scores)) < visible
    masked = np.where(seen, values, -np.inf)
    rule = Selection("s", masked - error, masked + error, seen[None, None], topk, ("request", "position"))
    return rule.judge({"s": Tensor("I32", np.asarray([[chosen]], np.int32).reshape(1, 1, -1))})


SCORES = [3.0, 1.0, 2.0, 2.0, 9.0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([0, 2], ""),
        ([0, 3], ""),
        ([2, 3], "higher score was left out"),
        ([0, 1], "higher score was left out"),
        ([2, 0], "not ascending"),
        ([0, 0], "not ascending"),
        ([-1, 0], "-1 stands before"),
        ([0, -1], "number of valid entries"),
        ([0, 4], "cannot see"),
        ([0, 5], "neither -1 nor a position"),
        ([0, -2], "neither -1 nor a position"),
        ([0], "wrong shape"),
    ],
)
def test_selection(chosen: list[int], message: str) -> None:
    verdict = select(chosen, SCORES, visible=4, topk=2)
    assert verdict.passed == (not message)
    assert message in verdict.message


def test_selection_accepts_what_the_error_cannot_tell_apart_and_nothing_else() -> None:
    assert select([0, 1], SCORES, visible=4, topk=2, error=0.5).passed
    assert not select([0, 1], SCORES, visible=4, topk=2, error=0.49).passed
    assert select([-1, -1], SCORES, visible=0, topk=2).passed
    assert select([0, -1], SCORES, visible=1, topk=2).passed
    assert select([], [], visible=0, topk=2).passed


def candidates(kept: list[bool], seen: int, blocks: int = 2, error: float = 0.0) -> Verdict:
    scores = np.asarray([[[5.0, 0.0, 4.0, 0.0, 1.0, 0.0, 0.5]]])
    masked = np.where(np.arange(7) < seen, scores, -np.inf)
    rule = CandidateBlocks(
        "c", Bounded(masked, np.full(masked.shape, error)), np.asarray([[seen]]), 2, blocks, ("request", "position")
    )
    return rule.judge({"c": Tensor("BOOL", np.asarray([[kept]]))})


T, F = True, False


@pytest.mark.parametrize(
    ("kept", "seen", "message"),
    [
        ([T, T, F, F, F, F, T], 7, ""),
        ([T, T, F, F, T, T, F], 5, ""),
        ([T, T, F, F, T, F, F], 5, "only partly"),
        ([T, T, T, T, F, F, F], 7, "newest visible position is missing"),
        ([F, F, T, T, F, F, T], 7, "higher maximum was left out"),
        ([T, T, T, T, F, F, T], 7, "number of blocks"),
        ([T, T, F, F, F, F, T], 2, "without any visible position"),
        ([T, T, F, F, F, F, F], 2, ""),
        ([F, F, F, F, F, F, F], 0, ""),
        ([T, T, F, F, F, F, F], 0, "without any visible position"),
    ],
)
def test_candidate_blocks(kept: list[bool], seen: int, message: str) -> None:
    verdict = candidates(kept, seen)
    assert verdict.passed == (not message)
    assert message in verdict.message


def test_candidate_blocks_accept_what_the_error_cannot_tell_apart() -> None:
    assert candidates([F, F, T, T, F, F, T], 7, error=0.5).passed
    assert not candidates([F, F, T, T, F, F, T], 7, error=0.4).passed


def gate(indices: list[int], weights: list[float], error: float = 1e-6) -> Verdict:
    scores = Bounded(np.asarray([[1.0, 2.0, 3.0, 2.0]]), np.full((1, 4), error))
    biased = scores + Bounded.exact(np.asarray([[5.0, 0.0, 0.0, 0.0]]))
    rule = GateChoice(scores, biased, 2, 1.5, ("token", "choice"))
    return rule.judge(
        {
            "gate_indices": Tensor("I32", np.asarray([indices], np.int32)),
            "gate_weights": Tensor.from_values([weights], "F32"),
        }
    )


@pytest.mark.parametrize(
    ("indices", "weights", "message"),
    [
        ([0, 2], [0.375, 1.125], ""),
        ([2, 0], [1.125, 0.375], ""),
        ([2, 0], [0.375, 1.125], "beyond their bound"),
        ([0, 2], [0.25, 0.75], "beyond their bound"),
        ([0, 2], [np.nan, 1.125], "beyond their bound"),
        ([1, 2], [0.6, 0.9], "higher score was left out"),
        ([0, 0], [0.75, 0.75], "chosen twice"),
        ([0, 4], [0.375, 1.125], "not an expert"),
        ([0, -1], [0.375, 1.125], "not an expert"),
    ],
)
def test_gate_choice(indices: list[int], weights: list[float], message: str) -> None:
    verdict = gate(indices, weights)
    assert verdict.passed == (not message)
    assert message in verdict.message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, -1], [1, 0]], ""),
        ([[-1, 0], [0, 1]], ""),
        ([[0, 0], [0, 1]], "stands twice"),
        ([[0, -1], [1, 2]], "missing [0], not expected [2]"),
        ([[-1, -1], [0, 1]], "missing [0]"),
        ([[0, -2], [0, 1]], "not expected [-2]"),
        ([[0], [1]], "wrong shape"),
    ],
)
def test_row_sets(rows: list[list[int]], message: str) -> None:
    verdict = RowSets("indices", [{0}, {0, 1}], 2).judge({"indices": Tensor("I32", np.asarray(rows, np.int32))})
    assert verdict.passed == (not message)
    assert message in verdict.message


@pytest.mark.parametrize(
    ("ids", "passed"), [([2, 0], True), ([1, 0], False), ([3, 0], False), ([-1, 0], False), ([2, 1], True)]
)
def test_greedy_ids_are_judged_by_the_logits_that_came_with_them(ids: list[int], passed: bool) -> None:
    logits = Tensor.from_values([[0.0, 1.0, 2.0], [5.0, 5.0, 1.0]], "F32")
    rule = OwnArgmax("ids", "logits")
    assert rule.judge({"ids": Tensor("I32", np.asarray(ids, np.int32)), "logits": logits}).passed == passed


def test_greedy_ids_among_nan_are_wrong() -> None:
    logits = Tensor.from_values([[0.0, np.nan, 2.0]], "F32")
    assert (
        not OwnArgmax("ids", "logits").judge({"ids": Tensor("I32", np.asarray([2], np.int32)), "logits": logits}).passed
    )


def test_propagated_measures_the_distance_of_the_whole_tensor() -> None:
    recorded = Tensor.from_values(np.full((2, 8), 2.0), "F32")
    rule = Propagated("x", recorded, Distance(0.1, 0.05, 1.0), "measured", ("position", "feature"))
    near = judged(rule, np.full((2, 8), 2.1), "F32")
    assert near.passed
    assert near.ratio == pytest.approx(0.5)
    assert "measured" in near.note
    far = judged(rule, np.full((2, 8), 2.3), "F32")
    assert not far.passed
    assert far.ratio == pytest.approx(1.5)
    assert "noise floor" in far.message
