"""One record of the catalogue: fixed size, with a checksum of its own. Imports no numpy: the checking child uses it."""

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
"""The rest of an entry is its checksum, over key and body."""

LOCATION = slice(64, 72)
"""Bytes of an entry: extent << 32 | block, little endian; 0 for a record that LMDB keeps."""

NBYTES = slice(40, 48)
"""Bytes of an entry: its ``nbytes``, little endian."""

STORED_NBYTES = slice(48, 56)
"""Bytes of an entry: its ``stored_nbytes``, little endian."""

PAGE_NUMBER = slice(56, 64)
"""Bytes of an entry: its ``page_number``, little endian. Versions up to decision 026 read records there."""

CATALOGUE_SHARE = 1024
"""In an entry's ``nbytes``: leaf and branch bytes of one record in both trees, at their lowest fill of a quarter."""

LOSS = 37
"""Byte of an entry: its ``loss``."""

LOSSES = ("", "exact", "fp8", "int8", "k8v4", "int4", "int4-64")
"""Classes of loss by their numbers, which are never given to another. 0: the entry is older than this field."""

_BODY = struct.Struct("<36sBB2xQQQIIQ")
_NO_PARENT = bytes(36)


class Entry(NamedTuple):
    """Where and how one page is stored.

    ``nbytes`` is what the record costs on disk, ``stored_nbytes`` its payload. In an extent file: its number (from 1)
    and the slot's first 4 KiB block there, else 0. ``generation``: what the record's head repeats. ``loss``: of the
    keys' namespace, see LOSSES. ``page_number``: where LMDB keeps the record in data.mdb, as versions up to decision
    026 noted it, else 0; nothing is read there.
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
    """Blocks of the slot in an extent file whose record costs ``nbytes``, whatever the sizes of slots were then."""
    return (nbytes - CATALOGUE_SHARE) // 4096


def pack(key: bytes, entry: Entry) -> bytes:
    """``entry`` as it is stored under ``key``."""
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
    """Whether ``raw`` is what ``pack`` made for ``key``."""
    return len(raw) == ENTRY_NBYTES and xxh3_64_digest(key + raw[:BODY_NBYTES]) == raw[BODY_NBYTES:]


def summary(item: tuple[bytes, bytes]) -> tuple[PageKey, PageKey | None, int]:
    """Key, parent and ``nbytes`` of an entry known to be intact: what an open needs, a million times."""
    key, raw = item
    nbytes = int.from_bytes(raw[NBYTES], "little")
    return PageKey(key), PageKey(raw[:36]) if raw[36] else None, nbytes


def loss_class(item: tuple[bytes, bytes]) -> tuple[PageKey, str]:
    """Key and class of loss of an entry known to be intact; "" where it says nothing that this version knows."""
    key, raw = item
    return PageKey(key), LOSSES[raw[LOSS]] if raw[LOSS] < len(LOSSES) else ""


def unpack(key: bytes, raw: bytes) -> Entry:
    """The entry in ``raw``; IntegrityError unless it is intact."""
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
