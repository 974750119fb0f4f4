"""Reading page records of one environment, each checked: for the reader threads, and for tools that only look.

The catalogue's entry gives the page number, and ``preadv`` within the read transaction fetches the record straight
into the caller's page: a cut or unreadable file is an error there, where a mapped read would be a signal. Entries
without a number are read through LMDB. No memoryview of LMDB's leaves a method.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.entry import summary, unpack
from tierstore.nvme.home import DATA_FILE
from tierstore.types import PageKey

SCRATCH_NBYTES = 16 + codec.HEAD_NBYTES
"""What a caller lends to ``load``: LMDB's page header and ours."""


class RecordReader:
    """Reads by any thread; keeps a descriptor of data.mdb open until ``close``."""

    def __init__(
        self, env: lmdb.Environment, catalogue: lmdb._Database, pages: lmdb._Database, *, fingerprint: str
    ) -> None:
        self._env = env
        self._catalogue = catalogue
        self._pages = pages
        self._fingerprint = codec.fingerprint_digest(fingerprint)
        self._block = env.stat()["psize"]
        # data.mdb only: closing any descriptor of lock.mdb would drop LMDB's own locks.
        self._fd = os.open(Path(env.path()) / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)

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
            if entry.page_number:
                self._read_at(entry.page_number, out, scratch)
            else:
                self._copy_value(txn, key, out, scratch)
        codec.verify(scratch[-codec.HEAD_NBYTES :], out, fingerprint=self._fingerprint, key=key)

    def summaries(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Key, parent and bytes on disk of every record, in key order, from one snapshot. Not beside a writer.

        The entries are taken as the checking child found them; each is checked again when its page is loaded.
        """
        with self._env.begin() as txn:
            yield from map(summary, txn.cursor(db=self._catalogue))

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Load every record: its key, and what is wrong with it or None. For tools; nothing is changed."""
        scratch = np.empty(SCRATCH_NBYTES, dtype=np.uint8)
        out = np.empty(0, dtype=np.uint8)
        with self._env.begin() as txn:
            items = list(txn.cursor(db=self._catalogue))
        for key, raw in items:
            try:
                length = unpack(key, raw).stored_nbytes
                if length != out.nbytes:
                    out = np.empty(length, dtype=np.uint8)
                self.load(PageKey(key), out, scratch)
            except KeyError:
                yield PageKey(key), "no record"
            except (IntegrityError, OSError, lmdb.Error) as error:
                yield PageKey(key), str(error)
            else:
                yield PageKey(key), None

    def close(self) -> None:
        """Close the descriptor, not the environment. No call may be running, and none may follow."""
        os.close(self._fd)

    def has_at(self, page_number: int, value: bytes) -> bool:
        """Whether the file holds ``value``, behind LMDB's page header, at ``page_number``."""
        return os.pread(self._fd, len(value), page_number * self._block + 16) == value

    def _read_at(self, page_number: int, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> None:
        wanted = scratch.nbytes + out.nbytes
        try:
            got = os.preadv(self._fd, [scratch.data, out.data], page_number * self._block)
        except OverflowError as error:
            raise IntegrityError("page number beyond any file") from error
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
