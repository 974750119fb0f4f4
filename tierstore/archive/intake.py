"""Import of an archive into a store. Header, index and trailer are checked before any page is stored."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from aiofiles.threadpool import wrap
from numpy.typing import NDArray

from tierstore.archive import file_format
from tierstore.archive.file_format import require_same
from tierstore.archive.source_sink import Progress, Sink, ahead, checked, most_ahead, whole
from tierstore.errors import ArchiveError, IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.reader import Record
from tierstore.threads import SharedFile
from tierstore.types import PageKey

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedReader

_BATCH_NBYTES = 16 << 20
_BATCH_PAGES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Result of an import. Every page of the archive is counted exactly once.

    Attributes:
        path: The archive.
        pages: Number of pages that were stored.
        present: Number of pages that the store already had.
        damaged: Pages that are damaged, each with the reason. They were not stored.
        orphans: Pages that were not stored because a page before them is missing or damaged.
        no_room: Pages that were not stored because the store is full. Not all of them were verified.
    """

    path: Path
    pages: int
    present: int
    damaged: tuple[tuple[PageKey, str], ...]
    orphans: tuple[PageKey, ...]
    no_room: tuple[PageKey, ...]

    @property
    def complete(self) -> bool:
        """Whether the store now contains every page of the file."""
        return not (self.damaged or self.orphans or self.no_room)


class Contents(NamedTuple):
    """The description of an archive's pages, and the items of its index, parents before their children."""

    description: file_format.Description
    items: list[file_format.Item]


async def read_contents(path: Path) -> Contents:
    """Read and check the header, the index and the trailer of an archive. Pages are not read.

    Raises:
        ArchiveError: The file is not an archive, was truncated, or is damaged outside its pages.
        OSError: The file cannot be read.
    """
    with _named(path), _opened(path) as file:
        return await _contents(wrap(file), os.fstat(file.fileno()).st_size)


async def read_archive(path: Path, sink: Sink, progress: Progress | None = None) -> Imported:
    """Store the intact and reachable pages of an archive.

    A page can be reached if the store contains all pages before it in its sequence. A page that ``sink`` already has is
    not replaced. If the import is cancelled, the pages stored so far are kept. Each of them is complete and can
    be reached.

    Args:
        path: The archive.
        sink: The store that receives the pages.
        progress: Called after every page.

    Returns:
        The number of pages that were stored, the number that were already present, and the pages that were not
        stored.

    Raises:
        ArchiveError: The file is not an archive, was truncated, or is damaged outside its pages, or its pages
            do not match ``sink.description``. Nothing was stored.
        OSError: The file cannot be read.
        TierStoreError: See ``Sink.take``. Pages that were already stored are kept.
    """
    with _named(path), _opened(path) as file:
        reader = wrap(file)
        contents = await _contents(reader, os.fstat(file.fileno()).st_size)
        require_same(contents.description, sink.description)
        reading = _Reading(SharedFile(os.dup(file.fileno())), sink, contents)
        await reading.pages(progress)
        await reading.flush()
        reading.look_again()
    return Imported(
        path=path,
        pages=len(reading.taken),
        present=reading.present,
        damaged=tuple(reading.damaged),
        orphans=tuple(reading.orphans),
        no_room=tuple(reading.no_room),
    )


@dataclass
class _Reading:
    """State of an import. Pages are collected in a batch, and the sink stores one batch at a time."""

    file: SharedFile
    sink: Sink
    contents: Contents
    taken: list[PageKey] = field(default_factory=list)
    present: int = 0
    damaged: list[tuple[PageKey, str]] = field(default_factory=list)
    orphans: list[PageKey] = field(default_factory=list)
    no_room: list[PageKey] = field(default_factory=list)
    _kept: set[PageKey] = field(default_factory=set)
    _batch: list[Record] = field(default_factory=list)

    async def pages(self, progress: Progress | None) -> None:
        """Process all items in the order of the index. Meanwhile, threads read the next records."""
        items = self.contents.items
        looks = (partial(self._look, item) for item in items)
        most = most_ahead(self.contents.description.layout.blob_nbytes)
        async with aclosing(ahead(looks, most)) as found:
            number = 0
            async for record in found:
                await self._page(items[number], record)
                number += 1
                if progress is not None:
                    progress(number, len(items))

    async def _page(self, item: file_format.Item, found: Record | str | None) -> None:
        if self.sink.has(item.key):
            self.present += 1
            if item.parent in self._kept or self.sink.reaches(item.key):
                self._kept.add(item.key)
        elif self.no_room:
            self.no_room.append(item.key)
        elif not (item.parent is None or item.parent in self._kept or self.sink.reaches(item.parent)):
            self.orphans.append(item.key)
        else:
            await self._take(item, found)

    async def flush(self) -> None:
        """Pass the current batch to the sink, and record which of its pages were kept, were damaged or did not fit."""
        batch, self._batch = self._batch, []
        while batch:
            taken = await whole(partial(self.sink.take, batch))
            self.taken += [record.head.key for record in batch[: taken.kept]]
            batch = batch[taken.kept :]
            if batch and taken.fault is not None:
                batch = self._without_first(batch, taken.fault)
            else:
                keys = [record.head.key for record in batch]
                self._kept.difference_update(keys)
                self.no_room += keys
                return

    def look_again(self) -> None:
        """Move pages that the store no longer has from ``taken`` to ``no_room``.

        A running store that is full may drop imported pages to make space for later ones.
        """
        self.no_room += [key for key in self.taken if not self.sink.has(key)]
        self.taken = [key for key in self.taken if self.sink.has(key)]

    async def _take(self, item: file_format.Item, found: Record | str | None) -> None:
        if found is None:  # _look found the page in the store, but the store has dropped it since
            found = await whole(partial(self._read, item))
        if isinstance(found, str):
            self.damaged.append((item.key, found))
            return
        self._kept.add(item.key)
        self._batch.append(found)
        nbytes = sum(record.payload.nbytes for record in self._batch)
        if nbytes >= _BATCH_NBYTES or len(self._batch) >= _BATCH_PAGES:
            await self.flush()

    def _look(self, item: file_format.Item) -> Record | str | None:
        """Read the record of an item and verify it. Thread-safe.

        If the record is damaged, return a description of the fault. If the store has the page or is full, return
        None without reading the record.
        """
        return None if self.no_room or self.sink.has(item.key) else self._read(item)

    def _read(self, item: file_format.Item) -> Record | str:
        try:
            raw = _read_at(self.file, item.offset, item.end - item.offset)
            head, payload = raw[: record_format.HEAD_NBYTES].tobytes(), raw[record_format.HEAD_NBYTES :]
            return checked(item, head, payload, self.contents.description)
        except (IntegrityError, OSError) as error:
            return str(error)

    def _without_first(self, batch: list[Record], reason: str) -> list[Record]:
        """Remove the damaged first page of a batch, and the pages of the batch that follow it in a sequence.

        Return the rest of the batch.
        """
        lost = {batch[0].head.key}
        self.damaged.append((batch[0].head.key, reason))
        left = []
        for record in batch[1:]:
            if record.head.parent in lost:
                lost.add(record.head.key)
                self.orphans.append(record.head.key)
            else:
                left.append(record)
        self._kept -= lost
        return left


async def _contents(file: AsyncBufferedReader, nbytes: int) -> Contents:
    start = await _read(file, 0, file_format.PRELUDE_NBYTES)
    header = await _read(file, 0, file_format.header_nbytes(start))
    description = file_format.parse_header(header)
    end = await _read(file, max(0, nbytes - file_format.TRAILER_NBYTES), file_format.TRAILER_NBYTES)
    trailer = file_format.parse_trailer(end, nbytes, header[-16:])
    index = await _read(file, trailer.index_offset, trailer.num_items * file_format.ITEM_NBYTES)
    items = file_format.parse_index(index, trailer, len(header), description.layout.blob_nbytes)
    return Contents(description, items)


def _read_at(file: SharedFile, offset: int, nbytes: int) -> NDArray[np.uint8]:
    raw = np.empty(nbytes, dtype=np.uint8)
    done = 0
    while done < nbytes:
        got = os.preadv(file.fd, [raw[done:].data], offset + done)
        if not got:
            raise IntegrityError("the file was truncated while it was being read")
        done += got
    return raw


async def _read(file: AsyncBufferedReader, offset: int, nbytes: int) -> bytes:
    await file.seek(offset)
    return await file.read(nbytes)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open the file for the duration of a ``with`` block. Never awaits, so a cancellation cannot leave it open."""
    file = path.open("rb")
    with file:
        yield file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from error
