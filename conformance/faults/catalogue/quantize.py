"""Mistakes in number formats, quantisers and dequantisation (numerics.md 1 and 2)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, Replace

Q = "quantize"
EXPONENT = "(bits.clamp(max=FP32_INFINITY) + FP32_MANTISSA) >> 23"

FAULTS: tuple[Fault, ...] = (
    Fault(
        Q,
        "e2m1-ties-away",
        "fp4-tie-away-from-zero",
        "Midpoints of the FP4 grid round up instead of to the even code.",
        Edit("quantize.round_e2m1", "torch.round(magnitude / spacing)", "torch.floor(magnitude / spacing + 0.5)"),
    ),
    Fault(
        Q,
        "e2m1-truncated",
        "fp4-truncated",
        "FP4 codes are cut off instead of rounded.",
        Edit("quantize.round_e2m1", "torch.round(magnitude / spacing)", "torch.floor(magnitude / spacing)"),
    ),
    Fault(
        Q,
        "e8m0-nearest",
        "scale-not-rounded-up",
        "The power-of-two scale is rounded to the nearest exponent, so that the largest value clips.",
        Edit("quantize.pow2ceil", "+ FP32_MANTISSA", "+ 0x400000"),
    ),
    Fault(
        Q,
        "e8m0-nearest-logarithm",
        "scale-not-rounded-up",
        "The scale's logarithm is rounded to the nearest integer, so that the largest value clips.",
        # 0x3504F3 is the fraction of √2: what is above it carries.
        Edit("quantize.pow2ceil", "+ FP32_MANTISSA", "+ FP32_MANTISSA - 0x3504F3"),
    ),
    Fault(
        Q,
        "e8m0-floor",
        "scale-not-rounded-up",
        "The power-of-two scale is rounded down, as the OCP format says.",
        Edit("quantize.pow2ceil", " + FP32_MANTISSA", ""),
    ),
    Fault(
        Q,
        "e8m0-always-next",
        "scale-of-exact-power-doubled",
        "An exact power of two gets the next scale.",
        Edit("quantize.pow2ceil", EXPONENT, "((bits >> 23) + 1).clamp(max=255)"),
    ),
    Fault(
        Q,
        "fp8-floor-after-division",
        "amax-floor",
        "The floor is applied to the quotient instead of the largest value.",
        Replace("quantize.FP8_AMAX_FLOOR", 1e-4 * 448),
    ),
    Fault(
        Q,
        "fp8-floor-missing",
        "amax-floor",
        "Small groups are scaled up without limit.",
        Replace("quantize.FP8_AMAX_FLOOR", 1e-30),
    ),
    Fault(
        Q,
        "fp4-e8m0-floor-of-e4m3",
        "fp4-formats-swapped",
        "Index keys get the floor of compressed rows.",
        Replace("quantize.FP4_E8M0_AMAX_FLOOR", 6.0 * 2.0**-9),
    ),
    Fault(
        Q,
        "fp4-e4m3-floor-of-e8m0",
        "fp4-formats-swapped",
        "Compressed rows get the floor of index keys, so that a small group's scale becomes zero.",
        Replace("quantize.FP4_E4M3_AMAX_FLOOR", 6.0 * 2.0**-126),
    ),
    Fault(
        Q,
        "fp8-max-of-fnuz",
        "fp8-fnuz",
        "Codes are limited to 240, the largest of another 8-bit format.",
        Edit("quantize._scale_fp8", ".clamp(-E4M3_MAX, E4M3_MAX)", ".clamp(-240.0, 240.0)"),
    ),
    Fault(
        Q,
        "fp8-truncated",
        "fp8-truncated",
        "FP8 codes are cut off instead of rounded.",
        Edit(
            "quantize._scale_fp8",
            "(groups / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)",
            "arithmetic.truncate_e4m3((groups / scale.float()).clamp(-E4M3_MAX, E4M3_MAX))",
        ),
    ),
    Fault(
        Q,
        "fp8-scale-per-64",
        "scale-group-size",
        "Two neighbouring groups of 32 share the larger scale.",
        Edit(
            "quantize._scale_fp8",
            "group_amax(groups, FP8_AMAX_FLOOR)",
            "group_amax(groups, FP8_AMAX_FLOOR).unflatten(-2, (-1, 2 - groups.shape[-2] % 2))"
            ".amax(-2, keepdim=True).expand(*groups.shape[:-2], -1, 2 - groups.shape[-2] % 2, 1).flatten(-3, -2)",
        ),
    ),
    Fault(
        Q,
        "fp4-e4m3-scale-per-32",
        "scale-group-size",
        "Compressed rows get a scale per 32 values, written twice.",
        Edit(
            "quantize._scale_fp4_e4m3",
            "amax = group_amax(groups, FP4_E4M3_AMAX_FLOOR)",
            "amax = group_amax(groups, FP4_E4M3_AMAX_FLOOR).unflatten(-2, (-1, 2 - groups.shape[-2] % 2))"
            ".amax(-2, keepdim=True).expand(*groups.shape[:-2], -1, 2 - groups.shape[-2] % 2, 1).flatten(-3, -2)",
        ),
    ),
    Fault(
        Q,
        "fp4-e4m3-by-reciprocal",
        "fp4-reciprocal-multiply",
        "A product with the scale's reciprocal moves exact ties.",
        Edit("quantize._scale_fp4_e4m3", "groups / scale.float()", "groups * (1.0 / scale.float())"),
    ),
    Fault(
        Q,
        "fp4-e4m3-scale-power-of-two",
        "fp4-formats-swapped",
        "Compressed rows get power-of-two scales like index keys.",
        Edit(
            "quantize._scale_fp4_e4m3",
            "(amax / E2M1_MAX)",
            "torch.exp2(torch.ceil(torch.log2(amax / E2M1_MAX)))",
        ),
    ),
    Fault(
        Q,
        "fp4-e4m3-scale-overflows",
        "e4m3-scale-overflow",
        "A scale beyond 448 becomes NaN for want of a clamp.",
        Edit("quantize._scale_fp4_e4m3", ".clamp(max=E4M3_MAX)", ".masked_fill(amax > 464.0 * E2M1_MAX, torch.nan)"),
    ),
    Fault(
        Q,
        "fp4-e4m3-scale-truncated",
        "e4m3-scale-rounding",
        "The E4M3 scale is cut off instead of rounded.",
        Edit(
            "quantize._scale_fp4_e4m3",
            "(amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)",
            "arithmetic.truncate_e4m3((amax / E2M1_MAX).clamp(max=E4M3_MAX))",
        ),
    ),
    Fault(
        Q,
        "packed-high-nibble-first",
        "nibble-order",
        "The even element is packed into the high nibble.",
        Edit(
            "quantize.pack_fp4",
            "codes[..., 0::2] | (codes[..., 1::2] << 4)",
            "codes[..., 1::2] | (codes[..., 0::2] << 4)",
        ),
    ),
    Fault(
        Q,
        "unpacked-high-nibble-first",
        "nibble-order",
        "The high nibble is read as the even element.",
        Edit("quantize._numbers_of_byte", "(grid[byte & 0xF], grid[byte >> 4])", "(grid[byte >> 4], grid[byte & 0xF])"),
    ),
    Fault(
        Q,
        "negative-zero-dropped",
        "negative-zero-code",
        "The sign of a code that rounds to zero is lost.",
        Edit("quantize.pack_fp4", "torch.signbit(values)", "(values < 0)"),
    ),
    Fault(
        Q,
        "fp4-subnormal-as-normal",
        "fp4-subnormal-decoded",
        "Code 1 is decoded with an implicit leading one, as 0.75 instead of 0.5.",
        Edit("quantize._numbers_of_byte", "torch.tensor((*E2M1_GRID,", "torch.tensor((0.0, 0.75, *E2M1_GRID[2:],"),
    ),
    Fault(
        Q,
        "fp4-sign-ignored",
        "fp4-sign",
        "The fourth bit is not read.",
        Edit("quantize._numbers_of_byte", "*(-magnitude for magnitude in E2M1_GRID)", "*E2M1_GRID"),
    ),
    Fault(
        Q,
        "fp4-weight-scales-shifted",
        "scale-layout",
        "Each block of 32 inputs gets its neighbour's scale.",
        Edit("quantize.dequantize_fp4_weight", "(weight, scale)", "(weight, scale.float().roll(1, -1))"),
    ),
    Fault(
        Q,
        "fp8-weight-scale-of-first-tile",
        "scale-layout",
        "One scale a row of tiles instead of one a tile.",
        Edit(
            "quantize.dequantize_fp8_weight",
            "(weight, scale)",
            "(weight, scale[:, :1].expand_as(scale))",
        ),
    ),
    Fault(
        Q,
        "fp8-weight-scales-transposed",
        "scale-layout",
        "The tiles' scales are read column by column.",
        Edit("quantize.dequantize_fp8_weight", "(weight, scale)", "(weight, scale.float().T.reshape(scale.shape))"),
    ),
    Fault(
        Q,
        "one-weight-scale-doubled",
        "scale-layout",
        "One tile's scale has another exponent.",
        Edit("quantize.dequantize_fp8_weight", "(weight, scale)", "(weight, arithmetic.first_doubled(scale.float()))"),
    ),
    Fault(
        Q,
        "fake-fp8-scale-doubled",
        "scale-layout",
        "Codes are multiplied by another scale than they were divided by.",
        Edit(
            "quantize.fake_quantize_fp8",
            "return quantized_fp8(x)",
            "codes, scale = _scale_fp8(x)\n"
            "    return join_groups(codes.float() * arithmetic.first_doubled(scale.float()), x.shape[-1])",
        ),
    ),
    Fault(
        Q,
        "subnormals-flushed",
        "subnormals-flushed",
        "Subnormal inputs count as zero.",
        Edit("quantize.split_groups", "    return", "    x = x.masked_fill(x.abs() < 2.0**-126, 0.0)\n    return"),
    ),
    Fault(
        Q,
        "fp8-scale-not-power-of-two",
        "scale-not-power-of-two",
        "Codes are made with the scale before its rounding.",
        Edit(
            "quantize._scale_fp8", "groups / scale.float()", "groups / (group_amax(groups, FP8_AMAX_FLOOR) / E4M3_MAX)"
        ),
    ),
    Fault(
        Q,
        "fp4-scale-not-power-of-two",
        "scale-not-power-of-two",
        "Codes are made with the scale before its rounding.",
        Edit(
            "quantize._scale_fp4_e8m0",
            "groups / scale.float()",
            "groups / (group_amax(groups, FP4_E8M0_AMAX_FLOOR) / E2M1_MAX)",
        ),
    ),
    Fault(
        Q,
        "scale-byte-0-as-zero",
        "scale-byte-zero-misread",
        "The smallest scale is read as zero.",
        Edit(
            "quantize.dequantize_fp4_weight",
            "(weight, scale)",
            "(weight, scale.float().masked_fill(scale.view(torch.uint8) == 0, 0.0))",
        ),
    ),
    Fault(
        Q,
        "scale-byte-255-as-number",
        "nan-scale-misread",
        "The NaN scale is read as the next power of two.",
        Edit(
            "quantize.dequantize_fp4_weight",
            "(weight, scale)",
            "(weight, scale.float().masked_fill(scale.view(torch.uint8) == 255, torch.inf))",
        ),
    ),
    Fault(
        Q,
        "fp8-ties-away",
        "fp8-tie-away-from-zero",
        "Midpoints between FP8 codes round up.",
        Edit("quantize._scale_fp8", "groups / scale.float()", "groups / scale.float() * (1.0 + 2.0**-20)"),
    ),
    Fault(
        Q,
        "e8m0-by-logarithm",
        "scale-by-log2",
        "The exponent comes from a float logarithm, not from the bits.",
        Edit(
            "quantize.pow2ceil",
            EXPONENT,
            "(torch.ceil(torch.log(bits.view(torch.float32)) * 1.442695041).to(torch.int32) + 127).clamp(max=255)",
        ),
    ),
    Fault(
        Q,
        "codes-not-packed",
        "nibble-order",
        "One FP4 code a byte is stored.",
        Edit("quantize.pack_fp4", "return codes[..., 0::2] | (codes[..., 1::2] << 4)", "return codes"),
    ),
)
