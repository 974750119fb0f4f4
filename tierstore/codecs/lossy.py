"""The lossy codecs by name, the layout of their payloads, and their encoder and decoder.

``LOSSY`` says how each codec quantizes keys and values, and its loss class. A loss class is part of the key namespace:
pages of one class may stand for each other, pages of two never do. Codecs that give back the same numbers are of one
class: ``int8`` and ``int8+zstd`` state the same numbers, and going from one to the other (``CodeCompressor``,
``CodeExpander``) loses nothing and asks for no arithmetic.

``PayloadLayout`` says which bytes of a page are keys and values, and where in a payload their codes and scales lie:

    payload = of each KV group, keys then values: scales, and the smallest numbers where they are stored
            | the bytes of the page that are no such numbers
            | of each KV group, keys then values: codes, or one zstandard frame of all these

Within each of these, layer by layer. All lengths but the frame's follow from the layout.

An ``Encoder`` or ``Decoder`` handles some layers at a time and has scratch of its own: make one for each thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import zstandard

from tierstore.codecs import quantization
from tierstore.codecs.quantization import SCALE, WORDS, Fp8, Shape, Steps
from tierstore.errors import IntegrityError
from tierstore.keys import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.codecs.quantization import Bound
    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.float32]


class Scheme(Protocol):
    """How the keys or values of one layer become codes and scales; see ``Steps`` and ``Fp8``."""

    @property
    def bound(self) -> Bound: ...
    @property
    def floored(self) -> bool: ...
    @property
    def most(self) -> float: ...
    def largest_scale(self, dtype: str) -> int: ...
    def members(self, shape: Shape) -> int: ...
    def sides(self, shape: Shape) -> tuple[int, int]: ...
    def code_nbytes(self, shape: Shape) -> int: ...
    def encode(
        self,
        numbers: NDArray[np.float32],
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
        spare: NDArray[np.float32],
    ) -> None: ...
    def decode(
        self,
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
        numbers: NDArray[np.float32],
        spare: NDArray[np.float32],
    ) -> None: ...
    def check(
        self,
        shape: Shape,
        dtype: str,
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Lossy:
    """A lossy codec. ``keys`` is also used for data with one plane, such as MLA's latent.

    With ``zstd`` the codes are compressed and a payload's length depends on the numbers, otherwise on the layout alone.
    """

    name: str
    loss_class: str
    keys: Scheme
    values: Scheme
    zstd: bool = False


_INT8 = Steps(8, "token", 64, signed=True)

LOSSY = {
    codec.name: codec
    for codec in (
        Lossy("fp8", "fp8", Fp8(), Fp8()),
        Lossy("fp8+zstd", "fp8", Fp8(), Fp8(), zstd=True),
        Lossy("int8", "int8", _INT8, _INT8),
        Lossy("int8+zstd", "int8", _INT8, _INT8, zstd=True),
        Lossy("k8v4", "k8v4", Steps(8, "channel", 64), Steps(4, "token", 32)),
        Lossy("int4", "int4", Steps(4, "channel", 32), Steps(4, "token", 32)),
        Lossy("int4-64", "int4-64", Steps(4, "channel", 64), Steps(4, "token", 64)),
    )
}
"""The lossy codecs by name."""

LOSS_CLASSES = {"none": EXACT, "exp": EXACT} | {name: codec.loss_class for name, codec in LOSSY.items()}
"""The loss class of every codec by its name."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys or the values of a KV group: ``[layers, tokens, heads, dim]``, interleaved with the other plane."""

    scheme: Scheme
    dtype: str
    offset: int
    layers: int
    planes: int
    index: int
    shape: Shape

    @property
    def numbers(self) -> int:
        """Number of values in the plane."""
        return self.layers * self.shape.numbers

    @property
    def end(self) -> int:
        """Offset in the page at which the KV group ends."""
        return self.offset + self.numbers * self.planes * WORDS[self.dtype].itemsize

    @property
    def scale_nbytes(self) -> int:
        """Bytes of all scales."""
        return self.layers * prod(self.scheme.sides(self.shape)) * SCALE.itemsize

    @property
    def floor_nbytes(self) -> int:
        """Bytes of all minima; 0 if they are not stored."""
        if not self.scheme.floored:
            return 0
        return self.layers * prod(self.scheme.sides(self.shape)) * WORDS[self.dtype].itemsize

    @property
    def code_nbytes(self) -> int:
        """Bytes of all codes."""
        return self.layers * self.scheme.code_nbytes(self.shape)

    def words(self, page: Bytes) -> NDArray[Any]:
        """Return the view of ``page``, ``[layers, tokens, heads, dim]``."""
        whole = page[self.offset : self.end].view(WORDS[self.dtype])
        return whole.reshape(self.layers, self.planes, *self.shape)[:, self.index]


class Parts(NamedTuple):
    """The parts of a plane in a payload: ``[layers, *sides]`` of scales and minima, ``[layers, n]`` of codes."""

    scales: NDArray[np.uint16]
    floors: NDArray[Any]
    codes: Bytes


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """The planes of a page in order, and the lengths of a payload."""

    page_nbytes: int
    planes: tuple[Plane, ...]

    @classmethod
    def of(cls, layout: PageLayout, codec: Lossy) -> PayloadLayout:
        """Return the payload layout. Groups of floats with tokens are encoded; all others are kept as they are."""
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
        """Bytes before the codes: scales, minima, and what is kept as it is."""
        sides = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        return sides + sum(end - start for start, end in self.gaps())

    @property
    def fixed_nbytes(self) -> int:
        """Length of a payload whose codes are not compressed."""
        return self.kept_nbytes + self.code_nbytes

    def parts(self, kept: Bytes, codes: Bytes) -> Iterator[tuple[Plane, Parts]]:
        """Return views of the two halves of a payload, plane by plane."""
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
        """Yield views of each piece of ``page`` that is kept as it is, and of its place in ``kept``."""
        at = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        for start, end in self.gaps():
            yield page[start:end], kept[at : at + end - start]
            at += end - start

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each piece of a page that is kept as it is, in order."""
        groups = dict.fromkeys((plane.offset, plane.end) for plane in self.planes)
        starts, ends = [0, *(end for _, end in groups)], [*(start for start, _ in groups), self.page_nbytes]
        return ((start, end) for start, end in zip(starts, ends, strict=True) if start < end)


def compressor() -> zstandard.ZstdCompressor:
    """Make a compressor for codes, which have no long matches. For one thread."""
    settings = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12)
    return zstandard.ZstdCompressor(compression_params=settings)


def expanded(zstd: zstandard.ZstdDecompressor, frame: Bytes, wanted: int) -> Bytes:
    """Return the codes in ``frame``. IntegrityError unless they are ``wanted`` bytes."""
    try:
        stated = zstandard.frame_content_size(frame.data)
        if stated != wanted:  # before anything of that size is allocated
            raise IntegrityError(f"codes of {stated} bytes where the page has {wanted}")
        codes = zstd.decompress(frame.data, max_output_size=wanted, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"codes cannot be expanded: {error}") from error
    if len(codes) != wanted:
        raise IntegrityError(f"codes of {len(codes)} bytes where the page has {wanted}")
    return np.frombuffer(codes, dtype=np.uint8)


class CodeCompressor:
    """Turns payloads of a codec without zstandard into those of ``codec``, its variant with it. For one thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._zstd = compressor()

    def encode(self, payload: Bytes, out: Bytes) -> int | None:
        """Write the compressed payload into ``out`` and return its length; None if it would not be shorter.

        Both are flat contiguous uint8 and do not overlap; ``out`` has at least the payload's length.
        """
        start, end = self._places.kept_nbytes, self._places.fixed_nbytes
        frame = self._zstd.compress(np.ascontiguousarray(payload[start:end]).data)
        length = start + len(frame)
        if length >= end:
            return None
        np.copyto(out[:start], payload[:start])
        np.copyto(out[start:length], np.frombuffer(frame, dtype=np.uint8))
        return length


class CodeExpander:
    """The inverse of ``CodeCompressor``. For one thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self._places = PayloadLayout.of(layout, codec)
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, payload: Bytes, out: Bytes) -> None:
        """Fill ``out`` with the payload without zstandard. IntegrityError if the frame is not of such a page."""
        start, end = self._places.kept_nbytes, self._places.fixed_nbytes
        codes = expanded(self._zstd, payload[start:], self._places.code_nbytes)
        np.copyto(out[:start], payload[:start])
        np.copyto(out[start:end], codes)


MOST_STORED = 0.9
"""A payload that takes more than this share of its page is not worth its loss: the page is stored raw."""

_PART = 1 << 16  # numbers handled at a time: passes over them stay in the processor's cache


def fixed_nbytes(codec: Lossy, layout: PageLayout) -> int | None:
    """Return the length of every payload; None if it varies or no page of this layout is encoded."""
    places = PayloadLayout.of(layout, codec)
    return (
        places.fixed_nbytes
        if not codec.zstd and places.planes and _worth(places, places.fixed_nbytes)
        else None
    )


class _Passes:
    """Scratch memory for the largest part of any plane, and the parts."""

    def __init__(self, places: PayloadLayout) -> None:
        room = max((plane.shape.numbers * _step(plane) for plane in places.planes), default=0)
        self._numbers, self._spare = np.empty(room, np.float32), np.empty(room, np.float32)

    def over(
        self, plane: Plane, words: NDArray[Any], parts: Parts
    ) -> Iterator[tuple[Any, Parts, Numbers, Numbers]]:
        """Yield some layers of a plane at a time, with scratch memory of their size: numbers and spare."""
        step = _step(plane)
        for start in range(0, plane.layers, step):
            some = slice(start, start + step)
            part = words[some]
            numbers, spare = (room[: part.size].reshape(part.shape) for room in (self._numbers, self._spare))
            floors = parts.floors[some] if plane.scheme.floored else parts.floors
            yield part, Parts(parts.scales[some], floors, parts.codes[some]), numbers, spare


def _step(plane: Plane) -> int:
    return min(plane.layers, max(1, _PART // plane.shape.numbers))


def _worth(places: PayloadLayout, length: int) -> bool:
    return length <= MOST_STORED * places.page_nbytes


class Encoder:
    """Makes payloads of ``codec``. Not thread-safe; its scratch memory is one part and the codes."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._passes = _Passes(self._places)
        self._codes = np.empty(self._places.code_nbytes if codec.zstd else 0, dtype=np.uint8)
        self._zstd = compressor() if codec.zstd else None

    def encode(self, page: Bytes, out: Bytes) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length, or None to keep the page raw.

        It returns None if the payload would save less than 10 %, or if a number is NaN, infinite or beyond ``LARGEST``.

        Args:
            page: Flat contiguous uint8; not changed.
            out: Flat contiguous uint8 of the page's length that does not overlap it. Its content is undefined after
                None.
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
    """Turns payloads of ``codec`` into pages. Not thread-safe; its scratch memory is one part."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._passes = _Passes(self._places)
        self._zstd = zstandard.ZstdDecompressor() if codec.zstd else None

    def decode(self, payload: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``payload``, both flat contiguous uint8 that do not overlap, within the codec's bounds.

        A payload always gives the same finite numbers. A modified payload that still has the right form gives others;
        the record's checksum detects that.

        Raises:
            IntegrityError: ``Encoder`` cannot have made this of such a page. The content of ``page`` is undefined, and
                nothing is written outside it.
        """
        places = self._places
        if page.nbytes != places.page_nbytes or not self._has_form(payload.nbytes):
            raise IntegrityError(f"payload of {payload.nbytes} bytes for a page of {page.nbytes}")
        kept, codes = payload[: places.kept_nbytes], payload[places.kept_nbytes :]
        if self._zstd is not None:
            codes = expanded(self._zstd, codes, places.code_nbytes)
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
