"""Hyper-connections on recorded streams (numerics.md 5)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import GoldenModel, Joined, exact
from conformance.judge.components import hyper_connections as rules_of
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

READ_AXES = ("request", "position", "feature")
WRITE_AXES = ("request", "position", "stream", "feature")
PER_STREAM = ("request", "position", "stream")
COMB_AXES = ("request", "position", "summed stream", "written stream")

COEFFICIENT_FLAGS = (
    "comb-transposed",
    "sinkhorn-order",
    "sinkhorn-rounds",
    "sinkhorn-eps",
    "pre-post-form",
    "pre-post-order",
    "mix-offsets",
    "mix-rms",
    "mix-in-bf16",
)

SUBLAYERS = {"attention": "attn", "feed-forward": "ffn"}


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """Coefficients, the read and the write of both sublayers of every block."""
    for name, prefix in SUBLAYERS.items():
        yield Case(
            f"hyper_connections/coefficients/{name}",
            "smoke" if name == "attention" else "core",
            "composed",
            "Fails when Sinkhorn ends on rows, a round or an eps is missing, or the norm is taken over one stream.",
            "numerics.md 5",
            partial(_coefficients, model, joined, prefix),
            flags=COEFFICIENT_FLAGS,
            source=joined.source,
        )
        yield Case(
            f"hyper_connections/read/{name}",
            "core",
            "composed",
            "Fails when the mix is summed over another axis or in bf16.",
            "numerics.md 5",
            partial(_read, model, joined, prefix),
            flags=("read-mix-ignored", "mix-in-bf16", "bf16-accumulator", "bf16-truncated"),
            source=joined.source,
        )
        yield Case(
            f"hyper_connections/write-comb-orientation/{name}",
            "smoke" if name == "attention" else "core",
            "composed",
            "Fails when comb is transposed: the sum runs over its first index.",
            "numerics.md 5",
            partial(_write, model, joined, prefix),
            flags=("comb-transposed", "write-rounded-twice", "write-stream-lost", "bf16-truncated"),
            source=joined.source,
        )


def _stream(joined: Joined, prefix: str, layer: int) -> Tensor:
    return joined.attention_stream(layer) if prefix == "attn" else joined.tap("h_mid", layer)


def _coefficients(model: GoldenModel, joined: Joined, prefix: str) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        h = _stream(joined, prefix, layer)
        parameters = model.layer(layer)
        names = {part: f"hc_{prefix}_{part}" for part in ("fn", "scale", "base")}
        arguments = {"config": model.mapping, "h": h} | {part: parameters.tensor(name) for part, name in names.items()}

        def rules(h: Tensor = h, layer: int = layer, names: dict[str, str] = names) -> list[Within]:
            values = {part: model.layer(layer)[name] for part, name in names.items()}
            expected = rules_of.coefficients(model.config, exact(h), **values)
            return [
                Within(part, value, "F32", axes, recorded=joined.tap(f"{prefix}_{part}", layer))
                for part, value, axes in (
                    ("pre", expected.pre, PER_STREAM),
                    ("post", expected.post, PER_STREAM),
                    ("comb", expected.comb, COMB_AXES),
                )
            ]

        yield Step(Call("hyper_connection_coefficients", arguments), rules, joined.place(layer))


def _read(model: GoldenModel, joined: Joined, prefix: str) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        h = _stream(joined, prefix, layer)
        pre = joined.tap("pre_in" if prefix == "attn" else "attn_pre", layer)

        def rules(h: Tensor = h, pre: Tensor = pre) -> list[Within]:
            return [Within("out", rules_of.read(exact(h), exact(pre)), "BF16", READ_AXES)]

        yield Step(Call("hyper_connection_read", {"h": h, "pre": pre}), rules, joined.place(layer))


def _write(model: GoldenModel, joined: Joined, prefix: str) -> Iterator[Step]:
    out, result = ("attn_out", "h_mid") if prefix == "attn" else ("ffn_out", "h_out")
    for layer in range(model.config.n_layers):
        arguments = {
            "y": joined.tap(out, layer),
            "h": _stream(joined, prefix, layer),
            "post": joined.tap(f"{prefix}_post", layer),
            "comb": joined.tap(f"{prefix}_comb", layer),
        }

        def rules(arguments: dict[str, Tensor] = arguments, layer: int = layer) -> list[Within]:
            expected = rules_of.write(**{name: exact(value) for name, value in arguments.items()})
            return [Within("out", expected, "BF16", WRITE_AXES, recorded=joined.tap(result, layer))]

        yield Step(Call("hyper_connection_write", arguments), rules, joined.place(layer))
