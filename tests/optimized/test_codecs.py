"""Codecs inside kernels, on every code and on every bf16 number: against torch's casts and the suite's own formats."""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED

# ruff: isort: split
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance.formats.format import E2M1, E4M3, Format
from optimized import codecs

EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


@triton.jit
def encode_kernel(x, out, BLOCK: tl.constexpr, FP8: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place)
    if FP8:
        tl.store(out + place, codecs.encode_e4m3(values))
    else:
        tl.store(out + place, codecs.encode_e2m1(values).to(tl.uint8))


@triton.jit
def decode_kernel(code, out, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    place = tl.arange(0, BLOCK)
    codes = tl.load(code + place)
    if FORMAT == "e4m3":
        values = codecs.decode_e4m3(codes)
    elif FORMAT == "e2m1":
        values = codecs.decode_e2m1(codes & 15)
    else:
        values = codecs.decode_e8m0(codes)
    tl.store(out + place, values)


@triton.jit
def scale_kernel(amax, code, inverse, BLOCK: tl.constexpr, RECIPROCAL: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found, factor = codecs.power_of_two_scale(tl.load(amax + place), RECIPROCAL)
    tl.store(code + place, found)
    tl.store(inverse + place, factor)


@triton.jit
def round_trip_kernel(packed, out, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    values = codecs.unpack_pairs(tl.load(packed + place))
    tl.store(out + place, codecs.pack_pairs(codecs.encode_e2m1(values), ROWS, PAIRS))


def near(values: torch.Tensor) -> torch.Tensor:
    """fp32 values with both neighbours, in a multiple of 4096."""
    bits = values.view(torch.int32)
    every = torch.cat([bits - 1, bits, bits + 1])
    return torch.nn.functional.pad(every, (0, -len(every) % 4096)).view(torch.float32)


def encode(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    x = x.contiguous().to(DEVICE)
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    block = 65536 if INTERPRETED and len(x) % 65536 == 0 else 4096
    encode_kernel[(len(x) // block,)](x, out, BLOCK=block, FP8=fp8)
    return out.cpu()


def ties(form: Format, largest: int) -> torch.Tensor:
    """The middles between neighbouring positive codes, and their negatives."""
    values = form.decode(np.arange(largest + 1, dtype=np.uint8))
    middles = torch.from_numpy((values[1:] + values[:-1]) / 2).float()
    return torch.cat([middles, -middles])


def test_e4m3_is_encoded_as_torch_casts() -> None:
    for x in (EVERY_BF16, near(ties(E4M3, 0x7E))):
        clamped = torch.where(x.isnan(), x, x.clamp(-448, 448))
        assert torch.equal(encode(x, fp8=True), clamped.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e2m1_is_encoded_to_the_nearest_code() -> None:
    for x in (EVERY_BF16[~EVERY_BF16.isnan()][: 15 * 4096], near(ties(E2M1, 7))):
        expected = E2M1.encode(x.clamp(-6, 6).numpy().astype(np.float64))
        assert torch.equal(encode(x, fp8=False), torch.from_numpy(np.asarray(expected, dtype=np.uint8)))


@pytest.mark.parametrize(
    ("form", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e8m0", torch.float8_e8m0fnu), ("e2m1", None)]
)
def test_every_code_is_decoded(form: str, dtype: torch.dtype | None) -> None:
    code = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](code.to(DEVICE), out, BLOCK=256, FORMAT=form)
    if dtype is None:
        expected = torch.from_numpy(E2M1.decode((code & 15).numpy()).astype(np.float32))
    else:
        expected = code.view(dtype).float()
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert torch.equal(out.cpu().nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


@pytest.mark.parametrize(("reciprocal", "floor"), [(1 / 448, 1e-4), (1 / 6, 6 * 2.0**-126)], ids=["fp8", "fp4"])
def test_the_scale_is_the_next_power_of_two(reciprocal: float, floor: float) -> None:
    """For every positive finite bf16 maximum from the smallest that a quantiser may see."""
    amax = EVERY_BF16[(floor <= EVERY_BF16) & EVERY_BF16.isfinite()]
    amax = torch.cat([amax, amax[:1].expand(-len(amax) % 4096)]).contiguous()
    code = torch.empty(len(amax), dtype=torch.int32, device=DEVICE)
    inverse = torch.empty(len(amax), device=DEVICE)
    scale_kernel[(len(amax) // 4096,)](amax.to(DEVICE), code, inverse, BLOCK=4096, RECIPROCAL=reciprocal)
    fraction, exponent = torch.frexp(amax * torch.tensor(reciprocal, dtype=torch.float32))
    expected = exponent - (fraction == 0.5).int()
    assert torch.equal(code.cpu() - 127, expected.int())
    assert torch.equal(inverse.cpu().double(), torch.ldexp(torch.ones(len(amax)).double(), -expected))


def test_pairs_are_packed_as_they_were_unpacked() -> None:
    """Every byte; -0 keeps its sign."""
    packed = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(packed)
    round_trip_kernel[(1,)](packed, out, ROWS=16, PAIRS=16)
    assert torch.equal(out, packed)
