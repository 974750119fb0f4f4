"""Page bytes in LMDB: records as values beside the catalogue, read at their page number past LMDB's map.

While a record is written its page number is taken from LMDB's page header and kept in the entry; a self-test shows
whether that holds with this LMDB. Records whose entry has no page number are copied out of LMDB's map, inside the
transaction. No memoryview of LMDB's leaves a method.

LMDB frees as many pages as the header of a value says, from the page that it says; one that changed on disk ends that
in transactions that fail for good, in a signal, or in a live page that is written over. Nothing else reads these
headers, and what they must say follows from the catalogue's entry, which has a checksum of its own and agrees with
LMDB's tree: ``tree`` saw to it. So a wrong header is written anew before LMDB frees what it names.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import Entry, unpack
from tierstore.nvme.direct_io import BLOCK, is_aligned, set_direct
from tierstore.nvme.directory_layout import DATA_FILE
from tierstore.nvme.disk_space import Sizing
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.page_coding import Coding
from tierstore.nvme.record_storage import (
    HEAD,
    TRIES,
    Fetched,
    MovedError,
    Page,
    Written,
    look_again,
    lookup,
    memory_for,
)
from tierstore.types import PageKey

_log = logging.getLogger("tierstore.nvme.headers")

_HEADER = struct.Struct("<QHHI")  # page number, pad, flags, pages
_LARGE = 4


class PageHeaders:
    """Of the environment in ``directory``, with pages of ``block`` bytes. By one thread, within its write transactions.

    ``num_mended``: how many were wrong.
    """

    def __init__(self, directory: Path, block: int) -> None:
        self.num_mended = 0
        self._path, self._block = directory / DATA_FILE, block
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def mend(self, page_number: int, nbytes: int) -> None:
        """See that the header is right of a value of ``nbytes`` at this page, which is committed and will be freed.

        Nobody writes to such a page but this. OSError if it cannot be read or written; then it must not be freed.
        """
        right = _HEADER.pack(page_number, 0, _LARGE, -(-(_HEADER.size + nbytes) // self._block))
        if os.pread(self._fd, _HEADER.size, page_number * self._block) == right:
            return
        if os.pwrite(self._fd, right, page_number * self._block) < _HEADER.size:
            raise OSError(f"the header of page {page_number} cannot be written")
        self.num_mended += 1
        _log.warning("the header of page %d in %s was damaged, and is mended", page_number, self._path)

    def close(self) -> None:
        """No call may follow."""
        os.close(self._fd)


class InlineBytes:
    """Of records that LMDB keeps. Keeps data.mdb open twice where ``direct``, for buffers that are not aligned."""

    def __init__(self, env: Environment, *, direct: bool) -> None:
        self._env = env
        self._block = env.block
        # data.mdb only: closing any descriptor of lock.mdb would drop LMDB's own locks.
        self._fd = os.open(env.path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        self._direct_fd = -1
        if direct and self._block % BLOCK == 0:
            self._direct_fd = os.open(env.path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
            set_direct(self._direct_fd)

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
            if not entry.page_number:
                return self._copied(key, out, scratch, held)
            body, payload = memory_for(entry, out, scratch, held)
            try:
                self._read_at(entry.page_number, body, scratch[:BLOCK], BLOCK + payload.nbytes)
            except (IntegrityError, OSError) as error:
                raw = look_again(self._env, key, raw, error)
            else:
                return Fetched(payload, raw, entry.generation)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd >= 0:
            os.close(self._direct_fd)

    def _read_at(
        self, page_number: int, out: NDArray[np.uint8], head: NDArray[np.uint8], wanted: int
    ) -> None:
        direct = self._direct_fd >= 0 and is_aligned(out) and is_aligned(head)
        try:
            got = os.preadv(
                self._direct_fd if direct else self._fd, [head.data, out.data], page_number * self._block
            )
        except OverflowError as error:
            raise IntegrityError("page number beyond any file") from error
        if got < wanted:
            raise IntegrityError(f"{got} bytes where the record has {wanted}")

    def _copied(
        self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8], held: int | None
    ) -> Fetched:
        """A record whose place in the file is not known, out of LMDB's map."""
        with self._env.begin(buffers=True) as txn:
            found = txn.get(key, db=self._env.catalogue)
            if found is None:
                raise KeyError(key)
            raw = bytes(found)
            entry = unpack(key, raw)
            _, payload = memory_for(entry, out, scratch, held)
            self._copy_value(txn, key, payload, scratch)
        return Fetched(payload, raw, entry.generation)

    def _copy_value(
        self,
        txn: lmdb.Transaction[memoryview],
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
    ) -> None:
        value = txn.get(key, db=self._env.pages)
        if value is None:
            raise KeyError(key)
        record = np.frombuffer(value, dtype=np.uint8)
        if record.nbytes != record_format.HEAD_NBYTES + out.nbytes:
            raise IntegrityError(f"value of {record.nbytes} bytes for a payload of {out.nbytes}")
        np.copyto(scratch[HEAD], record[: record_format.HEAD_NBYTES])
        np.copyto(out, record[record_format.HEAD_NBYTES :])


_PROBE_KEY = b"probe"


class InlineRecords:
    """Records are values of LMDB's ``pages`` tree."""

    numbered: bool | None = None
    """Whether page numbers can be told: a self-test says. None: there was no room for it yet."""

    def __init__(
        self,
        env: Environment,
        sizing: Sizing,
        *,
        fingerprint: bytes,
        page_nbytes: int,
        coding: Coding,
        headers: PageHeaders,
        numbers_hold: Callable[[], bool],
    ) -> None:
        """Closes ``headers``. ``numbers_hold``: the self-test, which writes."""
        self._numbers_hold = numbers_hold
        self._env = env
        self._headers = headers
        self._fresh: set[PageKey] = set()  # written by this transaction: their pages are not on disk yet
        self._sizing = sizing
        self._coding = coding
        self._encoder = coding.encoder()
        self._fingerprint = fingerprint
        self._record = np.empty(record_format.record_nbytes(page_nbytes), dtype=np.uint8)
        self._generations = itertools.count(1 + secrets.randbits(62))  # no two openings share any; never 0

    def test_numbers(self) -> None:
        """See whether page numbers can be told, unless that is known. lmdb.Error, OSError: it could not be tried."""
        if self.numbered is None:
            self.numbered = self._numbers_hold()

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        self.test_numbers()
        return [Written()] * len(pages)

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        generation = next(self._generations)
        if page.head is not None:
            length = record_format.copy(page.head, page.payload, self._record, generation=generation)
        else:
            length = record_format.encode(
                page.payload,
                self._record,
                fingerprint=self._fingerprint,
                key=page.key,
                parent=page.parent,
                encoder=self._encoder,
                plain=self._coding.plain,
                raw_nbytes=self._coding.raw_nbytes(page.payload),
                generation=generation,
            )
        stored = length - record_format.HEAD_NBYTES
        if page.key in self._fresh:  # else LMDB may keep it in pages that are too many for it
            txn.delete(page.key, db=self._env.pages)
        self._fresh.add(page.key)
        txn.put(page.key, self._record[:length].data, db=self._env.pages)
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.cost(stored),
            stored_nbytes=stored,
            page_number=page_number(txn, page.key, self._env.pages) if self.numbered else 0,
            generation=generation,
        )

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """Put the header of the old record right before LMDB frees its pages. Readers need none of them: they check."""
        if old is None or key in self._fresh:
            return
        try:
            entry = unpack(key, old)
        except IntegrityError:
            return  # changed behind our back: nothing is known of it
        if entry.page_number:
            self._headers.mend(entry.page_number, record_format.HEAD_NBYTES + entry.stored_nbytes)

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        txn.delete(key, db=self._env.pages)
        self._fresh.discard(key)

    def settle(self) -> None:
        self._fresh.clear()

    def undo(self) -> None:
        self._fresh.clear()

    def doubt(self) -> None:
        self._fresh.clear()

    def make_places(self, count: int) -> bool:
        return False

    def in_doubt(self, key: PageKey) -> bool:
        return False

    def close(self) -> None:
        self._headers.close()


def page_number(txn: lmdb.Transaction[memoryview], key: bytes, db: lmdb._Database) -> int:
    """Where LMDB will write the value just put: the first field of the page header, 16 bytes before the value."""
    value = txn.get(key, db=db)
    if value is None:
        return 0
    address = np.frombuffer(value, dtype=np.uint8).ctypes.data
    return int.from_bytes(ctypes.string_at(address - 16, 8), "little")


def numbers_hold(env: Environment) -> bool:
    """Whether a value's page number, as we find it, is where its bytes are in the file after the commit: tries one."""
    value = os.urandom(record_format.HEAD_NBYTES + 4096)
    with env.begin(write=True, buffers=True) as txn:
        txn.put(_PROBE_KEY, value, db=env.meta)
        number = page_number(txn, _PROBE_KEY, env.meta)
    if not 0 < number < 1 << 40:
        return False
    fd = os.open(env.path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, len(value), number * env.block + 16) == value
    finally:
        os.close(fd)
