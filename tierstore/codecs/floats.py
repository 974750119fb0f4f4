"""Floating point of a page <-> float32, and scales as bfloat16. bfloat16 is handled as 16-bit words: numpy has none.

All functions work on parts: ``words`` any view of a page in its dtype's word, ``numbers`` contiguous float32 of the
same shape, ``spare`` float32 of that shape that is overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.codecs.bounds import LARGEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float32]
    Words = NDArray[Any]

WORDS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""What a page's dtype is viewed as. Groups of other dtypes are kept as they are."""

SCALE = np.dtype("<u2")
"""A scale is stored as bfloat16: it has the range of what it scales, and 8 bits are enough if steps are made of it."""

_SMALLEST = np.float32(2.0**-126)


def widen(words: Words, numbers: Numbers) -> None:
    """Fill ``numbers`` with the exact values of ``words``."""
    if words.dtype != np.uint16:
        np.copyto(numbers, words)
        return
    bits = numbers.view(np.uint32)
    np.copyto(bits, words)
    np.left_shift(bits, 16, out=bits)


def narrow(numbers: Numbers, words: Words, spare: Numbers) -> None:
    """Fill ``words`` with ``numbers`` rounded to nearest, ties to even. ``numbers`` is overwritten; it holds no NaN.

    Nothing becomes infinite: what would is the largest finite number.
    """
    if words.dtype == np.float16:
        limit = np.float32(LARGEST["float16"])
        np.clip(numbers, -limit, limit, out=numbers)
    if words.dtype != np.uint16:
        np.copyto(words, numbers, casting="same_kind")
        return
    bits, odd = numbers.view(np.uint32), spare.view(np.uint32)
    np.right_shift(bits, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFF, out=odd)
    np.add(bits, odd, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(words, bits, casting="unsafe")


def within(numbers: Numbers, dtype: str, spare: Numbers) -> bool:
    """Whether all numbers are finite and none is too large to be encoded."""
    bits = spare.view(np.uint32)
    np.bitwise_and(numbers.view(np.uint32), 0x7FFFFFFF, out=bits)
    limit = int(np.float32(LARGEST[dtype]).view(np.uint32))
    return int(bits.max()) <= limit


def rounded_up(scales: Numbers) -> NDArray[np.uint16]:
    """Non-negative ``scales`` as bfloat16, none smaller than it was, at most 1/128 larger; 0 stays 0.

    None but 0 is below the smallest normal number, so that its reciprocal is finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0xFFFF >> 16).astype(SCALE)


def rounded(scales: Numbers) -> NDArray[np.uint16]:
    """Non-negative ``scales`` as the nearest bfloat16, at most 1/256 larger or smaller; 0 stays 0.

    None but 0 is below the smallest normal number, so that its reciprocal is finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(SCALE)


def power_of_two(scales: Numbers) -> NDArray[np.uint16]:
    """Non-negative ``scales`` as bfloat16, each the next power of two that is not smaller; 0 stays 0."""
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFFFF >> 23 << 7).astype(SCALE)


def scale_values(stored: NDArray[np.uint16]) -> Numbers:
    """The values of stored scales."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def reciprocals(scales: Numbers) -> Numbers:
    """1 by each scale; 0 for 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
