"""One entry of the catalogue: fixed size, with its own checksum. No numpy, because the checking child imports it."""

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
"""Length of an entry's body. The rest of an entry is a checksum over key and body."""

LOCATION = slice(64, 72)
"""Where an entry holds extent << 32 | block, little endian; 0 for a record in LMDB."""

NBYTES = slice(40, 48)
"""Where an entry holds ``nbytes``, little endian."""

STORED_NBYTES = slice(48, 56)
"""Where an entry holds ``stored_nbytes``, little endian."""

PAGE_NUMBER = slice(56, 64)
"""Where an entry holds ``page_number``, little endian. Versions before decision 026 read records there."""

CATALOGUE_SHARE = 1024
"""Share of ``nbytes`` for the leaf and branch bytes of one record in both trees, at LMDB's minimum fill of a quarter.
"""

LOSS = 37
"""Index of an entry's ``loss`` byte."""

LOSSES = ("", "exact", "fp8", "int8", "k8v4", "int4", "int4-64")
"""Loss classes by number. A number is never reused. 0: the entry is older than this field."""

_BODY = struct.Struct("<36sBB2xQQQIIQ")
_NO_PARENT = bytes(36)


class Entry(NamedTuple):
    """Where and how one page is stored.

    Attributes:
        nbytes: What the record costs on disk.
        stored_nbytes: Length of its payload.
        extent: Number of its extent file, from 1; 0 for a record in LMDB.
        block: First 4 KiB block of its slot in that file, else 0.
        generation: The same value as in the record's head.
        loss: Loss class of the keys' namespace, an index of LOSSES.
        page_number: Where LMDB keeps the record in data.mdb, as noted by versions before decision 026, else 0. Never
            read.
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
    """Return the blocks of a slot whose record costs ``nbytes``, independent of the slot sizes when it was written."""
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
    """Return key, parent and ``nbytes`` of an intact entry. Opening calls this once per record, so it must be fast."""
    key, raw = item
    nbytes = int.from_bytes(raw[NBYTES], "little")
    return PageKey(key), PageKey(raw[:36]) if raw[36] else None, nbytes


def loss_class(item: tuple[bytes, bytes]) -> tuple[PageKey, str]:
    """Return key and loss class of an intact entry; "" if the class is missing or unknown to this version."""
    key, raw = item
    return PageKey(key), LOSSES[raw[LOSS]] if raw[LOSS] < len(LOSSES) else ""


def unpack(key: bytes, raw: bytes) -> Entry:
    """Decode an entry. Raises IntegrityError if it is damaged."""
    if not intact(key, raw):
        raise IntegrityError("catalogue record differs from its checksum")
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
