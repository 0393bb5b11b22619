"""Codes of every format against torch, ml_dtypes and the definition of rounding to nearest even."""

import ast
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from conformance import formats
from conformance.formats import BF16, E2M1, E4M3, E8M0, FORMATS, FP16, FP32, Codes, Float64Array, Format

SMALL_FORMATS = [E4M3, E8M0, E2M1, BF16, FP16]
ML_DTYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F4_E2M1": ml_dtypes.float4_e2m1fn,
}
TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def all_codes(fmt: Format) -> Codes:
    return np.arange(1 << fmt.width).astype(fmt.code_dtype)


def neighbours(fmt: Format) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Consecutive finite values `lower < upper` of at least +0, and the one a tie goes to.

    Of two neighbours the even one is the even code, except in E8M0 where it is always the upper.
    """
    if fmt is FP32:
        starts = np.random.default_rng(0).integers(0, 0x7F7FFFFF, 20_000, dtype=np.uint32)
        edges = np.array([0, 1, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x7F7FFFFE], np.uint32)
        codes = np.concatenate([starts, edges])
        lower, upper = (c.view(np.float32).astype(np.float64) for c in (codes, codes + np.uint32(1)))
    else:
        codes = np.arange(1 << (fmt.width - fmt.signed)).astype(fmt.code_dtype)
        with np.errstate(invalid="ignore"):
            values = codes.view(ML_DTYPES[fmt.name]).astype(np.float64)
        values = values[np.isfinite(values)]
        lower, upper = values[:-1], values[1:]
        codes = codes[: len(lower)]
    even = upper if fmt is E8M0 else np.where(codes % 2 == 0, lower, upper)
    return lower, upper, even


def assert_same(actual: Float64Array, expected: Float64Array) -> None:
    """Equal including the sign of zero; any NaN equals any NaN."""
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


def test_formats_are_listed_by_their_safetensors_name() -> None:
    assert {name: fmt.name for name, fmt in FORMATS.items()} == {
        name: name for name in ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4_E2M1")
    }


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_largest_is_the_largest_finite_code(fmt: Format) -> None:
    if fmt is FP32:
        assert fmt.largest == float(np.finfo(np.float32).max)
        return
    values = fmt.decode(all_codes(fmt))
    assert fmt.largest == values[np.isfinite(values)].max()


def test_code_dtypes() -> None:
    sizes = {fmt.name: (fmt.width, fmt.code_dtype) for fmt in FORMATS.values()}
    assert sizes == {
        "F32": (32, np.uint32),
        "F16": (16, np.uint16),
        "BF16": (16, np.uint16),
        "F8_E4M3": (8, np.uint8),
        "F8_E8M0": (8, np.uint8),
        "F4_E2M1": (4, np.uint8),
    }


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=lambda f: f.name)
def test_every_code_decodes_as_in_ml_dtypes(fmt: Format) -> None:
    codes = all_codes(fmt)
    with np.errstate(invalid="ignore"):
        expected = codes.view(ML_DTYPES[fmt.name]).astype(np.float64)
    assert_same(fmt.decode(codes), expected)


@pytest.mark.parametrize("fmt", [E4M3, E8M0, BF16, FP16], ids=lambda f: f.name)
def test_every_code_decodes_as_in_torch(fmt: Format) -> None:
    codes = all_codes(fmt)
    expected = torch.from_numpy(codes).view(TORCH_DTYPES[fmt.name]).to(torch.float32).double().numpy()
    assert_same(fmt.decode(codes), expected)


def test_fp32_decodes_as_the_hardware_does() -> None:
    codes = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    codes[:8] = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x80000000, 0xFF800000]
    with np.errstate(invalid="ignore"):
        expected = codes.view(np.float32).astype(np.float64)
    assert_same(FP32.decode(codes), expected)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_codes_survive_decode_and_encode(fmt: Format) -> None:
    codes = all_codes(fmt) if fmt is not FP32 else np.arange(0, 1 << 32, 9973).astype(np.uint32)
    codes = codes[~np.isnan(fmt.decode(codes))]
    encoded = fmt.encode(fmt.decode(codes))
    assert encoded.dtype == fmt.code_dtype
    np.testing.assert_array_equal(encoded, codes)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_ties_go_to_even_and_one_float64_ulp_decides(fmt: Format) -> None:
    # One float64 ulp off the midpoint vanishes in a cast through float32: double rounding fails here.
    lower, upper, even = neighbours(fmt)
    middle = (lower + upper) / 2
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    for sign in (1, -1) if fmt.signed else (1,):
        for method in (fmt.round, lambda x: fmt.decode(fmt.encode(x))):
            assert_same(method(sign * middle), sign * even)
            assert_same(method(sign * below), sign * lower)
            assert_same(method(sign * above), sign * upper)


@pytest.mark.parametrize(("tie", "value"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)])
def test_e2m1_ties_of_the_specification(tie: float, value: float) -> None:
    code = [0, 0.5, 1, 1.5, 2, 3, 4, 6].index(value)
    np.testing.assert_array_equal(E2M1.encode([tie, -tie]), [code, code | 8])


def test_e4m3_encodes_every_clamped_bf16_as_torch_does() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(E4M3.encode(x.numpy()), expected)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda f: f.name)
def test_float32_encodes_as_torch_does(fmt: Format) -> None:
    lower, upper, _ = neighbours(fmt)
    middle = ((lower + upper) / 2).astype(np.float32)
    patterns = np.random.default_rng(2).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    # All exponents, then the exponents of the format, then midpoints and their float32 neighbours.
    normals = np.random.default_rng(3).standard_normal(200_000).astype(np.float32)
    near = [np.nextafter(middle, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf)]
    x = np.concatenate([patterns[~np.isnan(patterns)], normals, middle, -middle, *near])
    expected = torch.from_numpy(x).to(TORCH_DTYPES[fmt.name]).view(torch.uint16).numpy()
    np.testing.assert_array_equal(fmt.encode(x), expected)


def test_e8m0_encodes_normal_bf16_as_ml_dtypes_and_torch_do() -> None:
    # Both libraries are no oracle for float32 subnormals: they send 65/64 · 2^-127 to 2^-126.
    x = torch.arange(0x80, 0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    codes = E8M0.encode(x.numpy())
    for expected in (
        x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8),
        x.to(torch.float8_e8m0fnu).view(torch.uint8).numpy(),
    ):
        # Both turn what rounds beyond 2^127 into NaN where this format saturates.
        np.testing.assert_array_equal(codes, np.minimum(expected, 254))


def test_fp32_encodes_random_float64_as_the_hardware_does() -> None:
    bits = np.random.default_rng(4).integers(0, 1 << 63, 200_000, dtype=np.uint64)
    exponents = np.random.default_rng(5).integers(-160, 130, 200_000)
    x = np.concatenate([bits.view(np.float64), np.ldexp(np.random.default_rng(6).uniform(-1, 1, 200_000), exponents)])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(FP32.encode(x), expected)


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda f: f.name)
def test_ieee_formats_overflow_from_half_a_step_beyond_largest(fmt: Format) -> None:
    edge = fmt.largest + float(fmt.spacing(fmt.largest)) / 2
    inside = np.nextafter(edge, 0)
    values = np.array([inside, edge, np.inf, 1e308, -inside, -edge, -np.inf])
    expected = np.array([fmt.largest, *[np.inf] * 3, -fmt.largest, *[-np.inf] * 2])
    assert_same(fmt.round(values), expected)
    assert_same(fmt.decode(fmt.encode(values)), expected)


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda f: f.name)
def test_formats_without_infinity_saturate(fmt: Format) -> None:
    beyond = np.array([fmt.largest, np.nextafter(fmt.largest, np.inf), 1.1 * fmt.largest, 1e300, np.inf])
    assert_same(fmt.round(beyond), np.full(5, fmt.largest))
    assert_same(fmt.decode(fmt.encode(-beyond)), np.full(5, -fmt.largest))


def test_e8m0_saturates_at_both_ends() -> None:
    np.testing.assert_array_equal(
        E8M0.encode([5e-324, 2.0**-128, 2.0**-127, 2.0**127, 1e300, np.inf]), [0] * 3 + [254] * 3
    )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_nan(fmt: Format) -> None:
    # A negative NaN with a full payload overflows integer arithmetic that forgets about NaN.
    values = np.array([1.0, np.nan, 0.0])
    values[2:].view(np.uint64)[:] = 0xFFFFFFFFFFFFFFFF
    if fmt is E2M1:
        with pytest.raises(ValueError, match=r"F4_E2M1 has no NaN: element \(1,\) is nan"):
            fmt.encode(values)
        return
    quiet = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0, "F8_E4M3": 0x7F, "F8_E8M0": 0xFF}[fmt.name]
    np.testing.assert_array_equal(fmt.encode(values)[1:], [quiet, quiet])
    np.testing.assert_array_equal(fmt.round(values), [1, np.nan, np.nan])


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -np.inf])
def test_e8m0_rejects_what_is_not_positive(value: float) -> None:
    with pytest.raises(ValueError, match=r"F8_E8M0 holds positive numbers only: element \(0, 1\)"):
        E8M0.encode([[1.0, value]])


def test_shapes_are_kept() -> None:
    for shape in [(), (0,), (2, 3), (1, 0, 4)]:
        values = np.ones(shape)
        assert BF16.encode(values).shape == BF16.round(values).shape == BF16.spacing(values).shape == shape
        assert BF16.decode(BF16.encode(values)).shape == FP32.decode(FP32.encode(values)).shape == shape
    columns = np.arange(12.0).reshape(3, 4).T / 7
    np.testing.assert_array_equal(BF16.round(columns), BF16.round(columns.copy()))


@pytest.mark.parametrize("codes", [np.array([1.0]), np.array([16]), np.array([-1])])
def test_decode_rejects_what_is_not_a_code(codes: Float64Array) -> None:
    with pytest.raises(ValueError, match="F4_E2M1 codes"):
        E2M1.decode(codes)


def test_the_package_imports_numpy_and_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "numpy"}
    for source in Path(formats.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith("conformance.formats.") or name.split(".")[0] in allowed, (source.name, name)
