"""Records in extent files: slots taken, bytes written and made durable before an entry names them, slots given back.

The writer's thread, or at open. Threads of its own encode and sum what is written next; they do no I/O, so that they
never hang.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from contextlib import closing

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme.allocator import Place, Slots, sorted_by_extent
from tierstore.nvme.capacity import Sizing
from tierstore.nvme.direct_io import BLOCK
from tierstore.nvme.entry import Entry, slot_blocks, unpack
from tierstore.nvme.extents import ExtentFiles
from tierstore.nvme.record import Page, Written
from tierstore.nvme.sealing import Sealed, Sealer
from tierstore.types import PageKey


class ExtentRecords:
    """Records are slots of extent files; a slot is written again only after the end of its entry is committed."""

    def __init__(self, files: ExtentFiles, slots: Slots, sizing: Sizing, sealer: Sealer) -> None:
        self._files = files
        self._slots = slots
        self._sizing = sizing
        self._sealer = sealer
        self._generations = itertools.count(secrets.randbits(62))  # no two openings share any
        self._arriving: dict[PageKey, set[Place]] = {}
        """Slots written for the transaction that is open or comes next, and those it makes free, by key."""
        self._leaving: dict[PageKey, set[Place]] = {}
        self._doubts: dict[PageKey, set[Place]] = {}
        """Slots that an entry may name or not, since a commit failed; the next change of the key's entry settles it."""

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        written: list[Written | None] = []
        try:
            with closing(self._sealer.seal(pages, self._generations)) as chunks:
                for sealed in chunks:
                    for each in sealed:
                        place = self._take(each.nbytes // BLOCK)
                        where = None if place is None else Written(place, each.generation, each.stored_nbytes)
                        written.append(where)
                    self._put(written[-len(sealed) :], sealed)
            self._files.sync(_places(written))
        except BaseException:
            self._slots.free(_places(written))
            raise
        for page, where in zip(pages, written, strict=True):
            if where is not None:
                self.arriving(page.key, where.place)
        return written

    def arriving(self, key: PageKey, place: Place) -> None:
        """The transaction that comes next will name this slot under ``key``."""
        self._arriving.setdefault(key, set()).add(place)

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.cost(written.stored_nbytes),
            stored_nbytes=written.stored_nbytes,
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
        place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
        if self._slots.has(place):
            places.add(place)

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Its slot is free once the transaction is committed."""

    def settle(self) -> None:
        for key, places in self._leaving.items():
            self._doubts.pop(key, None)
            self._slots.free(places)
        self._arriving.clear()
        self._leaving.clear()

    def close(self) -> None:
        self._sealer.close()

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

    def in_doubt(self, key: PageKey) -> bool:
        return key in self._doubts

    def _put(self, written: Sequence[Written | None], sealed: Sequence[Sealed]) -> None:
        placed = [(to.place, each.parts) for to, each in zip(written, sealed, strict=True) if to is not None]
        self._files.write([place for place, _ in placed], [parts for _, parts in placed])

    def _take(self, blocks: int) -> Place | None:
        """A slot, in a new file where the old ones have none. OSError if the disk has no room for one."""
        place = self._slots.take(blocks)
        left = self._sizing.extents_nbytes - self._slots.total * BLOCK
        if place is None and left >= blocks * BLOCK:
            nbytes = min(max(self._sizing.extent_nbytes, blocks * BLOCK), left) // BLOCK * BLOCK
            self._slots.add_extent(self._files.add(nbytes), nbytes // BLOCK)
            place = self._slots.take(blocks)
        return place


def _places(written: Sequence[Written | None]) -> list[Place]:
    return [where.place for where in written if where is not None]


def slots_of(
    files: ExtentFiles, sizing: Sizing, entries: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64]]]
) -> Slots:
    """The slots of ``files``; used are those of ``entries``: chunks of the catalogue's LOCATION and NBYTES.

    IntegrityError if one lies outside or reaches into another.
    """
    empty = np.empty(0, dtype=np.uint64)
    chunks = [(empty, empty), *entries]
    firsts, costs = (np.concatenate(column) for column in zip(*chunks, strict=True))
    used = sorted_by_extent(firsts, slot_blocks(costs))
    slots = Slots(sizing.slot_nbytes // BLOCK)
    for number, nbytes in files.sizes.items():
        slots.add_extent(number, nbytes // BLOCK, used.pop(number, ()))
    if used:
        raise IntegrityError(f"records in extent files {sorted(used)}, which are missing")
    return slots
