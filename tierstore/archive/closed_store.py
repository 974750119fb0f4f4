"""The directory of a store that nobody has open, as the source or the sink of an archive. Needs no model."""

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
    """A sub-directory of a home, and what its marker says its pages are."""

    directory: Path
    description: Description
    marker: directory_layout.ShardMarker


def shards_of(path: Path) -> list[Shard]:
    """The sub-directories of a home that say what their pages are; of others nothing can be exported.

    ConfigError if ``path`` is not a home. Changes nothing.
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
    """ArchiveError, naming what was found and what is allowed, if ``path`` holds pages of other models only.

    A new or an empty directory takes any.
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
    """Gives the records of a sub-directory as they are."""

    def __init__(self, reader: RecordReader, description: Description) -> None:
        """Takes nothing over; use ``open_source``."""
        self.description = description
        self._reader = reader
        self._memory = RecordBuffers(description.layout.blob_nbytes)
        # An entry that does not say so is of the class that the directory was opened with last.
        self._classes = {key: found or description.loss_class for key, found in reader.loss_classes()}

    def classes(self, keys: Iterable[PageKey] | None = None) -> Counter[str]:
        """The classes of loss of all pages, or of those of ``keys`` that are there, and how many are of each."""
        found = self._classes
        return Counter(found.values() if keys is None else (found[key] for key in keys if key in found))

    def choose(self, loss_class: str) -> None:
        """Give pages of this class of loss and no others."""
        self.description = replace(self.description, loss_class=loss_class)

    def keys(self) -> list[PageKey]:
        """Every page of the class, in the order of the catalogue."""
        return [key for key, found in self._classes.items() if found == self.description.loss_class]

    def record(self, key: PageKey) -> Record | str:
        """``Source.record``."""
        wanted = self.description.loss_class
        if self._classes.get(key, wanted) != wanted:
            return f"its loss class is {self._classes[key]!r}, but this file takes {wanted!r} only"
        return read_record(self._reader, key, self._memory)

    def release(self, record: Record) -> None:
        """``Source.release``."""
        self._memory.give_back(record)


@contextmanager
def open_source(shard: Shard) -> Iterator[ClosedSource]:
    """Hold a sub-directory and read its records; changes nothing. ConfigError if it is in use or damaged."""
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
    """Takes records into a sub-directory as they are, within its budget. Drops nothing that is there."""

    def __init__(self, shard: OpenShard, description: Description) -> None:
        """Takes ``shard`` over; use ``open_sink``."""
        self.description = description
        self._shard = shard
        self._catalogue = shard.catalogue
        self._lock = Lock()
        self._present: set[PageKey] = set()
        self._cut_off: dict[PageKey, list[PageKey]] = {}
        """By the page before them: pages that cannot be reached yet."""
        self._reached: set[PageKey] = set()
        for key, parent, _ in shard.catalogue.reader.summaries():
            self._note(key, parent)

    def has(self, key: PageKey) -> bool:
        """``Sink.has``."""
        return key in self._present

    def reaches(self, key: PageKey) -> bool:
        """``Sink.reaches``."""
        return key in self._reached

    def take(self, records: Sequence[Record]) -> Taken:
        """``Sink.take``: each batch is one transaction."""
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
        """Make everything durable and let the sub-directory go, once no call is running."""
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
        """How many are kept, from the first on."""
        pages = [Page(each.head.key, each.head.parent, each.payload, each.head) for each in records]
        try:
            sizes = self._catalogue.store(pages)
            count = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
            late = [page.key for page, size in zip(pages[count:], sizes[count:], strict=True) if size]
            if late:  # no page without those before it
                self._catalogue.erase(late)
        except lmdb.MapFullError:
            return 0
        except (lmdb.Error, OSError) as error:
            raise _refused(error) from error
        for page in pages[:count]:
            self._note(page.key, page.parent)
        return count

    def _note(self, key: PageKey, parent: PageKey | None) -> None:
        """A page is there: it is reached if the one before it is, and with it what waits for it."""
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
    """ConfigError for a capacity below that of the directory: opened so, it would drop pages to take others in."""
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
    """Open or make the sub-directory of ``path`` for these pages, as the store of this configuration would.

    ``capacity``, ``codec`` and ``payload``: of its nvme section. ConfigError if it cannot be had; ArchiveError for keys
    of another scheme or for another loss class than ``codec`` gives. Everything kept is durable at the end.
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
    """What the marker says of the pages; None if it says nothing that this version knows."""
    try:
        groups = marker.description["groups"]
        return PageLayout.of([PageSpec(**group) for group in groups])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        return None


def _refused(error: lmdb.Error | OSError) -> TransferError:
    return TransferError(f"the directory takes no more pages: {error}")
