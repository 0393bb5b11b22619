"""Mistakes in linear layers (numerics.md 3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

L = "linear"
PRODUCT = "functional.linear(x.to(compute), weight.to(compute))"
SCALED = "functional.linear(x, weight)"
WEIGHT8 = "fp8_weight(weight, scale, compute=compute)"
WEIGHT4 = "fp4_weight(weight, scale, compute=compute)"
LARGEST_SCALE = "scale.to(compute).amax(-1, keepdim=True)"
INPUT = "quantized_fp8(x, compute=compute)"

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
            "linear.scaled_product",
            SCALED,
            "arithmetic.blocked_product(x, weight, 32, total=arithmetic.as_bf16)",
        ),
    ),
    Fault(
        L,
        "bf16-block-sums",
        "bf16-accumulator",
        "The product sum of each block of 32 inputs is rounded to bf16 before it is scaled.",
        Edit(
            "linear.scaled_product",
            SCALED,
            "arithmetic.blocked_product(x, weight, 32, part=arithmetic.as_bf16)",
        ),
    ),
    Fault(
        L,
        "fp8-truncated",
        "bf16-truncated",
        "The result of an FP8 layer is cut to bf16 instead of rounded.",
        Edit("linear.linear_fp8", "return scaled_product(", "return arithmetic.truncated_product("),
    ),
    Fault(
        L,
        "fp4-truncated",
        "bf16-truncated",
        "The result of an FP4 layer is cut to bf16 instead of rounded.",
        Edit("linear.linear_fp4", "scaled_product(", "arithmetic.truncated_product("),
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
        Edit("linear.linear_fp8", INPUT, f"arithmetic.without_last({INPUT})"),
    ),
    Fault(
        L,
        "fp4-last-input-dropped",
        "last-input-dropped",
        "The loop over the inputs ends one early.",
        Edit("linear.linear_fp4", INPUT, f"arithmetic.without_last({INPUT})"),
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
        Edit("linear.scaled_product", SCALED, "arithmetic.without_last(x, 32) @ weight.mT"),
    ),
    Fault(
        L,
        "fp8-input-not-quantised",
        "activation-not-quantised",
        "The input of an FP8 layer stays bf16, as where weights are dequantised at load.",
        Edit("linear.linear_fp8", INPUT, "x.to(compute)"),
    ),
    Fault(
        L,
        "fp4-input-not-quantised",
        "activation-not-quantised",
        "The input of an FP4 layer stays bf16, as where weights are dequantised at load.",
        Edit("linear.linear_fp4", INPUT, "x.to(compute)"),
    ),
    Fault(
        L,
        "input-scales-shifted",
        "scale-layout",
        "Each block of inputs gets its neighbour's scale.",
        Edit("quantize.quantized_fp8", "scale.to(compute)", "scale.to(compute).roll(1, -2)"),
    ),
    Fault(
        L,
        "input-scales-ignored",
        "scale-layout",
        "The codes are multiplied, their scales are forgotten.",
        Edit("quantize.quantized_fp8", "scale.to(compute)", "torch.ones_like(scale.to(compute))"),
    ),
    Fault(
        L,
        "fp8-weight-scale-per-row-of-tiles",
        "scale-layout",
        "The scale of the first tile serves the whole row of tiles.",
        Edit("linear.linear_fp8", WEIGHT8, WEIGHT8.replace("scale,", "scale[:, :1].expand_as(scale),")),
    ),
    Fault(
        L,
        "fp8-weight-tiles-off-by-one",
        "scale-layout",
        "Output features take the scale of the tile above.",
        Edit("linear.linear_fp8", WEIGHT8, WEIGHT8.replace("scale,", "scale.to(compute).roll(1, 0),")),
    ),
    Fault(
        L,
        "fp4-weight-scale-doubled",
        "scale-layout",
        "One scale of an FP4 weight has another exponent.",
        Edit("linear.linear_fp4", WEIGHT4, WEIGHT4.replace("scale,", "arithmetic.first_doubled(scale.to(compute)),")),
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
        Edit("linear.scaled_product", SCALED, f"arithmetic.without_last({SCALED})"),
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
            WEIGHT4,
            f"({WEIGHT4} / {LARGEST_SCALE}).to(torch.float8_e4m3fn).to(compute) * {LARGEST_SCALE}",
        ),
    ),
)
