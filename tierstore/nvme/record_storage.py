"""What the two places of record bytes must answer, to whoever writes them and to whoever reads them.

Record bytes are in LMDB (``lmdb_pages``) or in extent files (``extents``). Both answer ``Records``, the calls of the
``Catalogue`` that writes: ``write`` before its transaction, ``replaced``, then ``entry`` or ``erased`` of a key
within it, then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if nobody knows. Both answer
``RecordBytes``, the call of the ``RecordReader``.

From an extent file ``preadv`` fetches a record straight into the caller's page, past the page cache where it may: a cut
or unreadable file is an error there, where a mapped read would be a signal. The read transaction of the lookup ends
before the read begins: an open transaction keeps LMDB from using freed pages again, and a read that hangs would fill
the map. A slot is pinned while it is read: no new record is written there, though one may have been between the lookup
and the pin. Its checksum, key and generation show that, and the reader looks the key up again. A record in LMDB is
copied out of the map within the transaction that looks it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import Entry
from tierstore.nvme.direct_io import BLOCK, padded
from tierstore.nvme.extent_allocator import Place
from tierstore.nvme.lmdb_environment import Environment
from tierstore.types import PageKey


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8. ``head``: of a record that is stored as it is, payload and codec."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]
    head: record_format.Head | None = None


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

    def make_places(self, count: int) -> bool:
        """Make room that no erase gives by itself, for up to ``count`` records for which ``write`` had no place.

        Return whether that is worth another try.
        """
        ...

    def in_doubt(self, key: PageKey) -> bool:
        """Whether something is kept for a record since its last transaction raised, until the next one with it."""
        ...

    def close(self) -> None:
        """End its thread. No call may follow."""
        ...


HEAD = slice(BLOCK - record_format.HEAD_NBYTES, BLOCK)
"""Where a record's head is in the scratch that it was fetched with."""

TRIES = 4
"""Lookups of a key whose record is replaced or moved again and again."""


class MovedError(Exception):
    """The record was replaced or moved during every try to read it: that says nothing of the record."""


class Fetched(NamedTuple):
    """A record's bytes as they were found, unchecked: its payload, and the catalogue entry that led to it."""

    payload: NDArray[np.uint8]
    raw: bytes
    generation: int


class RecordBytes(Protocol):
    """Fetches the bytes of a record, unchecked."""

    def fetch(
        self,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None,
    ) -> Fetched:
        """Fill ``out`` with a payload as long as it, or its beginning with one of ``held`` bytes, ``scratch`` behind
        BLOCK with any other, and ``scratch`` up to BLOCK with the head.

        KeyError, IntegrityError, OSError, MovedError, lmdb.Error as ``RecordReader.fetch`` raises them.
        """
        ...

    def close(self) -> None:
        """Close what it opened."""
        ...


def lookup(env: Environment, key: PageKey) -> bytes:
    """The catalogue's entry of ``key`` now, as it is stored. KeyError if there is none."""
    raw = env.entry(key)
    if raw is None:
        raise KeyError(key)
    return raw


def look_again(env: Environment, key: PageKey, raw: bytes, error: Exception) -> bytes:
    """The entry of a key whose read failed with ``error``, which is raised if the entry is still ``raw``."""
    again = lookup(env, key)
    if again == raw:
        raise error
    return again


def memory_for(
    entry: Entry, out: NDArray[np.uint8], scratch: NDArray[np.uint8], held: int | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Where a record's payload is to be read to, and the part of it that is payload.

    IntegrityError for one longer than a page. One that is neither as long as memory holds it is another codec's, or of
    a page of another length: its head tells.
    """
    stored = entry.stored_nbytes
    if stored == out.nbytes:
        return out, out
    if stored == held and stored < out.nbytes:
        return out[: padded(stored)], out[:stored]
    if stored > out.nbytes and (held is None or stored > scratch.nbytes - BLOCK):
        raise IntegrityError(f"record of {stored} bytes for a page of {out.nbytes}")
    body = scratch[BLOCK : BLOCK + padded(stored)]
    if body.nbytes < stored:
        raise ValueError(f"scratch of {scratch.nbytes} bytes is too small for a page of {out.nbytes}")
    return body, body[:stored]
