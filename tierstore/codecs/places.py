"""Where everything is: which bytes of a page are keys and values, and where in a payload their codes and scales lie.

    payload = of each KV group, keys then values: scales, and the smallest numbers where they are stored
            | the bytes of the page that are no such numbers
            | of each KV group, keys then values: codes, or one zstandard frame of all these

Within each of these, layer by layer. All lengths but the frame's follow from the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tierstore.codecs.quantization import SCALE, WORDS, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.codecs.kinds import Lossy, Scheme
    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys, or the values, of a KV group: ``[layers, tokens, heads, dim]`` with a step over the other plane."""

    scheme: Scheme
    dtype: str
    offset: int
    layers: int
    planes: int
    index: int
    shape: Shape

    @property
    def numbers(self) -> int:
        """How many there are."""
        return self.layers * self.shape.numbers

    @property
    def end(self) -> int:
        """Where the KV group ends in the page."""
        return self.offset + self.numbers * self.planes * WORDS[self.dtype].itemsize

    @property
    def scale_nbytes(self) -> int:
        """Bytes of all scales."""
        return self.layers * prod(self.scheme.sides(self.shape)) * SCALE.itemsize

    @property
    def floor_nbytes(self) -> int:
        """Bytes of all smallest numbers; 0 where they are not stored."""
        if not self.scheme.floored:
            return 0
        return self.layers * prod(self.scheme.sides(self.shape)) * WORDS[self.dtype].itemsize

    @property
    def code_nbytes(self) -> int:
        """Bytes of all codes."""
        return self.layers * self.scheme.code_nbytes(self.shape)

    def words(self, page: Bytes) -> NDArray[Any]:
        """The view of ``page``, ``[layers, tokens, heads, dim]``."""
        whole = page[self.offset : self.end].view(WORDS[self.dtype])
        return whole.reshape(self.layers, self.planes, *self.shape)[:, self.index]


class Parts(NamedTuple):
    """Of a plane in a payload: ``[layers, *sides]`` of scales and smallest numbers, ``[layers, n]`` of codes."""

    scales: NDArray[np.uint16]
    floors: NDArray[Any]
    codes: Bytes


@dataclass(frozen=True, slots=True)
class Places:
    """The planes of a page in their order, and the lengths of a payload."""

    page_nbytes: int
    planes: tuple[Plane, ...]

    @classmethod
    def of(cls, layout: PageLayout, codec: Lossy) -> Places:
        """Groups of floats with tokens are encoded; other dtypes and states of no tokens are kept as they are."""
        planes = []
        for offset, spec in zip(layout.offsets, layout.specs, strict=True):
            if spec.dtype not in WORDS or spec.kind == "state":
                continue
            layers, count, *shape = spec.shape
            for index, scheme in enumerate((codec.keys, codec.values)[:count]):
                planes.append(Plane(scheme, spec.dtype, offset, layers, count, index, Shape(*shape)))
        return cls(layout.blob_nbytes, tuple(planes))

    @property
    def code_nbytes(self) -> int:
        """Bytes of all codes, which end a payload or are in its frame."""
        return sum(plane.code_nbytes for plane in self.planes)

    @property
    def kept_nbytes(self) -> int:
        """Bytes before the codes: scales, smallest numbers, and what is kept as it is."""
        sides = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        return sides + sum(end - start for start, end in self.gaps())

    @property
    def fixed_nbytes(self) -> int:
        """Length of a payload whose codes are not compressed."""
        return self.kept_nbytes + self.code_nbytes

    def parts(self, kept: Bytes, codes: Bytes) -> Iterator[tuple[Plane, Parts]]:
        """Views of the two halves of a payload, plane by plane."""
        at, code = 0, 0
        for plane in self.planes:
            sides = (plane.layers, *plane.scheme.sides(plane.shape))
            middle = at + plane.scale_nbytes
            scales = kept[at:middle].view(SCALE).reshape(sides)
            at = middle + plane.floor_nbytes
            floors = kept[middle:at].view(WORDS[plane.dtype])
            end = code + plane.code_nbytes
            found = codes[code:end].reshape(plane.layers, -1)
            yield plane, Parts(scales, floors.reshape(sides) if plane.scheme.floored else floors, found)
            code = end

    def rest(self, page: Bytes, kept: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Views of each piece of ``page`` that is kept as it is, and of its place in ``kept``."""
        at = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        for start, end in self.gaps():
            yield page[start:end], kept[at : at + end - start]
            at += end - start

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Start and end of each piece of a page that is kept as it is, in order."""
        groups = dict.fromkeys((plane.offset, plane.end) for plane in self.planes)
        starts, ends = [0, *(end for _, end in groups)], [*(start for start, _ in groups), self.page_nbytes]
        return ((start, end) for start, end in zip(starts, ends, strict=True) if start < end)
