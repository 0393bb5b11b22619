"""Number formats of DeepSeek-V4.1-Flash as exact numpy arithmetic (numerics.md section 1).

`Format` describes one floating-point format by its parameters; everything else (encoding, rounding,
spacing, ULP distance) follows from them, so that no format has arithmetic of its own. The package
imports numpy only: what judges an implementation must not share its rounding code.
"""

from conformance.formats.codes import Codes, pack_fp4, unpack_fp4
from conformance.formats.format import (
    BF16,
    E2M1,
    E4M3,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    Float64Array,
    Format,
    Specials,
)
from conformance.formats.scales import power_of_two_scale

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "E8M0",
    "FORMATS",
    "FP16",
    "FP32",
    "Codes",
    "Float64Array",
    "Format",
    "Specials",
    "pack_fp4",
    "power_of_two_scale",
    "unpack_fp4",
]
