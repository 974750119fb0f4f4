"""The file format of archives. The functions are thread-safe and do no I/O.

An archive has four parts, one directly after the other:

    header    prelude (magic, version, length) | description of the pages as JSON | xxh3-128 of both
    records   in the form in which a store contains them: a head of 4,080 bytes, then the payload. The head ends
              with the xxh3-128 of the rest of the head and of the payload
    index     one item per record, parents before their children, each with the checksum of its record
    trailer   offset of the index | number of items | checksums of header and index | xxh3-128 of all of these

A checksum covers every byte of the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import NamedTuple

from xxhash import xxh3_128_digest

from tierstore import keys
from tierstore.errors import ArchiveError
from tierstore.keys import KEY_NBYTES
from tierstore.nvme import record_format
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey, exact_size

MAGIC = b"TierArch"
END = b"TierDone"
VERSION = 1
"""Version of the format. Increment it for every change that older versions would misread."""

MOST_DESCRIBED = 1 << 20
"""Maximum length of the JSON description in a header, in bytes."""

CHECKSUM = slice(-16, None)
"""The slice of a record's head that contains the record's checksum."""

_SUM_NBYTES = 16
_PRELUDE = struct.Struct("<8sHHI")
_ITEM = struct.Struct("<36s36sBBHIQQQ16s")
_TRAILER = struct.Struct("<8sHHIQQ16s16s")
_NO_PARENT = bytes(KEY_NBYTES)

PRELUDE_NBYTES = _PRELUDE.size
ITEM_NBYTES = _ITEM.size
TRAILER_NBYTES = _TRAILER.size + _SUM_NBYTES


@dataclass(frozen=True)
class Description:
    """Description of the pages in an archive or a store: layout, loss class and key scheme."""

    layout: PageLayout
    loss_class: str = keys.EXACT
    key_scheme: str = keys.SCHEME

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of the layout's fingerprint, as stored in record heads."""
        return record_format.fingerprint_digest(self.layout.fingerprint)

    @property
    def models(self) -> str:
        """Model names of all KV groups, each name once, separated by commas."""
        return ", ".join(dict.fromkeys(spec.model for spec in self.layout.specs))


class Item(NamedTuple):
    """An item of the index: the entry for one record. Lengths and offsets are in bytes.

    ``raw_nbytes`` is the length of the uncompressed page, and ``stored_nbytes`` that of the record's payload.
    ``offset`` is the position of the record's head in the file. ``checksum`` is the last 16 bytes of the head.
    """

    key: PageKey
    parent: PageKey | None
    codec: int
    raw_nbytes: int
    stored_nbytes: int
    offset: int
    checksum: bytes

    @property
    def end(self) -> int:
        """Offset in the file at which the record ends and the next one starts."""
        return self.offset + record_format.HEAD_NBYTES + self.stored_nbytes


class Trailer(NamedTuple):
    """The contents of an archive's trailer. ``header_sum`` and ``index_sum`` are checksums of header and index."""

    index_offset: int
    num_items: int
    header_sum: bytes
    index_sum: bytes

    @property
    def file_nbytes(self) -> int:
        """Length that a file with this trailer must have, in bytes."""
        return self.index_offset + self.num_items * ITEM_NBYTES + TRAILER_NBYTES


def header(description: Description) -> bytes:
    """Return the header of an archive with pages of this description, as bytes.

    Raises:
        ArchiveError: The description is longer than ``MOST_DESCRIBED``.
    """
    layout = description.layout
    described = {
        "fingerprint": layout.fingerprint,
        "groups": [asdict(spec) for spec in layout.specs],
        "key_scheme": description.key_scheme,
        "loss_class": description.loss_class,
        "page_nbytes": layout.blob_nbytes,
    }
    body = json.dumps(described, sort_keys=True).encode()
    if len(body) > MOST_DESCRIBED:
        raise ArchiveError(
            f"the description of the pages takes {exact_size(len(body))}, more than the limit of "
            f"{exact_size(MOST_DESCRIBED)}; use a shorter model name"
        )
    summed = _PRELUDE.pack(MAGIC, VERSION, 0, len(body)) + body
    return summed + xxh3_128_digest(summed)


def header_nbytes(prelude: bytes) -> int:
    """Return the length in bytes of the header that starts with ``prelude``.

    Raises:
        ArchiveError: ``prelude`` is not the start of an archive, or the archive has another format version.
    """
    if len(prelude) < PRELUDE_NBYTES or prelude[: len(MAGIC)] != MAGIC:
        raise ArchiveError("it is not a page archive; choose a file that `tierstore export` wrote")
    _, version, reserved, length = _PRELUDE.unpack_from(prelude)
    if version != VERSION:
        raise ArchiveError(
            f"it is an archive in format version {version}, but this TierStore reads version {VERSION}; "
            "use the TierStore version that wrote it"
        )
    if reserved or length > MOST_DESCRIBED:
        raise ArchiveError("its header is damaged")
    return PRELUDE_NBYTES + int(length) + _SUM_NBYTES


def parse_header(raw: bytes) -> Description:
    """Decode and check a header.

    Raises:
        ArchiveError: The header is damaged, or this version does not understand its description of the pages.
    """
    summed, found = raw[:-_SUM_NBYTES], raw[-_SUM_NBYTES:]
    if len(raw) != header_nbytes(raw) or xxh3_128_digest(summed) != found:
        raise ArchiveError("its header is damaged")
    try:
        stated = json.loads(summed[PRELUDE_NBYTES:])
        layout = PageLayout.of([PageSpec(**group) for group in stated["groups"]])
        known = (layout.fingerprint, layout.blob_nbytes)
        if known != (stated["fingerprint"], stated["page_nbytes"]):
            raise ArchiveError(
                "its pages have a layout that this version of TierStore does not know; export them again"
            )
        return Description(layout, str(stated["loss_class"]), str(stated["key_scheme"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArchiveError(
            f"its header describes pages that this version of TierStore does not know ({error})"
        ) from error


def codec_name(number: int) -> str:
    """Return the name of the codec with this number, or the number as text if this version does not know it."""
    return record_format.NAMES.get(number, str(number))


def parents_first(items: Iterable[Item]) -> list[Item]:
    """Return the items in an order in which parents come before their children, as an index requires."""
    waiting: dict[PageKey, list[Item]] = {}
    items = list(items)
    present = {item.key for item in items}
    ordered: list[Item] = []
    for item in items:
        if item.parent is None or item.parent not in present:
            ordered.append(item)
        else:
            waiting.setdefault(item.parent, []).append(item)
    for item in ordered:  # the list grows during the loop
        ordered += waiting.pop(item.key, [])
    return ordered


def index(items: Sequence[Item]) -> bytes:
    """Return the index of an archive as bytes. ``items`` must list parents before their children."""
    return b"".join(
        _ITEM.pack(
            item.key,
            item.parent or _NO_PARENT,
            item.parent is not None,
            item.codec,
            0,
            0,
            item.raw_nbytes,
            item.stored_nbytes,
            item.offset,
            item.checksum,
        )
        for item in items
    )


def parse_index(raw: bytes, trailer: Trailer, header_end: int, page_nbytes: int) -> list[Item]:
    """Decode and check an index.

    Args:
        raw: The bytes of the index.
        trailer: The trailer of the file.
        header_end: The offset at which the header ends and the first record starts.
        page_nbytes: Size of an uncompressed page in bytes.

    Raises:
        ArchiveError: The index is damaged, or its items cannot be correct: records overlap or leave gaps, have the
            wrong length, are listed twice, or come before their parents.
    """
    if len(raw) != trailer.num_items * ITEM_NBYTES or xxh3_128_digest(raw) != trailer.index_sum:
        raise ArchiveError("its index is damaged")
    items = [
        Item(
            PageKey(key),
            PageKey(parent) if has_parent else None,
            number,
            raw_nbytes,
            stored_nbytes,
            offset,
            checksum,
        )
        for key, parent, has_parent, number, _, _, raw_nbytes, stored_nbytes, offset, checksum in (
            _ITEM.iter_unpack(raw)
        )
    ]
    end = header_end
    for item in sorted(items, key=lambda item: item.offset):
        if item.offset != end or item.raw_nbytes != page_nbytes or item.stored_nbytes > page_nbytes:
            raise ArchiveError(
                "its index is damaged: records overlap, leave a gap or have an impossible length"
            )
        end = item.end
    seen: set[PageKey] = set()
    later = {item.key for item in items}
    for item in items:
        if item.key in seen or (item.parent in later and item.parent not in seen):
            raise ArchiveError("its index is damaged: a page is listed twice, or before its parent")
        seen.add(item.key)
    if end != trailer.index_offset:
        raise ArchiveError("its index is damaged: it does not follow the last record")
    return items


def trailer(header_sum: bytes, index_offset: int, indexed: bytes) -> bytes:
    """Return the trailer of an archive as bytes.

    Args:
        header_sum: The checksum at the end of the header.
        index_offset: The offset at which the index starts.
        indexed: The bytes of the index.
    """
    count = len(indexed) // ITEM_NBYTES
    summed = _TRAILER.pack(END, VERSION, 0, 0, index_offset, count, header_sum, xxh3_128_digest(indexed))
    return summed + xxh3_128_digest(summed)


def parse_trailer(raw: bytes, file_nbytes: int, header_sum: bytes) -> Trailer:
    """Decode and check a trailer.

    Args:
        raw: The bytes of the trailer.
        file_nbytes: The actual length of the file in bytes.
        header_sum: The checksum at the end of the header.

    Raises:
        ArchiveError: The trailer is damaged, or it does not match the file's length or header.
    """
    summed, found = raw[: _TRAILER.size], raw[_TRAILER.size :]
    if len(raw) != TRAILER_NBYTES or summed[: len(END)] != END or xxh3_128_digest(summed) != found:
        raise ArchiveError("the file was truncated, or its trailer is damaged")
    _, _, _, _, index_offset, num_items, stated_sum, index_sum = _TRAILER.unpack(summed)
    end = Trailer(index_offset, num_items, stated_sum, index_sum)
    if end.file_nbytes != file_nbytes or stated_sum != header_sum:
        raise ArchiveError("its trailer does not match its header: the file was truncated or concatenated")
    return end


_ORDER = ("model", "page_size", "dtype")  # compared first, because these differences tell users the most


def require_same(found: Description, allowed: Description) -> None:
    """Check that pages with the description ``found`` may be stored as pages with the description ``allowed``.

    Raises:
        ArchiveError: The descriptions differ. The message names the first difference and both values.
    """
    if found.key_scheme != allowed.key_scheme:
        raise ArchiveError(_says("the key scheme", found.key_scheme, allowed.key_scheme))
    ours, theirs = allowed.layout.specs, found.layout.specs
    if len(ours) != len(theirs):
        raise ArchiveError(_says("the number of KV groups", len(theirs), len(ours)))
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        difference = _difference(their, our)
        if difference is not None:
            where = f" of KV group {number}" if len(ours) > 1 else ""
            name, value, expected = difference
            raise ArchiveError(_says(f"the {name}{where}", value, expected))
    if found.loss_class != allowed.loss_class:
        raise ArchiveError(_says("the loss class", found.loss_class, allowed.loss_class))


def _difference(their: PageSpec, our: PageSpec) -> tuple[str, object, object] | None:
    for name in dict.fromkeys((*_ORDER, *(field.name for field in fields(PageSpec)))):
        if getattr(their, name) != getattr(our, name):
            return name, getattr(their, name), getattr(our, name)
    return None


def _says(what: str, found: object, allowed: object) -> str:
    return f"{what} of its pages is {found!r}, but this store needs {allowed!r}"
