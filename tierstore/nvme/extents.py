"""Page bytes in extent files: the files, records sealed and written to slots, records read, and room made again.

``ExtentFiles``: preallocated files of 4 KiB blocks, past the page cache where the disk takes that. ``Sealer``:
records made ready in aligned memory by threads of its own, while the chunk before them is written; they do no I/O, so
that they never hang. ``ExtentRecords``: bytes are durable before an entry names them, and a slot is written again
only after the end of its entry is committed; files are cut to a lower capacity, and holes joined. ``ExtentBytes``:
slots are pinned while they are read.

Only the writer's thread, or an open, changes anything; reads are for any thread.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.codecs import PageEncoder
from tierstore.errors import IntegrityError
from tierstore.nvme import directory_layout, record_format
from tierstore.nvme.catalogue_entry import LOCATION, NBYTES, Entry, slot_blocks, unpack
from tierstore.nvme.direct_io import BLOCK, aligned, is_aligned, padded, reserve, set_direct
from tierstore.nvme.disk_space import Sizing
from tierstore.nvme.extent_allocator import Move, Place, Slots, moves, sorted_by_extent
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.record_format import HEAD_NBYTES
from tierstore.nvme.record_storage import (
    TRIES,
    Fetched,
    MovedError,
    Page,
    Written,
    look_again,
    lookup,
    memory_for,
)
from tierstore.types import PageKey

PREFIX = b"TierStore extent"
"""In front of a head, where LMDB has its page header."""

_HEAD_AT = BLOCK - HEAD_NBYTES
_SLOTS_A_CALL = 500  # two buffers each; the kernel takes 1,024
_BLOCKS_A_CALL = (64 << 20) // BLOCK  # a call that ends is the only sign that a slow disk still takes writes


class ExtentFiles:
    """Every extent file of a directory, open. ``direct``: past the page cache; else through it."""

    def __init__(self, directory: Path, *, direct: bool, writable: bool = True) -> None:
        """OSError if one cannot be opened; then none stays open."""
        self._directory = directory
        self._direct = direct
        self._has_new = False  # files whose names may not be durable yet
        self._fds: dict[int, int] = {}
        self.sizes = directory_layout.extent_sizes(directory)
        """Number and bytes of each file."""
        try:
            for number in self.sizes:
                self._open(number, os.O_RDWR if writable else os.O_RDONLY)
        except BaseException:
            self.close()
            raise

    def add(self, nbytes: int) -> int:
        """Make a file of ``nbytes`` that the disk has set aside; its number. OSError, and no file, if it has not."""
        number = next(number for number in itertools.count(1) if number not in self.sizes)
        try:
            self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            reserve(self._fds[number], nbytes)
        except BaseException:
            if number in self._fds:
                os.close(self._fds.pop(number))
                directory_layout.extent_path(self._directory, number).unlink(missing_ok=True)
            raise
        self.sizes[number] = nbytes
        self._has_new = True
        return number

    def remove(self, number: int) -> None:
        """Delete a file, which gives its room back to the disk."""
        os.close(self._fds.pop(number))
        del self.sizes[number]
        directory_layout.extent_path(self._directory, number).unlink(missing_ok=True)

    def cut(self, number: int, nbytes: int) -> None:
        """Shorten a file, which gives room back to the disk."""
        os.ftruncate(self._fds[number], nbytes)
        self.sizes[number] = nbytes

    def write(
        self, places: Sequence[Place], parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    ) -> None:
        """Write head block and padded payload, which fill the slot, of each; neighbours in one call. Not durable yet.
        OSError: any of them may have changed.
        """
        for first, end in _runs(places):
            buffers = deque(buffer for pair in parts[first:end] for buffer in pair)
            _write_all(self._fds[places[first].extent], buffers, places[first].block * BLOCK)

    def sync(self, places: Sequence[Place]) -> None:
        """Make what was written there durable."""
        for number in {place.extent for place in places}:
            os.fdatasync(self._fds[number])
        if self._has_new:
            self._sync_directory()
            self._has_new = False

    def read(self, place: Place, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill ``out`` with a slot's payload and return its head, a part of ``scratch`` (at least a block).

        Straight into ``out`` where it may be, else by way of ``scratch`` if that is aligned and large enough, else of
        a buffer made for it. IntegrityError: there is no such slot, or it is cut. OSError: it could not be read.
        """
        fd = self._fds.get(place.extent)
        if fd is None:
            raise IntegrityError(f"no extent file {place.extent}")
        if self._direct and not (is_aligned(out) and is_aligned(scratch[:BLOCK])):
            self._read_bounced(fd, place, out, scratch)
        else:
            got = os.preadv(fd, [scratch[:BLOCK].data, out.data], place.block * BLOCK)
            _require(got, out.nbytes)
        if scratch[:_HEAD_AT].tobytes() != PREFIX:
            raise IntegrityError("no record begins there")
        return scratch[_HEAD_AT:BLOCK]

    def close(self) -> None:
        """No call may be running, and none may follow."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _read_bounced(
        self, fd: int, place: Place, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> None:
        length = BLOCK + padded(out.nbytes)
        bounce = scratch[:length]
        if bounce.nbytes < length or not is_aligned(bounce):
            bounce = aligned(length)
        got = os.preadv(fd, [bounce.data], place.block * BLOCK)
        _require(got, out.nbytes)
        np.copyto(out, bounce[BLOCK : BLOCK + out.nbytes])
        if bounce.base is not scratch.base:
            np.copyto(scratch[:BLOCK], bounce[:BLOCK])

    def _open(self, number: int, flags: int) -> None:
        path = directory_layout.extent_path(self._directory, number)
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if self._direct:
                set_direct(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fds[number] = fd

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _runs(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Slices of slots that lie one behind the other."""
    first = 0
    for end in range(1, len(places) + 1):
        before = places[end - 1]
        if (
            end == len(places)
            or end - first == _SLOTS_A_CALL
            or places[end].first + places[end].blocks - places[first].first > _BLOCKS_A_CALL
            or places[end].first != before.first + before.blocks
        ):
            yield first, end
            first = end


def _write_all(fd: int, buffers: deque[NDArray[np.uint8]], offset: int) -> None:
    while buffers:
        done = os.pwritev(fd, [buffer.data for buffer in buffers], offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        while buffers and done >= buffers[0].nbytes:
            done -= buffers.popleft().nbytes
        if done:
            buffers[0] = buffers[0][done:]


def _require(got: int, nbytes: int) -> None:
    if got < BLOCK + nbytes:
        raise IntegrityError(f"{got} bytes where the record has {BLOCK + nbytes}")


class ExtentBytes:
    """Of records in extent files, whose slots are pinned while they are read. ``close`` closes the files."""

    def __init__(self, env: Environment, files: ExtentFiles, slots: Slots) -> None:
        self._env = env
        self._files = files
        self._slots = slots

    def fetch(
        self,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None,
    ) -> Fetched:
        raw = lookup(self._env, key)
        for _ in range(TRIES):
            entry = unpack(key, raw)
            body, payload = memory_for(entry, out, scratch, held)
            place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
            try:
                with self._slots.pinned(place):  # nothing new is put there while the disk works
                    self._files.read(place, body, scratch)
            except (IntegrityError, OSError) as error:
                raw = look_again(self._env, key, raw, error)
            else:
                return Fetched(payload, raw, entry.generation)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def close(self) -> None:
        self._files.close()


def copy_records(files: ExtentFiles, planned: Sequence[Move]) -> None:
    """Write the records into their new slots, byte for byte and durably; the old ones stay. OSError, IntegrityError."""
    longest = max(move.old.blocks for move in planned)
    body, head = aligned((longest - 1) * BLOCK), aligned(BLOCK)
    for old, new in planned:
        payload = body[: (old.blocks - 1) * BLOCK]
        files.read(old, payload, head)
        files.write([new], [(head, payload)])
    files.sync([move.new for move in planned])


_CHUNK_NBYTES = 8 << 20
_MOST_THREADS = 4


class Sealed(NamedTuple):
    """Head block and payload of a record, which fills its slot with them. Valid until the chunk after the next."""

    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    generation: int
    stored_nbytes: int

    @property
    def nbytes(self) -> int:
        """Of the slot."""
        return self.parts[0].nbytes + self.parts[1].nbytes


class Sealer:
    """The writer's thread alone calls it."""

    def __init__(self, sizing: Sizing, *, fingerprint: bytes, coding: Coding) -> None:
        self._sizing = sizing
        self._fingerprint = fingerprint
        self._coding = coding
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0))) if coding.changes else 1
        self._idle: list[PageEncoder] = []  # an encoder serves one share at a time, whichever thread has it
        self._step = max(self._threads, _CHUNK_NBYTES // sizing.slot_nbytes)
        rows = 2 * self._step  # one chunk is written, one is made
        self._heads = aligned(rows * BLOCK).reshape(rows, BLOCK)
        self._heads[:, : len(PREFIX)] = np.frombuffer(PREFIX, dtype=np.uint8)
        self._bodies = aligned(rows * (sizing.slot_nbytes - BLOCK)).reshape(rows, -1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierstore-nvme-seal")

    def seal(self, pages: Sequence[Page], generations: Iterator[int]) -> Generator[list[Sealed]]:
        """The pages' records in their order, a chunk at a time.

        The pages may change again once this has ended, whether at its end or by ``close``.
        """
        numbers = [next(generations) for _ in pages]
        first = min(len(pages), max(self._threads, self._step // 4))  # nothing is written while it is made
        starts = [*range(first, len(pages), self._step), len(pages)]
        chunks = [range(first), *(range(start, end) for start, end in pairwise(starts))]
        made: list[Future[list[Sealed]]] = []
        ahead: list[Future[list[Sealed]]] = []
        try:
            for chunk in [*chunks, range(0)]:
                made, ahead = ahead, self._begin(chunk, pages, numbers)
                if made:
                    yield _in_order([future.result() for future in made])
        finally:
            wait([*made, *ahead])  # they read pages that are the caller's again once they have failed

    def close(self) -> None:
        """End the threads. No call may follow."""
        self._pool.shutdown()

    def _begin(
        self, chunk: range, pages: Sequence[Page], numbers: Sequence[int]
    ) -> list[Future[list[Sealed]]]:
        """A share of the chunk for every thread: every so many-th page."""
        begun: list[Future[list[Sealed]]] = []
        for first in range(min(self._threads, len(chunk))):
            share = chunk[first :: self._threads]
            try:
                begun.append(self._pool.submit(self._share, share, pages, numbers))
            except RuntimeError:  # the interpreter ends, and no thread begins anything
                done: Future[list[Sealed]] = Future()
                begun.append(done)
                done.set_result(self._share(share, pages, numbers))
        return begun

    def _share(self, share: range, pages: Sequence[Page], numbers: Sequence[int]) -> list[Sealed]:
        encoder = self._encoder()
        try:
            rows = len(self._heads)
            return [self._seal(index % rows, pages[index], numbers[index], encoder) for index in share]
        finally:
            if encoder is not None:
                self._idle.append(encoder)

    def _encoder(self) -> PageEncoder | None:
        try:
            return self._idle.pop()
        except IndexError:
            return self._coding.encoder()

    def _seal(self, row: int, page: Page, generation: int, encoder: PageEncoder | None) -> Sealed:
        payload, body = self._payload(row, page.payload, None if page.head else encoder)
        head = page.head or record_format.Head(
            fingerprint=self._fingerprint,
            key=page.key,
            parent=page.parent,
            codec=self._coding.plain
            if payload.nbytes == page.payload.nbytes
            else record_format.CODECS[self._coding.name],
            raw_nbytes=self._coding.raw_nbytes(page.payload),
            stored_nbytes=payload.nbytes,
        )
        head = replace(head, generation=generation)
        block = self._heads[row]
        block[len(PREFIX) :] = np.frombuffer(record_format.seal(head, payload), dtype=np.uint8)
        return Sealed((block, body), generation, payload.nbytes)

    def _payload(
        self, row: int, page: NDArray[np.uint8], encoder: PageEncoder | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Payload of a page, and the memory it fills up to the end of its slot: the page itself where it may be."""
        body = self._bodies[row]
        length = None if encoder is None else encoder.encode(page, body[: page.nbytes])
        if length is None and is_aligned(page) and page.nbytes == body.nbytes:
            return page, page
        if length is None:
            length = page.nbytes
            np.copyto(body[:length], page)
        body = body[: self._sizing.slot(length) - BLOCK]
        body[length:] = 0
        return body[:length], body


def _in_order(shares: list[list[Sealed]]) -> list[Sealed]:
    """What every so many-th share made, one after the other."""
    made: list[Sealed] = []
    for turn in range(len(shares[0])):
        made += [share[turn] for share in shares if turn < len(share)]
    return made


class Entries(Protocol):
    """What ``ExtentRecords`` asks of the catalogue that uses it."""

    def locations(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """LOCATION and NBYTES of all entries, as they are found, some at a time."""
        ...

    def find(self, wanted: Callable[[bytes], bool]) -> list[tuple[PageKey, bytes]]:
        """The entries that are."""
        ...

    def erase(self, keys: Sequence[PageKey]) -> None:
        """Remove records in one transaction."""
        ...

    def move(self, places: Mapping[PageKey, Place]) -> None:
        """Name other places for these in one transaction."""
        ...


class ExtentRecords:
    """Records are slots of extent files; a slot is written again only after the end of its entry is committed."""

    def __init__(
        self, entries: Entries, files: ExtentFiles, sizing: Sizing, *, fingerprint: bytes, coding: Coding
    ) -> None:
        """``files`` stay the caller's. IntegrityError if a slot of an entry lies outside or reaches into another."""
        self._entries = entries
        self._files = files
        self._sizing = sizing
        self._erase_keys = sizing.erase_keys
        self._longest = sizing.slot_nbytes // BLOCK
        self._slots = _slots_of(files, self._longest, entries.locations())
        self._sealer = Sealer(sizing, fingerprint=fingerprint, coding=coding)
        self._generations = itertools.count(secrets.randbits(62))  # no two openings share any
        self._arriving: dict[PageKey, set[Place]] = {}
        """Slots written for the transaction that is open or comes next, and those it makes free, by key."""
        self._leaving: dict[PageKey, set[Place]] = {}
        self._doubts: dict[PageKey, set[Place]] = {}
        """Slots that an entry may name or not, since a commit failed; the next change of the key's entry settles it."""

    @property
    def slots(self) -> Slots:
        """The slots of all files, for whoever reads them."""
        return self._slots

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
                self._arrives(page.key, where.place)
        return written

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

    def shrink(self, nbytes: int) -> int:
        """Give the end of the last extent files back to the disk until all take ``nbytes`` at most; how many records
        were dropped with it. Their entries go first.
        """
        ends, left = {}, nbytes // BLOCK
        for number, length in self._files.sizes.items():
            ends[number] = min(left, length // BLOCK)
            if ends[number] < min(self._longest, length // BLOCK):
                ends[number] = 0  # no record would fit
            left -= ends[number]
        cut = {number: end for number, end in ends.items() if end < self._files.sizes[number] // BLOCK}
        lost = [key for key, _ in self._entries.find(lambda raw: _reaches_behind(raw, cut))] if cut else []
        for start in range(0, len(lost), self._erase_keys):
            self._entries.erase(lost[start : start + self._erase_keys])
        for number, end in cut.items():
            self._slots.cut_extent(number, end)
            if end:
                self._files.cut(number, end * BLOCK)
            else:
                self._files.remove(number)
        return len(lost)

    def make_places(self, count: int) -> bool:
        """Move records so that up to ``count`` more of the longest fit; whether any was moved. O(records).

        Holes between records are joined. Raises what the disk or the catalogue raises; every record is then where an
        entry says.
        """
        columns = list(self._entries.locations())
        if not columns:
            return False
        firsts, costs = (np.concatenate(column) for column in zip(*columns, strict=True))
        spans = sorted_by_extent(firsts, slot_blocks(costs))
        extents = {
            number: (nbytes // BLOCK, spans.get(number, [])) for number, nbytes in self._files.sizes.items()
        }
        with moves(self._slots, extents, self._longest, count) as planned:
            if planned:
                self._move(planned)
        return bool(planned)

    def _arrives(self, key: PageKey, place: Place) -> None:
        """The transaction that comes next will name this slot under ``key``."""
        self._arriving.setdefault(key, set()).add(place)

    def _move(self, planned: Sequence[Move]) -> None:
        try:
            copy_records(self._files, planned)
        except BaseException:
            self._slots.free([move.new for move in planned])
            raise
        there = {move.old.first: move.new for move in planned}
        found = self._entries.find(lambda raw: _location(raw) in there)
        places = {key: there.pop(_location(raw)) for key, raw in found}
        self._slots.free(there.values())
        for key, place in places.items():
            self._arrives(key, place)
        self._entries.move(places)

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


def _slots_of(
    files: ExtentFiles, longest: int, entries: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64]]]
) -> Slots:
    """The slots of ``files``; used are those of ``entries``: chunks of the catalogue's LOCATION and NBYTES.

    IntegrityError if one lies outside or reaches into another.
    """
    empty = np.empty(0, dtype=np.uint64)
    chunks = [(empty, empty), *entries]
    firsts, costs = (np.concatenate(column) for column in zip(*chunks, strict=True))
    used = sorted_by_extent(firsts, slot_blocks(costs))
    slots = Slots(longest)
    for number, nbytes in files.sizes.items():
        slots.add_extent(number, nbytes // BLOCK, used.pop(number, ()))
    if used:
        raise IntegrityError(f"records in extent files {sorted(used)}, which are missing")
    return slots


def _location(raw: bytes) -> int:
    return int.from_bytes(raw[LOCATION], "little")


def _reaches_behind(raw: bytes, ends: Mapping[int, int]) -> bool:
    location = _location(raw)
    end = (location & 0xFFFFFFFF) + slot_blocks(int.from_bytes(raw[NBYTES], "little"))
    return end > ends.get(location >> 32, end)
