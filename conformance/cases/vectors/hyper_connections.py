"""Hand-made vectors of the hyper-connections (numerics.md 5).

With a projection of zeros the coefficients' logits are the offsets `base`, so any logit can be set; the read and the
write are judged on lattices, where every order of the sum gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Level, Step
from conformance.cases.vectors.configuration import CONFIG, MODEL
from conformance.cases.vectors.lattice import exact_product, integers
from conformance.cases.vectors.weights import normal
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.hyper_connections import coefficients
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

STREAMS, WIDTH = MODEL.hc_mult, MODEL.dim
READ_AXES = ("request", "position", "feature")
WRITE_AXES = ("request", "position", "stream", "feature")
PER_STREAM = ("request", "position", "stream")
COMB_AXES = ("request", "position", "summed stream", "written stream")
UNIT_SCALE = (1.0, 1.0, 1.0)


def _ones() -> Floats:
    return np.ones((1, 1, STREAMS, WIDTH))


def _projection() -> Floats:
    """fp32 weights of full significand, with logits of about one."""
    return np.asarray(normal("hc vectors fn", MODEL.coefficient_rows, STREAMS * WIDTH) / np.sqrt(STREAMS * WIDTH))


def _no_projection() -> Floats:
    return np.zeros((MODEL.coefficient_rows, STREAMS * WIDTH))


@dataclass(frozen=True)
class Coefficients:
    """Streams [B,T,S,D], a projection, scales and offsets for `hyper_connection_coefficients`."""

    variant: str
    why: str
    flags: tuple[str, ...]
    pre: tuple[float, ...] = (0.0,) * STREAMS
    post: tuple[float, ...] = (0.0,) * STREAMS
    comb: tuple[tuple[float, ...], ...] = ((0.0,) * STREAMS,) * STREAMS
    h: Callable[[], Floats] = _ones
    fn: Callable[[], Floats] = _no_projection
    scale: tuple[float, float, float] = UNIT_SCALE
    level: Level = "core"

    @property
    def base(self) -> Floats:
        """The offsets: pre, post, then comb row by row."""
        return np.concatenate([self.pre, self.post, np.reshape(self.comb, -1)])


def _uneven_streams() -> Floats:
    """Streams whose norms are 1, 1/8, 64 and 8."""
    h = integers(41, (2, 5, STREAMS, WIDTH), 255) / 128
    return np.asarray(h * np.array([1.0, 0.125, 64.0, 8.0])[:, None])


def _zero_streams() -> Floats:
    """A token whose streams are all zero, then tokens of which one stream is."""
    h = integers(42, (1, 1 + STREAMS, STREAMS, WIDTH), 255) / 128
    h[0, 0] = 0.0
    for stream in range(STREAMS):
        h[0, 1 + stream, stream] = 0.0
    return h


def _tokens(count: int) -> Floats:
    return integers(43 + count, (1, count, STREAMS, WIDTH), 255) / 128


OFFSETS = (0.5, -1.0, 2.0, -0.25)
ASYMMETRIC = ((0.0, 4.0, -2.0, 1.0), (-3.0, 0.5, 5.0, 0.0), (1.0, -1.0, 0.0, 6.0), (3.0, 0.0, 2.0, -4.0))
PERMUTATION = ((-20, 20, -20, -20), (-20, -20, 20, -20), (-20, -20, -20, 20), (20, -20, -20, -20))
TRIANGLE = ((0, 0, 0, 0), (-30, 0, 0, 0), (-30, -30, 0, 0), (-30, -30, -30, 0))
"""Its support holds one permutation only: Sinkhorn comes nearer by 1/n a round, and entries of eps size decide."""
ONE_COLUMN = ((30, -30, -28, -26), (30, -27, -30, -30), (30, -30, -30, -25), (30, -29, -30, -30))
EPS_COLUMN = (
    (-15.0, 0.0, -16.5, -2.75),
    (-15, -1.75, -14.75, -14.25),
    (-15.5, -1.75, -16.25, -13.5),
    (-16, -16, 2.75, -16),
)
"""The first column's entries come from eps alone, so that the eps in its sum is a quarter of it."""
NEAR_PERMUTATION = ((9, 0, -3, 2), (8, 6, 0, -1), (0, 7, 9, -4), (5, 0, 8, 7))

TOKEN_COUNTS: tuple[tuple[int, Level], ...] = ((1, "core"), (16, "core"), (512, "full"), (4096, "full"))

COEFFICIENTS = (
    Coefficients(
        "logits-zero",
        "Fails when pre lacks its eps, post its factor two, or comb is not uniform: 0.500001, 1 and 1/4 are due.",
        ("pre-post-form",),
    ),
    Coefficients(
        "logits-plus-minus-30",
        "Fails when pre lacks its eps or post has one: pre is then 1e-6, post 2e-13, where the logit is -30.",
        ("pre-post-form", "sinkhorn-eps"),
        pre=(-30.0, 30.0, -30.0, 0.0),
        post=(30.0, -30.0, 0.0, -30.0),
        comb=ONE_COLUMN,
    ),
    Coefficients(
        "logits-of-100",
        "Fails when exponentials are taken without subtracting the row's maximum.",
        ("sinkhorn-overflow",),
        pre=(100.0, -100.0, 0.0, 50.0),
        post=(-80.0, 100.0, 50.0, 0.0),
        comb=((100, 99, 0, -100), (0, 100, 98, 50), (-100, 0, 100, 100), (97, 100, 0, 100)),
    ),
    Coefficients(
        "asymmetric-comb",
        "Fails when comb is laid out column by column, or its softmax runs over columns.",
        ("comb-transposed", "sinkhorn-order", "mix-offsets"),
        pre=OFFSETS,
        post=OFFSETS[::-1],
        comb=ASYMMETRIC,
    ),
    Coefficients(
        "comb-near-permutation",
        "Fails when comb is transposed: the cycle then runs the other way.",
        ("comb-transposed", "sinkhorn-eps"),
        comb=PERMUTATION,
    ),
    Coefficients(
        "slow-sinkhorn-triangle",
        "Fails when a round is missing or there is one too many, an eps is missing, or rows come last.",
        ("sinkhorn-rounds", "sinkhorn-eps", "sinkhorn-order"),
        comb=TRIANGLE,
    ),
    Coefficients(
        "column-of-eps",
        "Fails when the eps in the division by column sums is missing or another number.",
        ("sinkhorn-eps",),
        comb=EPS_COLUMN,
    ),
    Coefficients(
        "slow-sinkhorn-near-permutation",
        "Fails when a round is missing or there is one too many, or rows come last.",
        ("sinkhorn-rounds", "sinkhorn-order"),
        comb=NEAR_PERMUTATION,
    ),
    Coefficients(
        "streams-of-different-norm",
        "Fails when the mean square is that of one stream, the projection is in bf16, or parts are mixed up.",
        ("mix-rms", "mix-in-bf16", "pre-post-order", "mix-offsets"),
        pre=OFFSETS,
        post=OFFSETS[::-1],
        comb=ASYMMETRIC,
        h=_uneven_streams,
        fn=_projection,
        scale=(0.5, 1.5, 2.0),
    ),
    Coefficients(
        "zero-streams",
        "Fails when a token of zeros becomes NaN, or one stream alone sets the norm.",
        ("norm-eps", "mix-rms"),
        pre=OFFSETS,
        comb=ASYMMETRIC,
        h=_zero_streams,
        fn=_projection,
    ),
    Coefficients(
        "tiny-streams",
        "Fails when the norm's eps is 1e-6: logits of streams this small then vanish.",
        ("norm-eps", "mix-rms"),
        h=lambda: _uneven_streams() * 2.0**-26,
        fn=_projection,
    ),
    *(
        Coefficients(
            f"tokens-{count}",
            "Fails when a kernel is wrong beyond some number of tokens.",
            ("mix-many-tokens", "mix-rms", "mix-in-bf16"),
            pre=OFFSETS,
            comb=ASYMMETRIC,
            h=partial(_tokens, count),
            fn=_projection,
            level=level,
        )
        for count, level in TOKEN_COUNTS
    ),
)


def cases() -> Iterator[Case]:
    """Coefficients by vector; reads and writes on lattices."""
    for vector in COEFFICIENTS:
        yield Case(
            f"hyper_connections/coefficient-vectors/{vector.variant}",
            vector.level,
            "composed",
            vector.why,
            "numerics.md 5",
            partial(_coefficient_steps, vector),
            vector.flags,
            "hand-made",
        )
    for variant, shape in SHAPES.items():
        yield Case(
            f"hyper_connections/lattice-read/{variant}",
            "core",
            "exact",
            "Fails when the mix runs over another axis, is rounded to bf16, or the sum is kept in less than fp32.",
            "numerics.md 5",
            partial(_read_steps, shape),
            ("read-mix-ignored", "mix-in-bf16", "bf16-accumulator", "bf16-truncated"),
            "lattice",
        )
        yield Case(
            f"hyper_connections/lattice-write/{variant}",
            "core",
            "exact",
            "Fails when comb is transposed, a coefficient is rounded to bf16, or a part of the sum is rounded early.",
            "numerics.md 5",
            partial(_write_steps, shape),
            ("comb-transposed", "mix-in-bf16", "write-rounded-twice", "write-stream-lost", "bf16-truncated"),
            "lattice",
        )
    yield Case(
        "hyper_connections/lattice-read/cancelling-and-ties",
        "core",
        "exact",
        "Fails when the sum over streams is kept in bf16, cut off, or rounds ties away from even.",
        "numerics.md 5",
        _cancelling_read,
        ("bf16-accumulator", "bf16-truncated"),
        "worked out by hand",
    )
    yield Case(
        "hyper_connections/lattice-write/one-hot-comb",
        "core",
        "exact",
        "Fails when comb is transposed: stream k must receive stream k-1, plus its own post times y.",
        "numerics.md 5",
        _one_hot_write,
        ("comb-transposed", "write-stream-lost"),
        "worked out by hand",
    )


SHAPES = {"one-token": (1, 1), "two-by-three-tokens": (2, 3), "sixty-four-tokens": (1, 64)}


def _coefficient_steps(vector: Coefficients) -> Iterator[Step]:
    h = Tensor.from_values(vector.h(), "BF16")
    parts = {"fn": vector.fn(), "scale": np.array(vector.scale), "base": vector.base}
    tensors = {name: Tensor.from_values(values, "F32") for name, values in parts.items()}

    def rules() -> list[Within]:
        given = {name: tensor.values() for name, tensor in tensors.items()}
        expected = coefficients(MODEL, Bounded.exact(h.values()), **given)
        named = (
            ("pre", expected.pre, PER_STREAM),
            ("post", expected.post, PER_STREAM),
            ("comb", expected.comb, COMB_AXES),
        )
        return [Within(name, value, "F32", axes) for name, value, axes in named]

    yield Step(Call("hyper_connection_coefficients", {"config": CONFIG, "h": h, **tensors}), rules)


def _fractions(seed: int, *shape: int) -> Floats:
    """Coefficients of 12 significant bits, which bf16 does not hold, below one in magnitude."""
    return integers(seed, shape, 4095) / 4096


def _read_steps(shape: tuple[int, int]) -> Iterator[Step]:
    h, pre = integers(51, (*shape, STREAMS, WIDTH), 255), _fractions(52, *shape, STREAMS)
    yield _read(h, pre, exact_product(pre[..., None, :], h.swapaxes(-1, -2))[..., 0, :])


def _cancelling_read() -> Iterator[Step]:
    """Feature by feature: 2^15 - 2^15 + 1 + 2^-7; 256 + 1; 256 + 3; 256 + 1 + 1/128, and their negatives."""
    h = np.zeros((1, 2, STREAMS, WIDTH))
    h[0, 0, :, :4] = np.array([[128, -128, 1, 1], [1, 0, 1, 0], [1, 0, 3, 0], [1, 0, 1, 1]]).T
    h[0, 0, :, 0] = [2.0**15, -(2.0**15), 1, 2.0**-7]
    h[0, 0, :, 1:4] *= np.array([256, 1, 1, 2.0**-7])[:, None]
    h[0, 1] = -h[0, 0]
    expected = np.zeros((1, 2, WIDTH))
    expected[0, 0, :4] = [1 + 2.0**-7, 256, 260, 258]
    expected[0, 1] = -expected[0, 0]
    yield _read(h, np.ones((1, 2, STREAMS)), expected)


def _read(h: Floats, pre: Floats, expected: Floats) -> Step:
    arguments = {"h": Tensor.from_values(h, "BF16"), "pre": Tensor.from_values(pre, "F32")}
    return Step(
        Call("hyper_connection_read", arguments),
        lambda: [Exact("out", Tensor.from_values(expected, "BF16"), READ_AXES)],
    )


def _write_steps(shape: tuple[int, int]) -> Iterator[Step]:
    y, h = integers(53, (*shape, WIDTH), 255), integers(54, (*shape, STREAMS, WIDTH), 255)
    post, comb = _fractions(55, *shape, STREAMS), _fractions(56, *shape, STREAMS, STREAMS)
    # One product: [comb transposed | post] with the streams and y as its inputs.
    mixing = np.concatenate([comb.swapaxes(-1, -2), post[..., None]], -1)
    inputs = np.concatenate([h, y[..., None, :]], -2)
    yield _write(y, h, post, comb, exact_product(mixing, inputs.swapaxes(-1, -2)))


def _one_hot_write() -> Iterator[Step]:
    h = np.arange(1.0, STREAMS + 1)[None, None, :, None] * np.ones((1, 1, STREAMS, WIDTH))
    comb = np.roll(np.eye(STREAMS), 1, axis=1)[None, None]
    post = np.array([[[1.0, 2.0, 0.0, 0.5]]])
    received = np.array([4.0, 1.0, 2.0, 3.0]) + 16.0 * post[0, 0]
    expected = received[None, None, :, None] * np.ones_like(h)
    yield _write(np.full((1, 1, WIDTH), 16.0), h, post, comb, expected)


def _write(y: Floats, h: Floats, post: Floats, comb: Floats, expected: npt.NDArray[np.float64]) -> Step:
    arguments = {
        "y": Tensor.from_values(y, "BF16"),
        "h": Tensor.from_values(h, "BF16"),
        "post": Tensor.from_values(post, "F32"),
        "comb": Tensor.from_values(comb, "F32"),
    }
    return Step(
        Call("hyper_connection_write", arguments),
        lambda: [Exact("out", Tensor.from_values(expected, "BF16"), WRITE_AXES)],
    )
