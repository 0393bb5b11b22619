"""Linear layers of every kind of weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.bench.problem import (
    POOL,
    Arguments,
    Counts,
    Ints,
    Problem,
    Sizes,
    lazily,
    made,
    made_weight,
    nbytes,
    one_method,
    require_multiple,
)
from conformance.judge.bounded import Bounded
from conformance.judge.components.linear import Parameters, product, quantized
from conformance.judge.expectations import Verdict, Within
from conformance.tensors import Tensor

RESULT_BYTES = {"BF16": 2, "F32": 4}


def linear(kind: str, dtype: str) -> Callable[[Sizes], Problem]:
    """x [tokens, inputs] times a weight [outputs, inputs] of a kind; each call has a copy of the weight of its own."""
    name = f"linear_{kind}"
    bind, taps = one_method(name)

    def make(sizes: Sizes) -> Problem:
        require_multiple(sizes, "inputs", 32)
        tokens, inputs, outputs = sizes["tokens"], sizes["inputs"], sizes["outputs"]
        pool = made(f"{name}/x", "input", POOL, inputs)
        if kind in ("fp8", "fp4"):
            weight, scale = made_weight(name, kind, outputs, inputs)
            stored = {"weight": weight, "scale": scale}
        else:
            stored = {"weight": made(name, kind, outputs, inputs)}
        multiply = quantized if "scale" in stored else product
        # The decoded weight is not kept: it has eight bytes an element.
        expected = lazily(lambda: multiply(Bounded.exact(pool.values()), Parameters(stored)["weight"]))

        def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
            rule = Within("out", expected()[which], dtype, ("row", "feature"), "dot", terms=inputs)
            return [rule.judge(results)]

        def own(call: int, which: Ints) -> Arguments:
            return {"x": pool[which], **stored}

        weights = nbytes(*stored.values())
        moved = 2 * tokens * inputs + weights + RESULT_BYTES[dtype] * tokens * outputs
        counts = Counts(2.0 * tokens * inputs * outputs, moved, weights)
        return Problem((tokens,), POOL, own, judge, counts, bind, taps)

    return make


linear_fp8 = linear("fp8", "BF16")
linear_fp4 = linear("fp4", "BF16")
linear_bf16 = linear("bf16", "BF16")
linear_fp32 = linear("fp32", "F32")
