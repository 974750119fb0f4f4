"""Storage of page records in extent files.

``ExtentFiles`` are preallocated files of 4 KiB blocks, accessed with O_DIRECT where the disk supports it.
``Sealer`` prepares records in aligned memory on its own threads while the previous chunk is being written.
These threads do no I/O, so they cannot hang on the disk. ``ExtentRecords`` makes bytes durable before an entry
refers to them, and reuses a slot only after the removal of its entry is committed. It also shrinks the files when
the capacity is lowered, and merges holes. ``ExtentBytes`` reads slots, and pins each slot during the read.

Only the writer's thread, or the thread that opens the tier, may change anything. Reading is thread-safe.
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
from tierstore.types import PageKey, exact_size

PREFIX = b"TierStore extent"
"""Bytes at the start of a slot, before the head of the record."""

_HEAD_AT = BLOCK - HEAD_NBYTES
_SLOTS_A_CALL = 500  # each slot needs two buffers; the kernel accepts 1,024 per call
_BLOCKS_A_CALL = (64 << 20) // BLOCK  # a slow disk shows progress only when a call returns


class ExtentFiles:
    """All extent files of a directory, kept open. With ``direct``, they are accessed with O_DIRECT."""

    def __init__(self, directory: Path, *, direct: bool, writable: bool = True) -> None:
        """Open the files. If one of them cannot be opened, close the others and raise OSError."""
        self._directory = directory
        self._direct = direct
        self._has_new = False  # whether there are files whose names may not be durable yet
        self._fds: dict[int, int] = {}
        self.sizes = directory_layout.extent_sizes(directory)
        """Size of each file in bytes, by number."""
        try:
            for number in self.sizes:
                self._open(number, os.O_RDWR if writable else os.O_RDONLY)
        except BaseException:
            self.close()
            raise

    def add(self, nbytes: int) -> int:
        """Create a preallocated file of ``nbytes`` and return its number.

        Raises:
            OSError: The file cannot be created or allocated. No file is left behind.
        """
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
        """Delete a file to free its disk space."""
        os.close(self._fds.pop(number))
        del self.sizes[number]
        directory_layout.extent_path(self._directory, number).unlink(missing_ok=True)

    def cut(self, number: int, nbytes: int) -> None:
        """Truncate a file to ``nbytes`` to free disk space."""
        os.ftruncate(self._fds[number], nbytes)
        self.sizes[number] = nbytes

    def write(
        self, places: Sequence[Place], parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    ) -> None:
        """Write the head block and the padded payload of each record into its slot.

        Adjacent slots share one system call. The bytes are not durable until ``sync``.

        Raises:
            OSError: The write failed; any of the slots may have changed.
        """
        for first, end in _runs(places):
            buffers = deque(buffer for pair in parts[first:end] for buffer in pair)
            _write_all(self._fds[places[first].extent], buffers, places[first].block * BLOCK)

    def sync(self, places: Sequence[Place]) -> None:
        """Make the bytes written to these slots, and the names of new files, durable."""
        for number in {place.extent for place in places}:
            os.fdatasync(self._fds[number])
        if self._has_new:
            self._sync_directory()
            self._has_new = False

    def read(self, place: Place, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Read a slot's payload into ``out`` and return its head, a view of ``scratch``.

        Reads directly into ``out`` if the alignment of ``out`` allows this. Otherwise reads via ``scratch`` if that
        is aligned and large enough, or else via a temporary buffer.

        Args:
            place: The slot to read.
            out: Flat uint8 array for the payload.
            scratch: Flat uint8 array of at least one block, for the head.

        Raises:
            IntegrityError: The file is missing or truncated, or the slot does not start with a record.
            OSError: The slot cannot be read.
        """
        fd = self.descriptor(place.extent)
        if self._direct and not (is_aligned(out) and is_aligned(scratch[:BLOCK])):
            self._read_bounced(fd, place, out, scratch)
        else:
            got = os.preadv(fd, [scratch[:BLOCK].data, out.data], place.block * BLOCK)
            _require(got, out.nbytes)
        if scratch[:_HEAD_AT].tobytes() != PREFIX:
            raise IntegrityError("the slot does not start with a record")
        return scratch[_HEAD_AT:BLOCK]

    def read_run(
        self, places: Sequence[Place], outs: Sequence[NDArray[np.uint8]], heads: Sequence[NDArray[np.uint8]]
    ) -> bool:
        """Read adjacent slots of one file with one call, and return whether all bytes were read.

        Each head block is read into ``heads[i]``, and each payload into ``outs[i]``. If not all bytes were
        read, the contents of the memory are undefined.

        Raises:
            IntegrityError: The file is missing.
            OSError: The slots cannot be read.
        """
        buffers = [part.data for pair in zip(heads, outs, strict=True) for part in pair]
        got = os.preadv(self.descriptor(places[0].extent), buffers, places[0].block * BLOCK)
        return got == sum(buffer.nbytes for buffer in buffers)

    def descriptor(self, number: int) -> int:
        """Return the descriptor of a file. Raises IntegrityError if there is no such file."""
        fd = self._fds.get(number)
        if fd is None:
            raise IntegrityError(f"extent file {number} does not exist")
        return fd

    def close(self) -> None:
        """Close the files. No other call may be in progress or follow."""
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
        if self._fds.setdefault(number, fd) != fd:  # another thread was faster
            os.close(fd)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _runs(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Divide ``places`` into ranges of adjacent slots that one call can write. Yield each range as (first, end)."""
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
            raise OSError(errno.EIO, "a write to an extent file wrote 0 bytes")
        offset += done
        while buffers and done >= buffers[0].nbytes:
            done -= buffers.popleft().nbytes
        if done:
            buffers[0] = buffers[0][done:]


def _require(got: int, nbytes: int) -> None:
    if got < BLOCK + nbytes:
        raise IntegrityError(
            f"only {exact_size(got)} of the record's {exact_size(BLOCK + nbytes)} could be read"
        )


class ExtentBytes:
    """Reader of records in extent files. Pins a slot while reading it. ``close`` closes the files."""

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
                with self._slots.pinned(place):  # keeps the slot from being rewritten during the read
                    self._files.read(place, body, scratch)
            except (IntegrityError, OSError) as error:
                raw = look_again(self._env, key, raw, error)
            else:
                return Fetched(payload, raw, entry.generation)
        raise MovedError(f"the record was replaced {TRIES} times while it was being read")

    def fetch_run(
        self,
        keys: Sequence[PageKey],
        outs: Sequence[NDArray[np.uint8]],
        heads: Sequence[NDArray[np.uint8]],
        began: Callable[[], None],
    ) -> list[Fetched | None]:
        raws = self._env.entries(keys)
        places = [_exact(key, raw, out) for key, raw, out in zip(keys, raws, outs, strict=True)]
        found: list[Fetched | None] = [None] * len(keys)
        for first, end in _whole_runs(places):
            run = [place for place in places[first:end] if place is not None]
            for place in run:
                self._slots.pin(place)
            began()
            try:
                if not self._files.read_run(run, outs[first:end], heads[first:end]):
                    continue
            except (IntegrityError, OSError):
                continue  # ``fetch`` of each page shows which one cannot be read
            finally:
                for place in run:
                    self._slots.unpin(place)
            for index in range(first, end):
                raw = raws[index]
                if raw is not None and heads[index][:_HEAD_AT].tobytes() == PREFIX:
                    found[index] = Fetched(outs[index], raw, unpack(keys[index], raw).generation)
        return found

    def close(self) -> None:
        self._files.close()


def _exact(key: PageKey, raw: bytes | None, out: NDArray[np.uint8]) -> Place | None:
    """Return the slot of an entry if its payload fills the slot and can be read into ``out``, else None."""
    try:
        entry = None if raw is None else unpack(key, raw)
    except IntegrityError:
        return None
    if entry is None or entry.stored_nbytes != out.nbytes or not is_aligned(out):
        return None
    place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
    return place if place.blocks * BLOCK == BLOCK + out.nbytes else None


def _whole_runs(places: Sequence[Place | None]) -> Iterator[tuple[int, int]]:
    """Divide ``places`` into ranges of at least two adjacent slots. Yield each range as (first, end)."""
    known = [index for index, place in enumerate(places) if place is not None]
    for first, end in _runs([place for place in places if place is not None]):
        if end - first > 1 and known[end - 1] - known[first] == end - 1 - first:
            yield known[first], known[end - 1] + 1


def copy_records(files: ExtentFiles, planned: Sequence[Move]) -> None:
    """Copy records byte for byte into their new slots, and make the copies durable. The old slots are kept.

    Raises:
        OSError: A slot cannot be read or written.
        IntegrityError: A slot contains no record.
    """
    longest = max(move.old.blocks for move in planned)
    body, head = aligned((longest - 1) * BLOCK), aligned(BLOCK)
    for old, new in planned:
        payload = body[: (old.blocks - 1) * BLOCK]
        files.read(old, payload, head)
        files.write([new], [(head, payload)])
    files.sync([move.new for move in planned])


_CHUNK_NBYTES = 32 << 20
_MOST_THREADS = 4


class Sealed(NamedTuple):
    """Head block and payload of a record, which together fill its slot.

    Valid until the generator that yielded it is resumed.
    """

    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    generation: int
    stored_nbytes: int

    @property
    def nbytes(self) -> int:
        """Length of the slot in bytes."""
        return self.parts[0].nbytes + self.parts[1].nbytes


class Sealer:
    """Turns pages into records that are ready to be written. Only the writer's thread may call it."""

    def __init__(self, sizing: Sizing, *, fingerprint: bytes, coding: Coding) -> None:
        self._sizing = sizing
        self._fingerprint = fingerprint
        self._coding = coding
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0))) if coding.changes else 1
        self._idle: list[PageEncoder] = []  # an encoder works on one share at a time, on any thread
        self._step = max(self._threads, _CHUNK_NBYTES // sizing.slot_nbytes)
        rows = 2 * self._step  # one chunk is written while the next is sealed
        self._heads = aligned(rows * BLOCK).reshape(rows, BLOCK)
        self._heads[:, : len(PREFIX)] = np.frombuffer(PREFIX, dtype=np.uint8)
        self._bodies = aligned(rows * (sizing.slot_nbytes - BLOCK)).reshape(rows, -1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierstore-nvme-seal")

    def seal(self, pages: Sequence[Page], generations: Iterator[int]) -> Generator[list[Sealed]]:
        """Yield the records of ``pages`` in order, one chunk at a time.

        The pages must not change until the generator is exhausted or closed.
        """
        numbers = [next(generations) for _ in pages]
        # The first chunk is small, because nothing is written until it is sealed.
        first = min(len(pages), max(self._threads, self._step // 4))
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
            wait([*made, *ahead])  # no thread may read the pages once the caller can reuse them

    def close(self) -> None:
        """Stop the threads. This must be the last call."""
        self._pool.shutdown()

    def _begin(
        self, chunk: range, pages: Sequence[Page], numbers: Sequence[int]
    ) -> list[Future[list[Sealed]]]:
        """Submit a chunk to the n threads. Each thread seals every n-th page of the chunk."""
        begun: list[Future[list[Sealed]]] = []
        for first in range(min(self._threads, len(chunk))):
            share = chunk[first :: self._threads]
            try:
                begun.append(self._pool.submit(self._share, share, pages, numbers))
            except RuntimeError:  # the interpreter is shutting down, and no thread can start
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
        """Return a page's payload without and with the padding that fills its slot.

        If the page needs no encoding, padding or alignment, both are the page itself.
        """
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
    """Merge the records of n threads, each of which sealed every n-th page, in page order."""
    made: list[Sealed] = []
    for turn in range(len(shares[0])):
        made += [share[turn] for share in shares if turn < len(share)]
    return made


class Entries(Protocol):
    """The part of the catalogue that ``ExtentRecords`` uses."""

    def locations(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """Yield the LOCATION and NBYTES fields of all entries as arrays, in chunks and in key order."""
        ...

    def find(self, wanted: Callable[[bytes], bool]) -> list[tuple[PageKey, bytes]]:
        """Return (key, stored entry) for each entry for which ``wanted(entry)`` is true."""
        ...

    def erase(self, keys: Sequence[PageKey]) -> None:
        """Remove the records of these pages in one transaction."""
        ...

    def move(self, places: Mapping[PageKey, Place]) -> None:
        """Make the entries of these pages refer to other slots, in one transaction."""
        ...


class ExtentRecords:
    """Records in slots of extent files. A slot is reused only after the removal of its entry is committed."""

    def __init__(
        self, entries: Entries, files: ExtentFiles, sizing: Sizing, *, fingerprint: bytes, coding: Coding
    ) -> None:
        """Store records in ``files``, which the caller must close.

        Raises:
            IntegrityError: The slot of an entry lies outside its file or overlaps another slot, or the file is
                missing.
        """
        self._entries = entries
        self._files = files
        self._sizing = sizing
        self._erase_keys = sizing.erase_keys
        self._longest = sizing.slot_nbytes // BLOCK
        self._slots = _slots_of(files, self._longest, entries.locations())
        self._sealer = Sealer(sizing, fingerprint=fingerprint, coding=coding)
        self._generations = itertools.count(secrets.randbits(62))  # differ from those of every other open
        self._arriving: dict[PageKey, set[Place]] = {}
        """For each key, the slots written for the open transaction or, if none is open, for the next one.

        ``_leaving`` contains the slots that the same transaction frees.
        """
        self._leaving: dict[PageKey, set[Place]] = {}
        self._doubts: dict[PageKey, set[Place]] = {}
        """For each key, the slots that its entry may still refer to after a failed commit.

        The next committed change of the entry frees them.
        """

    @property
    def slots(self) -> Slots:
        """Allocator of the slots of all files. Readers pin slots through it."""
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
            return  # damaged by another program; its slot stays in use until the next open
        place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
        if self._slots.has(place):
            places.add(place)

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Do nothing: ``replaced`` has recorded the slot, and ``settle`` frees it."""

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
        """Truncate or delete the last extent files until all files together take at most ``nbytes``.

        The entries of records in the removed space are erased first.

        Returns:
            The number of records that were dropped.
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
        """Move records so that up to ``count`` more records of maximum length fit.

        Return whether any record was moved.

        Moving records joins the holes between them. It takes time proportional to the number of records. Errors from
        the disk and the catalogue are raised unchanged; every record is then still where its entry says.
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
        """Record that the next transaction will change the entry of ``key`` to refer to this slot."""
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
        """Take a slot, if necessary in a new file. Return None if the capacity is used up.

        Raises:
            OSError: The disk has no space for a new file.
        """
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
    """Return the slots of ``files``, with those that ``entries`` refer to marked as used.

    Args:
        entries: Chunks of the catalogue's LOCATION and NBYTES fields.

    Raises:
        IntegrityError: A slot lies outside its file or overlaps another slot, or the file is missing.
    """
    empty = np.empty(0, dtype=np.uint64)
    chunks = [(empty, empty), *entries]
    firsts, costs = (np.concatenate(column) for column in zip(*chunks, strict=True))
    used = sorted_by_extent(firsts, slot_blocks(costs))
    slots = Slots(longest)
    for number, nbytes in files.sizes.items():
        slots.add_extent(number, nbytes // BLOCK, used.pop(number, ()))
    if used:
        missing = ", ".join(map(str, sorted(used)))
        raise IntegrityError(f"the catalogue has records in extent files that are missing: {missing}")
    return slots


def _location(raw: bytes) -> int:
    return int.from_bytes(raw[LOCATION], "little")


def _reaches_behind(raw: bytes, ends: Mapping[int, int]) -> bool:
    location = _location(raw)
    end = (location & 0xFFFFFFFF) + slot_blocks(int.from_bytes(raw[NBYTES], "little"))
    return end > ends.get(location >> 32, end)
