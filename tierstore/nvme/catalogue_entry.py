"""Encoding of catalogue entries. Every entry has the same size and its own checksum.

This module does not import numpy, because the child process that checks a directory imports it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from xxhash import xxh3_64_digest

from tierstore.errors import IntegrityError
from tierstore.types import PageKey

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Number = TypeVar("_Number", int, "NDArray[np.uint64]")

CATALOGUE_DB = b"catalogue"
PAGES_DB = b"pages"
META_DB = b"meta"
MAX_DBS = 4

ENTRY_NBYTES = 88
BODY_NBYTES = 80
"""Length of an entry's body in bytes. A checksum of key and body follows it."""

LOCATION = slice(64, 72)
"""Slice of an entry that contains ``extent << 32 | block``, little endian; 0 for a record in LMDB."""

NBYTES = slice(40, 48)
"""Slice of an entry that contains ``nbytes``, little endian."""

STORED_NBYTES = slice(48, 56)
"""Slice of an entry that contains ``stored_nbytes``, little endian."""

PAGE_NUMBER = slice(56, 64)
"""Slice of an entry that contains ``page_number``, little endian.

Versions before decision 026 read the record from the LMDB page with this number. New entries contain 0 here.
"""

CATALOGUE_SHARE = 1024
"""The part of ``nbytes`` that is the record's share of LMDB's leaf and branch pages in both trees.

The value assumes that these LMDB pages are only 25 % full, the minimum.
"""

LOSS = 37
"""Index of the ``loss`` byte in an entry."""

LOSSES = ("", "exact", "fp8", "int8", "k8v4", "int4", "int4-64")
"""Loss classes by number. Numbers are never reused. 0 means that the entry predates this field."""

_BODY = struct.Struct("<36sBB2xQQQIIQ")
_NO_PARENT = bytes(36)


class Entry(NamedTuple):
    """A catalogue entry: the parent, size and location of one stored page.

    Attributes:
        nbytes: Bytes that the record takes on disk, including CATALOGUE_SHARE.
        stored_nbytes: Length of the record's payload in bytes.
        extent: Number of the record's extent file, starting at 1; 0 for a record in LMDB.
        block: First 4 KiB block of the record's slot in that file; 0 for a record in LMDB.
        generation: The same value as in the record's head.
        loss: Loss class of the key, as an index into LOSSES.
        page_number: Number of the record's first LMDB page in data.mdb if a version before decision 026 wrote
            the entry, else 0. Readers do not use it; only ``lmdb_walker`` checks it.
    """

    parent: PageKey | None
    nbytes: int
    stored_nbytes: int
    page_number: int = 0
    extent: int = 0
    block: int = 0
    generation: int = 0
    loss: int = 0


def slot_blocks(nbytes: _Number) -> _Number:
    """Return the length, in 4 KiB blocks, of the slot of an entry with this ``nbytes``.

    The result is also correct for entries that were written when the slot sizes were different.
    """
    return (nbytes - CATALOGUE_SHARE) // 4096


def pack(key: bytes, entry: Entry) -> bytes:
    """Encode ``entry`` for storage under ``key``."""
    body = _BODY.pack(
        entry.parent or _NO_PARENT,
        entry.parent is not None,
        entry.loss,
        entry.nbytes,
        entry.stored_nbytes,
        entry.page_number,
        entry.block,
        entry.extent,
        entry.generation,
    )
    return body + xxh3_64_digest(key + body)


def intact(key: bytes, raw: bytes) -> bool:
    """Return whether ``raw`` is an undamaged result of ``pack`` for ``key``."""
    return len(raw) == ENTRY_NBYTES and xxh3_64_digest(key + raw[:BODY_NBYTES]) == raw[BODY_NBYTES:]


def summary(item: tuple[bytes, bytes]) -> tuple[PageKey, PageKey | None, int]:
    """Return the key, parent and ``nbytes`` of an intact entry, given as (key, stored entry).

    Called for every record when a directory is opened, so it must be fast.
    """
    key, raw = item
    nbytes = int.from_bytes(raw[NBYTES], "little")
    return PageKey(key), PageKey(raw[:36]) if raw[36] else None, nbytes


def loss_class(item: tuple[bytes, bytes]) -> tuple[PageKey, str]:
    """Return the key and loss class of an intact entry, given as (key, stored entry).

    The class is "" if the entry predates this field, or if this version does not know the class.
    """
    key, raw = item
    return PageKey(key), LOSSES[raw[LOSS]] if raw[LOSS] < len(LOSSES) else ""


def unpack(key: bytes, raw: bytes) -> Entry:
    """Decode an entry. Raises IntegrityError if it is damaged."""
    if not intact(key, raw):
        raise IntegrityError(f"the catalogue entry of page {key.hex()} does not match its checksum")
    parent, has_parent, loss, nbytes, stored_nbytes, page_number, block, extent, generation = (
        _BODY.unpack_from(raw)
    )
    return Entry(
        PageKey(parent) if has_parent else None,
        nbytes,
        stored_nbytes,
        page_number,
        extent,
        block,
        generation,
        loss,
    )
