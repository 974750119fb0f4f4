"""The codes of a payload as one zstandard frame, and payloads with and without one turned into each other.

``int8`` and ``int8+zstd`` state the same numbers: going from one to the other loses nothing and asks for no arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard

from tierstore.codecs.places import Places
from tierstore.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.codecs.kinds import Lossy
    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]


def compressor() -> zstandard.ZstdCompressor:
    """For codes, which have no long matches. For one thread."""
    settings = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12)
    return zstandard.ZstdCompressor(compression_params=settings)


def expanded(zstd: zstandard.ZstdDecompressor, frame: Bytes, wanted: int) -> Bytes:
    """The codes in ``frame``; IntegrityError unless they are ``wanted`` bytes."""
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


class Squeezer:
    """Payloads of a codec without zstandard into those of ``codec``, which is the same with it. For one thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self.name = codec.name
        self._places = Places.of(layout, codec)
        self._zstd = compressor()

    def encode(self, payload: Bytes, out: Bytes) -> int | None:
        """Write the other payload into ``out`` and return its length; None if it would not be shorter.

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


class Spreader:
    """The way back of ``Squeezer``. For one thread."""

    def __init__(self, codec: Lossy, layout: PageLayout) -> None:
        self._places = Places.of(layout, codec)
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, payload: Bytes, out: Bytes) -> None:
        """Fill ``out`` with the payload without zstandard. IntegrityError if the frame is not of such a page."""
        start, end = self._places.kept_nbytes, self._places.fixed_nbytes
        codes = expanded(self._zstd, payload[start:], self._places.code_nbytes)
        np.copyto(out[:start], payload[:start])
        np.copyto(out[start:end], codes)
