"""A port of two components in numpy alone: what a third party writes to be judged, in one file.

Run it from this folder:

    conformance check two_components:Port
"""

import numpy as np

import conformance

GROUP = 32
LARGEST = 448.0
E4M3_VALUES = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127], dtype=np.float32
)
E4M3_TIES = (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2


class Port(conformance.Implementation):
    """Everything that is not here is reported as unsupported."""

    tensor_type = "numpy"

    def describe(self) -> conformance.Description:
        """Name and version, for the header of the report."""
        return conformance.Description("two components", "1.0", homepage="https://example.org")

    def quantize_fp8(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of groups of 32 numbers."""
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        largest = np.maximum(np.abs(groups).max(axis=-1), np.float32(1e-4))
        bits = (largest * np.float32(1 / LARGEST)).view(np.uint32)
        # The power of two at or above: the exponent, plus one when anything follows it.
        scale_codes = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        scales = (scale_codes << 23).astype(np.uint32).view(np.float32)
        scaled = np.clip(groups / scales[..., None], -LARGEST, LARGEST)
        return encode_e4m3(scaled).reshape(x.shape), scale_codes.astype(np.uint8)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """Norm in float32; the result is rounded to bf16, which numpy keeps in float32."""
        mean_square = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
        return round_to_bf16(x * (1 / np.sqrt(mean_square + np.float32(eps))) * weight)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to the nearest of the 127 magnitudes; a tie goes to the even code."""
    magnitude = np.abs(x)
    below = np.searchsorted(E4M3_TIES, magnitude)
    tied = E4M3_TIES[np.minimum(below, E4M3_TIES.size - 1)] == magnitude
    codes = below + (tied & (below % 2 == 1))
    return (codes | (np.signbit(x) << 7)).astype(np.uint8)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest number of 16 bits, a tie to the even one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
