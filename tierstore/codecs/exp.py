"""The lossless codec ``exp`` for pages of 16-bit floats.

It compresses the exponents with zstandard and stores all other bits as they are.

Each 16-bit element is split into two bytes. The high byte is bits 14..7 (bfloat16: the exponent; float16: the
exponent and three bits of the mantissa). The low byte is the sign and bits 6..0, which do not compress. Over
the tokens of a page, the high bytes of one channel (layer, K or V, head, dimension) stay close to their
maximum. The codec therefore compresses each channel's maximum and the distances from it. All arithmetic is on
integers, so every bit pattern is restored: NaN payloads, infinities, subnormals and -0. KV groups of other
dtypes and the gaps between groups are copied unchanged.

    payload = zstandard frame of (maxima, distances) for each KV group of 16-bit floats
              | low bytes of the elements | rest of the page

Zstandard levels above 1 and match searches compress real KV less well, and take longer. Token-major order
compresses as well as channel-major order once the maxima are removed (docs/history/codecs.md).

A zstandard context is not thread-safe, so every I/O thread creates its own ``Encoder`` or ``Decoder``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from tierstore.errors import IntegrityError
from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]

MOST_STORED = 0.9
"""If a payload would be larger than this fraction of its page, the page is stored unencoded.

Decoding would take more time than the smaller payload saves.
"""

_PART = 1 << 19  # elements processed at a time, so that they stay in the processor's cache
_LOW = 0x807F  # mask of the bits in the low byte
_SLACK = {"bfloat16": 0, "float16": 7}  # mantissa bits of the high byte, all set in the maximum
_WORD = np.dtype("<u2")


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group of 16-bit floats: ``rows`` arrays ``[tokens, channels]`` that start at ``offset``."""

    offset: int
    rows: int
    tokens: int
    channels: int
    slack: int = 0

    @property
    def numbers(self) -> int:
        """Number of 16-bit elements in the group."""
        return self.rows * self.tokens * self.channels

    @property
    def end(self) -> int:
        """Offset in the page at which the group ends."""
        return self.offset + 2 * self.numbers

    @property
    def row_parts(self) -> Iterator[slice]:
        """Slices of rows that are processed together: at most ``_PART`` elements, but at least one row."""
        step = self.part_rows
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    @property
    def part_rows(self) -> int:
        """Number of rows that are processed together."""
        return min(self.rows, max(1, _PART // (self.tokens * self.channels)))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV groups of 16-bit floats in a page of ``page_nbytes`` bytes, in order and without overlaps."""

    page_nbytes: int
    groups: tuple[Group, ...] = ()

    @classmethod
    def of(cls, layout: PageLayout) -> Geometry:
        """Return the geometry of pages with this layout. Pages include the gaps between groups."""
        groups = [
            Group(offset, prod(spec.shape[:2]), spec.shape[2], prod(spec.shape[3:]), _SLACK[spec.dtype])
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
            if spec.dtype in _SLACK
        ]
        return cls(layout.blob_nbytes, tuple(groups))

    @property
    def numbers(self) -> int:
        """Number of 16-bit elements in the page."""
        return sum(group.numbers for group in self.groups)

    @property
    def plane_nbytes(self) -> int:
        """Size in bytes of the zstandard frame's content.

        The content is one byte per element for the distance, and one byte per channel of each row for the
        maximum.
        """
        return sum(group.numbers + group.rows * group.channels for group in self.groups)

    @property
    def kept_nbytes(self) -> int:
        """Number of bytes after the frame: the low bytes of the elements, and all bytes outside the groups."""
        return self.page_nbytes - self.numbers

    def rest(self, page: Bytes) -> Iterator[Bytes]:
        """Yield views of the bytes of ``page`` that are outside the groups."""
        starts = [0, *(group.end for group in self.groups)]
        ends = [*(group.offset for group in self.groups), self.page_nbytes]
        return (page[start:end] for start, end in zip(starts, ends, strict=True) if start < end)


class Encoder:
    """Encodes pages into payloads. Not thread-safe. Uses half a page plus about 2 MiB of scratch memory."""

    name = "exp"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._plane = np.empty(geometry.plane_nbytes, dtype=np.uint8)
        self._words = _scratch(geometry, _WORD)
        self._signs = _scratch(geometry, _WORD)
        settings = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12)
        self._zstd = zstandard.ZstdCompressor(compression_params=settings)

    def encode(self, page: Bytes, out: Bytes) -> int | None:
        """Write the payload of ``page`` into ``out``.

        Return its length in bytes, or None if the page has no group of 16-bit floats or would shrink by less than 10 %.

        Args:
            page: Flat contiguous uint8. It is not changed.
            out: Flat contiguous uint8 of the page's length that does not overlap the page. Its content is
                undefined if None is returned.
        """
        if not self._geometry.groups:
            return None
        for group, maxima, distances in _planes(self._geometry, self._plane):
            self._measure(group, page, maxima, distances)
        frame = self._zstd.compress(self._plane.data)
        length = len(frame) + self._geometry.kept_nbytes
        if length > MOST_STORED * page.nbytes:
            return None
        np.copyto(out[: len(frame)], np.frombuffer(frame, dtype=np.uint8))
        self._keep(page, out[len(frame) : length])
        return length

    def _measure(self, group: Group, page: Bytes, maxima: Bytes, distances: Bytes) -> None:
        words = _words(group, page)
        for part in group.row_parts:
            high = _like(self._words, words[part])
            np.right_shift(words[part], 7, out=high)
            np.copyto(distances[part], high, casting="unsafe")
            np.maximum.reduce(distances[part], axis=1, out=maxima[part])
            np.bitwise_or(maxima[part], group.slack, out=maxima[part])
            np.subtract(maxima[part, None], distances[part], out=distances[part])

    def _keep(self, page: Bytes, out: Bytes) -> None:
        for group, low in _lows(self._geometry, out):
            words = _words(group, page)
            for part in group.row_parts:
                kept, sign = _like(self._words, words[part]), _like(self._signs, words[part])
                np.bitwise_and(words[part], _LOW, out=kept)
                np.right_shift(kept, 8, out=sign)
                np.bitwise_or(kept, sign, out=kept)
                np.copyto(low[part], kept, casting="unsafe")
        at = self._geometry.numbers
        for piece in self._geometry.rest(page):
            np.copyto(out[at : at + piece.nbytes], piece)
            at += piece.nbytes


class Decoder:
    """Decodes payloads into pages. Not thread-safe. Uses about 1.5 MiB of scratch memory."""

    name = "exp"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._high = _scratch(geometry, np.dtype(np.uint8))
        self._words = _scratch(geometry, _WORD)
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, payload: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``payload``. Both are flat contiguous uint8 and must not overlap.

        Corruption that leaves the form of the payload valid is detected by the record's checksum, not here.

        Raises:
            IntegrityError: ``Encoder`` cannot have written this payload for such a page. The content of
                ``page`` is then undefined, and nothing was written outside it.
        """
        frame_nbytes = payload.nbytes - self._geometry.kept_nbytes
        if page.nbytes != self._geometry.page_nbytes or frame_nbytes <= 0:
            raise IntegrityError(
                f"a payload of {exact_size(payload.nbytes)} does not match a page of {exact_size(page.nbytes)}"
            )
        plane = self._expand(payload[:frame_nbytes])
        kept = payload[frame_nbytes:]
        lows = _lows(self._geometry, kept)
        for (group, maxima, distances), (_, low) in zip(_planes(self._geometry, plane), lows, strict=True):
            self._join(group, page, maxima, distances, low)
        at = self._geometry.numbers
        for piece in self._geometry.rest(page):
            np.copyto(piece, kept[at : at + piece.nbytes])
            at += piece.nbytes

    def _expand(self, frame: Bytes) -> Bytes:
        wanted = self._geometry.plane_nbytes
        try:
            stated = zstandard.frame_content_size(frame.data)
            if stated != wanted:  # checked before memory of that size is allocated
                raise IntegrityError(
                    f"the frame header says {exact_size(stated)} of exponents, "
                    f"but the page needs {exact_size(wanted)}"
                )
            plane = self._zstd.decompress(frame.data, max_output_size=wanted, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"the exponents cannot be decompressed: {error}") from error
        if len(plane) != wanted:
            raise IntegrityError(
                f"the exponents decompress to {exact_size(len(plane))}, but the page needs {exact_size(wanted)}"
            )
        return np.frombuffer(plane, dtype=np.uint8)

    def _join(self, group: Group, page: Bytes, maxima: Bytes, distances: Bytes, low: Bytes) -> None:
        words = _words(group, page)
        for part in group.row_parts:
            high, kept = _like(self._high, words[part]), _like(self._words, words[part])
            np.subtract(maxima[part, None], distances[part], out=high)
            np.copyto(words[part], high)
            np.left_shift(words[part], 7, out=words[part])
            np.copyto(kept, low[part])
            np.multiply(kept, 257, out=kept)  # copies the byte to bits 15..8, where its sign bit belongs
            np.bitwise_and(kept, _LOW, out=kept)
            np.bitwise_or(words[part], kept, out=words[part])


def _scratch(geometry: Geometry, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Allocate scratch memory for the largest part of any group."""
    largest = max((group.numbers // group.rows * group.part_rows for group in geometry.groups), default=0)
    return np.empty(largest, dtype=dtype)


def _like(scratch: NDArray[Any], part: NDArray[Any]) -> NDArray[Any]:
    return scratch[: part.size].reshape(part.shape)


def _words(group: Group, page: Bytes) -> NDArray[np.uint16]:
    return page[group.offset : group.end].view(_WORD).reshape(group.rows, group.tokens, group.channels)


def _planes(geometry: Geometry, plane: Bytes) -> Iterator[tuple[Group, Bytes, Bytes]]:
    """Yield each group with its maxima ``[rows, channels]`` and distances ``[rows, tokens, channels]``."""
    at = 0
    for group in geometry.groups:
        middle = at + group.rows * group.channels
        maxima = plane[at:middle].reshape(group.rows, group.channels)
        at = middle + group.numbers
        yield group, maxima, plane[middle:at].reshape(group.rows, group.tokens, group.channels)


def _lows(geometry: Geometry, kept: Bytes) -> Iterator[tuple[Group, Bytes]]:
    """Yield each group with the low bytes of its elements, ``[rows, tokens, channels]``."""
    at = 0
    for group in geometry.groups:
        end = at + group.numbers
        yield group, kept[at:end].reshape(group.rows, group.tokens, group.channels)
        at = end
