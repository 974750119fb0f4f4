"""Storage of page records in LMDB, as values that are copied into and out of LMDB's map.

Only public calls of py-lmdb are used. Each page is copied within the short transaction that looks it up. Its entry
and record therefore belong together, and no method returns a memoryview of LMDB. LMDB does not reuse a freed LMDB
page while an open transaction may still read it. If read transactions keep the map full for this reason, the writer
keeps its batch and waits for them (see ``writer``).

Mapped pages are read by page faults. A disk that cannot deliver a block causes SIGBUS, and a disk that hangs
blocks the thread within its transaction. Extent files have neither problem (docs/guarantees.md).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import Entry, unpack
from tierstore.nvme.disk_space import Sizing
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.record_storage import HEAD, Fetched, Page, Written, memory_for
from tierstore.types import PageKey, exact_size


class InlineBytes:
    """Reader of records stored in LMDB. Thread-safe."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def fetch(
        self,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None,
    ) -> Fetched:
        with self._env.begin(buffers=True) as txn:
            found = txn.get(key, db=self._env.catalogue)
            if found is None:
                raise KeyError(key)
            raw = bytes(found)
            entry = unpack(key, raw)
            place, payload = memory_for(entry, out, scratch, held)
            self._copy(txn, key, payload, scratch)
            place[payload.nbytes :] = 0  # as in extent files, where records are padded with zeros
        return Fetched(payload, raw, entry.generation)

    def fetch_run(
        self,
        keys: Sequence[PageKey],
        outs: Sequence[NDArray[np.uint8]],
        heads: Sequence[NDArray[np.uint8]],
        began: Callable[[], None],
    ) -> list[Fetched | None]:
        return [None] * len(keys)  # each record is copied out of the map separately

    def close(self) -> None:
        """Do nothing: the owner of the environment closes it."""

    def _copy(
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
            raise IntegrityError(
                f"the size of the record is {exact_size(record.nbytes)}, but its entry says "
                f"{exact_size(record_format.HEAD_NBYTES + out.nbytes)}"
            )
        np.copyto(scratch[HEAD], record[: record_format.HEAD_NBYTES])
        np.copyto(out, record[record_format.HEAD_NBYTES :])


class InlineRecords:
    """Storage of records as values in LMDB's ``pages`` tree."""

    def __init__(
        self, env: Environment, sizing: Sizing, *, fingerprint: bytes, page_nbytes: int, coding: Coding
    ) -> None:
        self._env = env
        self._fresh: set[PageKey] = set()  # keys of records written by the open transaction
        self._sizing = sizing
        self._coding = coding
        self._encoder = coding.encoder()
        self._fingerprint = fingerprint
        self._record = np.empty(record_format.record_nbytes(page_nbytes), dtype=np.uint8)
        self._generations = itertools.count(
            1 + secrets.randbits(62)
        )  # differs from that of every other open; never 0

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
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
        if page.key in self._fresh:  # an overwritten value may keep more LMDB pages than it needs
            txn.delete(page.key, db=self._env.pages)
        self._fresh.add(page.key)
        txn.put(page.key, self._record[:length].data, db=self._env.pages)
        return Entry(
            parent=page.parent,
            nbytes=self._sizing.cost(stored),
            stored_nbytes=stored,
            generation=generation,
        )

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """Do nothing: LMDB frees the old record itself."""

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
        """Do nothing: this storage has no threads to stop."""
