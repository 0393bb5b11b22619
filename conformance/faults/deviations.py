"""The reference with declared deviations: each a few changes of its source, applied while it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Request
from conformance.deviations import DEVIATIONS
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Change, Edit, patched
from conformance.interface import METHODS, Description
from conformance.tensors import Tensor

HEADS = "indexer._score_heads"
DOWN = 'scaled_product(a, expert_matrix(weights, "w2", compute=compute))'
WEIGHTED = "out if routing_weight is None else to_bf16(out.to(compute) * routing_weight.to(compute)[:, None])"

CHANGES: Mapping[str, tuple[Change, ...]] = {
    "no-activation-quantiser": (
        Edit("linear.linear_fp8", "quantized_fp8(x, compute=compute)", "x.to(compute)"),
        Edit("linear.linear_fp4", "quantized_fp8(x, compute=compute)", "x.to(compute)"),
        Edit("experts.expert", "quantized_fp8(x, compute=compute)", "x.to(compute)"),
        Edit("experts.experts", "quantized_fp8(x, compute=compute)", "x.to(compute)"),
        Edit(
            "experts.expert_of_quantized",
            "quantized_fp8(to_bf16(hidden), compute=compute)",
            "to_bf16(hidden).to(compute)",
        ),
    ),
    "fp32-index-scores": (
        Edit(HEADS, "to_bf16(queries", "(queries"),
        Edit(HEADS, "to_bf16(torch.relu", "(torch.relu"),
        Edit(HEADS, "to_bf16(weighted", "(weighted"),
    ),
    "fp32-probabilities": (Edit("sparse_attention._attend", "to_bf16(probabilities).to(compute)", "probabilities"),),
    "norm-rounded-before-weight": (
        Edit("norm.rms_norm", "to_bf16(normed * weight.to(compute))", "to_bf16(to_bf16(normed) * weight.to(compute))"),
    ),
    "routing-weight-after-expert": (
        Edit("experts.expert_of_quantized", "if routing_weight is not None:", "if False:"),
        Edit("experts.expert_of_quantized", f"return {DOWN}", f"out = {DOWN}\n    return {WEIGHTED}"),
        Edit("experts.experts", "a[token], routing_weights[token, choice]", "a[token], None"),
        Edit(
            "experts.experts",
            "token, out.to(compute)",
            "token, out.to(compute) * routing_weights[token, choice].to(compute)[:, None]",
        ),
    ),
    "no-engram": (Edit("block.Block.step", "if self.config.has_engram(self.layer_id):", "if False:"),),
}
"""By the names of `conformance/deviations/deviations.toml`."""

assert CHANGES.keys() == DEVIATIONS.keys()

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "no-activation-quantiser": ("linear/fp8-input-not-quantised", "linear/fp4-input-not-quantised"),
    "fp32-index-scores": ("indexer/dots-not-rounded", "indexer/products-not-rounded"),
    "norm-rounded-before-weight": ("norm/rounded-before-weight",),
    "routing-weight-after-expert": ("experts/weight-after-down",),
    "no-engram": ("block/engram-missing",),
}
"""Faults of the catalogue that are a deviation, or one of its changes, made without saying so: where both explain a
result equally well, the deviation says it all."""


class DeviatingReference:
    """A session with the reference that deviates while it is asked, and only then: what else uses it is not touched."""

    def __init__(self, names: Sequence[str], declares: bool = True, variant: HonestVariant | None = None) -> None:
        """`names` of the list; without `declares` it keeps them to itself; `variant`: an honest one that deviates."""
        self._changes = [change for name in DEVIATIONS if name in names for change in CHANGES[name]]
        self._inner = InProcess(Reference() if variant is None else variant.implementation(**variant.options))
        self._changes += () if variant is None else variant.changes
        plain = self._inner.describe()
        self._description = Description(
            name=plain.name,
            version=plain.version,
            conventions=plain.conventions,
            deviations=tuple(names) if declares else (),
        )

    def describe(self) -> Description:
        """The reference's own, with the deviations."""
        return self._description

    def supports(self, method: str) -> bool:
        """Everything."""
        return method in METHODS

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        """Put one request to the reference as it deviates."""
        with patched(self._changes):
            return self._inner.ask(request)

    def reset(self) -> None:
        """As the reference."""
        self._inner.reset()

    def finish(self) -> None:
        """As the reference."""
        self._inner.finish()

    def close(self) -> None:
        """As the reference."""
        self._inner.close()
