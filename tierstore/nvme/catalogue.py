"""The catalogue of one sub-directory: an LMDB environment that records where each page is stored.

The ``catalogue`` tree maps the key of each page to a small ``Entry``. Only this tree is read in full when the tier
opens. The ``pages`` tree maps the same keys to the head and payload of each record. That tree is empty if records
are stored in extent files, which are in the same directory. A page's entry and its record in LMDB change in the same
transaction. The ``meta`` tree contains a few values for the whole directory.

LMDB errors are raised unchanged. The writer and the readers turn them into a ``Failure`` for each page.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.codecs import LOSS_CLASSES
from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import (
    ENTRY_NBYTES,
    LOCATION,
    LOSSES,
    MAX_DBS,
    NBYTES,
    pack,
    unpack,
)
from tierstore.nvme.directory_layout import FULL, read_marker
from tierstore.nvme.disk_space import Sizing, require_free
from tierstore.nvme.extent_allocator import Place, Slots
from tierstore.nvme.extents import ExtentBytes, ExtentFiles, ExtentRecords
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.lmdb_pages import InlineBytes, InlineRecords
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.reader import RecordReader
from tierstore.nvme.record_storage import Page, RecordBytes, Records
from tierstore.nvme.tombstones import RETIRED_KEY, Tombstones, retired, stamp
from tierstore.types import PageKey

__all__ = ["Catalogue", "FrozenCatalogue", "Page"]

_log = logging.getLogger(__name__)

_TURN_KEY = b"turn"
_CHUNK = 100_000
_REOPEN_S = 2.0
"""Maximum time in seconds that ``reopen`` waits for transactions in progress, which are short."""

_MAX_READERS = 126
"""Minimum number of reader slots (LMDB's default). Other programs that read the environment also take slots."""


class Catalogue:
    """The catalogue of an open sub-directory whose lock this process holds.

    Only the writer's thread may change it; ``reader`` is thread-safe. Records are stored in extent files if
    ``sizing`` defines slots, else in LMDB. With ``direct``, extent files are accessed with O_DIRECT, which
    bypasses the page cache.
    """

    reader: RecordReader

    num_records: int
    """Number of records after the last transaction."""

    live_nbytes: int
    """Total size of all records on disk in bytes, after the last transaction whose outcome is known."""

    num_dropped = 0
    """Number of records dropped when the catalogue was opened, because the capacity had been lowered."""

    tombstones: Tombstones
    """Keys of erased pages whose records LMDB could not delete yet."""

    def __init__(
        self,
        directory: Path,
        sizing: Sizing,
        *,
        fingerprint: str,
        page_nbytes: int,
        readers: int,
        direct: bool = False,
        coding: Coding,
    ) -> None:
        """Open or create the environment. ``examine`` must have found no fault in it.

        Raises:
            lmdb.Error: LMDB cannot open the environment.
            OSError: A file cannot be opened.
            IntegrityError: The entries do not match the extent files.
        """
        self._sizing = sizing
        self._coding = coding
        self._loss = LOSSES.index(LOSS_CLASSES[coding.on_disk])
        self.undeleted: list[PageKey] = []
        """Keys of erased pages whose records could not be deleted on opening. The records must not be served."""
        self._change = 0  # change of live_nbytes in the open transaction
        self._known = True  # False if live_nbytes is uncertain because a failed commit may have taken effect
        self.live_nbytes = 0
        self._fingerprint = record_format.fingerprint_digest(fingerprint)
        self._files: ExtentFiles | None = None
        self._env = Environment(
            partial(
                lmdb.open,
                str(directory),
                map_size=sizing.map_size,
                max_dbs=MAX_DBS,
                max_readers=max(_MAX_READERS, readers + 8),
                metasync=False,
                mode=0o600,
            ),
            create=True,
        )
        try:
            self._set_up(directory, page_nbytes, direct)
        except BaseException:
            if self._files is not None:
                self._files.close()
            self._env.close()
            raise

    def _set_up(self, directory: Path, page_nbytes: int, direct: bool) -> None:
        self._turns = 0
        self._records: Records
        if self._sizing.slot_nbytes:
            self._set_up_extents(directory, direct)
        else:
            self._set_up_inline(page_nbytes)
        self.num_records = self._count()
        self.live_nbytes = self._sum()
        self._bury(directory)

    def _bury(self, directory: Path) -> None:
        """Load the tombstones, and delete the records that an earlier process could only mark as erased.

        If that fails, log a warning and leave the keys of these records in ``undeleted``.
        """
        with self._env.begin() as txn:
            self.tombstones = Tombstones(directory, retired(txn.get(RETIRED_KEY, db=self._env.meta)))
        if self.tombstones.live:
            self.undeleted = self.find_keys(self.tombstones.__contains__)
            try:
                self.bury(self.undeleted)
            except (lmdb.Error, OSError) as error:
                _log.warning(
                    "%d erased pages in %s cannot be deleted yet and are not served: %s",
                    len(self.undeleted),
                    directory,
                    error,
                )
                return
            self.undeleted = []
        self.prepare_tombstones()

    def prepare_tombstones(self) -> None:
        """Create or repair the tombstone file, so that it is usable even on a full disk. Ignores OSError."""
        with suppress(OSError):  # retried when disk space is free or when the file is needed
            self.tombstones.prepare()

    def bury(self, keys: Sequence[PageKey]) -> None:
        """Delete these records durably, then retire the tombstones.

        ``keys`` must contain the key of every record that a tombstone still names.

        Raises:
            lmdb.Error: The records could not be deleted. The tombstones are kept.
            OSError: The records could not be deleted. The tombstones are kept.
        """
        each = self._sizing.erase_keys
        for start in range(0, len(keys), each):
            self.erase(keys[start : start + each])
        with self._env.begin(write=True) as txn:
            txn.put(RETIRED_KEY, stamp(self.tombstones.epoch), db=self._env.meta)
        self.sync()  # the file may be reused only after this
        self.tombstones.retire()

    def _set_up_inline(self, page_nbytes: int) -> None:
        self._records = InlineRecords(
            self._env,
            self._sizing,
            fingerprint=self._fingerprint,
            page_nbytes=page_nbytes,
            coding=self._coding,
        )
        self.reader = self._reader(InlineBytes(self._env))

    def _set_up_extents(self, directory: Path, direct: bool) -> None:
        self._files = files = ExtentFiles(directory, direct=direct)
        self._records = records = ExtentRecords(
            self, files, self._sizing, fingerprint=self._fingerprint, coding=self._coding
        )
        try:
            self.num_dropped = records.shrink(self._sizing.extents_nbytes)
        except (lmdb.Error, OSError) as error:
            if not is_full(error):
                raise
            _log.warning(
                "%s uses more disk space than its capacity until the next open: %s", directory, error
            )
        self.reader = self._reader(ExtentBytes(self._env, files, records.slots))

    def _reader(self, payload: RecordBytes) -> RecordReader:
        form = self._coding.form
        return RecordReader(
            self._env,
            payload,
            fingerprint=self._fingerprint,
            held_nbytes=None if form is None else form.payload_nbytes,
        )

    def room(self) -> int:
        """Return how many more pages ``store`` can accept now if every record has the maximum size."""
        if not self._known:
            self.live_nbytes, self._known = self._sum(), True
        return max(0, self._sizing.most_nbytes - self.live_nbytes) // self._sizing.record_nbytes

    def store(self, pages: Sequence[Page]) -> list[int | None]:
        """Write the pages in one transaction. Stored pages are readable on return.

        If the call raises an exception, no page counts as stored.

        Returns:
            The size of each record on disk in bytes, or None for a page that was not stored for lack of a
            free slot.
        """
        written = self._records.write(pages)
        sizes: list[int | None] = []
        with self._changing() as txn:
            for page, where in zip(pages, written, strict=True):
                if where is None:
                    sizes.append(None)
                    continue
                self._replace(txn, page.key)
                entry = self._records.entry(txn, page, where)._replace(loss=self._loss)
                self._change += entry.nbytes
                txn.put(page.key, pack(page.key, entry), db=self._env.catalogue)
                sizes.append(entry.nbytes)
        return sizes

    def erase(self, keys: Sequence[PageKey]) -> None:
        """Remove the records of these pages in one transaction. Keys without a record are ignored."""
        with self._changing() as txn:
            for key in keys:
                self._replace(txn, key)
                txn.delete(key, db=self._env.catalogue)
                self._records.erased(txn, key)

    def has(self, key: PageKey) -> bool:
        """Return whether the page has a record."""
        return self._env.entry(key) is not None

    def in_doubt(self, key: PageKey) -> bool:
        """Return whether, since a failed commit, it is unknown which slot the entry of this page refers to.
        The next committed change of the entry ends this state.
        """
        return self._records.in_doubt(key)

    def make_places(self, pages: Sequence[Page]) -> bool:
        """Make slots for these pages by moving other records.

        Call this after ``store`` found no free slots for the pages. Return whether to retry ``store``.
        """
        return self._records.make_places(len(pages))

    def turn(self) -> None:
        """Commit a transaction that changes almost nothing.

        Space that a transaction has freed can be reused only from the second transaction after it on. This
        commit makes the space freed by the last erase usable, and shows whether the disk accepts writes
        again.
        """
        self._turns += 1
        with self._env.begin(write=True) as txn:
            txn.put(_TURN_KEY, self._turns.to_bytes(8, "little"), db=self._env.meta)

    def drop_dead_readers(self) -> int:
        """Release the reader slots that killed processes left occupied. Return the number of released slots.

        An occupied slot can keep LMDB from reusing its freed pages.
        """
        return self._env.reader_check()

    def readers(self) -> set[tuple[int, str, int]]:
        """Return the open read transactions as (PID, thread, transaction ID).

        LMDB does not reuse a freed LMDB page while one of these transactions may still read it.
        """
        rows = (line.split() for line in self._env.readers().splitlines())
        return {(int(row[0]), row[1], int(row[2])) for row in rows if row[0].isdigit() and row[-1].isdigit()}

    def check_room(self) -> None:
        """Raise OSError if the disk has no space for another record."""
        require_free(self._env.path, self._sizing.record_nbytes)

    def sync(self) -> None:
        """Flush the last commits to disk, so that they survive a power failure."""
        self._env.sync(True)

    @property
    def in_panic(self) -> bool:
        """Whether LMDB refuses all transactions until the environment is reopened (MDB_PANIC)."""
        try:
            with self._env.begin():
                return False
        except lmdb.PanicError:
            return True
        except lmdb.Error:
            return False

    def reopen(self) -> None:
        """Close and reopen the environment. Reads block meanwhile.

        The outcome of an earlier failed commit stays unknown.

        Raises:
            lmdb.Error: The environment cannot be opened now.
            OSError: The environment cannot be opened now.
        """
        self._env.reopen(_REOPEN_S)
        self._known = False
        self.num_records = self._count()

    def close(self) -> None:
        """Close the environment and the files. Idempotent. No other call may be in progress or follow."""
        self.reader.close()
        self._records.close()
        self.tombstones.close()
        self._env.close()

    @contextmanager
    def _changing(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """Open a write transaction, report its outcome to the record storage, and update the counters."""
        self._change = 0
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                yield txn
        except lmdb.MapFullError:
            self._records.undo()
            raise
        except BaseException:
            self._records.doubt()
            self._known = False
            raise
        self._records.settle()
        self.live_nbytes += self._change
        self.num_records = self._count()

    def _replace(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Tell the record storage that the entry of ``key`` changes, and subtract the size of the old record."""
        found = txn.get(key, db=self._env.catalogue)
        old = None if found is None else bytes(found)
        self._records.replaced(key, old)
        if old is not None:
            self._change -= int.from_bytes(old[NBYTES], "little")

    def _sum(self) -> int:
        return sum(int(costs.sum()) for _, costs in self.locations())

    def locations(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """Yield the LOCATION and NBYTES fields of all entries as arrays, in chunks and in key order."""
        with self._env.begin() as txn:
            values = txn.cursor(db=self._env.catalogue).iternext(keys=False, values=True)
            while chunk := b"".join(itertools.islice(values, _CHUNK)):
                rows = np.frombuffer(chunk, dtype=np.uint8).reshape(-1, ENTRY_NBYTES)
                yield _numbers(rows[:, LOCATION]), _numbers(rows[:, NBYTES])

    def find(self, wanted: Callable[[bytes], bool]) -> list[tuple[PageKey, bytes]]:
        """Return (key, stored entry) for each entry for which ``wanted(entry)`` is true, in key order."""
        with self._env.begin() as txn:
            return [(PageKey(key), raw) for key, raw in txn.cursor(db=self._env.catalogue) if wanted(raw)]

    def find_keys(self, wanted: Callable[[bytes], bool]) -> list[PageKey]:
        """Return the keys for which ``wanted(key)`` is true, in key order."""
        with self._env.begin() as txn:
            keys = txn.cursor(db=self._env.catalogue).iternext(keys=True, values=False)
            return [PageKey(key) for key in keys if wanted(key)]

    def move(self, places: Mapping[PageKey, Place]) -> None:
        """Make the entries of these pages refer to other slots of the same length, in one transaction.

        The caller must already have copied the records into these slots.

        Raises:
            IntegrityError: An entry is missing or damaged.
        """
        with self._changing() as txn:
            for key, place in places.items():
                found = txn.get(key, db=self._env.catalogue)
                if found is None:
                    raise IntegrityError(f"the catalogue no longer has an entry for page {key.hex()}")
                entry = unpack(key, bytes(found))
                self._records.replaced(key, bytes(found))
                entry = entry._replace(extent=place.extent, block=place.block)
                txn.put(key, pack(key, entry), db=self._env.catalogue)

    def _count(self) -> int:
        with self._env.begin() as txn:
            return txn.stat(self._env.catalogue)["entries"]


class FrozenCatalogue:
    """The catalogue of a sub-directory that is opened read-only. Thread-safe.

    Opening changes nothing, and LMDB creates no lock file. The caller must hold the sub-directory's own lock,
    shared or exclusive, so that no process writes meanwhile. ``examine`` must have found no fault. The reader
    does not list records whose keys are in the tombstones.
    """

    undeleted: Sequence[PageKey] = ()
    """Always empty, because the reader skips keys that are in the tombstones. See ``Catalogue.undeleted``."""

    def __init__(
        self, directory: Path, fingerprint: str, *, direct: bool = False, held_nbytes: int | None = None
    ) -> None:
        """Open the environment read-only.

        Args:
            directory: The sub-directory. It must contain records.
            fingerprint: Fingerprint of the model and settings that the records belong to.
            direct: Whether to read extent files with O_DIRECT.
            held_nbytes: See ``RecordReader``.

        Raises:
            lmdb.Error: The environment cannot be opened.
            OSError: The environment cannot be opened.
        """
        self._env = Environment(
            partial(
                lmdb.open,
                str(directory),
                readonly=True,
                lock=False,
                create=False,
                max_dbs=MAX_DBS,
            )
        )
        payload: RecordBytes = InlineBytes(self._env)
        try:
            marker = read_marker(directory)
            if marker is not None and marker.payload == "extents":
                files = ExtentFiles(directory, direct=direct, writable=False)
                payload = ExtentBytes(self._env, files, Slots(1))
            with self._env.begin() as txn:
                epoch = retired(txn.get(RETIRED_KEY, db=self._env.meta))
            tombstones = Tombstones(directory, epoch, writable=False)
            self.reader = RecordReader(
                self._env,
                payload,
                fingerprint=record_format.fingerprint_digest(fingerprint),
                held_nbytes=held_nbytes,
                erased=tombstones if tombstones.live else (),
            )
            costs = [nbytes for _, _, nbytes in self.reader.summaries()]
        except BaseException:
            payload.close()
            self._env.close()
            raise
        self.num_records, self.live_nbytes = len(costs), sum(costs)

    def close(self) -> None:
        """Close the environment and the files. No other call may be in progress or follow."""
        self.reader.close()
        self._env.close()


def is_full(error: lmdb.Error | OSError) -> bool:
    """Return whether the error means that the disk, a quota or a limit leaves no space for the write."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, lmdb.DiskError) or (type(error) is lmdb.Error and error.code in FULL)


def _numbers(column: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(column).view("<u8")[:, 0]
