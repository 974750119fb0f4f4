"""Reading page records of one environment, each checked: for the reader threads, and for tools that only look.

The catalogue's entry says where a record is, and ``preadv`` fetches it from there straight into the caller's page,
past the page cache where it may: a cut or unreadable file is an error there, where a mapped read would be a signal.
Records that LMDB keeps are read within the read transaction that found them, so that they cannot go; extents know no
such thing, and a slot is pinned before its entry is looked at again. Entries of LMDB's without a page number are read
through LMDB. No memoryview of LMDB's leaves a method.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.coding import Decoders
from tierstore.nvme.direct import BLOCK, aligned, is_aligned, padded, set_direct
from tierstore.nvme.entry import Entry, loss_class, slot_blocks, summary, unpack
from tierstore.nvme.extents import ExtentFiles
from tierstore.nvme.home import DATA_FILE
from tierstore.nvme.slots import Place, Slots
from tierstore.types import PageKey

SCRATCH_NBYTES = BLOCK
"""What a caller lends to ``fetch`` at least: LMDB's page header, or an extent's, and ours."""

_HEAD = slice(BLOCK - codec.HEAD_NBYTES, BLOCK)
_TRIES = 4


def scratch_for(page_nbytes: int) -> NDArray[np.uint8]:
    """What ``fetch`` makes the best of: aligned, and with room for pages that a direct read cannot reach."""
    return aligned(BLOCK + padded(page_nbytes))


class Fetched(NamedTuple):
    """A record's bytes as they were found: its payload, and the generation that its entry names."""

    payload: NDArray[np.uint8]
    generation: int


class RecordBytes(Protocol):
    """Fetches the bytes of a record, unchecked."""

    def fetch(
        self,
        env: lmdb.Environment,
        catalogue: lmdb._Database,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None = None,
    ) -> Fetched:
        """Fill ``out`` with a payload as long as it, or its beginning with one of ``held`` bytes, ``scratch`` behind
        BLOCK with any other, and ``scratch`` up to BLOCK with the head.

        KeyError, IntegrityError, OSError, lmdb.Error as ``RecordReader.fetch`` raises them.
        """
        ...

    def close(self) -> None:
        """Close what it opened."""
        ...


class RecordReader:
    """Reads by any thread."""

    def __init__(
        self,
        env: lmdb.Environment,
        catalogue: lmdb._Database,
        payload: RecordBytes,
        *,
        fingerprint: bytes,
        held_nbytes: int | None = None,
    ) -> None:
        """``held_nbytes``: length of the payloads that memory holds in place of pages; None: it holds pages."""
        self._held = held_nbytes
        self._env = env
        self._catalogue = catalogue
        self._payload = payload
        self._fingerprint = fingerprint

    def fetch(self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> Fetched:
        """Read the record of ``key`` to ``out``, or to ``scratch`` what memory holds otherwise; nothing is checked.

        Both are the caller's own until ``check`` is through. KeyError: no such record. IntegrityError: it cannot be
        what was written. OSError, lmdb.Error: it could not be read.
        """
        try:
            return self._payload.fetch(self._env, self._catalogue, key, out, scratch, self._held)
        except lmdb.ReadersFullError:
            self._env.reader_check()  # readers that were killed may hold the places
            return self._payload.fetch(self._env, self._catalogue, key, out, scratch, self._held)

    def check(
        self,
        key: PageKey,
        fetched: Fetched,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        """Fill ``out`` with the page as memory holds it, every byte checked; it holds anything at all if this raises.

        ``fetched``, ``out`` and ``scratch``: what ``fetch`` gave and was given. ``decoders``: the calling thread's,
        which need not be that one. IntegrityError: not what was written, or encoded and there is no decoder;
        UnfitError: memory cannot hold it.
        """
        decoders.fill(self._verified(key, fetched, scratch), fetched.payload, out)

    def record(
        self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[bytes, NDArray[np.uint8]]:
        """The record of ``key`` as it is kept, every byte checked: its head, and its payload, a part of ``out`` or
        ``scratch``, which are as for ``fetch`` and may hold anything else after it. Raises as that and ``check`` do.
        """
        fetched = self.fetch(key, out, scratch)
        self._verified(key, fetched, scratch)
        return scratch[_HEAD].tobytes(), fetched.payload

    def _verified(self, key: PageKey, fetched: Fetched, scratch: NDArray[np.uint8]) -> codec.Head:
        """The head of a record, every byte of it and of the payload checked."""
        return codec.verify(
            scratch[_HEAD],
            fetched.payload,
            fingerprint=self._fingerprint,
            key=key,
            generation=fetched.generation,
        )

    def summaries(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Key, parent and bytes on disk of every record, in key order, from one snapshot. Not beside a writer.

        The entries are taken as the checking child found them; each is checked again when its page is loaded.
        """
        with self._env.begin() as txn:
            yield from map(summary, txn.cursor(db=self._catalogue))

    def loss_classes(self) -> Iterator[tuple[PageKey, str]]:
        """Key of every record and the class of loss of its namespace, "" where none was noted. As ``summaries``."""
        with self._env.begin() as txn:
            yield from map(loss_class, txn.cursor(db=self._catalogue))

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Read every record: its key, and what is wrong with it or None. For tools; nothing is changed.

        Encoded pages are not decoded: what is checked is that they are what was written.
        """
        scratch = out = aligned(0)
        with self._env.begin() as txn:
            items = list(txn.cursor(db=self._catalogue))
        for key, raw in items:
            try:
                length = unpack(key, raw).stored_nbytes
                if length != out.nbytes:
                    out, scratch = aligned(length)[:length], scratch_for(length)
                self._verified(PageKey(key), self.fetch(PageKey(key), out, scratch), scratch)
            except KeyError:
                yield PageKey(key), "no record"
            except (IntegrityError, OSError, lmdb.Error) as error:
                yield PageKey(key), str(error)
            else:
                yield PageKey(key), None

    def close(self) -> None:
        """Close the descriptors, not the environment. No call may be running, and none may follow."""
        self._payload.close()


class InlineBytes:
    """Of records that LMDB keeps. Keeps data.mdb open twice where ``direct``, for buffers that are not aligned."""

    def __init__(self, env: lmdb.Environment, pages: lmdb._Database, *, direct: bool) -> None:
        self._pages = pages
        self._block = env.stat()["psize"]
        # data.mdb only: closing any descriptor of lock.mdb would drop LMDB's own locks.
        self._fd = os.open(Path(env.path()) / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        self._direct_fd = -1
        if direct and self._block % BLOCK == 0:
            self._direct_fd = os.open(Path(env.path()) / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
            set_direct(self._direct_fd)

    def fetch(
        self,
        env: lmdb.Environment,
        catalogue: lmdb._Database,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None = None,
    ) -> Fetched:
        with env.begin(buffers=True) as txn:
            raw = txn.get(key, db=catalogue)
            if raw is None:
                raise KeyError(key)
            entry = unpack(key, bytes(raw))
            body, payload = _memory(entry, out, scratch, held)
            if entry.page_number:
                self._read_at(entry.page_number, body, scratch[:BLOCK], BLOCK + payload.nbytes)
            else:
                self._copy_value(txn, key, payload, scratch)
        return Fetched(payload, entry.generation)

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
            raise IntegrityError(f"value of {record.nbytes} bytes for a payload of {out.nbytes}")
        np.copyto(scratch[_HEAD], record[: codec.HEAD_NBYTES])
        np.copyto(out, record[codec.HEAD_NBYTES :])


class ExtentBytes:
    """Of records in extent files, whose slots are pinned while they are read. ``close`` closes the files."""

    def __init__(self, files: ExtentFiles, slots: Slots) -> None:
        self._files = files
        self._slots = slots

    def fetch(
        self,
        env: lmdb.Environment,
        catalogue: lmdb._Database,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None = None,
    ) -> Fetched:
        frees = self._slots.num_frees
        raw = _lookup(env, catalogue, key)
        for _ in range(_TRIES):
            entry = unpack(key, raw)
            body, payload = _memory(entry, out, scratch, held)
            place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
            with self._slots.pinned(place):
                # An entry that is still there now had its slot pinned before it could go. So had one that was there
                # since the last slot was freed: then it need not be looked at.
                again = raw if self._slots.num_frees == frees else _lookup(env, catalogue, key)
                if again == raw:
                    self._files.read(place, body, scratch)
                    return Fetched(payload, entry.generation)
            raw, frees = again, -1
        raise KeyError(key)  # replaced faster than it can be looked up

    def close(self) -> None:
        self._files.close()


def _lookup(env: lmdb.Environment, catalogue: lmdb._Database, key: PageKey) -> bytes:
    with env.begin() as txn:
        raw = txn.get(key, db=catalogue)
    if raw is None:
        raise KeyError(key)
    return raw


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
