"""Records in extent files: slots taken, bytes written and made durable before an entry names them, slots given back.

The writer's thread, or at open. A thread of its own makes the checksums of what is written next; it does no I/O, so
that it never hangs.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.direct import BLOCK, aligned, is_aligned, padded
from tierstore.nvme.entry import Entry, unpack
from tierstore.nvme.extents import PREFIX, ExtentFiles
from tierstore.nvme.records import Page, Written
from tierstore.nvme.sizing import Sizing
from tierstore.nvme.slots import Place, Slots
from tierstore.types import PageKey

_CHUNK_NBYTES = 8 << 20

Sealed = list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Head block and padded payload of some pages."""


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
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="tierstore-nvme-seal")
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
                self._write(pages[first : first + step], written[first : first + step])
            self._files.sync(places)
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

    def close(self) -> None:
        self._sealer.shutdown()

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

    def _write(self, pages: Sequence[Page], written: Sequence[Written]) -> None:
        """At most a batch, a chunk at a time: the next one's checksums are made while one is written."""
        step = max(1, _CHUNK_NBYTES // self._sizing.slot_nbytes)
        chunks = [range(first, min(first + step, len(pages))) for first in range(0, len(pages), step)]

        def sealed(chunk: range) -> Sealed:
            return [self._parts(index, pages[index], written[index]) for index in chunk]

        parts = sealed(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], range(0)], strict=True):
            ahead = self._begin(sealed, following)
            try:
                self._files.write([written[index].place for index in chunk], parts)
            finally:
                parts = ahead.result()  # it reads pages that are the caller's again once they have failed

    def _begin(self, sealed: Callable[[range], Sealed], chunk: range) -> Future[Sealed]:
        try:
            if chunk:
                return self._sealer.submit(sealed, chunk)
        except RuntimeError:  # the interpreter ends, and no thread begins anything
            pass
        done: Future[Sealed] = Future()
        done.set_result(sealed(chunk))
        return done

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
