"""Each repair of the interpreter, against torch: what the GPU does, a test without a GPU must do too."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import pytest
import torch
import triton
import triton.language as tl

from optimized import interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")

EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
EVERY_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def fp32_patterns() -> torch.Tensor:
    """Random bit patterns, and the exact middle between bf16 neighbours with what lies just beside it."""
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = (EVERY_BF16.view(torch.int16).to(torch.int32) << 16) + 0x8000
    return torch.cat([random, ties - 1, ties, ties + 1]).view(torch.float32)


def saturating_e4m3(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.where(wide.isnan(), wide, wide.clamp(-448, 448)).to(torch.float8_e4m3fn)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; -0 differs from 0."""
    wide, other = actual.double(), expected.double()
    return bool(
        torch.equal(wide.isnan(), other.isnan()) and torch.equal(wide.nan_to_num(), other.nan_to_num())
    ) and bool(torch.equal(wide.signbit()[~wide.isnan()], other.signbit()[~other.isnan()]))


@triton.jit
def cast_kernel(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < count)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < count)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), BLOCK=65536)
    return out


INTEGERS = torch.arange(-70_000, 70_000, 7, dtype=torch.int32)
EVERY_FP16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        pytest.param(EVERY_BF16, torch.float32, id="bf16-fp32"),
        pytest.param(fp32_patterns(), torch.bfloat16, id="fp32-bf16"),
        pytest.param(EVERY_FP16, torch.bfloat16, id="fp16-bf16"),
        pytest.param(INTEGERS, torch.bfloat16, id="int32-bf16"),
        pytest.param(EVERY_E4M3, torch.float32, id="e4m3-fp32"),
        pytest.param(EVERY_E4M3, torch.bfloat16, id="e4m3-bf16"),
        pytest.param(EVERY_BF16, torch.int32, id="bf16-int32"),
    ],
)
def test_casts_are_those_of_torch(x: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.int32:
        x = x[x.float().abs() < 2**30]
    assert same(cast(x, dtype), x.to(dtype))


@pytest.mark.parametrize("x", [EVERY_BF16, fp32_patterns()], ids=["bf16", "fp32"])
def test_casts_to_e4m3_round_to_even_and_saturate(x: torch.Tensor) -> None:
    assert same(cast(x, torch.float8_e4m3fn), saturating_e4m3(x))


@triton.jit
def arithmetic_kernel(x, y, out, greater, COUNT: tl.constexpr, OPERATION: tl.constexpr):
    place = tl.arange(0, COUNT)
    left, right = tl.load(x + place), tl.load(y + place)
    if OPERATION == "add":
        result = left + right
    elif OPERATION == "multiply":
        result = left * right
    else:
        result = left - right
    tl.store(out + place, result)
    tl.store(greater + place, (left > right).to(tl.uint8))


@pytest.mark.parametrize(
    ("operation", "expected"), [("add", torch.add), ("multiply", torch.mul), ("subtract", torch.sub)]
)
def test_bf16_arithmetic_works_on_values(operation: str, expected: object) -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(8192, generator=generator).bfloat16() for _ in range(2))
    out, greater = torch.empty_like(x), torch.empty(8192, dtype=torch.uint8)
    arithmetic_kernel[(1,)](x, y, out, greater, COUNT=8192, OPERATION=operation)
    assert same(out, expected(x, y))  # type: ignore[operator]
    assert torch.equal(greater.bool(), x > y)


@triton.jit
def scalar_kernel(x, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    values = tl.load(x + place)
    tl.store(out + place, tl.where(values < 0.5, 0.5, values.to(tl.float32)))


def test_bf16_compares_with_a_scalar_by_value() -> None:
    x = torch.linspace(-4, 4, 1024).bfloat16()
    out = torch.empty(1024)
    scalar_kernel[(1,)](x, out, COUNT=1024)
    assert torch.equal(out, x.float().clamp(min=0.5))


@triton.jit
def dot_kernel(x, y, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(x + row * SIZE + column), tl.load(y + row * SIZE + column))
    tl.store(out + row * SIZE + column, product)


def test_dot_of_bf16_is_the_sum_of_products() -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(64, 64)
    dot_kernel[(1,)](x, y, out, SIZE=64)
    # 64 sums in fp32: each at most half an ulp of the sum of magnitudes so far.
    bound = 64 * 2.0**-24 * (x.double().abs() @ y.double().abs())
    assert ((out.double() - x.double() @ y.double()).abs() <= bound).all()


@triton.jit
def sum_kernel(x, out, COUNT: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, COUNT)), axis=0))


def test_a_reduction_over_bf16_is_refused() -> None:
    with pytest.raises(Exception, match="cast to fp32 first"):
        sum_kernel[(1,)](torch.ones(16).bfloat16(), torch.empty(1, dtype=torch.bfloat16), COUNT=16)
    out = torch.empty(1)
    sum_kernel[(1,)](torch.ones(16), out, COUNT=16)
    assert out.item() == 16


@triton.jit
def loop_kernel(bound, out):
    total = 0
    for step in range(0, tl.load(bound)):
        total += step
    tl.store(out, total)


def test_loop_bounds_may_come_from_memory() -> None:
    out = torch.empty(1, dtype=torch.int32)
    loop_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


@triton.jit
def failing_helper(x):
    tl.static_assert(False, "on purpose")
    return x


@triton.jit
def failing_kernel(x, out):
    tl.store(out, failing_helper(tl.load(x)))


def test_a_failing_helper_leaves_the_language_as_it_was() -> None:
    before = tl.load, tl.tensor.__add__, tl.sum
    with pytest.raises(Exception, match="on purpose"):
        failing_kernel[(1,)](torch.ones(1), torch.empty(1))
    assert (tl.load, tl.tensor.__add__, tl.sum) == before
    test_loop_bounds_may_come_from_memory()


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    monkeypatch.setattr(interpreter, "_installed", False)
    with pytest.raises(RuntimeError, match=r"triton 9\.9\.9: its interpreter is repaired for 3\.6\.0, 3\.9\.0 only"):
        interpreter.install()


def test_installing_twice_repairs_once() -> None:
    before = interpreter.interpreter.InterpreterBuilder.cast_impl
    interpreter.install()
    assert interpreter.interpreter.InterpreterBuilder.cast_impl is before
