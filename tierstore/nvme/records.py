"""Where page records are kept: in LMDB beside the catalogue, here, or in extent files. The writer's thread, or at open.

Both answer the same calls of a ``Catalogue``: ``write`` before its transaction, ``replaced``, then ``entry`` or
``erased`` of a key within it, then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if nobody knows.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.coding import Coding
from tierstore.nvme.entry import Entry, unpack
from tierstore.nvme.environment import Environment
from tierstore.nvme.headers import PageHeaders
from tierstore.nvme.home import DATA_FILE
from tierstore.nvme.sizing import Sizing
from tierstore.nvme.slots import Place
from tierstore.types import PageKey

_PROBE_KEY = b"probe"


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8. ``head``: of a record that is stored as it is, payload and codec."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]
    head: codec.Head | None = None


class Written(NamedTuple):
    """Where a page's bytes are already. Nothing of it means anything in LMDB, which gets them in the transaction."""

    place: Place = Place(0, 0, 0)
    generation: int = 0
    stored_nbytes: int = 0


class Records(Protocol):
    """What a catalogue asks of the place of its records."""

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        """Put the bytes on disk, durably, before any entry says so; None for a page for which there is no place.

        If it raises nothing is kept.
        """
        ...

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        """The entry of a page."""
        ...

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """The transaction will replace or remove this entry, or make one where there is none. OSError: it must not."""
        ...

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """The transaction removes this record."""
        ...

    def settle(self) -> None:
        """The transaction is committed."""
        ...

    def undo(self) -> None:
        """The transaction is certainly not committed."""
        ...

    def doubt(self) -> None:
        """The transaction raised: it may be committed or not."""
        ...

    def in_doubt(self, key: PageKey) -> bool:
        """Whether something is kept for a record since its last transaction raised, until the next one with it."""
        ...

    def close(self) -> None:
        """End its thread. No call may follow."""
        ...


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
        self._record = np.empty(codec.record_nbytes(page_nbytes), dtype=np.uint8)
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
            length = codec.copy(page.head, page.payload, self._record, generation=generation)
        else:
            length = codec.encode(
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
        stored = length - codec.HEAD_NBYTES
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
            self._headers.mend(entry.page_number, codec.HEAD_NBYTES + entry.stored_nbytes)

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        txn.delete(key, db=self._env.pages)
        self._fresh.discard(key)

    def settle(self) -> None:
        self._fresh.clear()

    def undo(self) -> None:
        self._fresh.clear()

    def doubt(self) -> None:
        self._fresh.clear()

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
    value = os.urandom(codec.HEAD_NBYTES + 4096)
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
