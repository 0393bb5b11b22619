"""Arrays of codes: what counts as one, and how two FP4 codes share a byte."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Codes: TypeAlias = NDArray[np.unsignedinteger[Any]]


def checked_codes(codes: ArrayLike, width: int, name: str) -> NDArray[np.integer[Any]]:
    """Return `codes` as an integer array after checking that every element is a code.

    Args:
        codes: integers of any shape and any integer dtype.
        width: bits in a code.
        name: what the codes are, for the message.

    Raises:
        ValueError: the dtype is not an integer one, or an element lies outside `0 .. 2**width - 1`.
    """
    array = np.asarray(codes)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} codes must be integers, got dtype {array.dtype}")
    # An unsigned dtype of exactly this width holds nothing but codes; skip the passes over memory.
    if array.dtype.kind == "u" and array.dtype.itemsize * 8 == width:
        return array
    outside = (array < 0) | (array >= 2**width)
    if outside.any():
        raise ValueError(f"{name} codes lie in 0..{2**width - 1}, got {array[outside][0]}")
    return array


def pack_fp4(codes: ArrayLike) -> NDArray[np.uint8]:
    """Pack two FP4 codes into a byte, the even element in the low nibble (numerics.md section 1).

    Args:
        codes: `[..., 2n]` integers in 0..15.

    Returns:
        `[..., n]` uint8.

    Raises:
        ValueError: a code is above 15, there is no last dimension, or its length is odd.
    """
    nibbles = checked_codes(codes, 4, "FP4")
    if nibbles.ndim == 0 or nibbles.shape[-1] % 2:
        raise ValueError(f"packing FP4 needs an even last dimension, got shape {nibbles.shape}")
    even, odd = nibbles[..., 0::2], nibbles[..., 1::2]
    return (even | (odd << 4)).astype(np.uint8)


def unpack_fp4(packed: ArrayLike) -> NDArray[np.uint8]:
    """Undo `pack_fp4`: the low nibble becomes the even element (numerics.md section 1).

    Args:
        packed: `[..., n]` bytes.

    Returns:
        `[..., 2n]` uint8 in 0..15.

    Raises:
        ValueError: an element is not a byte, or there is no last dimension.
    """
    pairs = checked_codes(packed, 8, "packed FP4").astype(np.uint8)
    if pairs.ndim == 0:
        raise ValueError("unpacking FP4 needs a last dimension, got a scalar")
    return np.stack((pairs & 0xF, pairs >> 4), axis=-1).reshape(*pairs.shape[:-1], -1)
