"""Export of pages from a store to an archive. The archive appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiofiles.threadpool import wrap

from tierstore.archive import file_format
from tierstore.archive.atomic_file import Draft
from tierstore.archive.source_sink import Progress, Source, ahead, most_ahead, whole
from tierstore.errors import ArchiveError
from tierstore.nvme.reader import Record
from tierstore.types import PageKey

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedIOBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of ``write_archive``.

    Attributes:
        path: The file.
        pages: Number of pages in the file.
        nbytes: Size of the file in bytes.
        page_nbytes: Size of an uncompressed page in bytes.
        codecs: Number of pages in the file for each codec.
        missing: Requested pages that are not in the file, each with the reason.
    """

    path: Path
    pages: int
    nbytes: int
    page_nbytes: int
    codecs: dict[str, int]
    missing: tuple[tuple[PageKey, str], ...]


async def write_archive(
    path: Path, keys: Sequence[PageKey], source: Source, progress: Progress | None = None
) -> Exported:
    """Write pages to an archive, atomically replacing an existing file.

    Pages are written in the form in which ``source`` stores them. The file is durable when the call returns. After
    an error or a cancellation, the new file is removed, and an existing file is unchanged.

    Args:
        path: The file to write.
        keys: The keys of the pages. Duplicates are written once.
        source: The store that contains the pages.
        progress: Called after every page.

    Returns:
        The size of the file, the number of pages in it, and the pages that could not be read.

    Raises:
        ArchiveError: ``keys`` is empty, or no page could be read.
        OSError: The file cannot be written, for example because the disk is full.
    """
    wanted = list(dict.fromkeys(keys))
    with Draft(path) as draft:
        file = wrap(draft.file)
        writing = _Writing(file, source, progress or _silent)
        await writing.begin()
        await writing.pages(wanted)
        if not writing.items:
            raise ArchiveError(_nothing(writing.missing))
        nbytes = await writing.end()
        await file.flush()
        await whole(partial(os.fsync, draft.file.fileno()))
        draft.commit()
    codecs = [file_format.codec_name(item.codec) for item in writing.items]
    return Exported(
        path=path,
        pages=len(writing.items),
        nbytes=nbytes,
        page_nbytes=source.description.layout.blob_nbytes,
        codecs={name: codecs.count(name) for name in sorted(set(codecs))},
        missing=tuple(writing.missing),
    )


class _Writing:
    """State of an export: the file, the items of its index so far, and the pages that could not be read."""

    def __init__(self, file: AsyncBufferedIOBase, source: Source, progress: Progress) -> None:
        self._file = file
        self._source = source
        self._progress = progress
        self._header = file_format.header(source.description)
        self._offset = 0
        self.items: list[file_format.Item] = []
        self.missing: list[tuple[PageKey, str]] = []

    async def begin(self) -> None:
        await self._write(self._header)

    async def pages(self, keys: Sequence[PageKey]) -> None:
        """Write the pages in the order of ``keys``. Meanwhile, threads read the next pages."""
        reads = [partial(self._source.record, key) for key in keys]
        most = most_ahead(self._source.description.layout.blob_nbytes)
        async with aclosing(ahead(reads, most)) as records:
            number = 0
            async for record in records:
                if isinstance(record, str):
                    self.missing.append((keys[number], record))
                else:
                    await self._add(record)
                    self._source.release(record)
                number += 1
                self._progress(number, len(keys))

    async def end(self) -> int:
        """Write the index and the trailer. Return the length of the file in bytes."""
        indexed = file_format.index(file_format.parents_first(self.items))
        start = self._offset
        await self._write(indexed)
        await self._write(file_format.trailer(self._header[-16:], start, indexed))
        return self._offset

    async def _add(self, record: Record) -> None:
        item = file_format.Item(
            record.head.key,
            record.head.parent,
            int(record.head.codec),
            record.head.raw_nbytes,
            record.head.stored_nbytes,
            self._offset,
            record.raw[file_format.CHECKSUM],
        )
        await self._write(record.raw)
        await self._write(record.payload.data)
        self.items.append(item)

    async def _write(self, piece: bytes | memoryview) -> None:
        await self._file.write(piece)
        self._offset += len(piece)


def _nothing(missing: Sequence[tuple[PageKey, str]]) -> str:
    if not missing:
        return "there is nothing to export: the list of keys is empty"
    key, reason = missing[0]
    return f"none of the {len(missing)} pages could be read (the first, {key.hex()}: {reason}); no file was written"


def _silent(done: int, total: int) -> None:
    """Do nothing."""
