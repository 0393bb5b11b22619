"""Mistakes in RMSNorm (numerics.md 3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

N = "norm"
TARGET = "norm.rms_norm"
MEAN = "x.square().mean(dim=-1, keepdim=True)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        N,
        "eps-of-vision",
        "norm-eps",
        "The usual 1e-6 instead of 1e-20.",
        Edit(TARGET, "=True) + eps", "=True) + 1e-6"),
    ),
    Fault(
        N,
        "eps-missing",
        "norm-eps",
        "A row of zeros is divided by zero.",
        Edit(TARGET, "=True) + eps", "=True) * 1.0"),
    ),
    Fault(
        N,
        "rounded-before-weight",
        "norm-rounded-early",
        "The normed value is rounded to bf16 before the weight.",
        Edit(TARGET, "normed * weight", "arithmetic.as_bf16(normed) * weight"),
    ),
    Fault(
        N,
        "weight-plus-one",
        "norm-weight-offset",
        "The weight is taken as a deviation from one.",
        Edit(TARGET, "weight.to(compute)", "(weight.to(compute) + 1.0)"),
    ),
    Fault(
        N,
        "weight-missing",
        "norm-weight-offset",
        "The weight is not applied.",
        Edit(TARGET, "normed * weight.to(compute)", "normed"),
    ),
    Fault(
        N,
        "fp32-weight-in-bf16",
        "norm-weight-in-bf16",
        "A weight that is stored in fp32 is converted to bf16.",
        Edit(TARGET, "weight.to(compute)", "weight.bfloat16().to(compute)"),
    ),
    Fault(
        N,
        "mean-over-one-less",
        "norm-mean-count",
        "The sum of squares is divided by K - 1.",
        Edit(TARGET, MEAN, f"{MEAN} * (x.shape[-1] / max(1, x.shape[-1] - 1))"),
    ),
    Fault(
        N,
        "last-feature-not-counted",
        "norm-mean-count",
        "The last feature is missing in the sum of squares.",
        Edit(
            TARGET,
            MEAN,
            f"arithmetic.without_last({MEAN.removesuffix('.mean(dim=-1, keepdim=True)')}).mean(dim=-1, keepdim=True)",
        ),
    ),
    Fault(
        N,
        "mean-subtracted",
        "layer-norm",
        "A layer norm: the mean is subtracted first.",
        Edit(TARGET, "x = x.to(compute)", "x = x.to(compute) - x.to(compute).mean(dim=-1, keepdim=True)"),
    ),
    Fault(
        N,
        "squares-in-bf16",
        "norm-sum-in-bf16",
        "The squares are rounded to bf16 before they are summed.",
        Edit(TARGET, "x.square()", "arithmetic.as_bf16(x.square())"),
    ),
    Fault(
        N,
        "sum-in-bf16",
        "norm-sum-in-bf16",
        "The sum of squares is kept in bf16.",
        Edit(TARGET, MEAN, "arithmetic.bf16_sum(x.square(), -1, keepdim=True) / x.shape[-1]"),
    ),
    Fault(
        N,
        "truncated",
        "bf16-truncated",
        "The result is cut to bf16 instead of rounded.",
        Edit(TARGET, "to_bf16(normed", "arithmetic.truncate(normed"),
    ),
    Fault(
        N,
        "squares-in-fp16",
        "norm-sum-in-fp16",
        "The squares overflow in fp16.",
        Edit(TARGET, "x.square()", "x.square().half().to(compute)"),
    ),
    Fault(
        N,
        "mean-over-rows",
        "norm-rows-mixed",
        "The mean square is taken over all rows.",
        Edit(TARGET, MEAN, "x.square().mean()"),
    ),
)
