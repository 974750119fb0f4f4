"""Numbers as whole steps of a scale that neighbours share: 8 or 4 bits each, over a head of a token or along a channel.

Keys have channels that are large throughout: a scale along a channel, over some tokens, fits them. Values have none, a
scale a token does (KIVI, Liu et al. 2024). ``signed`` steps go both ways from 0; else they go up from the smallest
number, which is stored beside the scale in the page's own dtype, exactly: a constant channel comes back as it was.

A page may go up and down again and again, so what was decoded is to be encoded without another loss. Where a scale is
the nearest to a ``most``-th of the extent, and ``most`` is below 128, the largest step is always taken: the next scale
is the same, and so are the steps. Of 255 steps the last may be missed by one; there the scale is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tierstore.codecs.bounds import LARGEST, Bound
from tierstore.codecs.floats import reciprocals, rounded, rounded_up, scale_values
from tierstore.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.float32]

_EPSILON = 2.0**-16  # of arithmetic in float32, generously


class Shape(NamedTuple):
    """One layer's keys, or values, of a page."""

    tokens: int
    heads: int
    dim: int

    @property
    def numbers(self) -> int:
        """How many there are."""
        return self.tokens * self.heads * self.dim


class Block(NamedTuple):
    """Numbers ``[rows, ..., members, ...]`` that share scales along ``axis``, and those scales, to be broadcast."""

    numbers: Numbers
    axis: int
    place: tuple[slice, ...]

    def of(self, sides: Numbers) -> Numbers:
        """The view of ``sides`` (scales, or smallest numbers, of all blocks) that belongs to this block."""
        return np.expand_dims(sides[self.place], self.axis)

    def ends(self) -> tuple[Numbers, Numbers]:
        """The smallest and the largest of those that share a scale, to be broadcast."""
        members, axis = self.numbers, self.axis
        if axis == members.ndim - 1:  # numpy is slow along short last axes
            members, axis = np.ascontiguousarray(np.moveaxis(members, axis, 0)), 0
        return np.expand_dims(members.min(axis), self.axis), np.expand_dims(members.max(axis), self.axis)


@dataclass(frozen=True, slots=True)
class Steps:
    """``bits`` a number; a scale for each ``size`` numbers along a head of a token, or tokens along a channel.

    The last of them may be fewer. ``size`` None: a whole head, or all tokens of the page.
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
        """What is promised: half a step, of a scale that was rounded by a 256th at most, or up by a 128th."""
        larger = 2.0**-8 if self.nearest else 2.0**-7
        return Bound((1 + larger + _EPSILON) / (2 * self.most), self.signed)

    @property
    def floored(self) -> bool:
        """Whether the smallest number is stored beside each scale."""
        return not self.signed

    def members(self, shape: Shape) -> int:
        """How many numbers share a scale, at most."""
        whole = shape.dim if self.along == "token" else shape.tokens
        return min(whole, self.size or whole)

    def sides(self, shape: Shape) -> tuple[int, int]:
        """The shape of a layer's scales."""
        members = self.members(shape)
        if self.along == "token":
            return shape.tokens * shape.heads, -(-shape.dim // members)
        return -(-shape.tokens // members), shape.heads * shape.dim

    def code_nbytes(self, shape: Shape) -> int:
        """Bytes of a layer's codes. Of 4 bits each byte holds two tokens': the first half of the page is low."""
        if self.bits == 8:
            return shape.numbers
        return (shape.tokens + 1) // 2 * shape.heads * shape.dim

    def encode(
        self, numbers: Numbers, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes, spare: Numbers
    ) -> None:
        """Write what stands for ``numbers`` ``[rows, tokens, heads, dim]``, which is overwritten.

        ``scales`` and ``floors`` ``[rows, *sides]`` (empty where not stored), ``codes`` ``[rows, code_nbytes]``.
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
        """Fill ``numbers`` ``[rows, tokens, heads, dim]`` with what ``encode`` was given, within the bound."""
        self._unpack(codes, numbers, spare)
        values = scale_values(scales)
        for block in self._blocks(numbers):
            np.multiply(block.numbers, block.of(values), out=block.numbers)
            if self.floored:
                np.add(block.numbers, block.of(floors), out=block.numbers)

    def check(
        self, shape: Shape, dtype: str, scales: NDArray[np.uint16], floors: Numbers, codes: Bytes
    ) -> None:
        """IntegrityError if ``encode`` cannot have made these; after it ``decode`` gives finite numbers."""
        if scales.size and scales.max() > self.largest_scale(dtype):
            raise IntegrityError("scales that no page has")
        if floors.size and not np.abs(floors).max() <= LARGEST[dtype]:
            raise IntegrityError("smallest numbers that no page has")
        if self.signed and (codes == 0x80).any():
            raise IntegrityError("steps beyond the last")
        if self.bits == 4 and shape.tokens % 2 and (codes[:, -shape.heads * shape.dim :] > 15).any():
            raise IntegrityError("steps of tokens that the page does not have")

    def largest_scale(self, dtype: str) -> int:
        """The largest that is stored, as the bits of bfloat16."""
        extent = LARGEST[dtype] * (1 if self.signed else 2)
        return int(self._scales(np.array([extent], dtype=np.float32))[0])

    @property
    def nearest(self) -> bool:
        """Whether a scale is the nearest bfloat16, not the next that is not smaller."""
        return self.most < 128

    def _scales(self, extent: Numbers) -> NDArray[np.uint16]:
        scales = extent / np.float32(self.most)
        return rounded(scales) if self.nearest else rounded_up(scales)

    def _blocks(self, numbers: Numbers) -> Iterator[Block]:
        """The numbers by the scales they share: all whole ones in one, and the rest of the page or head."""
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
    """The beginning of ``spare`` in the shape of ``part``."""
    return spare.reshape(-1)[: part.size].reshape(part.shape)
