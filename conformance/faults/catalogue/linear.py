"""Mistakes in linear layers (numerics.md 3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

L = "linear"
PRODUCT = "functional.linear(x.to(compute), weight.to(compute))"

FAULTS: tuple[Fault, ...] = (
    Fault(
        L,
        "bf16-accumulator",
        "bf16-accumulator",
        "The running sum of a bf16 product is kept in bf16.",
        Edit("linear.linear_bf16", PRODUCT, "arithmetic.bf16_accumulator(x.to(compute), weight.to(compute))"),
    ),
    Fault(
        L,
        "bf16-accumulator-per-block",
        "bf16-accumulator",
        "The sum over blocks of 32 inputs is kept in bf16.",
        Edit(
            "linear._sum_blocks",
            "total.addcmul_(functional.linear(x_codes, weight_codes), x_factor * weight_factor)",
            "total = arithmetic.as_bf16("
            "torch.addcmul(total, functional.linear(x_codes, weight_codes), x_factor * weight_factor))",
        ),
    ),
    Fault(
        L,
        "bf16-block-sums",
        "bf16-accumulator",
        "The product sum of each block of 32 inputs is rounded to bf16 before it is scaled.",
        Edit(
            "linear._sum_blocks",
            "functional.linear(x_codes, weight_codes)",
            "arithmetic.as_bf16(functional.linear(x_codes, weight_codes))",
        ),
    ),
    Fault(
        L,
        "fp8-truncated",
        "bf16-truncated",
        "The result of an FP8 layer is cut to bf16 instead of rounded.",
        Edit("linear.linear_fp8", "to_bf16(block", "arithmetic.truncate(block"),
    ),
    Fault(
        L,
        "fp4-truncated",
        "bf16-truncated",
        "The result of an FP4 layer is cut to bf16 instead of rounded.",
        Edit("linear.linear_fp4", "to_bf16(block", "arithmetic.truncate(block"),
    ),
    Fault(
        L,
        "bf16-truncated",
        "bf16-truncated",
        "The result of a bf16 layer is cut to bf16 instead of rounded.",
        Edit("linear.linear_bf16", "to_bf16(functional", "arithmetic.truncate(functional"),
    ),
    Fault(
        L,
        "fp8-last-input-dropped",
        "last-input-dropped",
        "The loop over the inputs ends one early.",
        Edit("linear.linear_fp8", "(codes.to(compute)", "(arithmetic.without_last(codes.to(compute))"),
    ),
    Fault(
        L,
        "fp4-last-input-dropped",
        "last-input-dropped",
        "The loop over the inputs ends one early.",
        Edit("linear.linear_fp4", "(codes.to(compute)", "(arithmetic.without_last(codes.to(compute))"),
    ),
    Fault(
        L,
        "bf16-last-input-dropped",
        "last-input-dropped",
        "The loop over the inputs ends one early.",
        Edit("linear.linear_bf16", "x.to(compute)", "arithmetic.without_last(x.to(compute))"),
    ),
    Fault(
        L,
        "fp32-last-input-dropped",
        "last-input-dropped",
        "The loop over the inputs ends one early.",
        Edit("linear.linear_fp32", "x.to(compute)", "arithmetic.without_last(x.to(compute))"),
    ),
    Fault(
        L,
        "last-block-dropped",
        "last-input-dropped",
        "The loop over blocks of 32 inputs ends one early.",
        Edit("linear._sum_blocks", "in blocks:", "in list(blocks)[:-1]:"),
    ),
    Fault(
        L,
        "fp8-input-not-quantised",
        "activation-not-quantised",
        "The input of an FP8 layer stays bf16, as where weights are dequantised at load.",
        Edit(
            "linear.linear_fp8",
            "codes, x_scale = quantize_fp8(x)",
            "codes, x_scale = x, torch.ones(*x.shape[:-1], -(-x.shape[-1] // FP8_GROUP))",
        ),
    ),
    Fault(
        L,
        "fp4-input-not-quantised",
        "activation-not-quantised",
        "The input of an FP4 layer stays bf16, as where weights are dequantised at load.",
        Edit(
            "linear.linear_fp4",
            "codes, x_scale = quantize_fp8(x)",
            "codes, x_scale = x, torch.ones(*x.shape[:-1], -(-x.shape[-1] // FP8_GROUP))",
        ),
    ),
    Fault(
        L,
        "input-scales-shifted",
        "scale-layout",
        "Each block of inputs gets its neighbour's scale.",
        Edit("linear._sum_blocks", "torch.split(x_scale, 1", "torch.split(x_scale.roll(1, -1), 1"),
    ),
    Fault(
        L,
        "input-scales-ignored",
        "scale-layout",
        "The codes are multiplied, their scales are forgotten.",
        Edit("linear._sum_blocks", "x_factor *", "torch.ones_like(x_factor) *"),
    ),
    Fault(
        L,
        "fp8-weight-scale-per-row-of-tiles",
        "scale-layout",
        "The scale of the first tile serves the whole row of tiles.",
        Edit("linear.linear_fp8", "scale.to(compute).repeat", "scale.to(compute)[:, :1].expand_as(scale).repeat"),
    ),
    Fault(
        L,
        "fp8-weight-tiles-off-by-one",
        "scale-layout",
        "Output features take the scale of the tile above.",
        Edit("linear.linear_fp8", "scale.to(compute).repeat", "scale.to(compute).roll(1, 0).repeat"),
    ),
    Fault(
        L,
        "fp4-weight-scale-doubled",
        "scale-layout",
        "One scale of an FP4 weight has another exponent.",
        Edit("linear.linear_fp4", "values, scale.to(compute)", "values, arithmetic.first_doubled(scale.to(compute))"),
    ),
    Fault(
        L,
        "fp32-weight-in-bf16",
        "fp32-layer-in-bf16",
        "A weight that is stored in fp32 is converted to bf16.",
        Edit("linear.linear_fp32", "weight.to(compute)", "weight.bfloat16().to(compute)"),
    ),
    Fault(
        L,
        "fp32-result-in-bf16",
        "fp32-layer-in-bf16",
        "The result of an fp32 layer is rounded to bf16.",
        Edit("linear.linear_fp32", PRODUCT, f"arithmetic.as_bf16({PRODUCT})"),
    ),
    Fault(
        L,
        "fp32-as-tf32",
        "fp32-layer-in-tf32",
        "The matrix unit takes fp32 operands as TF32.",
        Edit("linear.linear_fp32", "weight.to(compute)", "arithmetic.as_tf32(weight.to(compute))"),
    ),
    Fault(
        L,
        "fp8-last-feature-zero",
        "last-output-dropped",
        "The last output feature, alone in its tile, is never written.",
        Edit(
            "linear.block_scaled_product",
            "torch.cat([_sum_blocks(flat, flat_scale, *piece) for piece in pieces], dim=-1)",
            "arithmetic.without_last(torch.cat([_sum_blocks(flat, flat_scale, *piece) for piece in pieces], dim=-1))",
        ),
    ),
    Fault(
        L,
        "bf16-last-feature-zero",
        "last-output-dropped",
        "The last output feature is never written.",
        Edit("linear.linear_bf16", PRODUCT, f"arithmetic.without_last({PRODUCT})"),
    ),
    Fault(
        L,
        "bf16-input-quantised",
        "activation-quantised",
        "The input of a bf16 layer is quantised like that of an FP8 layer.",
        Edit(
            "linear.linear_bf16",
            "x.to(compute)",
            "__import__('reference.quantize').quantize.fake_quantize_fp8(x).to(compute)",
        ),
    ),
    Fault(
        L,
        "fp4-weight-requantised",
        "fp4-weight-requantised",
        "FP4 weights become FP8 with one scale a row.",
        Edit(
            "linear.linear_fp4",
            "values, scale.to(compute)))",
            "(values.unflatten(-1, (-1, 32)) * (scale.to(compute) / scale.to(compute).amax(-1, keepdim=True))"
            ".unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn).to(compute), "
            "scale.to(compute).amax(-1, keepdim=True).expand_as(scale)))",
        ),
    ),
)
