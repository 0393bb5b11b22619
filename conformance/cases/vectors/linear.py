"""Lattice vectors of the linear layers (numerics.md 3): every summation order gives the same bits.

Each kind of weight gets the same situations.  Activations of the quantised kinds are not E4M3 numbers, so leaving the
quantiser out shows; scales differ from tile to tile and from row to row, so a misplaced one shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Level, Step
from conformance.cases.vectors.lattice import exact_product, integers, signs
from conformance.formats import E2M1, pack_fp4
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.linear import fp8_weight, lattice_holds, quantized
from conformance.judge.components.quantize import FP8
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

AXES = ("token", "feature")
GROUP = 32
E8M0_BIAS = 127


@dataclass(frozen=True)
class Operands:
    """Activations [M, K] and a stored weight with its values [N, K]."""

    x: Tensor
    weight: Tensor
    values: Floats
    scale: Tensor | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of weight: its method, how it stores values, and operands with full significands."""

    name: str
    output: str
    varied: Callable[[int, int, int], Operands]
    plain: Callable[[Floats, Floats], Operands]
    """Stores small whole numbers [M, K] and [N, K], or halves, without loss."""
    flags: tuple[str, ...]

    @property
    def quantises(self) -> bool:
        """Whether the layer quantises its input."""
        return self.name in ("fp8", "fp4")


def exponents(shape: tuple[int, int], steps: tuple[int, int], count: int) -> Floats:
    """Exponents 0 ... count - 1 that differ between neighbours along both axes."""
    return np.asarray(
        (np.arange(shape[0])[:, None] * steps[0] + np.arange(shape[1]) * steps[1]) % count, dtype=np.float64
    )


def scale_tensor(exponent: Floats) -> Tensor:
    """E8M0 bytes of powers of two."""
    return Tensor("F8_E8M0", (exponent + E8M0_BIAS).astype(np.uint8))


def unquantised(m: int, k: int) -> Floats:
    """Activations in [8, 16) times a power of two by group: Q8 rounds them to whole numbers times that power."""
    magnitude = 8 + (integers(1, (m, k), 63) + 64) / 16
    present = integers(2, (m, k), 3) != 0
    factor = np.repeat(2.0 ** exponents((m, k // GROUP), (3, 1), 4), GROUP, axis=-1)
    return np.asarray(magnitude * signs(3, (m, k)) * present * factor)


def fp8_operands(m: int, k: int, n: int) -> Operands:
    """Weights -3 ... 3 under tile scales 1 ... 64."""
    codes = Tensor.from_values(integers(4, (n, k), 3), "F8_E4M3")
    exponent = exponents((-(-n // GROUP), -(-k // GROUP)), (3, 1), 7)
    values = fp8_weight(codes.values(), 2.0**exponent)
    return Operands(Tensor.from_values(unquantised(m, k), "BF16"), codes, values, scale_tensor(exponent))


def fp4_operands(m: int, k: int, n: int) -> Operands:
    """All sixteen codes but -0 under row scales 1 ... 16."""
    codes = np.arange(n * k).reshape(n, k) * 7 % 16
    codes[codes == 8] = 7
    exponent = exponents((n, k // GROUP), (1, 3), 5)
    values = E2M1.decode(codes.astype(np.uint8)) * np.repeat(2.0**exponent, GROUP, axis=-1)
    x = Tensor.from_values(unquantised(m, k), "BF16")
    return Operands(x, Tensor("U8", pack_fp4(codes)), values, scale_tensor(exponent))


def bf16_operands(m: int, k: int, n: int) -> Operands:
    """Activations of 8 significant bits, which any quantiser would change, and weights of 7."""
    x, w = integers(5, (m, k), 255), integers(6, (n, k), 127)
    return Operands(Tensor.from_values(x, "BF16"), Tensor.from_values(w, "BF16"), w)


def fp32_operands(m: int, k: int, n: int) -> Operands:
    """Weights of 12 significant bits, which neither bf16 nor TF32 holds."""
    x, w = integers(7, (m, k), 7), integers(8, (n, k), 4095)
    return Operands(Tensor.from_values(x, "BF16"), Tensor.from_values(w, "F32"), w)


def fp32_input_operands(m: int, k: int, n: int) -> Operands:
    """The other way round: a bf16 weight and an fp32 input of 12 significant bits."""
    x, w = integers(9, (m, k), 4095), integers(10, (n, k), 7)
    return Operands(Tensor.from_values(x, "F32"), Tensor.from_values(w, "BF16"), w)


def plain_fp8(x: Floats, w: Floats) -> Operands:
    """All scales one."""
    shape = (-(-w.shape[0] // GROUP), -(-w.shape[1] // GROUP))
    codes = Tensor.from_values(w, "F8_E4M3")
    return Operands(Tensor.from_values(x, "BF16"), codes, w, scale_tensor(np.zeros(shape)))


def plain_fp4(x: Floats, w: Floats) -> Operands:
    """All scales one."""
    scale = scale_tensor(np.zeros((w.shape[0], w.shape[1] // GROUP)))
    return Operands(Tensor.from_values(x, "BF16"), Tensor("U8", pack_fp4(E2M1.encode(w))), w, scale)


def plain_bf16(x: Floats, w: Floats) -> Operands:
    """As they are."""
    return Operands(Tensor.from_values(x, "BF16"), Tensor.from_values(w, "BF16"), w)


def plain_fp32(x: Floats, w: Floats) -> Operands:
    """As they are."""
    return Operands(Tensor.from_values(x, "BF16"), Tensor.from_values(w, "F32"), w)


QUANTISED = ("activation-not-quantised", "scale-layout")
KINDS = (
    Kind("fp8", "BF16", fp8_operands, plain_fp8, QUANTISED),
    Kind("fp4", "BF16", fp4_operands, plain_fp4, (*QUANTISED, "nibble-order")),
    Kind("bf16", "BF16", bf16_operands, plain_bf16, ("activation-quantised",)),
    Kind("fp32", "F32", fp32_operands, plain_fp32, ("fp32-layer-in-bf16", "fp32-layer-in-tf32")),
)

SHAPES = {"one-token": (1, 160, 40), "three-tokens": (3, 96, 72), "sixty-four-tokens": (64, 416, 33)}
"""M, K, N: K is no multiple of 128, N none of 32."""


def cancelling(kind: Kind) -> Operands:
    """Two halves that cancel at up to 2^20 times the result, which the last input alone carries."""
    largest = 6.0 if kind.name == "fp4" else 128.0
    x = np.zeros((3, 160))
    x[:, :64], x[:, 64:128] = 240.0, -240.0
    # The four blocks' sums differ by a few quanta: none of them, nor any sum of them, is a bf16 number.
    x[:, [0, 32, 64, 96]] = [1.0, 3.0, -4.0, 0.0]
    x[:, -1] = [1.0, -1.0, 0.5]
    w = np.full((33, 160), largest)
    w[:, -1] = 1.0 + np.arange(33) % 3 * 0.5
    return kind.plain(x, w)


def last_input(kind: Kind) -> Operands:
    """Nothing but the last input, K = 416, N = 33: what a kernel computes in its tail."""
    x = np.zeros((3, 416))
    x[:, -1] = [1.0, -2.0, 3.0]
    w = integers(11, (33, 416), 3)
    w[:, -1] = [1.0, 2.0, 3.0] * 11
    return kind.plain(x, w)


def ties(kind: Kind) -> Operands:
    """Sums 257, 259, 257.25 and 258.75 and their negatives: bf16 holds even numbers there."""
    x = np.zeros((2, 32))
    x[:, :3] = [[64, 1, 0.25], [-64, -1, -0.25]]
    w = np.zeros((4, 32))
    w[:, :3] = [[4, 1, 0], [4, 3, 0], [4, 1, 1], [4, 3, -1]]
    return kind.plain(x, w)


def spread_scales(kind: Kind) -> Operands:
    """Scales 2^0 and 2^-17 inside 128 inputs: what is 2^-17 times 0.5 vanishes under one FP8 scale.

    The two groups under 2^0 cancel.
    """
    exponent = np.array([[0.0, -17.0, -17.0, 0.0]] * 8)
    codes = np.full((8, 128), 1, dtype=np.uint8)
    codes[:, 96:] = 9
    values = E2M1.decode(codes) * np.repeat(2.0**exponent, GROUP, axis=-1)
    return Operands(
        Tensor.from_values(np.ones((1, 128)), "BF16"), Tensor("U8", pack_fp4(codes)), values, scale_tensor(exponent)
    )


def cases() -> Iterator[Case]:
    """Shapes, cancellation, the last input and ties for each kind; what only one kind has."""
    for kind in KINDS:
        for variant, shape in SHAPES.items():
            yield _case(
                f"lattice-{kind.name}/{variant}",
                "Fails when a scale is misplaced, an operand is rounded that must not be, or a tail is left out.",
                kind,
                partial(kind.varied, *shape),
                (*kind.flags, "last-input-dropped", "last-output-dropped", "bf16-accumulator"),
            )
        rounding = () if kind.output == "F32" else ("bf16-truncated",)
        situations: tuple[tuple[str, str, Callable[[Kind], Operands], tuple[str, ...]], ...] = (
            ("cancelling", "Fails when the sum is kept in less than fp32.", cancelling, ("bf16-accumulator",)),
            (
                "last-input",
                "Fails when the last, partly filled tile is not added.",
                last_input,
                ("last-input-dropped", "last-output-dropped"),
            ),
            (
                "ties",
                "Fails when the result is cut off or ties are rounded away.",
                ties,
                rounding or ("fp32-layer-in-bf16",),
            ),
        )
        for variant, why, operands, flags in situations:
            yield _case(f"lattice-{kind.name}/{variant}", why, kind, partial(operands, kind), flags)
    by_name = {kind.name: kind for kind in KINDS}
    yield _case(
        "lattice-fp32/fp32-input",
        "Fails when an fp32 input is rounded to bf16 or TF32 before the product.",
        by_name["fp32"],
        partial(fp32_input_operands, 3, 416, 33),
        ("fp32-layer-in-bf16", "fp32-layer-in-tf32"),
    )
    yield _case(
        "lattice-fp4/scales-17-powers-apart",
        "Fails when FP4 weights were turned into FP8 under one scale for 128 inputs: the small ones become zero.",
        by_name["fp4"],
        partial(spread_scales, by_name["fp4"]),
        ("fp4-weight-requantised", "scale-layout"),
    )


def _case(name: str, why: str, kind: Kind, operands: Callable[[], Operands], flags: tuple[str, ...]) -> Case:
    level: Level = "smoke" if name.endswith(("three-tokens", "cancelling")) else "core"
    return Case(
        f"linear/{name}",
        level,
        "exact",
        why,
        "numerics.md 3",
        partial(_steps, kind, operands),
        flags,
        "lattice",
    )


def _steps(kind: Kind, operands: Callable[[], Operands]) -> Iterator[Step]:
    given = operands()
    arguments = {"x": given.x, "weight": given.weight}
    if given.scale is not None:
        arguments["scale"] = given.scale

    def rules() -> list[Expectation]:
        x = given.x.values()
        if kind.quantises:
            if not lattice_holds():
                return [Within("out", quantized(Bounded.exact(x), given.values), kind.output, AXES, "dot")]
            x = FP8.fake(Bounded.exact(x)).value
        return [Exact("out", Tensor.from_values(exact_product(x, given.values), kind.output), AXES)]

    yield Step(Call(f"linear_{kind.name}", arguments), rules)
