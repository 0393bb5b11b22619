"""Recipe tensors: every element a pure function of (seed, name, index), made on its own, in any order.

Sets at the released sizes store outputs only; their inputs and weights follow from this recipe (`fixtures/RECIPE.md`
describes it for other languages).  Nothing is drawn in sequence: one expert, one table row or one element costs what it
holds.  `conformance.recipe_weights` knows which parameter of the model has which kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.tensors import Array, Tensor

UInt64s = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)

LARGEST_BELL = 510
BELL_UNIT = 0.577
"""Standard deviation of n / 256."""
GRID_UNIT = 2.926
"""Standard deviation of the sixteen E2M1 values."""

PIECE = 1 << 18
"""Elements made at a time: the temporaries of one piece stay in cache."""


def key(name: str, seed: int) -> int:
    """The stream of a name: first 8 bytes, little-endian, of SHA-256 of the UTF-8 text "{seed}/{name}"."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def u(stream: int, index: npt.ArrayLike) -> UInt64s:
    """Splitmix64 at any index: uint64, shape of `index`."""
    with np.errstate(over="ignore"):
        z = np.uint64(stream) + (np.asarray(index).astype(np.uint64) + np.uint64(1)) * GOLDEN_RATIO
        z = (z ^ (z >> np.uint64(30))) * FIRST_MULTIPLIER
        z = (z ^ (z >> np.uint64(27))) * SECOND_MULTIPLIER
        result: UInt64s = z ^ (z >> np.uint64(31))
    return result


def byte(stream: int, index: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Byte i mod 8 of u(i div 8), least significant first: uint8, shape of `index`."""
    i = np.asarray(index).astype(np.uint64)
    shifted = u(stream, i >> np.uint64(3)) >> (np.uint64(8) * (i & np.uint64(7)))
    return (shifted & np.uint64(0xFF)).astype(np.uint8)


def n(stream: int, index: npt.ArrayLike) -> npt.NDArray[np.int16]:
    """Sum of the four bytes of half i mod 2 of u(i div 2), minus 510: int16 in -510...510, shape of `index`."""
    i = np.asarray(index).astype(np.uint64)
    half = (u(stream, i >> np.uint64(1)) >> (np.uint64(32) * (i & np.uint64(1)))).astype(np.uint32)
    total = sum((half >> np.uint32(shift)) & np.uint32(0xFF) for shift in (0, 8, 16, 24))
    return np.asarray(total, dtype=np.int16) - np.int16(LARGEST_BELL)


def _byte_run(stream: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """`byte` over a range, each u computed once."""
    first = start // 8
    words = u(stream, np.arange(first, -(-stop // 8), dtype=np.uint64)).astype("<u8")
    return words.view(np.uint8)[start - 8 * first : stop - 8 * first]


def _n_run(stream: int, start: int, stop: int) -> npt.NDArray[np.int16]:
    """`n` over a range, each u computed once."""
    first = start // 2
    words = u(stream, np.arange(first, -(-stop // 2), dtype=np.uint64))
    # Bytes are added inside each half: pairs first, then the pairs, without a carry between halves.
    low = np.uint64(0x00FF00FF00FF00FF)
    pairs = (words & low) + ((words >> np.uint64(8)) & low)
    halves = (pairs + (pairs >> np.uint64(16))).astype("<u8").view("<u2")[0::2]
    return np.asarray(halves[start - 2 * first : stop - 2 * first].astype(np.int16) - np.int16(LARGEST_BELL))


@dataclass(frozen=True)
class Kind:
    """How a draw becomes an element: `draw` is n, byte or u; n turns into round(n * factor + offset) in `dtype`."""

    dtype: str
    draw: str = "n"
    factor: float | None = None
    """None: 2^(e - 8), with e from the gain and the number of inputs."""
    offset: float = 0.0
    tile: tuple[int, int] | None = None
    """Rows and inputs (elements, not bytes) that share a scale; None without scales."""


KINDS: Mapping[str, Kind] = {
    "bf16": Kind("BF16"),
    "fp32": Kind("F32"),
    "fp8": Kind("F8_E4M3", factor=0.5, tile=(32, 32)),
    "fp4": Kind("U8", draw="byte", tile=(1, 32)),
    "fp8row": Kind("F8_E4M3", factor=0.5, tile=(1, 32)),
    "norm": Kind("BF16", factor=1 / 2048, offset=1.0),
    "small": Kind("F32", factor=1 / 1024),
    "scale3": Kind("F32", factor=1 / 4096, offset=0.5),
    "sink": Kind("F32", factor=1 / 128),
    "input": Kind("BF16", factor=1 / 256),
}
"""The kinds of the recipe.  A weight "fp32 rounded to bf16" is kind `bf16`: fp32 holds n * 2^k exactly."""


def exponent(gain: float, fan_in: int, unit: float) -> int:
    """round(log2(gain / sqrt(fan_in) / unit)), halves to the even integer."""
    return round(math.log2(gain * fan_in**-0.5 / unit))


@dataclass(frozen=True)
class RecipeTensor:
    """One tensor that is not there yet.  `shape` is the logical shape: [N, K] also where FP4 packs two to a byte."""

    name: str
    kind: str
    shape: tuple[int, ...]
    seed: int
    gain: float = 1.0

    @property
    def dtype(self) -> str:
        """Dtype of the stored tensor."""
        return KINDS[self.kind].dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor: [N, K/2] bytes for FP4, the logical shape otherwise."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.kind == "fp4" else self.shape

    @property
    def quantized(self) -> bool:
        """Whether scales belong to it."""
        return KINDS[self.kind].tile is not None

    @property
    def scale(self) -> RecipeScale:
        """The scales beside a quantised weight; ValueError for other kinds."""
        tile = KINDS[self.kind].tile
        if tile is None:
            raise ValueError(f"{self.name}: kind {self.kind} has no scales")
        if self.kind == "fp8row":
            e = -7
        else:
            e = self._exponent(GRID_UNIT) if self.kind == "fp4" else self._exponent(BELL_UNIT) - 7
        rows, columns = (-(-size // part) for size, part in zip(self.shape, tile, strict=True))
        return RecipeScale(self.name, (rows, columns), self.seed, e)

    def tensor(self) -> Tensor:
        """The whole tensor, made in pieces."""
        total = math.prod(self.stored_shape)
        data = np.empty(total, dtype=self._table.dtype)
        for start in range(0, total, PIECE):
            stop = min(start + PIECE, total)
            if KINDS[self.kind].draw == "byte":
                data[start:stop] = _byte_run(self._stream, start, stop)
            else:
                data[start:stop] = self._table[_n_run(self._stream, start, stop) + LARGEST_BELL]
        return Tensor(self.dtype, data.reshape(self.stored_shape))

    def at(self, index: npt.ArrayLike) -> Tensor:
        """Elements (FP4: bytes) at flat row-major indices of the stored tensor, in the shape of `index`."""
        if KINDS[self.kind].draw == "byte":
            return Tensor(self.dtype, byte(self._stream, index))
        return Tensor(self.dtype, np.asarray(self._table[n(self._stream, index) + LARGEST_BELL]))

    def rows(self, rows: npt.ArrayLike) -> Tensor:
        """Rows of a matrix: indices [...] -> [..., K], each made by itself."""
        return self.at(_flat(rows, self.stored_shape[-1]))

    @cached_property
    def _stream(self) -> int:
        return key(self.name, self.seed)

    @cached_property
    def _table(self) -> Array:
        """The stored element for each n from -510 to 510 (FP4: for each byte)."""
        kind = KINDS[self.kind]
        if kind.draw == "byte":
            return np.arange(256, dtype=np.uint8)
        factor = 2.0 ** (self._exponent(BELL_UNIT) - 8) if kind.factor is None else kind.factor
        numbers = np.arange(-LARGEST_BELL, LARGEST_BELL + 1, dtype=np.float64)
        return Tensor.from_values(numbers * factor + kind.offset, kind.dtype).data

    def _exponent(self, unit: float) -> int:
        return exponent(self.gain, self.shape[-1], unit)


@dataclass(frozen=True)
class RecipeScale:
    """The E8M0 scales of a quantised weight: byte 127 + e + (u mod 3 - 1), u of the name "{weight}.scale"."""

    weight: str
    shape: tuple[int, int]
    seed: int
    e: int

    def tensor(self) -> Tensor:
        """All scales."""
        return self.at(np.arange(math.prod(self.shape)).reshape(self.shape))

    def at(self, index: npt.ArrayLike) -> Tensor:
        """Scales at flat row-major tile indices, in the shape of `index`."""
        jitter = (u(self._stream, index) % np.uint64(3)).astype(np.int64) - 1
        return Tensor("F8_E8M0", np.asarray(127 + self.e + jitter).astype(np.uint8))

    def rows(self, rows: npt.ArrayLike) -> Tensor:
        """Rows of scales: indices [...] -> [..., columns]."""
        return self.at(_flat(rows, self.shape[-1]))

    @cached_property
    def _stream(self) -> int:
        return key(f"{self.weight}.scale", self.seed)


def _flat(rows: npt.ArrayLike, width: int) -> Any:
    return np.asarray(rows, dtype=np.int64)[..., None] * width + np.arange(width)
