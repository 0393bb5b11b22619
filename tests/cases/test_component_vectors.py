"""The hand-made vectors of the stateless components: the reference passes, and injected mistakes do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.vectors import experts, gate, hyper_connections, linear, norm, quantize, rotary
from conformance.faults.catalogue import FAULTS
from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, patched
from conformance.runner import CaseResult, run_case

MODULES = (quantize, linear, norm, rotary, hyper_connections, gate, experts)


@cache
def cases() -> dict[str, Case]:
    return {case.id: case for module in MODULES for case in module.cases()}


def run(case_id: str) -> CaseResult:
    return run_case(cases()[case_id], InProcess(Reference()))


KILLS: Sequence[tuple[str, str]] = (
    ("quantize/fp8-scale-rounds-up/amax-1.2-times-448", "quantize/e8m0-nearest"),
    ("quantize/fp8-scale-rounds-up/amax-1.9-times-448", "quantize/e8m0-floor"),
    ("quantize/fp8-scale-steps-above-448/codes", "quantize/e8m0-always-next"),
    ("quantize/fp8-floor/zeros", "quantize/fp8-floor-after-division"),
    ("quantize/fp8-floor/maximum-between-the-two-floors", "quantize/fp8-floor-after-division"),
    ("quantize/fp8-codes/saturation-subnormals-and-signs", "quantize/fp8-max-of-fnuz"),
    ("quantize/fp4-e8m0-ties/seven-midpoints", "quantize/e2m1-ties-away"),
    ("quantize/fp4-e4m3-ties/seven-midpoints", "quantize/e2m1-ties-away"),
    ("quantize/fp4-e4m3-true-division/tie-under-scale-15-over-512", "quantize/fp4-e4m3-by-reciprocal"),
    ("quantize/fp4-e4m3-every-scale/fake", "quantize/fp4-e4m3-by-reciprocal"),
    ("quantize/fp4-e8m0-negative-zero/sign-kept", "quantize/negative-zero-dropped"),
    ("quantize/fp4-e8m0-nibbles/all-codes", "quantize/packed-high-nibble-first"),
    ("quantize/fp4-e8m0-floor/maximum-below-the-other-formats-floor", "quantize/fp4-e8m0-floor-of-e4m3"),
    ("quantize/fp4-e4m3-floor/zeros", "quantize/fp4-e4m3-floor-of-e8m0"),
    ("quantize/fp4-weight-every-code-and-scale/normal-range", "quantize/fp4-subnormal-as-normal"),
    ("quantize/fp8-weight-partial-tiles/40-by-72", "quantize/fp8-weight-scale-of-first-tile"),
    ("linear/lattice-fp8/one-token", "linear/fp8-input-not-quantised"),
    ("linear/lattice-fp8/cancelling", "linear/bf16-accumulator-per-block"),
    ("linear/lattice-fp8/ties", "linear/fp8-truncated"),
    ("linear/lattice-fp8/last-input", "linear/last-block-dropped"),
    ("linear/lattice-fp8/three-tokens", "linear/fp8-weight-tiles-off-by-one"),
    ("linear/lattice-fp4/three-tokens", "linear/input-scales-shifted"),
    ("linear/lattice-bf16/cancelling", "linear/bf16-accumulator"),
    ("linear/lattice-fp32/three-tokens", "linear/fp32-as-tf32"),
    ("norm/rms-vectors/mean-square-1e-12", "norm/eps-of-vision"),
    ("norm/rms-vectors/mean-square-near-eps", "norm/eps-missing"),
    ("norm/rms-vectors/mean-not-subtracted", "norm/mean-subtracted"),
    ("norm/rms-vectors/last-feature-only", "norm/mean-over-one-less"),
    ("norm/rms-vectors/fp32-weight", "norm/fp32-weight-in-bf16"),
    ("rotary/pairs-adjacent/one-hot-at-position-1", "rotary/half-split-pairs"),
    ("rotary/inverse/one-hot-at-position-3", "rotary/inverse-ignored"),
    ("rotary/base-by-layer/position-200", "rotary/one-base-for-all-160000"),
    ("rotary/base-by-layer/position-200", "rotary/yarn-mscale"),
    ("rotary/yarn-ramp/released", "rotary/yarn-range-rounded-down"),
    ("rotary/yarn-ramp/released", "rotary/negative-power"),
    ("rotary/positions-far-out/up-to-1048575", "rotary/table-too-short"),
    ("rotary/positions-by-request/batch-of-two-heads-of-three", "rotary/positions-local-to-call"),
    ("hyper_connections/coefficient-vectors/logits-zero", "hyper_connections/post-without-two"),
    ("hyper_connections/coefficient-vectors/logits-plus-minus-30", "hyper_connections/pre-without-eps"),
    ("hyper_connections/coefficient-vectors/logits-plus-minus-30", "hyper_connections/post-with-eps"),
    ("hyper_connections/coefficient-vectors/logits-of-100", "hyper_connections/softmax-without-maximum"),
    ("hyper_connections/coefficient-vectors/slow-sinkhorn-triangle", "hyper_connections/sinkhorn-one-round-less"),
    ("hyper_connections/coefficient-vectors/slow-sinkhorn-near-permutation", "hyper_connections/sinkhorn-ends-on-rows"),
    ("hyper_connections/coefficient-vectors/streams-of-different-norm", "hyper_connections/rms-over-one-stream"),
    ("hyper_connections/coefficient-vectors/tiny-streams", "hyper_connections/rms-eps-of-vision"),
    ("hyper_connections/lattice-write/one-hot-comb", "hyper_connections/write-transposed"),
    ("hyper_connections/lattice-read/cancelling-and-ties", "hyper_connections/read-in-bf16"),
    ("gate/vectors/logits-of-minus-17", "gate/softplus-underflow"),
    ("gate/vectors/logits-of-minus-1000", "gate/eps-missing"),
    ("gate/vectors/bias-of-10-on-one-expert", "gate/bias-in-weights"),
    ("gate/vectors/bias-against-score", "gate/sigmoid"),
    ("gate/vectors/image-tokens-between-text", "gate/image-bias-ignored"),
    ("gate/vectors/winners-beyond-256-of-384", "gate/first-half-of-experts"),
    ("gate/vectors/logits-closer-than-bf16", "gate/logits-in-bf16"),
    ("experts/gate-and-up-clamps/routed", "experts/gate-clamped-below"),
    ("experts/gate-and-up-clamps/routed", "experts/up-not-clamped-below"),
    ("experts/gate-and-up-clamps/shared", "experts/shared-not-clamped"),
    ("experts/clamp-before-activation/routed", "experts/clamped-after-silu"),
    ("experts/routing-weight-before-quantiser/uneven-weights", "experts/weight-after-down"),
    ("experts/lattice-sum/large-and-small-parts", "experts/sum-in-bf16"),
    ("experts/lattice-sum/large-and-small-parts", "experts/routed-rounded-before-shared"),
    ("experts/lattice-sum/two-experts-for-all-tokens", "experts/last-tokens-lost"),
)
"""Case id and the id of the fault that it must reject: the vector that is made for a mistake sees that mistake."""

EDITS: Sequence[tuple[str, Edit]] = (
    (
        "quantize/fp8-scale-steps-up/exactly-448-times-32",
        Edit(
            "quantize.pow2ceil",
            "(bits.clamp(max=FP32_INFINITY) + FP32_MANTISSA) >> 23",
            "(torch.ceil(torch.log2(bits.view(torch.float32)) + 1e-6).to(torch.int32) + 127).clamp(max=255)",
        ),
    ),
    (
        "quantize/fp8-codes/saturation-subnormals-and-signs",
        Edit(
            "quantize._scale_fp8",
            "(groups / scale.float()).clamp(-E4M3_MAX, E4M3_MAX)",
            "(groups / scale.float() * (1 + 2.0**-20)).clamp(-E4M3_MAX, E4M3_MAX)",
        ),
    ),
    (
        "quantize/fp4-e4m3-scale/largest",
        Edit(
            "quantize._scale_fp4_e4m3",
            "(amax / E2M1_MAX).clamp(max=E4M3_MAX)",
            "(amax / E2M1_MAX).masked_fill(amax / E2M1_MAX > 464, float('nan'))",
        ),
    ),
    (
        "quantize/fp8-weight-every-code-and-scale/extreme-scales",
        Edit(
            "quantize.dequantize_fp8_weight",
            "(weight, scale)",
            "(weight, (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32))",
        ),
    ),
    (
        "quantize/fp8-weight-every-code-and-scale/nan-scale",
        Edit(
            "quantize.dequantize_fp8_weight",
            "(weight, scale)",
            "(weight, torch.exp2(scale.view(torch.uint8).float().clamp(max=254) - 127))",
        ),
    ),
    (
        "quantize/fp4-e8m0-subnormals/codes",
        Edit(
            "quantize._scale_fp4_e8m0",
            "x.float()",
            "(x.float() * (x.float().abs() >= 2.0**-126))",
        ),
    ),
    (
        "linear/lattice-bf16/one-token",
        Edit("linear.linear_bf16", "x.to(compute)", "arithmetic.truncate_e4m3(x.clamp(-448, 448)).to(compute)"),
    ),
    (
        "linear/lattice-fp4/scales-17-powers-apart",
        Edit(
            "linear.linear_fp4",
            "fp4_weight(weight, scale, compute=compute)",
            "fp4_weight(weight, scale, compute=compute).masked_fill("
            "(scale.float() < 2.0**-10).repeat_interleave(32, dim=-1), 0.0)",
        ),
    ),
    (
        "norm/rms-vectors/huge-values",
        Edit("norm.rms_norm", "x.square()", "x.square().half().to(compute)"),
    ),
    (
        "norm/rms-vectors/rows-of-different-size",
        Edit("norm.rms_norm", "mean(dim=-1, keepdim=True)", "mean()"),
    ),
    (
        "hyper_connections/coefficient-vectors/column-of-eps",
        Edit(
            "hyper_connections.sinkhorn",
            "c = c / c.sum(dim=-1, keepdim=True) + eps\n    c = c / (c.sum(dim=-2, keepdim=True) + eps)",
            "c = c / c.sum(dim=-1, keepdim=True) + eps\n    c = c / c.sum(dim=-2, keepdim=True)",
        ),
    ),
    (
        "hyper_connections/coefficient-vectors/tokens-512",
        Edit(
            "hyper_connections.hyper_connection_coefficients",
            "flat = h.flatten(-2).to(compute)",
            "flat = h.flatten(-2).to(compute)\n    flat = torch.cat((flat[:, :256], 0 * flat[:, 256:]), dim=1)",
        ),
    ),
    (
        "gate/vectors/equal-rows",
        Edit(
            "gate.gate",
            "(scores + bias).topk(config.n_activated_experts, dim=-1).indices",
            "(scores + bias).amax(-1, keepdim=True).eq(scores + bias).int().argmax(-1, keepdim=True)"
            ".expand(-1, config.n_activated_experts)",
        ),
    ),
    (
        "gate/vectors/logits-of-minus-85",
        Edit("gate.gate", "1e-20", "1e-12"),
    ),
)
"""Mistakes that the fault catalogue does not hold, each with the vector that must see it."""


@pytest.mark.parametrize("case_id", sorted(cases()))
def test_the_reference_passes(case_id: str) -> None:
    result = run(case_id)
    assert result.status == "PASS", result.message or result.first_failure


@pytest.mark.parametrize(("case_id", "fault_id"), KILLS)
def test_a_vector_rejects_the_mistake_that_it_is_made_for(case_id: str, fault_id: str) -> None:
    fault: Fault = next(fault for fault in FAULTS if fault.id == fault_id)
    with fault.applied():
        assert run(case_id).status in ("FAIL", "CRASH")
    assert fault.flag in cases()[case_id].flags


@pytest.mark.parametrize(("case_id", "edit"), EDITS, ids=[case_id for case_id, _ in EDITS])
def test_a_vector_rejects_a_mistake_of_no_catalogue(case_id: str, edit: Edit) -> None:
    with patched([edit]):
        assert run(case_id).status in ("FAIL", "CRASH")


def test_core_vectors_are_of_moderate_cost() -> None:
    elements = {case_id: run(case_id).judged for case_id, case in cases().items() if case.level != "full"}
    assert sum(elements.values()) < 10_000_000
