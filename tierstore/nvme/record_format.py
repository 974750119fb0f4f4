"""Encoding of pages as records and decoding of records. A record is a head of 4,080 bytes and the payload.

The payload is the page, unchanged or encoded. The head names everything that the bytes depend on (format,
fingerprint, key, parent, codec, lengths) and ends with an xxh3-128 checksum of itself and the payload.
The record of another page, an old format, truncation and bit flips are therefore all detected. The head and the 16
bytes that LMDB puts in front of a value fill one 4 KiB block, so the payload is block-aligned. This module does not
know where records are stored.

All functions are thread-safe and do no I/O. An encoder or decoder that is passed in must belong to the
calling thread.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128

from tierstore.errors import IntegrityError
from tierstore.keys import KEY_NBYTES
from tierstore.types import PageKey, exact_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.codecs import PageDecoder, PageEncoder

HEAD_NBYTES = 4080
"""Length of a record's head in bytes."""

FORMAT_VERSION = 1
"""Incremented whenever an older reader would misread a new record."""

_MAGIC = b"TierPage"
_FIELDS = struct.Struct(f"<8sHBBIQQ32s{KEY_NBYTES}s{KEY_NBYTES}sQ")
_CHECKSUM_NBYTES = 16
_SUMMED = HEAD_NBYTES - _CHECKSUM_NBYTES
_PADDING = bytes(_SUMMED - _FIELDS.size)
_NO_PARENT = bytes(KEY_NBYTES)


class Codec(IntEnum):
    """Codec of a record's payload. The values are stored on disk and never reused."""

    NONE = 0
    EXP = 1
    FP8 = 2
    FP8_ZSTD = 3
    INT8 = 4
    INT8_ZSTD = 5
    K8V4 = 6
    INT4 = 7
    INT4_64 = 8


CODECS = {
    "none": Codec.NONE,
    "exp": Codec.EXP,
    "fp8": Codec.FP8,
    "fp8+zstd": Codec.FP8_ZSTD,
    "int8": Codec.INT8,
    "int8+zstd": Codec.INT8_ZSTD,
    "k8v4": Codec.K8V4,
    "int4": Codec.INT4,
    "int4-64": Codec.INT4_64,
}
"""Codec number in a record's head, by codec name."""

NAMES: dict[int, str] = {codec: name for name, codec in CODECS.items()}
"""Codec name, by the number in a record's head."""

_ENCODED = frozenset(CODECS.values()) - {Codec.NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields of a record's head. Lengths are in bytes.

    Attributes:
        fingerprint: The 32 bytes returned by ``fingerprint_digest``.
        generation: Differs between writes of the same key, so that a reader can tell whether it has read the record
            that the catalogue named. It is 0 in LMDB records of older versions, which did not write this field.
    """

    fingerprint: bytes
    key: PageKey
    parent: PageKey | None
    codec: Codec
    raw_nbytes: int
    stored_nbytes: int
    generation: int = 0


def fingerprint_digest(fingerprint: str) -> bytes:
    """Return the 32 bytes that represent ``fingerprint`` in a head."""
    return sha256(fingerprint.encode()).digest()


def record_nbytes(page_nbytes: int) -> int:
    """Return the maximum length in bytes of the record of a page of ``page_nbytes`` bytes."""
    return HEAD_NBYTES + page_nbytes


def seal(head: Head, payload: NDArray[np.uint8]) -> bytes:
    """Return the head as 4,080 bytes, with the checksum of head and ``payload`` (flat, contiguous uint8)."""
    if len(head.fingerprint) != 32 or len(head.key) != KEY_NBYTES:
        raise ValueError(
            f"a head needs a fingerprint of 32 bytes and a key of {KEY_NBYTES} bytes, got "
            f"{exact_size(len(head.fingerprint))} and {exact_size(len(head.key))}"
        )
    if head.parent is not None and len(head.parent) != KEY_NBYTES:
        raise ValueError(f"a parent must be a key of {KEY_NBYTES} bytes, got {exact_size(len(head.parent))}")
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        head.codec,
        head.parent is not None,
        0,
        head.raw_nbytes,
        head.stored_nbytes,
        head.fingerprint,
        head.key,
        _NO_PARENT if head.parent is None else head.parent,
        head.generation,
    )
    summed = fields + _PADDING
    return summed + _checksum(summed, payload)


def encode(
    page: NDArray[np.uint8],
    record: NDArray[np.uint8],
    *,
    fingerprint: bytes,
    key: PageKey,
    parent: PageKey | None,
    encoder: PageEncoder | None = None,
    plain: Codec = Codec.NONE,
    raw_nbytes: int | None = None,
    generation: int = 0,
) -> int:
    """Write the record of ``page`` into ``record`` and return its length in bytes.

    The checksum is computed from the copy in ``record``, because this copy is what gets stored.

    Args:
        page: The page, flat contiguous uint8.
        record: Memory of at least ``record_nbytes(page.nbytes)`` bytes, flat contiguous uint8.
        encoder: Encoder to use. If it saves less than a tenth of the page, the page is stored as it is.
        plain: Codec with which ``page`` is already encoded.
        raw_nbytes: Unencoded length of the page in bytes. None: ``page`` is not encoded yet.
    """
    room = record[HEAD_NBYTES : record_nbytes(page.nbytes)]
    length = None if encoder is None else encoder.encode(page, room)
    if length is None:
        np.copyto(room, page)
    payload = room[:length]
    head = Head(
        fingerprint=fingerprint,
        key=key,
        parent=parent,
        codec=plain if encoder is None or length is None else CODECS[encoder.name],
        raw_nbytes=page.nbytes if raw_nbytes is None else raw_nbytes,
        stored_nbytes=payload.nbytes,
        generation=generation,
    )
    record[:HEAD_NBYTES] = np.frombuffer(seal(head, payload), dtype=np.uint8)
    return HEAD_NBYTES + payload.nbytes


def copy(head: Head, payload: NDArray[np.uint8], record: NDArray[np.uint8], *, generation: int = 0) -> int:
    """Write a record with an existing payload and a new ``generation`` into ``record``.

    Return its length in bytes.

    As in ``encode``, the checksum is computed from the copied bytes.
    """
    stored = record[HEAD_NBYTES : HEAD_NBYTES + head.stored_nbytes]
    np.copyto(stored, payload)
    record[:HEAD_NBYTES] = np.frombuffer(seal(replace(head, generation=generation), stored), dtype=np.uint8)
    return HEAD_NBYTES + stored.nbytes


def decode(
    head: Head, payload: NDArray[np.uint8], page: NDArray[np.uint8], decoder: PageDecoder | None
) -> None:
    """Decode the payload of a verified record into ``page``. ``payload`` and ``page`` must not overlap.

    Raises:
        IntegrityError: The payload is not a page of this length, or its codec has no decoder. The content of
            ``page`` is then undefined.
    """
    if head.raw_nbytes != page.nbytes:
        raise IntegrityError(
            f"the record holds a page of {exact_size(head.raw_nbytes)}, expected {exact_size(page.nbytes)}"
        )
    if head.codec is Codec.NONE:
        np.copyto(page, payload)
    elif decoder is None:
        raise IntegrityError("the record is encoded, but the page layout needed to decode it is unknown")
    elif CODECS[decoder.name] is not head.codec:
        raise IntegrityError(
            f"the record has codec {NAMES[head.codec]!r}, but the decoder is for {decoder.name!r}"
        )
    else:
        decoder.decode(payload, page)


def verify(
    head: NDArray[np.uint8] | bytes,
    payload: NDArray[np.uint8],
    *,
    fingerprint: bytes,
    key: PageKey,
    generation: int = 0,
) -> Head:
    """Verify a record that was read as ``head`` (4,080 bytes) and ``payload`` (the rest).

    Returns:
        The parsed head. The bytes are exactly those written for ``key`` under ``fingerprint`` as
        ``generation``.

    Raises:
        IntegrityError: The record is damaged, or belongs to another fingerprint, key or generation. The message
            says which.
    """
    raw = bytes(head)
    found = parse(raw)
    if found.stored_nbytes != payload.nbytes:
        raise IntegrityError(
            f"the size of the payload is {exact_size(payload.nbytes)}, but its head says "
            f"{exact_size(found.stored_nbytes)}"
        )
    if _checksum(raw[:_SUMMED], payload) != raw[_SUMMED:]:
        raise IntegrityError("the record does not match its checksum")
    if found.fingerprint != fingerprint:
        raise IntegrityError("the record belongs to another fingerprint")
    if found.key != key:
        raise IntegrityError("the record belongs to another key")
    if found.generation != generation:
        raise IntegrityError("the record belongs to another generation")
    return found


def parse(raw: bytes) -> Head:
    """Parse the fields of a head without verifying its checksum.

    Raises:
        IntegrityError: ``raw`` cannot be a head in this format.
    """
    if len(raw) != HEAD_NBYTES:
        raise IntegrityError(
            f"the size of the head is {exact_size(len(raw))}, expected {exact_size(HEAD_NBYTES)}"
        )
    magic, version, codec, has_parent, _, raw_nbytes, stored_nbytes, fingerprint, key, parent, generation = (
        _FIELDS.unpack_from(raw)
    )
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise IntegrityError("the head has a wrong magic number or format version")
    plain, encoded = codec == Codec.NONE, codec in _ENCODED
    if (
        not ((plain and raw_nbytes == stored_nbytes) or (encoded and raw_nbytes > stored_nbytes))
        or has_parent > 1
    ):
        raise IntegrityError("the head has field values that no writer of this format produces")
    return Head(
        fingerprint=fingerprint,
        key=PageKey(key),
        parent=PageKey(parent) if has_parent else None,
        codec=Codec(codec),
        raw_nbytes=raw_nbytes,
        stored_nbytes=stored_nbytes,
        generation=generation,
    )


def _checksum(summed: bytes, payload: NDArray[np.uint8]) -> bytes:
    digest = xxh3_128(summed)
    digest.update(payload.data)
    return digest.digest()
