"""Where page records are kept: in LMDB beside the catalogue, here, or in extent files. The writer's thread, or at open.

Both answer the same calls of a ``Catalogue``: ``write`` before its transaction, ``entry``, ``replaced`` and ``erased``
within it, then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if nobody knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.codecs import PageEncoder
from tierstore.nvme.entry import Entry
from tierstore.nvme.sizing import Sizing
from tierstore.nvme.slots import Place
from tierstore.types import PageKey


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
        """The transaction replaces or removes this entry."""
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

    def close(self) -> None:
        """End its thread. No call may follow."""
        ...


class InlineRecords:
    """Records are values of LMDB's ``pages`` tree."""

    numbered = False
    """Whether page numbers can be told: a self-test says."""

    def __init__(
        self,
        pages: lmdb._Database,
        sizing: Sizing,
        *,
        fingerprint: bytes,
        page_nbytes: int,
        encoder: PageEncoder | None,
    ) -> None:
        self._pages = pages
        self._sizing = sizing
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._record = np.empty(codec.record_nbytes(page_nbytes), dtype=np.uint8)

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        return [Written()] * len(pages)

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        if page.head is not None:
            length = codec.copy(page.head, page.payload, self._record)
        else:
            length = codec.encode(
                page.payload,
                self._record,
                fingerprint=self._fingerprint,
                key=page.key,
                parent=page.parent,
                encoder=self._encoder,
            )
        stored = length - codec.HEAD_NBYTES
        txn.put(page.key, self._record[:length].data, db=self._pages)
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.cost(stored),
            stored_nbytes=stored,
            page_number=page_number(txn, page.key, self._pages) if self.numbered else 0,
        )

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """LMDB keeps what is still read."""

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        txn.delete(key, db=self._pages)

    def settle(self) -> None:
        """Nothing is left to do."""

    def undo(self) -> None:
        """LMDB did."""

    def close(self) -> None:
        """Nothing of its own is open."""

    def doubt(self) -> None:
        """LMDB knows."""


def page_number(txn: lmdb.Transaction[memoryview], key: bytes, db: lmdb._Database) -> int:
    """Where LMDB will write the value just put: the first field of the page header, 16 bytes before the value."""
    value = txn.get(key, db=db)
    if value is None:
        return 0
    address = np.frombuffer(value, dtype=np.uint8).ctypes.data
    return int.from_bytes(ctypes.string_at(address - 16, 8), "little")
