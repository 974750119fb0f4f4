"""The directory of a closed store as the source of an export or the sink of an import. No model is needed.

A home is the directory that ``nvme.path`` names. It has a sub-directory (shard) for each fingerprint and rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import lmdb

from tierstore import keys
from tierstore.archive.file_format import Description, require_same
from tierstore.archive.source_sink import Taken
from tierstore.codecs import LOSS_CLASSES
from tierstore.errors import ArchiveError, ConfigError, TransferError
from tierstore.nvme import directory_layout
from tierstore.nvme.directory_lock import lock_path, locked_to_read
from tierstore.nvme.directory_opener import OpenShard, open_shard
from tierstore.nvme.examination import examine
from tierstore.nvme.inspection import open_reader
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.reader import Lender, Record, RecordBuffers, RecordReader
from tierstore.nvme.record_storage import Page
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey, exact_size


class Shard(NamedTuple):
    """A sub-directory of a home, with its marker file and the description of its pages from the marker."""

    directory: Path
    description: Description
    marker: directory_layout.ShardMarker


def shards_of(path: Path) -> list[Shard]:
    """Return those sub-directories of a home from which pages can be exported. Changes nothing.

    Sub-directories that are damaged, or whose marker does not describe their pages, are left out.

    Raises:
        ConfigError: ``path`` is not the directory of a store.
    """
    root = path.expanduser().resolve()
    directory_layout.require_home(root)
    found = []
    for directory, fingerprint, damaged in directory_layout.shard_directories(root):
        marker = None if damaged else directory_layout.read_marker(directory)
        layout = None if marker is None else _layout(marker)
        if marker is not None and layout is not None and layout.fingerprint == fingerprint:
            loss_class = LOSS_CLASSES.get(marker.codec, marker.codec)
            found.append(Shard(directory, Description(layout, loss_class, marker.key_scheme), marker))
    return found


def require_known(path: Path, description: Description) -> None:
    """Check that the store at ``path`` already has a sub-directory for pages with this description.

    A directory that does not exist or is empty passes the check.

    Raises:
        ArchiveError: All sub-directories are for other pages. The message names the first difference.
    """
    root = path.expanduser().resolve()
    if not root.exists() or not any(root.iterdir()):
        return
    known = shards_of(root)
    if any(shard.description.fingerprint == description.fingerprint for shard in known):
        return
    for shard in known:
        require_same(description, shard.description)


_CLOSE_S = 5.0


class ClosedSource:
    """A ``Source`` that reads the records of a sub-directory unchanged.

    It owns the open sub-directory. It never closes the memory map and the files while a
    thread is reading them.
    """

    def __init__(self, reader: RecordReader, description: Description, opened: ExitStack) -> None:
        """Create a source. Use ``open_source`` instead.

        Args:
            reader: Reads the records.
            description: Describes the pages.
            opened: Closes the reader and unlocks the sub-directory. The source takes ownership of it.
        """
        self.description = description
        self._lender = Lender(reader, description.layout.blob_nbytes)
        self._memory = RecordBuffers(description.layout.blob_nbytes)
        # An entry without a loss class has the class that the marker implies.
        self._classes = {key: found or description.loss_class for key, found in reader.loss_classes()}
        self._opened = opened.pop_all()

    def classes(self, keys: Iterable[PageKey] | None = None) -> Counter[str]:
        """Count the pages of each loss class, among ``keys`` or, if ``keys`` is None, among all pages."""
        found = self._classes
        return Counter(found.values() if keys is None else (found[key] for key in keys if key in found))

    def choose(self, loss_class: str) -> None:
        """Restrict the source to pages of this loss class. An archive contains pages of one class only."""
        self.description = replace(self.description, loss_class=loss_class)

    def keys(self) -> list[PageKey]:
        """Return the keys of all pages of the chosen loss class, in the order of the catalogue."""
        return [key for key, found in self._classes.items() if found == self.description.loss_class]

    def record(self, key: PageKey) -> Record | str:
        """See ``Source.record``."""
        wanted = self.description.loss_class
        if self._classes.get(key, wanted) != wanted:
            return f"its loss class is {self._classes[key]!r}, but this file accepts only {wanted!r}"
        return self._lender.record(key, self._memory)

    def release(self, record: Record) -> None:
        """See ``Source.release``."""
        self._memory.give_back(record)

    def close(self) -> None:
        """Reject further calls, wait up to 5 s for calls in progress, and close and unlock the sub-directory.

        If a call takes longer, or a signal handler raises an exception during the wait, the sub-directory stays
        open and locked until the call ends.
        """
        if self._lender.close(_CLOSE_S):
            self._opened.close()


@contextmanager
def open_source(shard: Shard) -> Iterator[ClosedSource]:
    """Lock a sub-directory for the duration of a ``with`` block, and yield a source of its records.

    Nothing is changed on disk.

    Raises:
        ConfigError: The sub-directory is in use or damaged.
        ArchiveError: The sub-directory contains no pages.
    """
    with ExitStack() as opened:
        holder = opened.enter_context(locked_to_read(lock_path(shard.directory)))
        if holder is not None:
            raise ConfigError(
                f"{shard.directory} is in use by process {holder or 'unknown'}; close that store first, "
                "or call its export_pages"
            )
        found = examine(shard.directory)
        if found.fault is not None:
            raise ConfigError(f"{shard.directory} is damaged: {found.fault}")
        if not found.records:
            raise ArchiveError(f"{shard.directory} holds no pages, so there is nothing to export")
        fingerprint = shard.description.layout.fingerprint
        reader = opened.enter_context(open_reader(shard.directory, fingerprint))
        source = ClosedSource(reader, shard.description, opened)
    try:
        yield source
    finally:
        source.close()


class ClosedSink:
    """A ``Sink`` that stores records unchanged in a sub-directory, as long as its capacity allows.

    It never drops existing pages to make space.
    """

    def __init__(self, shard: OpenShard, description: Description) -> None:
        """Create a sink that takes ownership of ``shard``. Use ``open_sink`` instead."""
        self.description = description
        self._shard = shard
        self._catalogue = shard.catalogue
        self._lock = Lock()
        self._closed = False
        self._present: set[PageKey] = set()
        self._cut_off: dict[PageKey, list[PageKey]] = {}
        """Pages that cannot be reached yet, grouped by parent. Each parent is missing or cannot be reached itself."""
        self._reached: set[PageKey] = set()
        for key, parent, _ in shard.catalogue.reader.summaries():
            self._note(key, parent)

    def has(self, key: PageKey) -> bool:
        """See ``Sink.has``."""
        return key in self._present

    def reaches(self, key: PageKey) -> bool:
        """See ``Sink.reaches``."""
        return key in self._reached

    def take(self, records: Sequence[Record]) -> Taken:
        """See ``Sink.take``. Records are stored in batches, one LMDB transaction each."""
        sizing = self._shard.sizing
        count = 0
        with self._lock:
            if self._closed:
                raise TransferError("the directory accepts no more pages, because the import was interrupted")
            while count < len(records):
                batch = self._fitting(records[count : count + sizing.batch_pages])
                stored = self._store(batch) if batch else 0
                count += stored
                if not stored or stored < len(batch):
                    break
        return Taken(count)

    def close(self) -> None:
        """Make all stored pages durable, and close and unlock the sub-directory. Waits for a call in progress.

        Raises:
            TransferError: The pages could not be made durable.
        """
        with self._lock:
            self._closed = True
            try:
                self._catalogue.sync()
            except (lmdb.Error, OSError) as error:
                raise _refused(error) from error
            finally:
                self._catalogue.close()
                self._shard.lock.release()

    def _fitting(self, records: Sequence[Record]) -> Sequence[Record]:
        sizing = self._shard.sizing
        room = sizing.budget_nbytes - self._catalogue.live_nbytes
        for number, record in enumerate(records):
            room -= sizing.cost(record.payload.nbytes)
            if room < 0:
                return records[:number]
        return records

    def _store(self, records: Sequence[Record]) -> int:
        """Store records in order, in one transaction. Return how many were kept, counted from the first record."""
        pages = [Page(each.head.key, each.head.parent, each.payload, each.head) for each in records]
        try:
            sizes = self._catalogue.store(pages)
            count = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
            late = [page.key for page, size in zip(pages[count:], sizes[count:], strict=True) if size]
            if late:  # records after the first that was not stored are removed: their parents may be missing
                self._catalogue.erase(late)
        except lmdb.MapFullError:
            return 0
        except (lmdb.Error, OSError) as error:
            raise _refused(error) from error
        for page in pages[:count]:
            self._note(page.key, page.parent)
        return count

    def _note(self, key: PageKey, parent: PageKey | None) -> None:
        """Add a page to the set of existing pages.

        If the page has no parent or its parent can be reached, the page can be reached, and so can existing
        pages that follow it.
        """
        self._present.add(key)
        if parent is not None and parent not in self._reached:
            self._cut_off.setdefault(parent, []).append(key)
            return
        reached = [key]
        while reached:
            found = reached.pop()
            self._reached.add(found)
            reached += self._cut_off.pop(found, ())


def _refuse_lower(path: Path, marker: directory_layout.ShardMarker) -> None:
    """Raise ConfigError if ``marker`` has a lower capacity than the existing directory.

    Opening the directory with a lower capacity could drop pages.
    """
    old = directory_layout.read_marker(
        path.expanduser() / directory_layout.shard_name(marker.fingerprint, marker.shard)
    )
    if old is not None and marker.capacity < old.capacity:
        raise ConfigError(
            f"nvme.capacity is {exact_size(marker.capacity)}, but the directory was last opened with "
            f"{exact_size(old.capacity)}; use at least that much for an import, because with a smaller capacity the "
            "directory could lose pages"
        )


@contextmanager
def open_sink(
    path: Path, description: Description, *, capacity: int, codec: str, payload: str
) -> Iterator[ClosedSink]:
    """Open or create the sub-directory for these pages for the duration of a ``with`` block, and yield its sink.

    The sub-directory is opened in the same way as by a store with this configuration. All pages that the sink has
    kept are durable when the block ends.

    Args:
        path: The home directory.
        description: Description of the pages to be imported.
        capacity: ``nvme.capacity`` of the configuration, in bytes.
        codec: ``nvme.codec`` of the configuration.
        payload: ``nvme.payload`` of the configuration.

    Raises:
        ConfigError: The directory cannot be opened, or ``capacity`` is lower than before.
        ArchiveError: The pages have a different key scheme, or ``codec`` does not match their loss class.
        TransferError: The directory contains erased pages that cannot be deleted.
    """
    if LOSS_CLASSES[codec] != description.loss_class:
        raise ArchiveError(
            f"the loss class of the pages is {description.loss_class!r}, but with nvme.codec {codec!r} the store needs "
            f"{LOSS_CLASSES[codec]!r}"
        )
    if description.key_scheme != keys.SCHEME:
        raise ArchiveError(
            f"the key scheme of the pages is {description.key_scheme!r}, but this TierStore uses {keys.SCHEME!r}"
        )
    layout = description.layout
    marker = directory_layout.ShardMarker(
        fingerprint=layout.fingerprint,
        shard=layout.shard,
        page_nbytes=layout.blob_nbytes,
        capacity=capacity,
        key_scheme=keys.SCHEME,
        codec=codec,
        description={"groups": [asdict(spec) for spec in layout.specs]},
    )
    _refuse_lower(path, marker)
    shard = open_shard(path, marker, payload, readers=None, coding=Coding(codec, layout))
    try:
        if shard.catalogue.undeleted:
            raise TransferError(
                f"the directory cannot accept pages, because {len(shard.catalogue.undeleted)} pages that were evicted "
                "could not be deleted from disk; make sure that the disk has free space and is writable"
            )
        sink = ClosedSink(shard, description)
    except BaseException:
        shard.catalogue.close()
        shard.undo()
        raise
    try:
        yield sink
    finally:
        sink.close()


def _layout(marker: directory_layout.ShardMarker) -> PageLayout | None:
    """Return the page layout that a marker describes, or None if this version does not understand it."""
    try:
        groups = marker.description["groups"]
        return PageLayout.of([PageSpec(**group) for group in groups])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        return None


def _refused(error: lmdb.Error | OSError) -> TransferError:
    return TransferError(f"the directory accepts no more pages: {error}")
