"""The protocols of the two storages of record bytes, LMDB (``lmdb_pages``) and extent files (``extents``).

Both implement ``Records``, which the ``Catalogue`` calls to write: ``write`` before its transaction; ``replaced``, then
``entry`` or ``erased``, for each key within it; then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if that
is unknown. Both implement ``RecordBytes``, which the ``RecordReader`` calls.

From an extent file ``preadv`` reads a record directly into the caller's page, past the page cache where possible: a
truncated or unreadable file is an error there, where a mapped read would raise a signal. The look-up's read transaction
ends before the read begins, because an open transaction keeps LMDB from reusing freed pages, and a read that hangs
would fill the map. A slot is pinned while it is read: no new record is written there, but one may have been written
between the look-up and the pin. Checksum, key and generation detect that, and the reader looks the key up again. A
record in LMDB is copied out of the map within the transaction that looks it up.
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
    """One page to store.

    ``payload`` is flat uint8. ``head`` is set for a record that is stored unchanged, with payload and codec.
    """

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]
    head: record_format.Head | None = None


class Written(NamedTuple):
    """Where a page's bytes were written. Not used by LMDB, which gets the bytes in the transaction."""

    place: Place = Place(0, 0, 0)
    generation: int = 0
    stored_nbytes: int = 0


class Records(Protocol):
    """What a catalogue needs from its storage of records."""

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        """Write the bytes durably before an entry names them. None for a page that found no free slot.

        If this raises, nothing is kept.
        """
        ...

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        """Return the entry of a page."""
        ...

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """Announce that the transaction replaces, removes or creates this entry. OSError means that it must not."""
        ...

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Announce that the transaction removes this record."""
        ...

    def settle(self) -> None:
        """Announce that the transaction was committed."""
        ...

    def undo(self) -> None:
        """Announce that the transaction was certainly not committed."""
        ...

    def doubt(self) -> None:
        """Announce that the transaction raised: it may or may not have been committed."""
        ...

    def make_places(self, count: int) -> bool:
        """Make space, which erasing alone does not, for up to ``count`` records that ``write`` had no slot for.

        Returns whether a retry makes sense.
        """
        ...

    def in_doubt(self, key: PageKey) -> bool:
        """Return whether a failed transaction left something that only the record's next transaction settles."""
        ...

    def close(self) -> None:
        """End the thread. No call may follow."""
        ...


HEAD = slice(BLOCK - record_format.HEAD_NBYTES, BLOCK)
"""Where a record's head is in the scratch memory that it was fetched with."""

TRIES = 4
"""Number of look-ups of a key whose record keeps being replaced or moved."""


class MovedError(Exception):
    """The record was replaced or moved during every attempt to read it. This says nothing about its state."""


class Fetched(NamedTuple):
    """A record's bytes as they were read, unchecked: its payload, and the catalogue entry that led to it."""

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
        """Read a record into memory.

        The head goes to the first BLOCK bytes of ``scratch``. A payload as long as ``out`` fills it, one of ``held``
        bytes goes to its beginning, and any other to ``scratch`` behind the head. Raises what ``RecordReader.fetch``
        raises.
        """
        ...

    def close(self) -> None:
        """Close the files it opened."""
        ...


def lookup(env: Environment, key: PageKey) -> bytes:
    """Return the catalogue's present entry of ``key`` as stored. Raises KeyError if there is none."""
    raw = env.entry(key)
    if raw is None:
        raise KeyError(key)
    return raw


def look_again(env: Environment, key: PageKey, raw: bytes, error: Exception) -> bytes:
    """Return the entry of a key whose read failed with ``error``, or raise ``error`` if the entry is still ``raw``."""
    again = lookup(env, key)
    if again == raw:
        raise error
    return again


def memory_for(
    entry: Entry, out: NDArray[np.uint8], scratch: NDArray[np.uint8], held: int | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Choose the memory for a record's payload; return it and the part of it that is payload.

    A payload of an unexpected length belongs to another codec or to a page of another length; its head will tell.

    Raises:
        IntegrityError: The payload is longer than a page.
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
