"""The LMDB environment of one sub-directory: page records, and the catalogue that says where each one is.

Two trees under the same keys: ``catalogue`` (one small ``Entry`` each, all that an open has to read) and ``pages``
(head and payload). Both change in one transaction. While a record is written, its page number is taken from LMDB's
page header and kept in the entry; a self-test at open shows whether that holds with this LMDB, else it is kept as 0.

LMDB errors come as they are; the writer and the readers name them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.nvme.entry import CATALOGUE_DB, MAX_DBS, META_DB, PAGES_DB, Entry, pack
from tierstore.nvme.reading import RecordReader
from tierstore.nvme.sizing import Sizing
from tierstore.types import PageKey

_PROBE_KEY = b"probe"
_TURN_KEY = b"turn"


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]


class Catalogue:
    """Opened by one process under its lock. The writer's thread changes it; ``reader`` is for any thread."""

    reader: RecordReader

    num_records: int
    """As of the last transaction."""

    def __init__(
        self, directory: Path, sizing: Sizing, *, fingerprint: str, page_nbytes: int, readers: int
    ) -> None:
        """Open or make the environment, which ``check.examine`` has passed. lmdb.Error or OSError if it cannot be."""
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
        try:
            self._set_up(page_nbytes, fingerprint)
        except BaseException:
            self._env.close()
            raise

    def _set_up(self, page_nbytes: int, fingerprint: str) -> None:
        self._env.reader_check()
        self._catalogue = self._env.open_db(CATALOGUE_DB)
        self._pages = self._env.open_db(PAGES_DB)
        self._meta = self._env.open_db(META_DB)
        self._record = np.empty(codec.record_nbytes(page_nbytes), dtype=np.uint8)
        self._turns = 0
        self.reader = RecordReader(self._env, self._catalogue, self._pages, fingerprint=fingerprint)
        self._has_page_numbers = self._test_page_numbers()
        self.num_records = self._count()

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

    def sync(self) -> None:
        """Make the last commits survive a loss of power."""
        self._env.sync(True)

    def close(self) -> None:
        """No call may be running, and none may follow."""
        self.reader.close()
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
            page_number=_page_number(txn, page.key, self._pages) if self._has_page_numbers else 0,
        )
        txn.put(page.key, pack(page.key, entry), db=self._catalogue)

    def _test_page_numbers(self) -> bool:
        """Whether a value's page number, as we find it, is where its bytes are in the file after the commit."""
        value = os.urandom(codec.HEAD_NBYTES + 4096)
        with self._env.begin(write=True, buffers=True) as txn:
            txn.put(_PROBE_KEY, value, db=self._meta)
            number = _page_number(txn, _PROBE_KEY, self._meta)
        return 0 < number < 1 << 40 and self.reader.has_at(number, value)

    def _count(self) -> int:
        with self._env.begin() as txn:
            return txn.stat(self._catalogue)["entries"]


def _page_number(txn: lmdb.Transaction[memoryview], key: bytes, db: lmdb._Database) -> int:
    """Where LMDB will write the value just put: the first field of the page header, 16 bytes before the value."""
    value = txn.get(key, db=db)
    if value is None:
        return 0
    address = np.frombuffer(value, dtype=np.uint8).ctypes.data
    return int.from_bytes(ctypes.string_at(address - 16, 8), "little")
