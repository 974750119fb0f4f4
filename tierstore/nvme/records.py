"""Where page records are kept: in LMDB beside the catalogue, or in extent files. The writer's thread, or at open.

Both answer the same calls of a ``Catalogue``: ``write`` before its transaction, ``entry``, ``replaced`` and ``erased``
within it, then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if nobody knows.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.exp import Encoder
from tierstore.nvme.direct import BLOCK, aligned, is_aligned, padded
from tierstore.nvme.entry import Entry, unpack
from tierstore.nvme.extents import PREFIX, ExtentFiles
from tierstore.nvme.sizing import Sizing
from tierstore.nvme.slots import Place, Slots
from tierstore.types import PageKey


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]


class Written(NamedTuple):
    """Where a page's bytes are already. Neither means anything in LMDB, which gets them within the transaction."""

    place: Place = Place(0, 0)
    generation: int = 0


class Records(Protocol):
    """What a catalogue asks of the place of its records."""

    def room(self) -> int | None:
        """How many pages ``write`` has places for; None: the map decides."""
        ...

    def write(self, pages: Sequence[Page]) -> Sequence[Written]:
        """Put the bytes on disk, durably, before any entry says so. If it raises nothing is kept."""
        ...

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        """The entry of a page."""
        ...

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """The transaction replaces or removes this entry."""
        ...

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """The transaction removes this record."""
        ...

    def settle(self) -> None:
        """The transaction is committed."""
        ...

    def undo(self) -> None:
        """The transaction is certainly not committed."""
        ...

    def doubt(self) -> None:
        """The transaction raised: it may be committed or not."""
        ...


class InlineRecords:
    """Records are values of LMDB's ``pages`` tree."""

    numbered = False
    """Whether page numbers can be told: a self-test says."""

    def __init__(
        self,
        pages: lmdb._Database,
        sizing: Sizing,
        *,
        fingerprint: bytes,
        page_nbytes: int,
        encoder: Encoder | None,
    ) -> None:
        self._pages = pages
        self._sizing = sizing
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._record = np.empty(codec.record_nbytes(page_nbytes), dtype=np.uint8)

    def room(self) -> int | None:
        return None

    def write(self, pages: Sequence[Page]) -> Sequence[Written]:
        return [Written()] * len(pages)

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        length = codec.encode(
            page.payload,
            self._record,
            fingerprint=self._fingerprint,
            key=page.key,
            parent=page.parent,
            encoder=self._encoder,
        )
        stored = length - codec.HEAD_NBYTES
        txn.put(page.key, self._record[:length].data, db=self._pages)
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.cost(stored),
            stored_nbytes=stored,
            page_number=page_number(txn, page.key, self._pages) if self.numbered else 0,
        )

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """LMDB keeps what is still read."""

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        txn.delete(key, db=self._pages)

    def settle(self) -> None:
        """Nothing is left to do."""

    def undo(self) -> None:
        """LMDB did."""

    def doubt(self) -> None:
        """LMDB knows."""


class ExtentRecords:
    """Records are slots of extent files; a slot is written again only after the end of its entry is committed."""

    def __init__(
        self, files: ExtentFiles, slots: Slots, sizing: Sizing, *, fingerprint: bytes, page_nbytes: int
    ) -> None:
        self._files = files
        self._slots = slots
        self._sizing = sizing
        self._fingerprint = fingerprint
        self._page_nbytes = page_nbytes
        self._heads = aligned(sizing.batch_pages * BLOCK).reshape(-1, BLOCK)
        self._heads[:, : len(PREFIX)] = np.frombuffer(PREFIX, dtype=np.uint8)
        self._copies = aligned(sizing.batch_pages * padded(page_nbytes)).reshape(sizing.batch_pages, -1)
        self._generations = itertools.count(secrets.randbits(62))  # no two openings share any
        self._arriving: dict[PageKey, set[Place]] = {}
        """Slots written for the transaction that is open or comes next, and those it makes free, by key."""
        self._leaving: dict[PageKey, set[Place]] = {}
        self._doubts: dict[PageKey, set[Place]] = {}
        """Slots that an entry may name or not, since a commit failed; the next change of the key's entry settles it."""

    def room(self) -> int | None:
        return self._slots.num_free + max(0, self._sizing.num_slots - self._slots.total)

    def write(self, pages: Sequence[Page]) -> Sequence[Written]:
        places = self._take(len(pages))
        written = [Written(place, next(self._generations)) for place in places]
        step = self._sizing.batch_pages
        try:
            for first in range(0, len(pages), step):
                parts = [
                    self._parts(index, *each)
                    for index, each in enumerate(zip(pages[first:][:step], written[first:], strict=False))
                ]
                self._files.write(places[first:][:step], parts)
        except BaseException:
            self._slots.free(places)
            raise
        for page, place in zip(pages, places, strict=True):
            self._arriving.setdefault(page.key, set()).add(place)
        return written

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.record_nbytes,
            stored_nbytes=page.payload.nbytes,
            page_number=0,
            extent=written.place.extent,
            block=written.place.block,
            generation=written.generation,
        )

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        places = self._leaving.setdefault(key, set())
        places |= self._doubts.get(key, set())
        if old is None:
            return
        try:
            entry = unpack(key, old)
        except IntegrityError:
            return  # changed behind our back: its slot is found again at the next open
        if self._slots.has(place := Place(entry.extent, entry.block)):
            places.add(place)

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Its slot is free once the transaction is committed."""

    def settle(self) -> None:
        for key, places in self._leaving.items():
            self._doubts.pop(key, None)
            self._slots.free(places)
        self._arriving.clear()
        self._leaving.clear()

    def undo(self) -> None:
        for places in self._arriving.values():
            self._slots.free(places)
        self._arriving.clear()
        self._leaving.clear()

    def doubt(self) -> None:
        for pending in (self._arriving, self._leaving):
            for key, places in pending.items():
                self._doubts.setdefault(key, set()).update(places)
            pending.clear()

    def _take(self, count: int) -> list[Place]:
        """``count`` slots, of new files where the old ones are full. OSError if the disk has no room for one."""
        while self._slots.num_free < count:
            slots = min(self._sizing.extent_slots, self._sizing.num_slots - self._slots.total)
            if slots <= 0:
                raise RuntimeError("a batch larger than the room there is")
            number = self._files.add(slots * self._sizing.slot_nbytes)
            self._slots.add_extent(number, slots)
        return self._slots.take(count)

    def _parts(self, index: int, page: Page, written: Written) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Head block and padded payload of a page: the page itself where it may be written as it is."""
        payload = page.payload
        body = payload
        if not is_aligned(payload):
            body = self._copies[index]
            np.copyto(body[: payload.nbytes], payload)
            payload = body[: payload.nbytes]
        head = codec.Head(
            fingerprint=self._fingerprint,
            key=page.key,
            parent=page.parent,
            codec=codec.Codec.NONE,
            raw_nbytes=payload.nbytes,
            stored_nbytes=payload.nbytes,
            generation=written.generation,
        )
        block = self._heads[index]
        block[len(PREFIX) :] = np.frombuffer(codec.seal(head, payload), dtype=np.uint8)
        return block, body


def slots_of(files: ExtentFiles, sizing: Sizing, locations: Iterable[NDArray[np.uint64]]) -> Slots:
    """The slots of ``files``, those used that ``locations`` of the catalogue name.

    IntegrityError if one lies outside or is named twice.
    """
    slots = Slots(sizing.slot_nbytes)
    for number, nbytes in files.sizes.items():
        slots.add_extent(number, nbytes // sizing.slot_nbytes)
    for chunk in locations:
        extents, blocks = chunk >> np.uint64(32), chunk & np.uint64(0xFFFFFFFF)
        for number in np.unique(extents):
            slots.mark(int(number), blocks[extents == number].astype(np.int64))
    return slots


def page_number(txn: lmdb.Transaction[memoryview], key: bytes, db: lmdb._Database) -> int:
    """Where LMDB will write the value just put: the first field of the page header, 16 bytes before the value."""
    value = txn.get(key, db=db)
    if value is None:
        return 0
    address = np.frombuffer(value, dtype=np.uint8).ctypes.data
    return int.from_bytes(ctypes.string_at(address - 16, 8), "little")
