"""Quantization of floating-point numbers, the same on every machine: whole steps of a shared scale, and fp8.

``Steps`` quantizes to 8 or 4 bits with a scale that neighbours share, over a head of a token or along a channel. Keys
have channels that are large throughout: a scale along a channel, over some tokens, fits them. Values have none, a scale
a token does (KIVI, Liu et al. 2024). ``signed`` steps go both ways from 0; else they go up from the smallest number,
which is stored beside the scale in the page's own dtype, exactly: a constant channel comes back as it was.

A page may go up and down again and again, so what was decoded is to be encoded without another loss. Where a scale is
the nearest to a ``most``-th of the extent, and ``most`` is below 128, the largest step is always taken: the next scale
is the same, and so are the steps. Of 255 steps the last may be missed by one; there the scale is rounded up.

``Fp8`` is fp8 e4m3 (Micikevicius et al. 2022, the "fn" form: no infinity, largest 448) with a power of two a layer. The
power brings the largest number of a layer's keys, or values, of the page to 448 at most and above 224: nothing
saturates, and it costs no accuracy. What is stored are the same 8 bits that a card converts by itself.

``Bound`` says, as data, what a codec promises of every number it gives back. ``widen`` and ``narrow`` convert between a
page's dtype and float32; bfloat16 is handled as 16-bit words, because NumPy has none. These functions work on parts:
``words`` is any view of a page in its dtype's word, ``numbers`` contiguous float32 of the same shape, and ``spare``
float32 of that shape that is overwritten.
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
"""Half a unit in the last place, as a share of the number: what rounding to the page's dtype may add."""

TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}
"""Errors up to this are outside every promise: steps below a dtype's own last place."""

LARGEST = {"bfloat16": 2.0**126, "float16": 65504.0, "float32": 2.0**126}
"""A page with a number beyond this, an infinity or a NaN is not encoded."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest error of numbers that share a scale.

    For each number x that comes back as y, with ``extent`` the largest magnitude among those that share its scale
    (``signed``) or the distance of the largest from the smallest (else):

        |y - x| <= of_extent * extent + of_value * |x| + HALF_ULP * max(|x|, |y|) + TINY
    """

    of_extent: float
    signed: bool
    of_value: float = 0.0

    def frobenius(self, members: int, dtype: str) -> float:
        """Return the largest ratio of error norm to norm if ``members`` numbers share a scale.

        Among numbers that share a scale, the largest one accounts for its extent in the norm; with a minimum, the
        smallest and the largest do, with at worst half the extent each.
        """
        spread = sqrt(members if self.signed else 2 * members) * self.of_extent
        lossy = spread + self.of_value
        return lossy + HALF_ULP[dtype] * (1 + lossy)


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
    """Fill ``words`` with ``numbers`` rounded to nearest, ties to even.

    ``numbers`` is overwritten and must not hold NaN. Numbers that would become infinite become the largest finite
    number.
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
    """Return whether all numbers are finite and small enough to be encoded."""
    bits = spare.view(np.uint32)
    np.bitwise_and(numbers.view(np.uint32), 0x7FFFFFFF, out=bits)
    limit = int(np.float32(LARGEST[dtype]).view(np.uint32))
    return int(bits.max()) <= limit


def rounded_up(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` rounded up to bfloat16, at most 1/128 larger; 0 stays 0.

    Other results are at least the smallest normal number, so that their reciprocals are finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0xFFFF >> 16).astype(SCALE)


def rounded(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` as the nearest bfloat16, at most 1/256 off; 0 stays 0.

    Other results are at least the smallest normal number, so that their reciprocals are finite.
    """
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(SCALE)


def power_of_two(scales: Numbers) -> NDArray[np.uint16]:
    """Return non-negative ``scales`` as bfloat16, each rounded up to a power of two; 0 stays 0."""
    bits = np.where(scales > 0, np.maximum(scales, _SMALLEST), np.float32(0)).view(np.uint32)
    return (bits + 0x7FFFFF >> 23 << 7).astype(SCALE)


def scale_values(stored: NDArray[np.uint16]) -> Numbers:
    """Return the values of stored scales."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def reciprocals(scales: Numbers) -> Numbers:
    """Return the reciprocals of scales; 0 for 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


_EPSILON = 2.0**-16  # of arithmetic in float32, generously


class Shape(NamedTuple):
    """The shape of the keys or values of one layer of a page."""

    tokens: int
    heads: int
    dim: int

    @property
    def numbers(self) -> int:
        """Number of values."""
        return self.tokens * self.heads * self.dim


class Block(NamedTuple):
    """Numbers ``[rows, ..., members, ...]`` that share scales along ``axis``, and those scales, broadcastable."""

    numbers: Numbers
    axis: int
    place: tuple[slice, ...]

    def of(self, sides: Numbers) -> Numbers:
        """Return the view of ``sides`` (scales or minima of all blocks) that belongs to this block."""
        return np.expand_dims(sides[self.place], self.axis)

    def ends(self) -> tuple[Numbers, Numbers]:
        """Return minimum and maximum of the numbers that share a scale, broadcastable."""
        members, axis = self.numbers, self.axis
        if axis == members.ndim - 1:  # numpy is slow along short last axes
            members, axis = np.ascontiguousarray(np.moveaxis(members, axis, 0)), 0
        return np.expand_dims(members.min(axis), self.axis), np.expand_dims(members.max(axis), self.axis)


@dataclass(frozen=True, slots=True)
class Steps:
    """Codes of ``bits`` bits, with one scale per ``size`` numbers: along a head of a token, or tokens along a channel.

    The last group may be smaller. ``size`` None: a whole head, or all tokens of the page.
    """

    bits: Literal[4, 8]
    along: Literal["token", "channel"]
    size: int | None
    signed: bool = False

    @property
    def most(self) -> int:
        """The largest step."""
        return (1 << self.bits - self.signed) - 1

    @property
    def bound(self) -> Bound:
        """The error bound: half a step, for a scale rounded by at most 1/256, or up by at most 1/128."""
        larger = 2.0**-8 if self.nearest else 2.0**-7
        return Bound((1 + larger + _EPSILON) / (2 * self.most), self.signed)

    @property
    def floored(self) -> bool:
        """Whether the minimum is stored beside each scale."""
        return not self.signed

    def members(self, shape: Shape) -> int:
        """Largest number of values that share a scale."""
        whole = shape.dim if self.along == "token" else shape.tokens
        return min(whole, self.size or whole)

    def sides(self, shape: Shape) -> tuple[int, int]:
        """The shape of a layer's scales."""
        members = self.members(shape)
        if self.along == "token":
            return shape.tokens * shape.heads, -(-shape.dim // members)
        return -(-shape.tokens // members), shape.heads * shape.dim

    def code_nbytes(self, shape: Shape) -> int:
        """Bytes of a layer's codes.

        With 4 bits a byte holds two tokens' codes, the first half of the page in the low bits.
        """
        if self.bits == 8:
            return shape.numbers
        return (shape.tokens + 1) // 2 * shape.heads * shape.dim

    def encode(
        self, numbers: Numbers, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, spare: Numbers
    ) -> None:
        """Encode ``numbers`` ``[rows, tokens, heads, dim]``, which are overwritten.

        Writes ``scales`` and ``floors`` ``[rows, *sides]`` (empty if not stored) and ``codes`` ``[rows, code_nbytes]``.
        """
        for block in self._blocks(numbers):
            smallest, largest = block.ends()
            extent: Numbers = np.maximum(largest, -smallest) if self.signed else largest - smallest
            if self.floored:
                # Of -0 and 0 either may be found the smallest, by the order of comparing: always 0 is stored.
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
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with the values given to ``encode``, within the bound."""
        self._unpack(codes, numbers, spare)
        values = scale_values(scales)
        for block in self._blocks(numbers):
            np.multiply(block.numbers, block.of(values), out=block.numbers)
            if self.floored:
                np.add(block.numbers, block.of(floors), out=block.numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """Raise IntegrityError if ``encode`` cannot have made these. Afterwards ``decode`` gives finite numbers."""
        if scales.size and scales.max() > self.largest_scale(dtype):
            raise IntegrityError("scales that no page has")
        if floors.size and not np.abs(floors).max() <= LARGEST[dtype]:
            raise IntegrityError("smallest numbers that no page has")
        if self.signed and (codes == 0x80).any():
            raise IntegrityError("steps beyond the last")
        if self.bits == 4 and shape.tokens % 2 and (codes[:, -shape.heads * shape.dim :] > 15).any():
            raise IntegrityError("steps of tokens that the page does not have")

    def largest_scale(self, dtype: str) -> int:
        """The largest scale that is stored, as the bits of a bfloat16."""
        extent = LARGEST[dtype] * (1 if self.signed else 2)
        return int(self._scales(np.array([extent], dtype=np.float32))[0])

    @property
    def nearest(self) -> bool:
        """Whether scales are rounded to the nearest bfloat16, not up."""
        return self.most < 128

    def _scales(self, extent: Numbers) -> NDArray[np.uint16]:
        scales = extent / np.float32(self.most)
        return rounded(scales) if self.nearest else rounded_up(scales)

    def _blocks(self, numbers: Numbers) -> Iterator[Block]:
        """Yield the numbers by the scales they share: all full groups together, and the rest of the page or head."""
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
    """Return the beginning of ``spare`` in the shape of ``part``."""
    return spare.reshape(-1)[: part.size].reshape(part.shape)


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
    """One byte per number, and one scale for all keys, or all values, of a layer of the page."""

    @property
    def most(self) -> float:
        """The number of the largest code."""
        return _MOST

    @property
    def bound(self) -> Bound:
        """The error bound: half a unit of three mantissa bits; below 2**-6 of 448, half a step of 2**-9."""
        return Bound(of_extent=2.0**-10 / (_MOST / 2), signed=True, of_value=2.0**-4)

    @property
    def floored(self) -> bool:
        """Always False: no minimum is stored."""
        return False

    def members(self, shape: Shape) -> int:
        """Number of values that share a scale."""
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
        """Encode ``numbers`` ``[rows, tokens, heads, dim]``, which are overwritten. Writes no ``floors``."""
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
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with the values given to ``encode``, within the bound."""
        np.take(_VALUES, codes, out=numbers.reshape(codes.shape), mode="clip")
        np.multiply(numbers, scale_values(scales)[..., None], out=numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """Raise IntegrityError if ``encode`` cannot have made these. Afterwards ``decode`` gives finite numbers."""
        if scales.size and (scales.max() > self.largest_scale(dtype) or (scales & 0x7F).any()):
            raise IntegrityError("scales that no page has")
        if (codes & 0x7F == 0x7F).any():
            raise IntegrityError("codes of no number")

    def largest_scale(self, dtype: str) -> int:
        """The largest scale that is stored, as the bits of a bfloat16."""
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
