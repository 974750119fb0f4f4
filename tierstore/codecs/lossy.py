"""The lossy codecs by name, the layout of their payloads, and their encoder and decoder.

``LOSSY`` defines how each codec quantizes keys and values, and its loss class. A loss class is part of the
key namespace: pages of the same class may replace each other, and pages of different classes never do. Codecs
that decode to the same values have the same class, for example ``int8`` and ``int8+zstd``. ``CodeCompressor``
and ``CodeExpander`` convert between the payloads of two such codecs without loss, and without decoding any
element.

``PayloadLayout`` defines which bytes of a page are keys and values, and where a payload contains their codes
and scales:

    payload = for each KV group, keys then values: scales, then minimums if the codec stores them
            | the bytes of the page that are not encoded
            | for each KV group, keys then values: codes, or one zstandard frame of all codes

Scales, minimums and codes are each ordered by layer. All lengths except the frame's follow from the layout.

An ``Encoder`` or ``Decoder`` processes a few layers at a time and has its own scratch memory. Create one per
thread.
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
from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.codecs.quantization import Bound
    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.float32]


class Scheme(Protocol):
    """A scheme that quantizes the keys or values of one layer. ``Steps`` and ``Fp8`` implement it."""

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
    """A lossy codec, with a scheme for keys and one for values.

    KV groups with a single plane, such as MLA's latent, use the scheme for keys. With ``zstd``, codes are
    compressed, and the length of a payload depends on the contents of the page. Without it, the length depends
    only on the layout.
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
"""The loss class of every codec, by codec name."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys or the values of a KV group, ``[layers, tokens, heads, dim]``.

    In the page, each layer's keys are followed by its values, so a plane is not contiguous. ``offset`` is the
    offset of the KV group in the page, ``planes`` the number of planes in the group, and ``index`` the index of
    this plane among them.
    """

    scheme: Scheme
    dtype: str
    offset: int
    layers: int
    planes: int
    index: int
    shape: Shape

    @property
    def numbers(self) -> int:
        """Number of elements in the plane."""
        return self.layers * self.shape.numbers

    @property
    def end(self) -> int:
        """Offset in the page at which the KV group ends."""
        return self.offset + self.numbers * self.planes * WORDS[self.dtype].itemsize

    @property
    def scale_nbytes(self) -> int:
        """Size of all scales in bytes."""
        return self.layers * prod(self.scheme.sides(self.shape)) * SCALE.itemsize

    @property
    def floor_nbytes(self) -> int:
        """Size of all minimums in bytes; 0 if the codec does not store them."""
        if not self.scheme.floored:
            return 0
        return self.layers * prod(self.scheme.sides(self.shape)) * WORDS[self.dtype].itemsize

    @property
    def code_nbytes(self) -> int:
        """Size of all codes in bytes."""
        return self.layers * self.scheme.code_nbytes(self.shape)

    def words(self, page: Bytes) -> NDArray[Any]:
        """Return the plane as a view of ``page``, ``[layers, tokens, heads, dim]``."""
        whole = page[self.offset : self.end].view(WORDS[self.dtype])
        return whole.reshape(self.layers, self.planes, *self.shape)[:, self.index]


class Parts(NamedTuple):
    """The parts of a payload that belong to one plane.

    These are scales and minimums ``[layers, *sides]``, and codes ``[layers, n]``.
    """

    scales: NDArray[np.uint16]
    floors: NDArray[Any]
    codes: Bytes


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """The planes of a page in order, and the lengths of the parts of a payload."""

    page_nbytes: int
    planes: tuple[Plane, ...]

    @classmethod
    def of(cls, layout: PageLayout, codec: Lossy) -> PayloadLayout:
        """Return the payload layout of pages with ``layout``.

        KV groups with a floating-point dtype are encoded, unless they are of kind "state". All other bytes are
        copied unchanged.
        """
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
        """Size in bytes of all codes, which are at the end of a payload or in its zstandard frame."""
        return sum(plane.code_nbytes for plane in self.planes)

    @property
    def kept_nbytes(self) -> int:
        """Number of bytes before the codes: scales, minimums and bytes that are not encoded."""
        sides = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        return sides + sum(end - start for start, end in self.gaps())

    @property
    def fixed_nbytes(self) -> int:
        """Length in bytes of a payload whose codes are not compressed."""
        return self.kept_nbytes + self.code_nbytes

    def parts(self, kept: Bytes, codes: Bytes) -> Iterator[tuple[Plane, Parts]]:
        """Yield each plane with views of its parts of a payload.

        Args:
            kept: The payload up to the codes, flat uint8 ``[kept_nbytes]``.
            codes: The uncompressed codes, flat uint8 ``[code_nbytes]``.
        """
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
        """Yield views of each piece of ``page`` that is not encoded, and of the same piece in ``kept``."""
        at = sum(plane.scale_nbytes + plane.floor_nbytes for plane in self.planes)
        for start, end in self.gaps():
            yield page[start:end], kept[at : at + end - start]
            at += end - start

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each piece of a page that is not encoded, in order."""
        groups = dict.fromkeys((plane.offset, plane.end) for plane in self.planes)
        starts, ends = [0, *(end for _, end in groups)], [*(start for start, _ in groups), self.page_nbytes]
        return ((start, end) for start, end in zip(starts, ends, strict=True) if start < end)


def compressor() -> zstandard.ZstdCompressor:
    """Create a compressor with settings for codes, in which long matches are rare. Not thread-safe."""
    settings = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12)
    return zstandard.ZstdCompressor(compression_params=settings)


def expanded(zstd: zstandard.ZstdDecompressor, frame: Bytes, wanted: int) -> Bytes:
    """Decompress the codes in ``frame``. Raises IntegrityError unless they have ``wanted`` bytes."""
    try:
        stated = zstandard.frame_content_size(frame.data)
        if stated != wanted:  # checked before memory of that size is allocated
            raise IntegrityError(
                f"the frame header says {exact_size(stated)} of codes, but the page needs {exact_size(wanted)}"
            )
        codes = zstd.decompress(frame.data, max_output_size=wanted, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"the codes cannot be decompressed: {error}") from error
    if len(codes) != wanted:
        raise IntegrityError(
            f"the codes decompress to {exact_size(len(codes))}, but the page needs {exact_size(wanted)}"
        )
    return np.frombuffer(codes, dtype=np.uint8)


class CodeCompressor:
    """Compresses the codes in payloads with zstandard, for example to convert ``int8`` to ``int8+zstd``.

    Not thread-safe.

    Args:
        codec: The variant with zstandard.
        layout: The layout of the pages.
    """

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._zstd = compressor()

    def encode(self, payload: Bytes, out: Bytes) -> int | None:
        """Write ``payload`` with compressed codes into ``out``, and return the new length in bytes.

        Return None if the new payload would not be shorter. Both arrays are flat contiguous uint8 and must not
        overlap. ``out`` must be at least as long as ``payload``.
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
    """Decompresses the codes in payloads, for example to convert ``int8+zstd`` to ``int8``. Not thread-safe."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self._places = PayloadLayout.of(layout, codec)
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, payload: Bytes, out: Bytes) -> None:
        """Write ``payload`` into ``out`` with its codes decompressed.

        Raises:
            IntegrityError: The codes cannot be decompressed, or do not fit a page of this layout.
        """
        start, end = self._places.kept_nbytes, self._places.fixed_nbytes
        codes = expanded(self._zstd, payload[start:], self._places.code_nbytes)
        np.copyto(out[:start], payload[:start])
        np.copyto(out[start:end], codes)


MOST_STORED = 0.9
"""If a payload would be larger than this fraction of its page, the page is stored unencoded.

Such a small saving is not worth the loss.
"""

_PART = 1 << 16  # elements processed at a time, so that they stay in the processor's cache


def fixed_nbytes(codec: Lossy, layout: PageLayout) -> int | None:
    """Return the length in bytes that every payload of pages of ``layout`` has.

    Return None if the length varies, or if the codec does not encode pages of this layout.
    """
    places = PayloadLayout.of(layout, codec)
    return (
        places.fixed_nbytes
        if not codec.zstd and places.planes and _worth(places, places.fixed_nbytes)
        else None
    )


class _Passes:
    """Iterates over planes in parts of a few layers, and owns the scratch memory for a part."""

    def __init__(self, places: PayloadLayout) -> None:
        room = max((plane.shape.numbers * _step(plane) for plane in places.planes), default=0)
        self._numbers, self._spare = np.empty(room, np.float32), np.empty(room, np.float32)

    def over(
        self, plane: Plane, words: NDArray[Any], parts: Parts
    ) -> Iterator[tuple[Any, Parts, Numbers, Numbers]]:
        """Yield a few layers of a plane at a time: their words, their parts of the payload, and scratch memory.

        The scratch memory is two float32 arrays of the words' shape.
        """
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
    """Encodes pages with ``codec``. Not thread-safe.

    Uses scratch memory for a few layers of K or V and, with zstandard, for all codes of a page.
    """

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._passes = _Passes(self._places)
        self._codes = np.empty(self._places.code_nbytes if codec.zstd else 0, dtype=np.uint8)
        self._zstd = compressor() if codec.zstd else None

    def encode(self, page: Bytes, out: Bytes) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length in bytes.

        Return None if the codec does not encode pages of this layout, if the payload would save less than 10 %,
        or if an element is NaN, infinite or beyond ``LARGEST``.

        Args:
            page: Flat contiguous uint8. It is not changed.
            out: Flat contiguous uint8 of the page's length that does not overlap the page. Its content is
                undefined if None is returned.
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
    """Decodes payloads of ``codec``. Not thread-safe. Uses scratch memory for a few layers of K or V."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = PayloadLayout.of(layout, codec)
        self._passes = _Passes(self._places)
        self._zstd = zstandard.ZstdDecompressor() if codec.zstd else None

    def decode(self, payload: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``payload``, within the codec's error bounds.

        Both are flat contiguous uint8 and must not overlap. A payload always decodes to the same finite values.
        Corruption that leaves the form of the payload valid is detected by the record's checksum, not here.

        Raises:
            IntegrityError: ``Encoder`` cannot have written this payload for such a page. The content of
                ``page`` is then undefined, and nothing was written outside it.
        """
        places = self._places
        if page.nbytes != places.page_nbytes or not self._has_form(payload.nbytes):
            raise IntegrityError(
                f"a payload of {exact_size(payload.nbytes)} does not match a page of {exact_size(page.nbytes)}"
            )
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
