"""Quantization of floating-point elements, with the same results on every machine.

``Steps`` quantizes to 8 or 4 bits. Neighbouring elements share a scale, either within a head of a token or
along a channel. Some channels of keys are large for all tokens, so a scale per channel, over several tokens,
suits keys. Values have no such channels, so a scale per token suits them (KIVI, Liu et al. 2024). ``signed``
steps are counted from 0 in both directions. Other steps are counted up from the minimum (the floor), which is
stored next to the scale in the page's own dtype. The minimum is exact, so a constant channel is restored
exactly.

A page may be encoded and decoded many times, so encoding a decoded page should lose nothing more. A scale is the
extent (see ``Bound``) divided by the number of steps (``most``), stored as bfloat16. If ``most`` is below 128,
the scale is rounded to nearest, and the outermost element of a group still gets the largest step. The next
encoding therefore finds the same scale and the same steps. With 255 steps, the outermost element could be off
by one step, so the scale is rounded up.

``Fp8`` is fp8 e4m3 (Micikevicius et al. 2022, the "fn" form: no infinity, largest number 448) with one power
of two as the scale for all keys, or all values, of a layer in a page. The largest magnitude of these elements
is scaled to more than 224 and at most 448, so nothing saturates and scaling costs no accuracy. The stored
bytes are in the format that GPUs convert in hardware.

``Bound`` describes the largest error of every decoded element. ``widen`` and ``narrow`` convert between a
page's dtype and float32; bfloat16 is handled as 16-bit words, because NumPy does not have it. These functions
work on parts of a page: ``words`` is any view of a page in its dtype's word type, ``numbers`` is contiguous
float32 of the same shape, and ``spare`` is float32 scratch of that shape, which is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tierstore.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Numbers = NDArray[np.float32]
    Words = NDArray[Any]
    Bytes = NDArray[np.uint8]

HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Half a unit in the last place, relative to the value: the largest rounding error of the page's dtype."""

TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}
"""Absolute error that every bound allows in addition, because the dtype cannot resolve smaller differences."""

LARGEST = {"bfloat16": 2.0**126, "float16": 65504.0, "float32": 2.0**126}
"""Largest magnitude that is encoded. A page with a larger element, an infinity or a NaN is not encoded."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest error of elements that share a scale.

    Let x be decoded as y. Let ``extent`` be the largest magnitude among the elements that share the scale of x
    (if ``signed``), or the difference between the largest and the smallest of them (if not). Then:

            |y - x| <= of_extent * extent + of_value * |x| + HALF_ULP * max(|x|, |y|) + TINY
    """

    of_extent: float
    signed: bool
    of_value: float = 0.0

    def frobenius(self, members: int, dtype: str) -> float:
        """Return the largest possible ratio of the Frobenius norm of the errors to that of the elements.

        ``members`` is how many elements share a scale. If ``signed``, the largest of them contributes the whole
        extent to the norm of the elements. If not, the smallest and the largest contribute, at worst, half the
        extent each.
        """
        spread = sqrt(members if self.signed else 2 * members) * self.of_extent
        lossy = spread + self.of_value
        return lossy + HALF_ULP[dtype] * (1 + lossy)


WORDS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""For each dtype of a page, the NumPy dtype of views of its elements. KV groups of other dtypes are not encoded."""

SCALE = np.dtype("<u2")
"""The NumPy dtype of stored scales. They are bfloat16, which has the range of float32.

Eight bits of precision are enough, because steps are computed with the scale as stored.
"""

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
    """Fill ``words`` with ``numbers`` rounded to nearest, ties to even.

    ``numbers`` must not contain NaN, and is overwritten. For float16, numbers outside the finite range are clamped
    to it.
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
    """Return whether all numbers are finite and small enough to be encoded. ``spare`` is overwritten."""
    bits = spare.view(np.uint32)
    np.bitwise_and(numbers.view(np.uint32), 0x7FFFFFFF, out=bits)
    limit = int(np.float32(LARGEST[dtype]).view(np.uint32))
    return int(bits.max()) <= limit


def rounded_up(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` rounded up to bfloat16. 0 stays 0.

    The relative error is at most 1/128. Results other than 0 are at least the smallest normal number, so that
    their reciprocals are finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0xFFFF >> 16).astype(SCALE)


def rounded(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` rounded to the nearest bfloat16. 0 stays 0.

    The relative error is at most 1/256. Results other than 0 are at least the smallest normal number, so that
    their reciprocals are finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(SCALE)


def power_of_two(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` as bfloat16, each rounded up to a power of two. 0 stays 0."""
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFFFF >> 23 << 7).astype(SCALE)


def scale_values(stored: NDArray[np.uint16]) -> Numbers:
    """Return the values of stored scales as float32."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def reciprocals(scales: Numbers) -> Numbers:
    """Return the reciprocals of scales, and 0 for a scale of 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


_EPSILON = 2.0**-16  # generous bound of the relative error of float32 arithmetic


class Shape(NamedTuple):
    """The shape of the keys, or of the values, of one layer of a page."""

    tokens: int
    heads: int
    dim: int

    @property
    def numbers(self) -> int:
        """Number of elements."""
        return self.tokens * self.heads * self.dim


class Block(NamedTuple):
    """Elements grouped by scale: all elements along ``axis`` share one scale.

    ``place`` selects the scales of this block in the array of all scales.
    """

    numbers: Numbers
    axis: int
    place: tuple[slice, ...]

    def of(self, sides: Numbers) -> Numbers:
        """Return this block's part of ``sides`` as a view that broadcasts to ``numbers``.

        ``sides`` contains the scales, or the minimums, of all blocks.
        """
        return np.expand_dims(sides[self.place], self.axis)

    def ends(self) -> tuple[Numbers, Numbers]:
        """Return the minimum and the maximum for each scale, in a shape that broadcasts to ``numbers``."""
        members, axis = self.numbers, self.axis
        if axis == members.ndim - 1:  # NumPy is slow along short last axes
            members, axis = np.ascontiguousarray(np.moveaxis(members, axis, 0)), 0
        return np.expand_dims(members.min(axis), self.axis), np.expand_dims(members.max(axis), self.axis)


@dataclass(frozen=True, slots=True)
class Steps:
    """Codes of ``bits`` bits, with one scale per ``size`` elements.

    If ``along`` is "token", the elements that share a scale are neighbours in one head of one token. If it is
    "channel", they have the same position in the head, in consecutive tokens. The last group of a head, or of a
    page, may be smaller. If ``size`` is None, the whole head, or all tokens of the page, share a scale.
    """

    bits: Literal[4, 8]
    along: Literal["token", "channel"]
    size: int | None
    signed: bool = False

    @property
    def most(self) -> int:
        """The largest number of steps that a code can represent."""
        return (1 << self.bits - self.signed) - 1

    @property
    def bound(self) -> Bound:
        """The error bound: half a step.

        A step may be larger than ``extent / most``, because the scale is rounded: by at most 1/256 if rounded to
        nearest, and by at most 1/128 if rounded up.
        """
        larger = 2.0**-8 if self.nearest else 2.0**-7
        return Bound((1 + larger + _EPSILON) / (2 * self.most), self.signed)

    @property
    def floored(self) -> bool:
        """Whether the minimum is stored next to each scale."""
        return not self.signed

    def members(self, shape: Shape) -> int:
        """Return the largest number of elements that share a scale."""
        whole = shape.dim if self.along == "token" else shape.tokens
        return min(whole, self.size or whole)

    def sides(self, shape: Shape) -> tuple[int, int]:
        """Return the shape of one layer's array of scales."""
        members = self.members(shape)
        if self.along == "token":
            return shape.tokens * shape.heads, -(-shape.dim // members)
        return -(-shape.tokens // members), shape.heads * shape.dim

    def code_nbytes(self, shape: Shape) -> int:
        """Return the size of a layer's codes in bytes.

        With 4 bits, a byte contains the codes of two tokens. The low four bits are the code of a token in the first
        half of the page, and the high four bits that of the corresponding token in the second half.
        """
        if self.bits == 8:
            return shape.numbers
        return (shape.tokens + 1) // 2 * shape.heads * shape.dim

    def encode(
        self, numbers: Numbers, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, spare: Numbers
    ) -> None:
        """Encode ``numbers`` ``[rows, tokens, heads, dim]``, which are overwritten.

        Fill ``scales`` ``[rows, *sides]``, ``codes`` ``[rows, code_nbytes]``, and ``floors`` with the minimums
        ``[rows, *sides]``. ``floors`` is empty if minimums are not stored.
        """
        for block in self._blocks(numbers):
            smallest, largest = block.ends()
            extent: Numbers = np.maximum(largest, -smallest) if self.signed else largest - smallest
            if self.floored:
                # If -0 and 0 both occur, either may be found as the minimum, depending on the order of
                # comparisons. 0 is always stored.
                block.of(floors)[...] = smallest + np.float32(0)
                np.subtract(block.numbers, smallest, out=block.numbers)
            stored = self._scales(extent)
            np.expand_dims(scales[block.place], block.axis)[...] = stored
            np.multiply(block.numbers, reciprocals(scale_values(stored)), out=block.numbers)
        np.rint(numbers, out=numbers)
        self._pack(numbers, codes, spare)

    def decode(
        self, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, numbers: Numbers, spare: Numbers
    ) -> None:
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with the encoded values, within the error bound."""
        self._unpack(codes, numbers, spare)
        values = scale_values(scales)
        for block in self._blocks(numbers):
            np.multiply(block.numbers, block.of(values), out=block.numbers)
            if self.floored:
                np.add(block.numbers, block.of(floors), out=block.numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """Raise IntegrityError if ``encode`` cannot have written this data.

        If it returns, ``decode`` yields only finite numbers.
        """
        if scales.size and scales.max() > self.largest_scale(dtype):
            raise IntegrityError("the payload contains scales outside the codec's range")
        if floors.size and not np.abs(floors).max() <= LARGEST[dtype]:
            raise IntegrityError("the payload contains minimums outside the codec's range")
        if self.signed and (codes == 0x80).any():
            raise IntegrityError("the payload contains codes outside the codec's range")
        if self.bits == 4 and shape.tokens % 2 and (codes[:, -shape.heads * shape.dim :] > 15).any():
            raise IntegrityError("the payload contains codes for tokens that the page does not have")

    def largest_scale(self, dtype: str) -> int:
        """Return the largest scale that is ever stored, as the bits of a bfloat16."""
        extent = LARGEST[dtype] * (1 if self.signed else 2)
        return int(self._scales(np.array([extent], dtype=np.float32))[0])

    @property
    def nearest(self) -> bool:
        """Whether scales are rounded to the nearest bfloat16 rather than up."""
        return self.most < 128

    def _scales(self, extent: Numbers) -> NDArray[np.uint16]:
        scales = extent / np.float32(self.most)
        return rounded(scales) if self.nearest else rounded_up(scales)

    def _blocks(self, numbers: Numbers) -> Iterator[Block]:
        """Yield a block of all full groups, then a block of the smaller last groups, if any."""
        rows, tokens, heads, dim = numbers.shape
        members = self.members(Shape(tokens, heads, dim))
        if self.along == "token":
            flat, axis, length = numbers.reshape(rows, tokens * heads, dim), 3, dim
        else:
            flat, axis, length = numbers.reshape(rows, tokens, heads * dim), 2, tokens
        whole = length // members
        every = (slice(None),) * (axis - 1)
        for part, count, at in (
            (slice(0, whole * members), whole, slice(0, whole)),
            (slice(whole * members, length), 1, slice(whole, whole + 1)),
        ):
            inside = flat[(*every, part)]
            if inside.size:
                shape = (
                    *inside.shape[: axis - 1],
                    count,
                    inside.shape[axis - 1] // count,
                    *inside.shape[axis:],
                )
                yield Block(inside.reshape(shape), axis, (*every, at))

    def _pack(self, steps: Numbers, codes: Bytes, spare: Numbers) -> None:
        rows = steps.shape[0]
        if self.bits == 8:
            np.copyto(
                codes.view(np.int8 if self.signed else np.uint8), steps.reshape(rows, -1), casting="unsafe"
            )
            return
        whole = _like(steps, spare.view(np.uint8)).reshape(rows, -1)
        np.copyto(whole, steps.reshape(rows, -1), casting="unsafe")
        low, high = whole[:, : codes.shape[1]], whole[:, codes.shape[1] :]
        np.copyto(codes, low)
        shifted = codes[:, : high.shape[1]]
        np.left_shift(high, 4, out=high)
        np.bitwise_or(shifted, high, out=shifted)

    def _unpack(self, codes: Bytes, numbers: Numbers, spare: Numbers) -> None:
        flat = numbers.reshape(numbers.shape[0], -1)
        if self.bits == 8:
            np.copyto(flat, codes.view(np.int8) if self.signed else codes)
            return
        nibbles = _like(codes, spare.view(np.uint8))
        middle = codes.shape[1]
        np.bitwise_and(codes, 15, out=nibbles)
        np.copyto(flat[:, :middle], nibbles)
        np.right_shift(codes, 4, out=nibbles)
        np.copyto(flat[:, middle:], nibbles[:, : flat.shape[1] - middle])


def _like(part: NDArray[Any], spare: NDArray[Any]) -> NDArray[Any]:
    """Return the start of ``spare`` in the shape of ``part``."""
    return spare.reshape(-1)[: part.size].reshape(part.shape)


_MOST = 448.0
_LEAST_NORMAL = np.float32(2.0**-6)
_PER_SUBNORMAL = np.float32(2.0**9)
_BIAS = (127 - 7) << 3  # difference of the exponent biases of float32 and e4m3, shifted past 3 mantissa bits
_FIRST_NORMAL = 8


def _values() -> Numbers:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


_VALUES = _values()


@dataclass(frozen=True, slots=True)
class Fp8:
    """One byte per element, and one scale for all keys, or all values, of a layer of the page."""

    @property
    def most(self) -> float:
        """The value that the largest code represents."""
        return _MOST

    @property
    def bound(self) -> Bound:
        """The error bound: half a unit in the last place of a number with three mantissa bits.

        Scaled numbers below 2**-6 are subnormal, and the bound is half of their step, 2**-9.
        """
        return Bound(of_extent=2.0**-10 / (_MOST / 2), signed=True, of_value=2.0**-4)

    @property
    def floored(self) -> bool:
        """Always False: no minimum is stored."""
        return False

    def members(self, shape: Shape) -> int:
        """Return the number of elements that share a scale."""
        return shape.numbers

    def sides(self, shape: Shape) -> tuple[int, int]:
        """Return the shape of one layer's array of scales."""
        return 1, 1

    def code_nbytes(self, shape: Shape) -> int:
        """Return the size of a layer's codes in bytes."""
        return shape.numbers

    def encode(
        self, numbers: Numbers, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, spare: Numbers
    ) -> None:
        """Encode ``numbers`` ``[rows, tokens, heads, dim]``, which are overwritten. See ``Steps.encode``.

        ``floors`` is not used.
        """
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
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with the encoded values, within the error bound."""
        np.take(_VALUES, codes, out=numbers.reshape(codes.shape), mode="clip")
        np.multiply(numbers, scale_values(scales)[..., None], out=numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """Raise IntegrityError if ``encode`` cannot have written this data.

        If it returns, ``decode`` yields only finite numbers.
        """
        if scales.size and (scales.max() > self.largest_scale(dtype) or (scales & 0x7F).any()):
            raise IntegrityError("the payload contains scales that are too large or not powers of two")
        if (codes & 0x7F == 0x7F).any():
            raise IntegrityError("the payload contains codes that do not represent a number")

    def largest_scale(self, dtype: str) -> int:
        """Return the largest scale that is ever stored, as the bits of a bfloat16."""
        return int(power_of_two(np.array([LARGEST[dtype] / _MOST], dtype=np.float32))[0])


def _codes(magnitudes: Numbers, spare: Numbers) -> None:
    """Write the codes of ``magnitudes``, without signs, into ``spare`` as uint32.

    Numbers are rounded to nearest, ties to even. ``magnitudes`` must be at most 448 and are overwritten.

    Two codes are computed for every number: one with the number raised to at least the smallest normal number,
    and one with the number lowered to at most that value. The sum of the two counts code 8, the code of the
    smallest normal number, once too often, so 8 is subtracted.
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
