"""Numbers as fp8 e4m3 (Micikevicius et al. 2022, the "fn" form: no infinity, largest 448), a power of two a layer.

The power brings the largest number of a layer's keys, or values, of the page to 448 at most and above 224: nothing
saturates, and it costs no accuracy. What is stored are the same 8 bits that a card converts by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.codecs.bounds import LARGEST, Bound
from tierstore.codecs.floats import power_of_two, reciprocals, scale_values
from tierstore.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.codecs.steps import Shape

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.float32]

_MOST = 448.0
_LEAST_NORMAL = np.float32(2.0**-6)
_PER_SUBNORMAL = np.float32(2.0**9)
_BIAS = (127 - 7) << 3  # of float32's exponent and three bits of mantissa, less that of e4m3
_FIRST_NORMAL = 8


def _values() -> Numbers:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


_VALUES = _values()


@dataclass(frozen=True, slots=True)
class Fp8:
    """A byte a number, a scale for all keys, or all values, of a layer of the page."""

    @property
    def most(self) -> float:
        """The largest code's number."""
        return _MOST

    @property
    def bound(self) -> Bound:
        """What is promised: half a place of three bits; below 2**-6 of 448 half a step of 2**-9."""
        return Bound(of_extent=2.0**-10 / (_MOST / 2), signed=True, of_value=2.0**-4)

    @property
    def floored(self) -> bool:
        """No smallest number is stored."""
        return False

    def members(self, shape: Shape) -> int:
        """How many numbers share a scale."""
        return shape.numbers

    def sides(self, shape: Shape) -> tuple[int, int]:
        """The shape of a layer's scales."""
        return 1, 1

    def code_nbytes(self, shape: Shape) -> int:
        """Bytes of a layer's codes."""
        return shape.numbers

    def encode(
        self, numbers: Numbers, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, spare: Numbers
    ) -> None:
        """Write what stands for ``numbers`` ``[rows, tokens, heads, dim]``, which is overwritten; no ``floors``."""
        magnitudes = spare.reshape(-1)[: numbers.size].reshape(numbers.shape)
        np.abs(numbers, out=magnitudes)
        largest = magnitudes.reshape(len(numbers), 1, -1).max(2, keepdims=True)
        scales[...] = power_of_two(largest / np.float32(_MOST))
        np.multiply(magnitudes, reciprocals(scale_values(scales))[..., None], out=magnitudes)
        signs = codes.reshape(numbers.shape)
        np.right_shift(numbers.view(np.uint32), 24, out=numbers.view(np.uint32))
        np.copyto(signs, numbers.view(np.uint32), casting="unsafe")
        np.bitwise_and(signs, 0x80, out=signs)
        _codes(magnitudes, numbers)
        np.bitwise_or(signs, numbers.view(np.uint32), out=signs, casting="unsafe")

    def decode(
        self, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, numbers: Numbers, spare: Numbers
    ) -> None:
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with what ``encode`` was given, within the bound."""
        np.take(_VALUES, codes, out=numbers.reshape(codes.shape), mode="clip")
        np.multiply(numbers, scale_values(scales)[..., None], out=numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """IntegrityError if ``encode`` cannot have made these; after it ``decode`` gives finite numbers."""
        if scales.size and (scales.max() > self.largest_scale(dtype) or (scales & 0x7F).any()):
            raise IntegrityError("scales that no page has")
        if (codes & 0x7F == 0x7F).any():
            raise IntegrityError("codes of no number")

    def largest_scale(self, dtype: str) -> int:
        """The largest that is stored, as the bits of bfloat16."""
        return int(power_of_two(np.array([LARGEST[dtype] / _MOST], dtype=np.float32))[0])


def _codes(magnitudes: Numbers, spare: Numbers) -> None:
    """Codes without signs as uint32 in ``spare``; ``magnitudes`` up to 448 are overwritten. Nearest, ties to even.

    Normal and subnormal codes meet at 8: each is counted with the range of the other cut off.
    """
    code = spare.view(np.uint32)
    np.maximum(magnitudes, _LEAST_NORMAL, out=spare)
    odd = code >> 20
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFFF, out=odd)
    np.add(code, odd, out=code)
    np.right_shift(code, 20, out=code)
    np.minimum(magnitudes, _LEAST_NORMAL, out=magnitudes)
    np.multiply(magnitudes, _PER_SUBNORMAL, out=magnitudes)
    np.rint(magnitudes, out=magnitudes)
    np.copyto(odd, magnitudes, casting="unsafe")
    np.add(code, odd, out=code)
    np.subtract(code, _BIAS + _FIRST_NORMAL, out=code)
