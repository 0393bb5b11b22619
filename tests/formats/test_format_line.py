"""Properties of rounding, spacing and the ordered line."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from conformance.formats import BF16, E2M1, E4M3, E8M0, FORMATS, FP16, FP32, Format

SMALL_FORMATS = [E4M3, E8M0, E2M1, BF16, FP16]
deterministic = settings(derandomize=True, max_examples=150, deadline=None, database=None)
formats = st.sampled_from(list(FORMATS.values()))
magnitudes = st.floats(min_value=5e-324, allow_nan=False) | st.floats(min_value=2.0**-151, max_value=1e5)


def values_for(fmt: Format, magnitude: float) -> np.ndarray:
    return np.array([magnitude, -magnitude, 0.0, -0.0] if fmt.signed else [magnitude])


@deterministic
@given(formats, magnitudes)
def test_round_is_decode_of_encode(fmt: Format, magnitude: float) -> None:
    values = values_for(fmt, magnitude)
    rounded, expected = fmt.round(values), fmt.decode(fmt.encode(values))
    np.testing.assert_array_equal(rounded.view(np.int64), expected.view(np.int64))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_round_is_decode_of_encode_over_several_blocks(fmt: Format) -> None:
    exponents = np.random.default_rng(0).integers(-160, 135, 100_003)
    values = np.ldexp(np.random.default_rng(1).uniform(0.5, 1, 100_003), exponents)
    if fmt.signed:
        values[::2] *= -1
        values[::97] = 0
    np.testing.assert_array_equal(fmt.round(values).view(np.int64), fmt.decode(fmt.encode(values)).view(np.int64))


@deterministic
@given(formats, magnitudes)
def test_round_lands_within_half_a_spacing_and_stays(fmt: Format, magnitude: float) -> None:
    rounded = fmt.round(magnitude)
    np.testing.assert_array_equal(fmt.round(rounded), rounded)
    if magnitude <= fmt.largest and (fmt.has_zero or magnitude >= fmt.smallest_normal):
        assert abs(float(rounded) - magnitude) <= float(fmt.spacing(magnitude)) / 2


@deterministic
@given(formats, magnitudes, magnitudes)
def test_encode_is_monotone(fmt: Format, a: float, b: float) -> None:
    low, high = fmt.ordered(fmt.encode(sorted([a, b])))
    assert low <= high


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=lambda f: f.name)
def test_ordered_line_steps_once_a_value(fmt: Format) -> None:
    codes = np.arange(1 << fmt.width).astype(fmt.code_dtype)
    codes = codes[~np.isnan(fmt.decode(codes))]
    order = np.argsort(fmt.decode(codes), kind="stable")
    values, positions = fmt.decode(codes)[order], fmt.ordered(codes)[order]
    np.testing.assert_array_equal(np.diff(positions), values[1:] > values[:-1])
    assert positions[-1] == len(codes) // (2 if fmt.signed else 1) - 1


def test_zeros_share_position_zero_and_subnormals_are_steps() -> None:
    np.testing.assert_array_equal(BF16.ordered(BF16.encode([0.0, -0.0, 2.0**-133, -(2.0**-133)])), [0, 0, 1, -1])
    assert BF16.ulp_distance(BF16.encode(2.0**-133), BF16.encode(-(2.0**-133))) == 2
    assert FP32.ulp_distance(FP32.encode(FP32.largest), FP32.encode(np.inf)) == 1
    assert E8M0.ordered(0) == 0


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not E2M1], ids=lambda f: f.name)
def test_nan_has_no_position(fmt: Format) -> None:
    with pytest.raises(ValueError, match=f"{fmt.name} NaN has no place"):
        fmt.ordered(fmt.encode([1.0, np.nan]))


@deterministic
@given(formats, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_ulp_distance_is_symmetric_and_zero_on_itself(fmt: Format, a: int, b: int) -> None:
    pair = np.array([a, b]) % (1 << fmt.width)
    pair[np.isnan(fmt.decode(pair))] = 1
    one, other = pair
    assert fmt.ulp_distance(one, other) == fmt.ulp_distance(other, one) >= 0
    assert fmt.ulp_distance(one, one) == 0
    assert (fmt.ulp_distance(one, other) == 0) == (fmt.decode(one) == fmt.decode(other))


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=lambda f: f.name)
def test_spacing_is_the_gap_to_the_next_value(fmt: Format) -> None:
    codes = np.arange(1 << (fmt.width - fmt.signed)).astype(fmt.code_dtype)
    values = fmt.decode(codes)
    values = values[np.isfinite(values)]
    gaps = np.diff(values)
    np.testing.assert_array_equal(fmt.spacing(values[:-1]), gaps)
    np.testing.assert_array_equal(fmt.spacing(-np.nextafter(values[1:], 0)), gaps)


@pytest.mark.parametrize(
    ("fmt", "at_zero", "at_one", "at_largest"),
    [
        (FP32, 2.0**-149, 2.0**-23, 2.0**104),
        (BF16, 2.0**-133, 2.0**-7, 2.0**120),
        (FP16, 2.0**-24, 2.0**-10, 32.0),
        (E4M3, 2.0**-9, 0.125, 32.0),
        (E2M1, 0.5, 0.5, 2.0),
        (E8M0, 2.0**-127, 1.0, 2.0**127),
    ],
    ids=lambda p: p.name if isinstance(p, Format) else "",
)
def test_spacing_at_the_ends(fmt: Format, at_zero: float, at_one: float, at_largest: float) -> None:
    points = [0.0, 5e-324, 1.0, fmt.largest, 1e300, np.inf, -np.inf, np.nan]
    expected = [at_zero, at_zero, at_one, *[at_largest] * 4, np.nan]
    np.testing.assert_array_equal(fmt.spacing(points), expected)
