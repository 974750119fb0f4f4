"""The protocols of record storage, which LMDB (``lmdb_pages``) and extent files (``extents``) implement.

The ``Catalogue`` writes through ``Records``. It calls ``write`` before its transaction. Within the
transaction, it calls ``replaced`` and then ``entry`` or ``erased`` for each key. Afterwards, it calls
``settle`` if the transaction was committed, ``undo`` if it was not, and ``doubt`` if the outcome is unknown.
The ``RecordReader`` reads through ``RecordBytes``.

A record in an extent file is read by ``preadv`` directly into the caller's page, bypassing the page cache
where possible. A truncated or unreadable file causes an exception; a read from a memory map would cause a signal
instead. The read transaction of the look-up ends before the read begins: an open transaction keeps LMDB from reusing
freed pages, so the map would fill up during a read that hangs. A slot is pinned while it is read, so that no new
record is written to it. However, a new record may have been written to the slot between the look-up and the pin. The
checksum, key and generation reveal this, and the reader then looks up the key again. A record in LMDB is copied out
of the map within the transaction that looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tierstore.types import PageKey, exact_size


class Page(NamedTuple):
    """A page to be stored.

    ``payload`` is flat uint8. If ``head`` is set, ``payload`` comes from an existing record and is stored with the
    same codec.
    """

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]
    head: record_format.Head | None = None


class Written(NamedTuple):
    """Where the bytes of a page's record were written.

    With LMDB storage, the fields keep their defaults, because ``Records.entry`` writes the record later.
    """

    place: Place = Place(0, 0, 0)
    generation: int = 0
    stored_nbytes: int = 0


class Records(Protocol):
    """The operations that a catalogue needs from its storage of records."""

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        """Write the bytes durably, before an entry refers to them. If an exception is raised, nothing is kept.

        LMDB storage writes nothing here, because ``entry`` writes its records.

        Returns:
            The location of each page's bytes, or None for a page that found no free slot.
        """
        ...

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        """Return the catalogue entry of a page. LMDB storage also writes the record, in ``txn``."""
        ...

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """Record that the transaction replaces, removes or creates this entry.

        ``old`` is the current entry as stored, or None. Raising OSError aborts the transaction.
        """
        ...

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """Record that the transaction removes this page's record. LMDB storage deletes it, in ``txn``."""
        ...

    def settle(self) -> None:
        """Record that the transaction was committed."""
        ...

    def undo(self) -> None:
        """Record that the transaction was definitely not committed."""
        ...

    def doubt(self) -> None:
        """Record that the transaction raised an exception, so it may or may not have been committed."""
        ...

    def make_places(self, count: int) -> bool:
        """Make slots for up to ``count`` records by moving other records. Return whether to retry ``write``.

        The catalogue calls this if ``write`` found no slots even after records were erased.
        """
        ...

    def in_doubt(self, key: PageKey) -> bool:
        """Return whether, since a failed transaction, it is unknown which slot the entry of ``key`` refers to."""
        ...

    def close(self) -> None:
        """Stop the threads of this storage. This must be the last call."""
        ...


HEAD = slice(BLOCK - record_format.HEAD_NBYTES, BLOCK)
"""Part of the scratch memory that contains a record's head after ``fetch``."""

TRIES = 4
"""Maximum number of look-ups of a key whose record keeps being replaced or moved."""


class MovedError(Exception):
    """The record was replaced or moved during every attempt to read it. It need not be damaged."""


class Fetched(NamedTuple):
    """A record that was read but not yet verified.

    ``raw`` is the stored catalogue entry that located the record, and ``generation`` is the generation in this entry.
    """

    payload: NDArray[np.uint8]
    raw: bytes
    generation: int


class RecordBytes(Protocol):
    """Reader that fetches the bytes of records without verifying them."""

    def fetch(
        self,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None,
    ) -> Fetched:
        """Read a record into memory.

        The head is read into the first BLOCK bytes of ``scratch``. A payload that is as long as ``out`` fills
        ``out``. A payload of ``held`` bytes is placed at the start of ``out``, and any other payload in
        ``scratch`` after the head. Raises the errors of ``RecordReader.fetch``.
        """
        ...

    def fetch_run(
        self,
        keys: Sequence[PageKey],
        outs: Sequence[NDArray[np.uint8]],
        heads: Sequence[NDArray[np.uint8]],
        began: Callable[[], None],
    ) -> list[Fetched | None]:
        """Read records that lie next to each other, unencoded, with few calls.

        The heads are read into the blocks ``heads``, and the payloads into ``outs``. Returns None for each record that
        was not read in this way; ``fetch`` must then read it, or report why it cannot be read. ``began`` is called
        before each read from the disk. Raises lmdb.Error.
        """
        ...

    def close(self) -> None:
        """Close the files that the records are read from."""
        ...


def lookup(env: Environment, key: PageKey) -> bytes:
    """Return the current catalogue entry of ``key`` as stored. Raises KeyError if the page has no entry."""
    raw = env.entry(key)
    if raw is None:
        raise KeyError(key)
    return raw


def look_again(env: Environment, key: PageKey, raw: bytes, error: Exception) -> bytes:
    """Return the entry of a key whose read failed with ``error``.

    Raise ``error`` if the entry is still ``raw``.
    """
    again = lookup(env, key)
    if again == raw:
        raise error
    return again


def memory_for(
    entry: Entry, out: NDArray[np.uint8], scratch: NDArray[np.uint8], held: int | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Choose the memory for a record's payload, in ``out`` or ``scratch``. See ``RecordBytes.fetch``.

    A payload with an unexpected length has a different codec, or belongs to a page of a different length. Which of
    these is the case is not known until the head has been read.

    Returns:
        Two arrays: the memory to read into, including padding, and the part of this memory that the payload
        occupies.

    Raises:
        IntegrityError: The payload is longer than a page.
        ValueError: ``scratch`` is too small.
    """
    stored = entry.stored_nbytes
    if stored == out.nbytes:
        return out, out
    if stored == held and stored < out.nbytes:
        return out[: padded(stored)], out[:stored]
    if stored > out.nbytes and (held is None or stored > scratch.nbytes - BLOCK):
        raise IntegrityError(
            f"a payload of {exact_size(stored)} is too long for a page of {exact_size(out.nbytes)}"
        )
    body = scratch[BLOCK : BLOCK + padded(stored)]
    if body.nbytes < stored:
        raise ValueError(
            f"scratch of {exact_size(scratch.nbytes)} is too small for a page of {exact_size(out.nbytes)}"
        )
    return body, body[:stored]
