"""Binary floating-point formats as parameters of one class.

Values are float64 throughout. Every format here is a subset of float64 with room to spare, so each
rounding happens exactly once and every intermediate result below is exact.
"""

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformance.formats.codes import Codes, checked_codes

Float64Array: TypeAlias = NDArray[np.float64]

_F64_MANTISSA_BITS = 52
_F64_BIAS = 1023
# Float64 elements rounded at a time: the temporaries of one block stay in the second-level cache.
_BLOCK = 16384
# Widest code decoded through a table: 65,536 float64 values are half a megabyte.
_TABLE_WIDTH = 16


class Specials(enum.Enum):
    """How a format codes infinities and NaN."""

    IEEE = "ieee"
    """The highest exponent field holds infinity (mantissa 0) and the NaNs."""
    ALL_ONES_NAN = "all-ones-nan"
    """No infinity; the code whose magnitude bits are all ones is NaN (E4M3: 0x7F, 0xFF; E8M0: 255)."""
    NONE = "none"
    """Every code is a finite number."""


@dataclass(frozen=True)
class Format:
    """A floating-point format: its parameters, and the exact arithmetic that follows from them.

    A code is `sign | exponent field | mantissa field`. Source: numerics.md section 1.

    Attributes:
        name: spelling of the dtype in safetensors files.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field. A format without mantissa bits has no subnormals
            and no zero: exponent field 0 is an ordinary power of two.
        bias: subtracted from the exponent field.
        signed: whether codes carry a sign bit.
        largest: largest finite value.
        specials: how infinities and NaN are coded.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool
    largest: float
    specials: Specials

    @property
    def width(self) -> int:
        """Bits in a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def code_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Smallest unsigned numpy dtype that holds a code (uint8 for the four bits of E2M1)."""
        return np.dtype(f"u{max(self.width, 8) // 8}")

    @property
    def has_zero(self) -> bool:
        """Whether exponent field 0 codes zero and the subnormals."""
        return self.mantissa_bits > 0

    @functools.cached_property
    def smallest_normal(self) -> float:
        """Smallest value with a full mantissa."""
        return math.ldexp(1.0, self._lowest_exponent)

    @property
    def _lowest_exponent(self) -> int:
        return (1 if self.has_zero else 0) - self.bias

    @property
    def _smallest_spacing(self) -> float:
        return math.ldexp(1.0, self._lowest_exponent - self.mantissa_bits)

    @property
    def _magnitude_mask(self) -> int:
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def _infinity_code(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def _nan_code(self) -> int:
        if self.specials is Specials.IEEE:
            return self._infinity_code | (1 << (self.mantissa_bits - 1))
        return self._magnitude_mask

    def round(self, values: ArrayLike) -> Float64Array:
        """Round to the nearest value of the format, ties to even; equals `decode(encode(values))`.

        IEEE formats overflow to infinity from half a step beyond `largest`. The others saturate:
        whatever lies beyond `largest`, infinity included, becomes `±largest`, and E8M0 becomes 2^-127
        below that. Subnormals round on their own grid and zeros keep their sign.

        In E8M0 a tie goes up, as it does in torch and ml_dtypes: 1.5·2^k lies between 1·2^k and 2·2^k,
        and two is the even multiple. Quantisers do not round their scale: they use
        `power_of_two_scale`.

        Args:
            values: any shape, read as float64.

        Returns:
            float64 of the same shape.

        Raises:
            ValueError: a NaN for a format without NaN (E2M1), or zero or a negative number for
                E8M0; the message names the first such element.
        """
        exact = np.asarray(values, dtype=np.float64)
        self._reject_values_without_code(exact)
        source = exact.reshape(-1)
        if source.size <= _BLOCK:
            return self._round_block(source).reshape(exact.shape)
        rounded = np.empty(exact.shape, dtype=np.float64)
        target = rounded.reshape(-1)
        for start in range(0, source.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            target[block] = self._round_block(source[block])
        return rounded

    def _reject_values_without_code(self, values: Float64Array) -> None:
        if self.specials is Specials.NONE:
            missing, reason = np.isnan(values), "has no NaN"
        elif not self.signed:
            missing, reason = values <= 0, "holds positive numbers only"
        else:
            return
        if missing.any():
            index = tuple(int(i) for i in np.argwhere(missing)[0])
            raise ValueError(f"{self.name} {reason}: element {index} is {values[index]}")

    def _round_block(self, values: Float64Array) -> Float64Array:
        """Round a vector whose elements all have a code."""
        dropped_bits = _F64_MANTISSA_BITS - self.mantissa_bits
        bits = values.view(np.int64)
        # Adding just under half a step, plus one if the last kept bit is odd, carries into the kept
        # bits exactly when the value rounds up; a carry out of the mantissa lands in the exponent.
        rounded_bits = bits >> dropped_bits
        rounded_bits &= 1
        if self.mantissa_bits == 0:
            # The last kept bit of the significand is its implicit one, not a bit of the exponent.
            rounded_bits[:] = 1
        rounded_bits += (1 << (dropped_bits - 1)) - 1
        rounded_bits += bits
        rounded_bits &= -(1 << dropped_bits)
        rounded = rounded_bits.view(np.float64)

        magnitude = np.abs(values)
        # The sum above has left zeros as they are.
        small = (magnitude < self.smallest_normal) & (magnitude > 0)
        if small.any():
            np.copyto(rounded, self._round_below_normal(values), where=small)
        # Negated so that NaN, whose bits the addition may have spoilt, is repaired here too.
        if not magnitude.max(initial=0.0) <= self.largest:
            large = ~(magnitude <= self.largest)
            rounded[large] = self._limit(rounded[large], values[large])
        return rounded

    def _round_below_normal(self, values: Float64Array) -> Float64Array:
        """Round as the subnormals do; elements of the normal range give a number of no meaning."""
        if not self.has_zero:
            return np.full_like(values, self.smallest_normal)
        # The minimum keeps those elements from overflowing in the division.
        steps = np.rint(np.minimum(np.abs(values), self.smallest_normal) / self._smallest_spacing)
        return np.copysign(steps * self._smallest_spacing, values)

    def _limit(self, rounded: Float64Array, values: Float64Array) -> Float64Array:
        beyond = math.inf if self.specials is Specials.IEEE else self.largest
        limited = np.where(np.abs(rounded) > self.largest, np.copysign(beyond, values), rounded)
        return np.where(np.isnan(values), np.nan, limited)

    def encode(self, values: ArrayLike) -> Codes:
        """Return the codes of `round(values)`.

        NaN becomes the format's positive quiet NaN, whatever its sign and payload were.

        Args:
            values: any shape, read as float64.

        Returns:
            `code_dtype` of the same shape.

        Raises:
            ValueError: as for `round`.
        """
        rounded = self.round(values)
        flat = rounded.reshape(-1)
        magnitude = np.abs(flat)
        # A subnormal lacks the implicit leading bit; adding it, exactly, brings its steps to where the
        # mantissa is, and the exponent field then is one too high.
        subnormal = magnitude < self.smallest_normal
        bits = (magnitude + np.where(subnormal, self.smallest_normal, 0.0)).view(np.int64)
        codes = bits >> (_F64_MANTISSA_BITS - self.mantissa_bits)
        codes -= (_F64_BIAS - self.bias + subnormal.astype(np.int64)) << self.mantissa_bits
        codes[np.isinf(flat)] = self._infinity_code
        codes |= np.signbit(flat).astype(np.int64) << (self.width - 1)
        codes[np.isnan(flat)] = self._nan_code
        return codes.astype(self.code_dtype).reshape(rounded.shape)

    def decode(self, codes: ArrayLike) -> Float64Array:
        """Return the values of codes, exactly.

        Args:
            codes: any shape, any integer dtype.

        Returns:
            float64 of the same shape; NaN codes give NaN.

        Raises:
            ValueError: an element is not a code of this format.
        """
        array = checked_codes(codes, self.width, self.name)
        if self.width <= _TABLE_WIDTH:
            return np.asarray(self._value_of_code[array])
        return self._decode_bits(array.reshape(-1)).reshape(array.shape)

    @functools.cached_property
    def _value_of_code(self) -> Float64Array:
        return self._decode_bits(np.arange(1 << self.width))

    def _decode_bits(self, codes: NDArray[np.integer[Any]]) -> Float64Array:
        """Decode a vector by moving its fields to where float64 has them."""
        magnitude = codes.astype(np.int64) & self._magnitude_mask
        bits = magnitude << (_F64_MANTISSA_BITS - self.mantissa_bits)
        bits += (_F64_BIAS - self.bias) << _F64_MANTISSA_BITS
        values = bits.view(np.float64)
        if self.has_zero:
            small = magnitude < (1 << self.mantissa_bits)
            values[small] = magnitude[small] * self._smallest_spacing
        if self.specials is Specials.IEEE:
            values[magnitude == self._infinity_code] = np.inf
        values[self._is_nan(magnitude)] = np.nan
        return np.where(codes > self._magnitude_mask, -values, values)

    def _is_nan(self, magnitude: NDArray[np.int64]) -> NDArray[np.bool_]:
        match self.specials:
            case Specials.IEEE:
                return np.greater(magnitude, self._infinity_code)
            case Specials.ALL_ONES_NAN:
                return np.equal(magnitude, self._magnitude_mask)
            case Specials.NONE:
                return np.zeros(magnitude.shape, dtype=np.bool_)

    def spacing(self, values: ArrayLike) -> Float64Array:
        """Return the gap between neighbouring values of the format at `|values|`.

        At a power of two it is the wider gap above. Below the normal range, at zero too, it is the
        spacing of the subnormals (for E8M0 the smallest value); beyond `largest`, at infinity too,
        that of the highest binade.

        Args:
            values: any shape, read as float64; signs are ignored.

        Returns:
            float64 of the same shape, powers of two; NaN where the value is NaN.
        """
        exact = np.asarray(values, dtype=np.float64)
        bits = np.abs(exact.reshape(-1)).view(np.int64)
        # Zero and infinity have the lowest and highest exponent fields, so the clip serves them too.
        exponent = (bits >> _F64_MANTISSA_BITS) - _F64_BIAS
        exponent = np.clip(exponent, self._lowest_exponent, math.frexp(self.largest)[1] - 1)
        gaps = np.ldexp(1.0, exponent - self.mantissa_bits).reshape(exact.shape)
        return np.where(np.isnan(exact), np.nan, gaps)

    def ordered(self, codes: ArrayLike) -> NDArray[np.int64]:
        """Return each code's position on the ordered line of the format's values.

        Neighbouring values are one step apart. +0 and -0 share position 0; the smallest subnormals
        stand at ±1, and subnormals are ordinary steps; infinity is one step beyond `largest`. E8M0 has
        neither zero nor sign: its position 0 is 2^-127.

        Args:
            codes: any shape, any integer dtype.

        Returns:
            int64 of the same shape.

        Raises:
            ValueError: an element is not a code of this format, or is NaN.
        """
        array = checked_codes(codes, self.width, self.name).astype(np.int64)
        magnitude = array & self._magnitude_mask
        nan = self._is_nan(magnitude)
        if nan.any():
            index = tuple(int(i) for i in np.argwhere(nan)[0])
            raise ValueError(f"{self.name} NaN has no place on the ordered line: element {index} is NaN")
        return np.where(array > self._magnitude_mask, -magnitude, magnitude)

    def ulp_distance(self, a_codes: ArrayLike, b_codes: ArrayLike) -> NDArray[np.int64]:
        """Return how many steps of the ordered line lie between two arrays of codes.

        Args:
            a_codes: any shape, any integer dtype.
            b_codes: a shape that broadcasts with `a_codes`.

        Returns:
            int64 of the broadcast shape, never negative; 0 between +0 and -0.

        Raises:
            ValueError: as for `ordered`.
        """
        distance: NDArray[np.int64] = np.abs(self.ordered(a_codes) - self.ordered(b_codes))
        return distance


def _format(name: str, exponent_bits: int, mantissa_bits: int, largest: float, specials: Specials) -> Format:
    """Return a format with the usual bias; only the format of scales (no mantissa) has no sign."""
    bias = 2 ** (exponent_bits - 1) - 1
    return Format(name, exponent_bits, mantissa_bits, bias, mantissa_bits > 0, largest, specials)


FP32 = _format("F32", 8, 23, (2 - 2.0**-23) * 2.0**127, Specials.IEEE)
FP16 = _format("F16", 5, 10, 65504.0, Specials.IEEE)
BF16 = _format("BF16", 8, 7, (2 - 2.0**-7) * 2.0**127, Specials.IEEE)
E4M3 = _format("F8_E4M3", 4, 3, 448.0, Specials.ALL_ONES_NAN)
E8M0 = _format("F8_E8M0", 8, 0, 2.0**127, Specials.ALL_ONES_NAN)
E2M1 = _format("F4_E2M1", 2, 1, 6.0, Specials.NONE)

FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in (FP32, FP16, BF16, E4M3, E8M0, E2M1)})
"""Every format by its name in safetensors files."""
