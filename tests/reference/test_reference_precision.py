"""Rounding and quantisers against definitions written another way."""

from __future__ import annotations

import math

import pytest
import torch

from reference.linear import linear_fp4, linear_fp8
from reference.precision import round_to, to_bf16
from reference.quantize import (
    E2M1_GRID,
    dequantize_fp4_weight,
    dequantize_fp8_weight,
    fake_quantize_fp4_e4m3,
    fake_quantize_fp4_e8m0,
    fake_quantize_fp8,
    pack_fp4,
    pow2ceil,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
    round_e2m1,
    unpack_fp4,
)
from reference.sampling import greedy, sample
from reference.sparse_attention import sparse_attention


def test_float64_rounds_once() -> None:
    tie = 1 + 2.0**-8
    above, below = tie + 2.0**-40, tie - 2.0**-40
    x = torch.tensor([tie, above, below, -above, 2.0**-133, 2.0**-134 * 1.5, 2.0**-134, 0.0], dtype=torch.float64)
    expected = [1.0, 1 + 2.0**-7, 1.0, -(1 + 2.0**-7), 2.0**-133, 2.0**-133, 0.0, 0.0]
    assert to_bf16(x).double().tolist() == expected
    assert to_bf16(torch.tensor([above], dtype=torch.float64).float()).item() == 1.0, "through float32 it rounds twice"


def test_float64_rounding_equals_float32_rounding_on_float32_numbers() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat((x[~x.isnan()], torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38])))
    assert torch.equal(round_to(x.double(), torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize(
    ("value", "expected"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)]
)
def test_e2m1_ties_go_to_the_even_code(value: float, expected: float) -> None:
    assert round_e2m1(torch.tensor([value, -value])).tolist() == [expected, -expected]


def test_e2m1_is_the_nearest_grid_number() -> None:
    x = torch.linspace(-6, 6, 4001)
    grid = torch.tensor([*E2M1_GRID, *(-number for number in E2M1_GRID)])
    nearest = (x.unsqueeze(-1) - grid).abs().amin(dim=-1)
    assert torch.equal((round_e2m1(x) - x).abs(), nearest)


def test_fp4_packs_the_even_element_low_and_keeps_the_sign_of_zero() -> None:
    values = torch.tensor([0.5, -6.0, -0.0, 1.5])
    assert pack_fp4(values).tolist() == [0xF1, 0x38]
    assert torch.equal(unpack_fp4(pack_fp4(values)), values)
    assert torch.signbit(unpack_fp4(pack_fp4(values))).tolist() == [False, True, True, False]


def test_pow2ceil() -> None:
    amax = torch.tensor([448.0, 449.0, 224.0, 1e-4])
    assert pow2ceil(amax, 448.0).float().tolist() == [1.0, 2.0, 0.5, 2.0 ** math.ceil(math.log2(1e-4 / 448))]


@pytest.mark.parametrize("width", [16, 32, 40, 96])
def test_fake_quantisation_is_dequantised_codes(width: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).bfloat16() * 5
    for quantize, fake, group in (
        (quantize_fp8, fake_quantize_fp8, 32),
        (quantize_fp4_e8m0, fake_quantize_fp4_e8m0, 32),
        (quantize_fp4_e4m3, fake_quantize_fp4_e4m3, 16),
    ):
        codes, scale = quantize(x)
        values = unpack_fp4(codes) if codes.dtype == torch.uint8 else codes.float()
        by_element = scale.float().repeat_interleave(group, dim=-1)[:, :width]
        assert torch.equal((values * by_element).bfloat16(), fake(x))


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (40, 96), (33, 48)])
def test_quantised_linears_are_products_of_dequantised_operands(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(5, columns, generator=generator).bfloat16()
    exact_x = fake_quantize_fp8(x).double()

    def scale(*shape: int) -> torch.Tensor:
        return torch.randint(120, 130, shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)

    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    by_tile = scale(-(-rows // 32), -(-columns // 32))
    expected = to_bf16(exact_x @ dequantize_fp8_weight(weight, by_tile).double().T)
    assert torch.equal(linear_fp8(x, weight, by_tile, compute=torch.float64), expected)

    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    by_row = scale(rows, -(-columns // 32))
    expected = to_bf16(exact_x @ dequantize_fp4_weight(packed, by_row).double().T)
    assert torch.equal(linear_fp4(x, packed, by_row, compute=torch.float64), expected)


def test_sparse_attention_against_one_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 2, 8, generator=generator).bfloat16()
    kv = torch.randn(2, 90, 8, generator=generator).bfloat16()
    indices = torch.randint(-1, 90, (2, 3, 150), generator=generator).to(torch.int32)
    indices[0, 1] = -1
    indices[1, 2, :64] = -1
    sink = torch.tensor([0.5, -2.0])
    got = sparse_attention(q, kv, indices, sink, 0.4, compute=torch.float64).double()
    rows = torch.stack([kv[one][indices[one].clamp(min=0).long()] for one in range(2)]).double()
    scores = (q.double() @ rows.transpose(-1, -2) * 0.4).masked_fill((indices < 0).unsqueeze(2), -torch.inf)
    logits = torch.cat((scores, sink.double().view(1, 1, 2, 1).expand(2, 3, 2, 1)), dim=-1)
    expected = torch.softmax(logits, dim=-1)[..., :-1] @ rows
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-2)
    assert not got[0, 1].any(), "no valid row gives zeros"


def test_sampling() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert greedy(logits).tolist() == [1]
    assert sample(logits, 0.0, torch.ones(1, 3)).tolist() == [1]
    exponentials = torch.empty(20_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    drawn = sample(logits.expand(20_000, 3), 1.5, exponentials)
    share = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(share, torch.softmax(logits[0] / 1.5, dim=-1), rtol=0, atol=0.02)
