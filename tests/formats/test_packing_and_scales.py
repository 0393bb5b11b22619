"""FP4 packing, and the power-of-two scale against exact rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from conformance.formats import BF16, E8M0, FP32, pack_fp4, power_of_two_scale, unpack_fp4

POSITIVE_BF16 = np.arange(1, 0x7F80).astype(np.uint16)


def ceil_log2(x: Fraction) -> int:
    """Smallest k with x <= 2^k."""
    k = x.numerator.bit_length() - x.denominator.bit_length() - 1
    while Fraction(2) ** k < x:
        k += 1
    return k


def scale_code(x: Fraction) -> int:
    return min(max(ceil_log2(x) + 127, 0), 254)


def test_even_element_is_the_low_nibble() -> None:
    np.testing.assert_array_equal(pack_fp4([[0x1, 0x2, 0xF, 0x8]]), [[0x21, 0x8F]])
    np.testing.assert_array_equal(unpack_fp4([[0x21, 0x8F]]), [[0x1, 0x2, 0xF, 0x8]])


def test_every_byte_survives_unpack_and_pack() -> None:
    packed = np.arange(256).astype(np.uint8).reshape(2, 4, 32)
    codes = unpack_fp4(packed)
    assert codes.shape == (2, 4, 64)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(pack_fp4(codes), packed)
    assert pack_fp4(codes).dtype == np.uint8


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(st.integers(0, 15), max_size=16).filter(lambda c: len(c) % 2 == 0), st.sampled_from("bBhHiIqQ"))
def test_codes_of_any_integer_dtype_survive_pack_and_unpack(codes: list[int], dtype: str) -> None:
    np.testing.assert_array_equal(unpack_fp4(pack_fp4(np.array(codes, dtype))), codes)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.array([1, 2, 3]), "even last dimension"),
        (np.array(3), "even last dimension"),
        (np.array([1, 16]), r"0\.\.15, got 16"),
        (np.array([-1, 2]), r"0\.\.15, got -1"),
        (np.array([0.5, 1.0]), "must be integers"),
    ],
)
def test_pack_rejects(codes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_fp4(codes)


def test_unpack_rejects() -> None:
    with pytest.raises(ValueError, match=r"0\.\.255, got 256"):
        unpack_fp4([256])
    with pytest.raises(ValueError, match="last dimension"):
        unpack_fp4(np.uint8(3))


@pytest.mark.parametrize("largest", [448, 6])
def test_scale_of_every_positive_bf16_is_exact(largest: int) -> None:
    amax = BF16.decode(POSITIVE_BF16)
    # The specification's remark: for bf16 maxima the rounded product gives the byte of the true quotient.
    expected = [scale_code(Fraction(a) / largest) for a in amax.tolist()]
    np.testing.assert_array_equal(power_of_two_scale(amax, largest), expected)


@pytest.mark.parametrize("largest", [448, 6, 25])
def test_scale_follows_the_rounded_product_on_float32(largest: int) -> None:
    # For 448 and 6 a division would give the same bytes; just above 25 * 2^k it does not.
    edges = np.float32(largest) * np.exp2(np.arange(-130, 110)).astype(np.float32)
    codes = np.concatenate([edges.view(np.uint32) + np.uint32(d) for d in range(4)] + [edges.view(np.uint32) - 1])
    amax = codes.view(np.float32)
    reciprocal = Fraction(float(FP32.round(1 / largest)))
    products = [FP32.round(float(Fraction(a) * reciprocal)) for a in amax.tolist()]
    np.testing.assert_array_equal(power_of_two_scale(amax, largest), [scale_code(Fraction(float(p))) for p in products])


@pytest.mark.parametrize("largest", [448, 6])
def test_scale_at_and_one_bf16_ulp_above_a_power(largest: int) -> None:
    k = np.arange(-125, 110)
    exact = largest * np.exp2(k)
    np.testing.assert_array_equal(power_of_two_scale(exact, largest), k + 127)
    above = BF16.decode(BF16.encode(exact) + np.uint16(1))
    np.testing.assert_array_equal(power_of_two_scale(above, largest), k + 128)


def test_scale_covers_the_group() -> None:
    amax = BF16.decode(POSITIVE_BF16)
    scale = E8M0.decode(power_of_two_scale(amax, 448))
    assert (amax <= 448 * scale).all()
    assert (amax > 448 * scale / 2)[scale > 2.0**-127].all()


def test_scale_of_subnormal_products() -> None:
    # p itself: 2^-127 is half of the subnormal range, code 0; anything above takes 2^-126.
    products = np.array([0.0, -0.0, 2.0**-149, 2.0**-127, 2.0**-127 + 2.0**-149, 2.0**-126, 2.0**-126 + 2.0**-149])
    np.testing.assert_array_equal(power_of_two_scale(products, 1), [0, 0, 0, 0, 1, 1, 2])


def test_scale_saturates_and_marks_nan() -> None:
    amax = np.array([FP32.largest, np.inf, np.nan, 2.0**127])
    np.testing.assert_array_equal(power_of_two_scale(amax, 1), [254, 255, 255, 254])
    scalar = power_of_two_scale(448.0, 448)
    assert scalar.shape == ()
    assert scalar.dtype == np.uint8


def test_scale_rejects_negative_maxima_and_useless_limits() -> None:
    with pytest.raises(ValueError, match=r"magnitude, got -1\.0"):
        power_of_two_scale([1.0, -1.0], 448)
    for largest in (0.0, -6.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            power_of_two_scale([1.0], largest)
