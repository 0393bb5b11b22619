"""Ports with one trait each, and the hand-made cases that they are put to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from conformance.cases.case import Advance, Call, Case, Open, Place, Step
from conformance.interface import Description, Implementation, Unsupported
from conformance.judge.bounded import Bounded
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

X = Tensor.from_values(np.arange(1, 9, dtype=np.float64).reshape(2, 4), "BF16")
WEIGHT = Tensor.from_values(np.ones(4), "BF16")


class Good(Implementation):
    """`fake_quantize_fp8` must answer its input, `rms_norm` too, `quantize_fp8` two ones: see `cases`."""

    def describe(self) -> Description:
        return Description("good", "1", conventions={"accumulator": "[bold]fp32[/bold]"})

    def fake_quantize_fp8(self, x: Any) -> Any:
        return x.clone()

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return x * weight

    def embed(self, weight: Any, input_ids: Any) -> Any:
        raise Unsupported("embed needs a vocabulary of [64]")


class Wrong(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        result = x.clone()
        result[1, 2] *= 2
        return result


class Raises(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        raise RuntimeError("device [0]\nis on fire")


class WrongShape(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        return x[:1].clone()


class WrongDtype(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        return x.to(torch.int32)


class ReturnsNan(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        return torch.full_like(x, float("nan"))


class TooManyResults(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        return x, x


class ReturnsText(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        return "four"


class ModifiesInput(Good):
    def fake_quantize_fp8(self, x: Any) -> Any:
        x += 1
        return x - 1


class Nothing(Implementation):
    def describe(self) -> Description:
        return Description("nothing", "0")


class Interrupted(Good):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        raise KeyboardInterrupt


class Sleeps(Good):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        print("asleep", flush=True)
        time.sleep(60)


class Quits(Good):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        raise SystemExit(0)


class Literal(Good):
    def describe(self) -> Description:
        return Description("literal", "1", reading="literal")


class BadReading(Good):
    def describe(self) -> Description:
        return Description("odd", "1", reading="sideways")  # type: ignore[arg-type]


class CannotBeMade(Good):
    def __init__(self) -> None:
        raise OSError("no such device")


class NotAPort:
    pass


def _quantize_steps() -> Iterator[Step]:
    yield Step(
        Call("fake_quantize_fp8", {"x": X}),
        lambda: [Exact("values", X, ("position", "feature"))],
        Place(3, (1,), (7, 8)),
    )


def _norm_steps() -> Iterator[Step]:
    expected = Bounded(X.values(), np.full(X.shape, 0.01))
    yield Step(
        Call("rms_norm", {"x": X, "weight": WEIGHT, "eps": 1e-20}),
        lambda: [
            Within("out", expected, "BF16", ("position", "feature"), note="allowance measured, not derived: test")
        ],
    )


def _embed_steps() -> Iterator[Step]:
    yield Step(Call("embed", {"weight": X, "input_ids": X}), lambda: [Exact("embed", X, ())])


def _broken_steps() -> Iterator[Step]:
    yield Step(Call("rms_norm", {"x": X, "weight": WEIGHT, "eps": 1e-20}), lambda: [1 / 0])  # type: ignore[list-item]


def _attention_steps() -> Iterator[Step]:
    config, weights = {"window_size": 128}, {"wq_a.weight": X, "wq_a.scale": X, "wkv.weight": X, "wo_b.weight": X}
    yield Step(Open("runtime", "runtime", {"config": config, "batch_size": 1, "reading": "intended"}))
    yield Step(Open("attention", "attention", {"config": config, "layer_id": 3, "weights": weights}))
    for call in range(8):
        yield Step(Advance("attention", {"x": X}), place=Place(3, (call,), (call,)))


GOOD_CASES = (
    Case(
        "quantize/identity/rows-1",
        "smoke",
        "exact",
        "A group is scaled by its neighbour's scale.",
        "numerics.md 2",
        _quantize_steps,
        flags=("scale-of-neighbour",),
        source="tiny/prefill-17",
    ),
    Case("quantize/identity/rows-10", "core", "exact", "The same in ten rows.", "numerics.md 2", _quantize_steps),
    Case("norm/identity/ones", "core", "composed", "The weight is left out.", "numerics.md 3", _norm_steps),
    Case(
        "norm/identity/full", "full", "composed", "The same, at length.", "numerics.md 3", _norm_steps, source="tiny-2"
    ),
)
UNSUPPORTED_CASE = Case("model/embed/row", "core", "exact", "Rows are off by one.", "numerics.md 9", _embed_steps)
LITERAL_CASE = Case(
    "indexer/slot/literal", "core", "exact", "The slot is fresh.", "numerics.md 6.4", _quantize_steps, reading="literal"
)
BROKEN_CASE = Case("norm/broken/rule", "core", "composed", "Never.", "numerics.md 3", _broken_steps)
ATTENTION_CASE = Case("attention/ring/wrap", "core", "composed", "Slot W is kept.", "numerics.md 6", _attention_steps)
CASES = (*GOOD_CASES, UNSUPPORTED_CASE, LITERAL_CASE)
