"""Reading page records of one environment, each checked: for the reader threads, and for tools that only look."""

from __future__ import annotations

from collections.abc import Container, Iterator

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.direct_io import BLOCK, aligned, padded
from tierstore.nvme.entry import loss_class, summary, unpack
from tierstore.nvme.environment import Environment
from tierstore.nvme.record import HEAD, TRIES, Decoders, Fetched, MovedError, RecordBytes, lookup
from tierstore.types import PageKey


def scratch_for(page_nbytes: int) -> NDArray[np.uint8]:
    """What ``fetch`` makes the best of: aligned, and with room for pages that a direct read cannot reach."""
    return aligned(BLOCK + padded(page_nbytes))


class RecordReader:
    """Reads by any thread."""

    def __init__(
        self,
        env: Environment,
        payload: RecordBytes,
        *,
        fingerprint: bytes,
        held_nbytes: int | None = None,
        erased: Container[bytes] = (),
    ) -> None:
        """``held_nbytes``: length of the payloads that memory holds in place of pages; None: it holds pages.

        ``erased``: records that ``record`` and the listings pass over.
        """
        self._held = held_nbytes
        self._env = env
        self._payload = payload
        self._fingerprint = fingerprint
        self._erased = erased

    def fetch(self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> Fetched:
        """Read the record of ``key`` to ``out``, or to ``scratch`` what memory holds otherwise; nothing is checked.

        ``scratch``: aligned, BLOCK long at least. Both are the caller's own until ``check`` is through. KeyError: no
        such record. IntegrityError: it cannot be what was written. OSError, lmdb.Error: it could not be read. The last
        three speak of the record that the catalogue names now: one that is replaced or moved under the read is looked
        up again, and MovedError says that this happened during every try.
        """
        try:
            return self._payload.fetch(key, out, scratch, self._held)
        except lmdb.ReadersFullError:
            self._env.reader_check()  # readers that were killed may hold the places
            return self._payload.fetch(key, out, scratch, self._held)

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
        which need not be that one. A record that was replaced or moved under the read is read again here.
        IntegrityError: not what was written, or encoded and there is no decoder. UnfitError: memory cannot hold it.
        Others as ``fetch``.
        """
        head, fetched = self._settled(key, fetched, out, scratch)
        decoders.fill(head, fetched.payload, out)

    def record(
        self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[bytes, NDArray[np.uint8]]:
        """The record of ``key`` as it is kept, every byte checked: its head, and its payload, a part of ``out`` or
        ``scratch``, which are as for ``fetch`` and may hold anything else after it. Raises as that and ``check`` do.
        """
        if key in self._erased:
            raise KeyError(key)
        _, fetched = self._settled(key, self.fetch(key, out, scratch), out, scratch)
        return scratch[HEAD].tobytes(), fetched.payload

    def _settled(
        self, key: PageKey, fetched: Fetched, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[codec.Head, Fetched]:
        """The checked head and the bytes it belongs to, read again if the catalogue names another record by now.

        A record that fails its checks is damaged only if the catalogue still names it: no transaction keeps its place
        from being written again under the read.
        """
        for _ in range(TRIES):
            try:
                return self._verified(key, fetched, scratch), fetched
            except IntegrityError:
                if lookup(self._env, key) == fetched.raw:
                    raise
            fetched = self.fetch(key, out, scratch)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def _verified(self, key: PageKey, fetched: Fetched, scratch: NDArray[np.uint8]) -> codec.Head:
        """The head of a record, every byte of it and of the payload checked."""
        return codec.verify(
            scratch[HEAD],
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
            yield from map(summary, self._listed(txn))

    def loss_classes(self) -> Iterator[tuple[PageKey, str]]:
        """Key of every record and the class of loss of its namespace, "" where none was noted. As ``summaries``."""
        with self._env.begin() as txn:
            yield from map(loss_class, self._listed(txn))

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Read every record: its key, and what is wrong with it or None. For tools; nothing is changed.

        Encoded pages are not decoded: what is checked is that they are what was written.
        """
        scratch = out = aligned(0)
        with self._env.begin() as txn:
            items = list(self._listed(txn))
        for key, raw in items:
            try:
                length = unpack(key, raw).stored_nbytes
                if length != out.nbytes:
                    out, scratch = aligned(length)[:length], scratch_for(length)
                self._settled(PageKey(key), self.fetch(PageKey(key), out, scratch), out, scratch)
            except KeyError:
                yield PageKey(key), "no record"
            except (IntegrityError, MovedError, OSError, lmdb.Error) as error:
                yield PageKey(key), str(error)
            else:
                yield PageKey(key), None

    def _listed(self, txn: lmdb.Transaction[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Key and entry of every record that is not erased."""
        items = iter(txn.cursor(db=self._env.catalogue))
        return items if self._erased == () else ((k, raw) for k, raw in items if k not in self._erased)

    def close(self) -> None:
        """Close the descriptors, not the environment. No call may be running, and none may follow."""
        self._payload.close()
