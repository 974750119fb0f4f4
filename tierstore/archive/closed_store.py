"""The directory of a closed store, as the source or the sink of an archive. Needs no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from tierstore.nvme.reader import Record, RecordBuffers, RecordReader, read_record
from tierstore.nvme.record_storage import Page
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey


class Shard(NamedTuple):
    """A sub-directory of a home, with its pages described by its marker."""

    directory: Path
    description: Description
    marker: directory_layout.ShardMarker


def shards_of(path: Path) -> list[Shard]:
    """List the sub-directories of a home whose markers describe their pages; only these can be exported.

    Changes nothing.

    Raises:
        ConfigError: ``path`` is not a home.
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
    """Check that pages of this description belong to a model that ``path`` already holds.

    A new or an empty directory accepts any model.

    Raises:
        ArchiveError: ``path`` holds pages of other models only. The message names the difference.
    """
    root = path.expanduser().resolve()
    if not root.exists() or not any(root.iterdir()):
        return
    known = shards_of(root)
    if any(shard.description.fingerprint == description.fingerprint for shard in known):
        return
    for shard in known:
        require_same(description, shard.description)


class ClosedSource:
    """The records of a sub-directory, unchanged."""

    def __init__(self, reader: RecordReader, description: Description) -> None:
        """Wrap an open reader, which the caller closes. ``open_source`` is the usual way to make one."""
        self.description = description
        self._reader = reader
        self._memory = RecordBuffers(description.layout.blob_nbytes)
        # An entry without a loss class has that of the directory's last opening.
        self._classes = {key: found or description.loss_class for key, found in reader.loss_classes()}

    def classes(self, keys: Iterable[PageKey] | None = None) -> Counter[str]:
        """Count pages by loss class: all pages, or those of ``keys`` that exist."""
        found = self._classes
        return Counter(found.values() if keys is None else (found[key] for key in keys if key in found))

    def choose(self, loss_class: str) -> None:
        """Restrict the source to pages of this loss class."""
        self.description = replace(self.description, loss_class=loss_class)

    def keys(self) -> list[PageKey]:
        """List the keys of the chosen loss class, in the order of the catalogue."""
        return [key for key, found in self._classes.items() if found == self.description.loss_class]

    def record(self, key: PageKey) -> Record | str:
        """See ``Source.record``."""
        wanted = self.description.loss_class
        if self._classes.get(key, wanted) != wanted:
            return f"its loss class is {self._classes[key]!r}, but this file takes {wanted!r} only"
        return read_record(self._reader, key, self._memory)

    def release(self, record: Record) -> None:
        """See ``Source.release``."""
        self._memory.give_back(record)


@contextmanager
def open_source(shard: Shard) -> Iterator[ClosedSource]:
    """Lock a sub-directory and read its records. Changes nothing.

    Raises:
        ConfigError: The sub-directory is in use or damaged.
        ArchiveError: It holds no pages.
    """
    with locked_to_read(lock_path(shard.directory)) as holder:
        if holder is not None:
            raise ConfigError(
                f"{shard.directory} is in use by process {holder or 'unknown'}; close that store first, "
                "or let it call export_pages"
            )
        found = examine(shard.directory)
        if found.fault is not None:
            raise ConfigError(f"{shard.directory} is damaged: {found.fault}")
        if not found.records:
            raise ArchiveError(f"{shard.directory} holds no pages, so there is nothing to export")
        with open_reader(shard.directory, shard.description.layout.fingerprint) as reader:
            yield ClosedSource(reader, shard.description)


class ClosedSink:
    """Stores records unchanged in a sub-directory, within its budget. Never drops an existing page."""

    def __init__(self, shard: OpenShard, description: Description) -> None:
        """Take over ``shard``. ``open_sink`` is the usual way to make one."""
        self.description = description
        self._shard = shard
        self._catalogue = shard.catalogue
        self._lock = Lock()
        self._present: set[PageKey] = set()
        self._cut_off: dict[PageKey, list[PageKey]] = {}
        """Pages that are not reachable yet, by the missing parent."""
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
        """See ``Sink.take``. Each batch is one transaction."""
        sizing = self._shard.sizing
        count = 0
        with self._lock:
            while count < len(records):
                batch = self._fitting(records[count : count + sizing.batch_pages])
                stored = self._store(batch) if batch else 0
                count += stored
                if not stored or stored < len(batch):
                    break
        return Taken(count)

    def close(self) -> None:
        """Make everything durable and release the sub-directory, after a call in progress has ended."""
        with self._lock:
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
        """Store records in order and return how many were kept."""
        pages = [Page(each.head.key, each.head.parent, each.payload, each.head) for each in records]
        try:
            sizes = self._catalogue.store(pages)
            count = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
            late = [page.key for page, size in zip(pages[count:], sizes[count:], strict=True) if size]
            if late:  # a page is kept only if its parent is
                self._catalogue.erase(late)
        except lmdb.MapFullError:
            return 0
        except (lmdb.Error, OSError) as error:
            raise _refused(error) from error
        for page in pages[:count]:
            self._note(page.key, page.parent)
        return count

    def _note(self, key: PageKey, parent: PageKey | None) -> None:
        """Record that a page exists. If its parent is reachable, so are the page and the pages waiting for it."""
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
    """Raise ConfigError if ``marker`` lowers the directory's capacity: opening would drop pages to make room."""
    old = directory_layout.read_marker(
        path.expanduser() / directory_layout.shard_name(marker.fingerprint, marker.shard)
    )
    if old is not None and marker.capacity < old.capacity:
        raise ConfigError(
            f"nvme.capacity is {marker.capacity} bytes, but the directory was opened with {old.capacity} before; "
            "set at least that for an import, because opening with less would drop pages"
        )


@contextmanager
def open_sink(
    path: Path, description: Description, *, capacity: int, codec: str, payload: str
) -> Iterator[ClosedSink]:
    """Open or create the sub-directory of ``path`` for these pages, as a store with this configuration would.

    Everything that the sink kept is durable when the context ends.

    Args:
        path: The home directory.
        description: The pages to be imported.
        capacity: ``nvme.capacity`` of the configuration, in bytes.
        codec: ``nvme.codec`` of the configuration.
        payload: ``nvme.payload`` of the configuration.

    Raises:
        ConfigError: The directory cannot be opened.
        ArchiveError: The pages have another key scheme, or another loss class than ``codec`` gives.
    """
    if LOSS_CLASSES[codec] != description.loss_class:
        raise ArchiveError(
            f"the loss class of the pages is {description.loss_class!r}, but nvme.codec {codec!r} needs "
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
                f"the directory takes no pages: {len(shard.catalogue.undeleted)} erased pages cannot be deleted from it"
            )
        sink = ClosedSink(shard, description)
    except BaseException:
        shard.catalogue.close()
        shard.lock.release()
        raise
    try:
        yield sink
    finally:
        sink.close()


def _layout(marker: directory_layout.ShardMarker) -> PageLayout | None:
    """Return the layout that a marker describes, or None if this version cannot read the description."""
    try:
        groups = marker.description["groups"]
        return PageLayout.of([PageSpec(**group) for group in groups])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        return None


def _refused(error: lmdb.Error | OSError) -> TransferError:
    return TransferError(f"the directory takes no more pages: {error}")
