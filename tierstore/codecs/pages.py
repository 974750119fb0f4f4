"""Encoder and decoder of the lossy codecs: pages to payloads and back, some layers at a time.

Each has scratch of its own: every thread makes one for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from tierstore.codecs import frames, quantization
from tierstore.codecs.places import Parts, Places, Plane
from tierstore.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.codecs.kinds import Lossy
    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.float32]

MOST_STORED = 0.9
"""A payload that takes more than this share of its page is not worth its loss: the page is stored raw."""

_PART = 1 << 16  # numbers handled at a time: passes over them stay in the processor's cache


def fixed_nbytes(codec: Lossy, layout: PageLayout) -> int | None:
    """The length of every payload; None where it depends on the numbers or no page of this layout is encoded."""
    places = Places.of(layout, codec)
    return (
        places.fixed_nbytes
        if not codec.zstd and places.planes and _worth(places, places.fixed_nbytes)
        else None
    )


class _Passes:
    """Scratch for the largest part of any plane, and the parts."""

    def __init__(self, places: Places) -> None:
        room = max((plane.shape.numbers * _step(plane) for plane in places.planes), default=0)
        self._numbers, self._spare = np.empty(room, np.float32), np.empty(room, np.float32)

    def over(
        self, plane: Plane, words: NDArray[Any], parts: Parts
    ) -> Iterator[tuple[Any, Parts, Numbers, Numbers]]:
        """Some layers of a plane at a time, with scratch of their size: numbers and spare."""
        step = _step(plane)
        for start in range(0, plane.layers, step):
            some = slice(start, start + step)
            part = words[some]
            numbers, spare = (room[: part.size].reshape(part.shape) for room in (self._numbers, self._spare))
            floors = parts.floors[some] if plane.scheme.floored else parts.floors
            yield part, Parts(parts.scales[some], floors, parts.codes[some]), numbers, spare


def _step(plane: Plane) -> int:
    return min(plane.layers, max(1, _PART // plane.shape.numbers))


def _worth(places: Places, length: int) -> bool:
    return length <= MOST_STORED * places.page_nbytes


class Encoder:
    """Makes payloads of ``codec``. Not thread-safe, and its scratch is a part and the codes: one for each thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = Places.of(layout, codec)
        self._passes = _Passes(self._places)
        self._codes = np.empty(self._places.code_nbytes if codec.zstd else 0, dtype=np.uint8)
        self._zstd = frames.compressor() if codec.zstd else None

    def encode(self, page: Bytes, out: Bytes) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length.

        None if it would save less than 10 %, or if a number is a NaN, an infinity or beyond ``LARGEST``: such a page
        is kept as it is. Both are flat contiguous uint8 of the page's length and do not overlap; ``page`` is not
        changed. After None ``out`` holds anything.
        """
        places = self._places
        if not places.planes or (self._zstd is None and not _worth(places, places.fixed_nbytes)):
            return None
        kept = out[: places.kept_nbytes]
        codes = out[places.kept_nbytes : places.fixed_nbytes] if self._zstd is None else self._codes
        for plane, parts in places.parts(kept, codes):
            if not self._plane(plane, page, parts):
                return None
        for piece, place in places.rest(page, kept):
            np.copyto(place, piece)
        return places.fixed_nbytes if self._zstd is None else self._compress(self._zstd, out)

    def _plane(self, plane: Plane, page: Bytes, whole: Parts) -> bool:
        for words, parts, numbers, spare in self._passes.over(plane, plane.words(page), whole):
            quantization.widen(words, numbers)
            if not quantization.within(numbers, plane.dtype, spare):
                return False
            floors = np.empty(parts.floors.shape, dtype=np.float32)
            plane.scheme.encode(numbers, parts.scales, floors, parts.codes, spare)
            if plane.scheme.floored:
                quantization.narrow(floors, parts.floors, np.empty_like(floors))
        return True

    def _compress(self, zstd: zstandard.ZstdCompressor, out: Bytes) -> int | None:
        frame = zstd.compress(self._codes.data)
        start, length = self._places.kept_nbytes, self._places.kept_nbytes + len(frame)
        if not _worth(self._places, length):
            return None
        np.copyto(out[start:length], np.frombuffer(frame, dtype=np.uint8))
        return length


class Decoder:
    """Turns payloads of ``codec`` into pages. Not thread-safe, and its scratch is a part: one for each thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = Places.of(layout, codec)
        self._passes = _Passes(self._places)
        self._zstd = zstandard.ZstdDecompressor() if codec.zstd else None

    def decode(self, payload: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``payload``, both flat contiguous uint8 that do not overlap, within the codec's bounds.

        Always the same numbers for the same payload, all finite. IntegrityError for whatever ``Encoder`` cannot have
        made of such a page; ``page`` then holds anything, and nothing is written outside it. A changed payload that
        still has the right form gives other bytes: a record's checksum is what tells.
        """
        places = self._places
        if page.nbytes != places.page_nbytes or not self._has_form(payload.nbytes):
            raise IntegrityError(f"payload of {payload.nbytes} bytes for a page of {page.nbytes}")
        kept, codes = payload[: places.kept_nbytes], payload[places.kept_nbytes :]
        if self._zstd is not None:
            codes = frames.expanded(self._zstd, codes, places.code_nbytes)
        for plane, parts in places.parts(kept, codes):
            self._plane(plane, page, parts)
        for piece, place in places.rest(page, kept):
            np.copyto(piece, place)

    def _has_form(self, nbytes: int) -> bool:
        if not self._places.planes:
            return False
        return (
            nbytes > self._places.kept_nbytes
            if self._zstd is not None
            else nbytes == self._places.fixed_nbytes
        )

    def _plane(self, plane: Plane, page: Bytes, whole: Parts) -> None:
        for words, parts, numbers, spare in self._passes.over(plane, plane.words(page), whole):
            floors = np.empty(parts.floors.shape, dtype=np.float32)
            quantization.widen(parts.floors, floors)
            plane.scheme.check(plane.shape, plane.dtype, parts.scales, floors, parts.codes)
            plane.scheme.decode(parts.scales, floors, parts.codes, numbers, spare)
            quantization.narrow(numbers, words, spare)
