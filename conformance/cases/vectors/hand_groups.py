"""Groups whose codes and scale byte were worked out by hand from the tables in numerics.md 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.cases.case import Level
from conformance.judge.components.quantize import FP4_E4M3, FP4_E8M0, FP8, Quantizer


@dataclass(frozen=True)
class HandGroup:
    """One group: its first values, zeros after them, and what they must become."""

    id: str
    quantizer: Quantizer
    values: tuple[float, ...]
    codes: tuple[int, ...]
    scale: int
    """The scale's byte: E8M0 holds the exponent plus 127, E4M3 is s eeee mmm."""
    why: str
    flags: tuple[str, ...]
    level: Level = "smoke"


MIDPOINTS = (6, 0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75, 2.5, -2.5, 3.5, -3.5, 5, -5)
MIDPOINT_CODES = (7, 0, 2, 10, 2, 10, 4, 12, 4, 12, 6, 14, 6, 14)
TIES = "Fails when one of the seven midpoints between codes is rounded away from the even code."
GRID = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6)
GRID_CODES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
NIBBLES = "Fails when the even element is not in the low nibble, or a code is another number."
NEGATIVE_ZEROS = (6, -0.25, -0.125, -0.0)
SIGN_OF_ZERO = (
    "Fails when the code of a value that rounds to zero from below, or of -0, is cleared: a convention in which ports "
    "differ, harmless to values, visible in bytes."
)

HAND_GROUPS = (
    HandGroup(
        "fp8-scale-rounds-up/amax-1.2-times-448",
        FP8,
        (536, -536, 448, 1),
        # 536 / 448 = 1.196: scale 2.  268 is nearest to 256, 224 is a code, so is 0.5.
        (0x78, 0xF8, 0x76, 0x30),
        128,
        "Fails when the scale is the nearest power of two, 1, or the next lower one: the maximum then saturates.",
        ("scale-not-rounded-up",),
    ),
    HandGroup(
        "fp8-scale-rounds-up/amax-1.9-times-448",
        FP8,
        (852, -852, 448, 1),
        # 852 / 448 = 1.902: scale 2.  426 is nearest to 416.
        (0x7D, 0xFD, 0x76, 0x30),
        128,
        "Fails when amax/448 is kept as the scale, or loses its mantissa instead of being rounded up.",
        ("scale-not-rounded-up", "scale-not-power-of-two"),
    ),
    HandGroup(
        "fp8-scale-steps-up/one-ulp-above-448-times-32",
        FP8,
        (14400, 14336),
        # 14400 / 448 is above 32: scale 64.  225 is nearest to 224, 14336 / 64 = 224.
        (0x76, 0x76),
        133,
        "Fails when the exponent comes one too low just above a power of two.",
        ("scale-by-log2", "scale-not-rounded-up"),
    ),
    HandGroup(
        "fp8-scale-steps-up/exactly-448-times-32",
        FP8,
        (14336, -7168),
        (0x7E, 0xF6),
        132,
        "Fails when the exponent comes one too high at an exact power of two, as ceil of an approximate log2 does.",
        ("scale-by-log2", "scale-of-exact-power-doubled"),
    ),
    HandGroup(
        "fp8-codes/saturation-subnormals-and-signs",
        FP8,
        (448, -448, 240, 250, 2**-9, 2**-10, -(2**-10), 1.5 * 2**-9, 2.5 * 2**-9, -(2.0**-30), -0.0, 1.0625, 1.1875),
        # 250 goes to 256; 2^-10 is a tie with zero; 1.5 and 2.5 steps both go to two; 1.0625 to 1, 1.1875 to 1.25.
        (0x7E, 0xFE, 0x77, 0x78, 1, 0, 0x80, 2, 2, 0x80, 0x80, 0x38, 0x3A),
        127,
        "Fails when codes are of the FNUZ kind (largest 240, 0x80 is NaN), subnormals are flushed, or ties go up.",
        ("fp8-fnuz", "fp8-truncated", "fp8-tie-away-from-zero"),
    ),
    HandGroup(
        "fp8-floor/zeros",
        FP8,
        (),
        (),
        # 1e-4 / 448 = 2.23e-7, the next power of two is 2^-22; a floor of 1e-4 on the quotient would give 2^-13.
        105,
        "Fails when a group of zeros gives another scale than 2^-22.",
        ("amax-floor",),
    ),
    HandGroup(
        "fp8-floor/maximum-between-the-two-floors",
        FP8,
        (0.010009765625,),
        # 0.01001 / 448 = 2.23e-5: scale 2^-15, not 2^-13.  328 is nearest to 320.
        (0x7A,),
        112,
        "Fails when 1e-4 is the floor of amax/448 and not of amax.",
        ("amax-floor",),
    ),
    HandGroup(
        "fp4-e8m0-ties/seven-midpoints", FP4_E8M0, MIDPOINTS, MIDPOINT_CODES, 127, TIES, ("fp4-tie-away-from-zero",)
    ),
    HandGroup(
        "fp4-e4m3-ties/seven-midpoints", FP4_E4M3, MIDPOINTS, MIDPOINT_CODES, 0x38, TIES, ("fp4-tie-away-from-zero",)
    ),
    HandGroup("fp4-e8m0-nibbles/all-codes", FP4_E8M0, GRID, GRID_CODES, 127, NIBBLES, ("nibble-order", "fp4-sign")),
    HandGroup("fp4-e4m3-nibbles/all-codes", FP4_E4M3, GRID, GRID_CODES, 0x38, NIBBLES, ("nibble-order", "fp4-sign")),
    HandGroup(
        "fp4-e8m0-negative-zero/sign-kept",
        FP4_E8M0,
        NEGATIVE_ZEROS,
        (7, 8, 8, 8),
        127,
        SIGN_OF_ZERO,
        ("negative-zero-code",),
        "core",
    ),
    HandGroup(
        "fp4-e4m3-negative-zero/sign-kept",
        FP4_E4M3,
        NEGATIVE_ZEROS,
        (7, 8, 8, 8),
        0x38,
        SIGN_OF_ZERO,
        ("negative-zero-code",),
        "core",
    ),
    HandGroup(
        "fp4-e4m3-true-division/tie-under-scale-15-over-512",
        FP4_E4M3,
        (0.17578125, 0.03662109375),
        # 0.17578125 / 6 = 0.029296875 = 15/512 is an E4M3 number.  The quotient of the second is 1.25, which goes to 1;
        # times the rounded reciprocal it is 1.2500001, which goes to 1.5.
        (7, 2),
        0x0F,
        "Fails when x times 1/s, or an approximate division, replaces the true one.",
        ("fp4-reciprocal-multiply",),
    ),
    HandGroup(
        "fp4-e4m3-floor/zeros",
        FP4_E4M3,
        (),
        (),
        # 6*2^-9 / 6 = 2^-9, the smallest subnormal.
        1,
        "Fails when a group of zeros gives a scale of zero.",
        ("amax-floor", "fp4-formats-swapped"),
    ),
    HandGroup(
        "fp4-e4m3-floor/maximum-below-the-floor",
        FP4_E4M3,
        (2**-8, -(2**-9)),
        # The scale is 2^-9 by the floor: quotients 2 and -1.
        (4, 10),
        1,
        "Fails when the scale of a small group is that of the index keys' format.",
        ("fp4-formats-swapped", "amax-floor"),
    ),
    HandGroup(
        "fp4-e8m0-floor/maximum-below-the-other-formats-floor",
        FP4_E8M0,
        (2**-8, -(2**-9)),
        # 2^-8 / 6 = 6.5e-4: scale 2^-10, quotients 4 and -2.
        (6, 12),
        117,
        "Fails when the floor is that of the compressed rows' format.",
        ("fp4-formats-swapped", "amax-floor"),
    ),
    HandGroup(
        "fp4-e8m0-floor/zeros",
        FP4_E8M0,
        (),
        (),
        1,
        "Fails when a group of zeros gives another scale than 2^-126.",
        ("amax-floor", "fp4-formats-swapped"),
    ),
    HandGroup(
        "fp4-e4m3-scale/largest",
        FP4_E4M3,
        (3072, -2688, 448, 1344),
        # 3072 / 6 = 512 is limited to 448: the quotient 6.86 to 6, -6, 1 and 3.
        (7, 15, 2, 5),
        0x7E,
        "Fails when a scale above 448 becomes NaN, or a quotient above 6 another code.",
        ("e4m3-scale-overflow",),
    ),
)
