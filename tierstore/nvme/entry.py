"""One record of the catalogue: fixed size, with a checksum of its own. Imports no numpy: the checking child uses it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from tierstore.errors import IntegrityError
from tierstore.types import PageKey

CATALOGUE_DB = b"catalogue"
PAGES_DB = b"pages"
META_DB = b"meta"
MAX_DBS = 4

ENTRY_NBYTES = 72
BODY_NBYTES = 64
"""The rest of an entry is its checksum, over key and body."""

_BODY = struct.Struct("<36sB3xQQQ")
_NO_PARENT = bytes(36)


class Entry(NamedTuple):
    """Where and how one page is stored.

    ``nbytes`` is what the record costs on disk, ``stored_nbytes`` its payload, ``page_number`` where LMDB keeps the
    record in data.mdb (0: not known, ask LMDB).
    """

    parent: PageKey | None
    nbytes: int
    stored_nbytes: int
    page_number: int


def pack(key: bytes, entry: Entry) -> bytes:
    """``entry`` as it is stored under ``key``."""
    body = _BODY.pack(
        entry.parent or _NO_PARENT,
        entry.parent is not None,
        entry.nbytes,
        entry.stored_nbytes,
        entry.page_number,
    )
    return body + xxh3_64_digest(key + body)


def intact(key: bytes, raw: bytes) -> bool:
    """Whether ``raw`` is what ``pack`` made for ``key``."""
    return len(raw) == ENTRY_NBYTES and xxh3_64_digest(key + raw[:BODY_NBYTES]) == raw[BODY_NBYTES:]


def summary(item: tuple[bytes, bytes]) -> tuple[PageKey, PageKey | None, int]:
    """Key, parent and ``nbytes`` of an entry known to be intact: what an open needs, a million times."""
    key, raw = item
    nbytes = int.from_bytes(raw[40:48], "little")
    return PageKey(key), PageKey(raw[:36]) if raw[36] else None, nbytes


def unpack(key: bytes, raw: bytes) -> Entry:
    """The entry in ``raw``; IntegrityError unless it is intact."""
    if not intact(key, raw):
        raise IntegrityError("catalogue record differs from its checksum")
    parent, has_parent, nbytes, stored_nbytes, page_number = _BODY.unpack_from(raw)
    return Entry(PageKey(parent) if has_parent else None, nbytes, stored_nbytes, page_number)
