"""Hand-made vectors of RMSNorm (numerics.md 3): rows whose size decides which mistake shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.vectors.lattice import integers
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.norm import rms_norm
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

AXES = ("row", "feature")
TEXT_EPS, VISION_EPS = 1e-20, 1e-6
WIDTH = 160


@dataclass(frozen=True)
class Vector:
    """Rows [N, K] and a weight [K]."""

    variant: str
    x: Callable[[], Floats]
    eps: float
    why: str
    flags: tuple[str, ...]
    weight_dtype: str = "BF16"


def _rows(factor: float) -> Floats:
    """Four rows of eight significant bits, of root mean square about 0.6 times `factor`."""
    return integers(21, (4, WIDTH), 255) / 256 * factor


def _shifted() -> Floats:
    """Rows with a mean four times their spread."""
    return 4.0 + integers(22, (4, WIDTH), 31) / 32


def _mixed_sizes() -> Floats:
    """One row in sixteen orders of magnitude of another: each has a mean of its own."""
    return np.asarray(_rows(1.0) * np.array([[1.0], [2.0**-26], [2.0**26], [1.0]]))


def _one_feature() -> Floats:
    """A single nonzero feature in the last place: every output is 0 or the root of K."""
    x = np.zeros((3, WIDTH))
    x[:, -1] = [1.0, -3.0, 2.0**-20]
    return x


def _zeros() -> Floats:
    return np.zeros((3, WIDTH))


VECTORS = (
    Vector(
        "mean-square-1e-12",
        lambda: _rows(2.0**-19),
        TEXT_EPS,
        "Fails when eps is 1e-6, or is added to the root and not to the mean: rows this small then shrink.",
        ("norm-eps",),
    ),
    Vector(
        "mean-square-near-eps",
        lambda: _rows(2.0**-33),
        TEXT_EPS,
        "Fails when eps is missing, or is added to the root and not to the mean.",
        ("norm-eps",),
    ),
    Vector(
        "vision-eps",
        lambda: _rows(2.0**-9),
        VISION_EPS,
        "Fails when the eps that was given is not the one that is used.",
        ("norm-eps",),
    ),
    Vector(
        "huge-values",
        lambda: _rows(2.0**58),
        TEXT_EPS,
        "Fails when squares are taken in fp16, whose range they leave.",
        ("norm-sum-in-fp16",),
    ),
    Vector(
        "rows-of-different-size",
        _mixed_sizes,
        TEXT_EPS,
        "Fails when one mean serves several rows, or squares are taken in fp16.",
        ("norm-sum-in-fp16", "norm-rows-mixed", "norm-weight-offset"),
    ),
    Vector(
        "mean-not-subtracted",
        _shifted,
        TEXT_EPS,
        "Fails when the mean is subtracted first, as LayerNorm does, or the sum of squares is kept in bf16.",
        ("layer-norm", "norm-sum-in-bf16", "norm-rounded-early", "bf16-truncated"),
    ),
    Vector(
        "last-feature-only",
        _one_feature,
        TEXT_EPS,
        "Fails when the last features do not enter the mean, or it is divided by another count.",
        ("norm-mean-count",),
    ),
    Vector(
        "fp32-weight",
        lambda: _rows(1.0),
        VISION_EPS,
        "Fails when an fp32 weight is rounded to bf16, or the product is rounded before it.",
        ("norm-rounded-early", "norm-weight-in-bf16"),
        "F32",
    ),
    Vector(
        "zero-rows",
        _zeros,
        TEXT_EPS,
        "Fails when a row of zeros becomes NaN.",
        ("norm-eps",),
    ),
)


def cases() -> Iterator[Case]:
    """One case a vector."""
    for vector in VECTORS:
        yield Case(
            f"norm/rms-vectors/{vector.variant}",
            "core",
            "composed",
            vector.why,
            "numerics.md 3",
            partial(_steps, vector),
            vector.flags,
            "hand-made",
        )


def weight_of(dtype: str) -> Tensor:
    """Weights between 0.5 and 1.5, of full significand."""
    return Tensor.from_values(1.0 + integers(23, (WIDTH,), 4095) / 8192, dtype)


def _steps(vector: Vector) -> Iterator[Step]:
    x = Tensor.from_values(vector.x(), "BF16")
    weight = weight_of(vector.weight_dtype)

    def rules() -> list[Expectation]:
        return [Within("out", rms_norm(Bounded.exact(x.values()), weight.values(), vector.eps), "BF16", AXES)]

    yield Step(Call("rms_norm", {"x": x, "weight": weight, "eps": vector.eps}), rules)
