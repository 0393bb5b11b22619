"""Linear layers on recorded activations (numerics.md 3): every kind of weight, many tokens at once and one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import GoldenModel, Joined, exact
from conformance.judge.components.linear import product, quantized
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

AXES = ("request", "position", "feature")


@dataclass(frozen=True)
class Kind:
    """One kind of weight: the method, where its matrices are, and which recorded tap is their input."""

    method: str
    dtype: str
    matrices: tuple[tuple[str, str], ...]
    why: str
    flags: tuple[str, ...]


SUMS = ("bf16-accumulator", "bf16-truncated", "last-input-dropped", "last-output-dropped")

KINDS = {
    "fp8": Kind(
        "linear_fp8",
        "BF16",
        (
            ("attn.wq_a", "attn_in"),
            ("attn.wq_b", "q_latent"),
            ("attn.wkv", "attn_in"),
            ("attn.indexer.wq_b", "q_latent"),
            ("ffn.shared_experts.w1", "ffn_in"),
        ),
        "Fails when the input is not quantised, a tile's scale is misplaced, or the sum is kept in less than fp32.",
        ("activation-not-quantised", "scale-layout", *SUMS),
    ),
    "fp4": Kind(
        "linear_fp4",
        "BF16",
        (("ffn.experts.0.w1", "ffn_in"), ("ffn.experts.1.w3", "ffn_in")),
        "Fails when nibbles are swapped, scales belong to other inputs, or the input is not quantised.",
        ("activation-not-quantised", "scale-layout", "nibble-order", *SUMS),
    ),
    "bf16": Kind(
        "linear_bf16",
        "BF16",
        (("attn.indexer.weights_proj", "attn_in"),),
        "Fails when the input is quantised where it must not be, or the sum is kept in bf16.",
        ("activation-quantised", *SUMS),
    ),
    "fp32": Kind(
        "linear_fp32",
        "F32",
        (("attn.compressor.wkv", "attn_in"), ("attn.compressor.wgate", "attn_in"), ("ffn.gate", "ffn_in")),
        "Fails when the input or the weight is rounded first, or the result is rounded to bf16.",
        ("fp32-layer-in-bf16", "fp32-layer-in-tf32", "last-input-dropped"),
    ),
}


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """Many tokens at once, and one token alone: engines use different kernels for the two."""
    for name, kind in KINDS.items():
        layers = range(model.config.n_layers)
        if not any(_present(model, layer, matrix, name) for layer in layers for matrix, _ in kind.matrices):
            continue
        for variant, tokens in (("many-tokens", None), ("one-token", 1)):
            yield Case(
                f"linear/{name}-weight/{variant}",
                "core",
                "dot",
                kind.why,
                "numerics.md 3",
                partial(_steps, model, joined, name, tokens),
                flags=kind.flags,
                source=joined.source,
            )


def _steps(model: GoldenModel, joined: Joined, name: str, tokens: int | None) -> Iterator[Step]:
    kind = KINDS[name]
    for layer in range(model.config.n_layers):
        parameters = model.layer(layer)
        for matrix, tap in kind.matrices:
            if not _present(model, layer, matrix, name):
                continue
            x = joined.tap(tap, layer)
            if tokens is not None:
                x = x[:, -tokens:]
            weight = parameters.tensor(f"{matrix}.weight")
            arguments = {"x": x, "weight": weight}
            if name in ("fp8", "fp4"):
                arguments["scale"] = parameters.tensor(f"{matrix}.scale")
            yield Step(
                Call(kind.method, arguments),
                partial(_rules, model, layer, matrix, x, kind, name),
                joined.place(layer),
            )


def _present(model: GoldenModel, layer: int, matrix: str, name: str) -> bool:
    stored = model.layer(layer).mapping().get(f"{matrix}.weight")
    if stored is None:
        return False
    return name != "fp32" or stored.dtype == "F32" or matrix == "ffn.gate"


def _rules(model: GoldenModel, layer: int, matrix: str, x: Tensor, kind: Kind, name: str) -> list[Within]:
    weight = model.layer(layer)[f"{matrix}.weight"]
    expected = (quantized if name in ("fp8", "fp4") else product)(exact(x), weight)
    return [Within("out", expected, kind.dtype, AXES, "dot", terms=x.shape[-1])]
