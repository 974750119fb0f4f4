"""The bytes of a record, unchecked, from where they lie: within LMDB, or in extent files.

The catalogue's entry says where a record is, and ``preadv`` fetches it from there straight into the caller's page,
past the page cache where it may: a cut or unreadable file is an error there, where a mapped read would be a signal.
The read transaction of the lookup ends before the read begins: an open transaction keeps LMDB from using freed pages
again, and a read that hangs would fill the map. So a record in LMDB may be overwritten while it is read. Its checksum,
key and generation show that, and the reader looks the key up again. A slot in an extent file is pinned while it is
read: no new record is written there, though one may have been between the lookup and the pin. Records whose entry has
no page number are copied out of LMDB's map, inside the transaction. No memoryview of LMDB's leaves a method.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.direct import BLOCK, is_aligned, padded, set_direct
from tierstore.nvme.entry import Entry, slot_blocks, unpack
from tierstore.nvme.environment import Environment
from tierstore.nvme.extents import ExtentFiles
from tierstore.nvme.home import DATA_FILE
from tierstore.nvme.slots import Place, Slots
from tierstore.types import PageKey

HEAD = slice(BLOCK - codec.HEAD_NBYTES, BLOCK)
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
            body, payload = _memory(entry, out, scratch, held)
            try:
                self._read_at(entry.page_number, body, scratch[:BLOCK], BLOCK + payload.nbytes)
            except (IntegrityError, OSError) as error:
                raw = _look_again(self._env, key, raw, error)
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
            _, payload = _memory(entry, out, scratch, held)
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
        if record.nbytes != codec.HEAD_NBYTES + out.nbytes:
            raise IntegrityError(f"value of {record.nbytes} bytes for a payload of {out.nbytes}")
        np.copyto(scratch[HEAD], record[: codec.HEAD_NBYTES])
        np.copyto(out, record[codec.HEAD_NBYTES :])


class ExtentBytes:
    """Of records in extent files, whose slots are pinned while they are read. ``close`` closes the files."""

    def __init__(self, env: Environment, files: ExtentFiles, slots: Slots) -> None:
        self._env = env
        self._files = files
        self._slots = slots

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
            body, payload = _memory(entry, out, scratch, held)
            place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
            try:
                with self._slots.pinned(place):  # nothing new is put there while the disk works
                    self._files.read(place, body, scratch)
            except (IntegrityError, OSError) as error:
                raw = _look_again(self._env, key, raw, error)
            else:
                return Fetched(payload, raw, entry.generation)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def close(self) -> None:
        self._files.close()


def lookup(env: Environment, key: PageKey) -> bytes:
    """The catalogue's entry of ``key`` now, as it is stored. KeyError if there is none."""
    raw = env.entry(key)
    if raw is None:
        raise KeyError(key)
    return raw


def _look_again(env: Environment, key: PageKey, raw: bytes, error: Exception) -> bytes:
    """The entry of a key whose read failed with ``error``, which is raised if the entry is still ``raw``."""
    again = lookup(env, key)
    if again == raw:
        raise error
    return again


def _memory(
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
