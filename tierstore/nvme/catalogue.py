"""The LMDB environment of one sub-directory: page records, and the catalogue that says where each one is.

Two trees under the same keys: ``catalogue`` (one small ``Entry`` each, all that an open has to read) and ``pages``
(head and payload). Both change in one transaction. Readers take the page number from the entry and ``preadv`` the
record within the read transaction, straight into the caller's page: a cut or unreadable file is an error there, where
a mapped read would be a signal. If a self-test at open finds the numbers wrong, they ask LMDB for the value instead.

No memoryview of LMDB's leaves a method. LMDB errors come as they are; the writer and the readers name them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.entry import CATALOGUE_DB, MAX_DBS, META_DB, PAGES_DB, Entry, pack, unpack
from tierstore.nvme.home import DATA_FILE
from tierstore.nvme.sizing import Sizing
from tierstore.types import PageKey

SCRATCH_NBYTES = 16 + codec.HEAD_NBYTES
"""What a reader lends to ``load``: LMDB's page header and ours."""

_PROBE_KEY = b"probe"
_TURN_KEY = b"turn"


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]


class Catalogue:
    """Opened by one process under its lock. ``store``, ``erase``, ``turn``: the writer's thread only; ``load``: any."""

    def __init__(
        self, directory: Path, sizing: Sizing, *, fingerprint: str, page_nbytes: int, readers: int
    ) -> None:
        """Opens or makes the environment, which ``check.find_fault`` has passed. lmdb.Error or OSError if it cannot."""
        self._sizing = sizing
        self._fingerprint = codec.fingerprint_digest(fingerprint)
        self._env = lmdb.open(
            str(directory),
            map_size=sizing.map_size,
            max_dbs=MAX_DBS,
            max_readers=readers + 8,
            metasync=False,
            readahead=False,
            mode=0o600,
        )
        self._env.reader_check()
        self._catalogue = self._env.open_db(CATALOGUE_DB)
        self._pages = self._env.open_db(PAGES_DB)
        self._meta = self._env.open_db(META_DB)
        self._record = np.empty(codec.record_nbytes(page_nbytes), dtype=np.uint8)
        self._block = self._env.stat()["psize"]
        # data.mdb only: closing any descriptor of lock.mdb would drop LMDB's own locks.
        self._fd = os.open(directory / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        self._turns = 0
        self._has_page_numbers = self._test_page_numbers()
        self.num_records = self._count()

    def records(self) -> Iterator[tuple[PageKey, Entry]]:
        """Every intact entry, in key order, from one snapshot. Not beside ``store`` or ``erase``."""
        with self._env.begin() as txn:
            for key, raw in txn.cursor(db=self._catalogue):
                try:
                    yield PageKey(key), unpack(key, raw)
                except IntegrityError:
                    continue

    def store(self, pages: Iterable[Page]) -> None:
        """Write the pages in one transaction: all are there when it returns, none if it raises."""
        with self._env.begin(write=True, buffers=True) as txn:
            for page in pages:
                self._put(txn, page)
        self.num_records = self._count()

    def erase(self, keys: Sequence[PageKey]) -> None:
        """Remove the records in one transaction; missing ones are no error."""
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.delete(key, db=self._catalogue)
                txn.delete(key, db=self._pages)
        self.num_records = self._count()

    def turn(self) -> None:
        """Commit a transaction that changes next to nothing.

        Space freed by one transaction serves the next but one, so this makes the last erase's room usable; it also
        tells whether the disk takes writes again.
        """
        self._turns += 1
        with self._env.begin(write=True) as txn:
            txn.put(_TURN_KEY, self._turns.to_bytes(8, "little"), db=self._meta)

    def load(self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the page of ``key`` and check every byte. ``out`` holds anything at all if it raises.

        KeyError: no such record. IntegrityError: not what was written. OSError, lmdb.Error: it could not be read.
        """
        with self._env.begin(buffers=True) as txn:
            raw = txn.get(key, db=self._catalogue)
            if raw is None:
                raise KeyError(key)
            entry = unpack(key, bytes(raw))
            if entry.stored_nbytes != out.nbytes:
                raise IntegrityError(f"record of {entry.stored_nbytes} bytes for a page of {out.nbytes}")
            if entry.page_number and self._has_page_numbers:
                self._read_at(entry.page_number, out, scratch)
            else:
                self._copy_value(txn, key, out, scratch)
        codec.verify(scratch[-codec.HEAD_NBYTES :], out, fingerprint=self._fingerprint, key=key)

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Read every record: its key, and what is wrong with it or None. For tools; nothing is changed."""
        scratch = np.empty(SCRATCH_NBYTES, dtype=np.uint8)
        out = np.empty(0, dtype=np.uint8)
        with self._env.begin() as txn:
            keys = list(txn.cursor(db=self._catalogue).iternext(keys=True, values=False))
        for key in map(PageKey, keys):
            out = self._sized_for(key, out)
            try:
                self.load(key, out, scratch)
            except (KeyError, IntegrityError, OSError, lmdb.Error) as error:
                yield key, str(error) or type(error).__name__
            else:
                yield key, None

    def sync(self) -> None:
        """Make the last commits survive a loss of power."""
        self._env.sync(True)

    def close(self) -> None:
        """No call may be running, and none may follow."""
        os.close(self._fd)
        self._env.close()

    def _put(self, txn: lmdb.Transaction[memoryview], page: Page) -> None:
        length = codec.encode(
            page.payload, self._record, fingerprint=self._fingerprint, key=page.key, parent=page.parent
        )
        txn.put(page.key, self._record[:length].data, db=self._pages)
        entry = Entry(
            parent=page.parent,
            nbytes=self._sizing.record_nbytes,
            stored_nbytes=length - codec.HEAD_NBYTES,
            page_number=self._page_number(txn, page.key, self._pages) if self._has_page_numbers else 0,
        )
        txn.put(page.key, pack(page.key, entry), db=self._catalogue)

    def _page_number(self, txn: lmdb.Transaction[memoryview], key: bytes, db: lmdb._Database) -> int:
        """Where LMDB will write the value just put: the first field of the page header, 16 bytes before the value."""
        value = txn.get(key, db=db)
        if value is None:
            return 0
        address = np.frombuffer(value, dtype=np.uint8).ctypes.data
        return int.from_bytes(ctypes.string_at(address - 16, 8), "little")

    def _read_at(self, page_number: int, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> None:
        wanted = scratch.nbytes + out.nbytes
        got = os.preadv(self._fd, [scratch.data, out.data], page_number * self._block)
        if got != wanted:
            raise IntegrityError(f"{got} bytes where the record has {wanted}")

    def _copy_value(
        self,
        txn: lmdb.Transaction[memoryview],
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
    ) -> None:
        value = txn.get(key, db=self._pages)
        if value is None:
            raise KeyError(key)
        record = np.frombuffer(value, dtype=np.uint8)
        if record.nbytes != codec.HEAD_NBYTES + out.nbytes:
            raise IntegrityError(f"value of {record.nbytes} bytes for a page of {out.nbytes}")
        np.copyto(scratch[-codec.HEAD_NBYTES :], record[: codec.HEAD_NBYTES])
        np.copyto(out, record[codec.HEAD_NBYTES :])

    def _sized_for(self, key: PageKey, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with self._env.begin() as txn:
            raw = txn.get(key, db=self._catalogue)
        try:
            length = unpack(key, raw).stored_nbytes if raw is not None else 0
        except IntegrityError:
            return out
        return out if length == out.nbytes else np.empty(min(length, 1 << 32), dtype=np.uint8)

    def _test_page_numbers(self) -> bool:
        """Whether a value's page number, as we find it, is where its bytes are in the file after the commit."""
        value = os.urandom(codec.HEAD_NBYTES + self._block)
        with self._env.begin(write=True, buffers=True) as txn:
            txn.put(_PROBE_KEY, value, db=self._meta)
            number = self._page_number(txn, _PROBE_KEY, self._meta)
        return os.pread(self._fd, len(value), number * self._block + 16) == value

    def _count(self) -> int:
        with self._env.begin() as txn:
            return txn.stat(self._catalogue)["entries"]
