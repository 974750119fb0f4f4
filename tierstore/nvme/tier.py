"""The NVMe tier: pages by key, catalogued in an LMDB environment, behind queues that never block the caller."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar, Literal

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import keys
from tierstore.errors import StoreClosed
from tierstore.keys import KEY_NBYTES
from tierstore.nvme import directory_layout
from tierstore.nvme.completion_queue import Outbox
from tierstore.nvme.directory_opener import FrozenShard, OpenShard, open_frozen, open_shard
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.reader import Lender, Readers
from tierstore.nvme.writer import NoWriter, SyncWork, Writer
from tierstore.page import PageLayout
from tierstore.types import Ack, PageKey, Tier, Transfer

_watchdog_log = logging.getLogger("tierstore.nvme.patience")

_LOOKS = 4
"""Number of checks within the timeout after which a read or a write counts as late."""


_CLOSE_S = 5.0


class Watchdog:
    """A daemon thread that calls each of ``looks`` with time.monotonic(), four times per ``timeout_s``."""

    def __init__(self, looks: Sequence[Callable[[float], None]], timeout_s: float) -> None:
        self._looks = looks
        self._every_s = timeout_s / _LOOKS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstore-nvme-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking. Waits briefly for a check in progress, which never does I/O."""
        self._over.set()
        self._thread.join(_CLOSE_S)  # limited: a signal handler may have left a lock held

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for look in self._looks:
                try:
                    look(time.monotonic())
                except Exception:  # noqa: BLE001  the thread's top: it goes on looking
                    _watchdog_log.exception("looking after the disk's threads failed")


_log = logging.getLogger("tierstore.nvme.tier")


class NvmeTier:
    """One (fingerprint, shard) of a home directory, held exclusively by this process.

    All methods are thread-safe, and ``submit_*`` never blocks. A page counts as read or written only once
    ``poll`` has returned its transfer's Ack. In a forked child all methods raise StoreClosed.
    """

    tier: ClassVar[Tier] = Tier.NVME
    """Which of the store's tiers this is."""

    record_nbytes: int
    """Largest cost of one page's record on disk, including its share of the catalogue."""

    budget_nbytes: int
    """Largest sum of record bytes with which all files of the tier stay within the capacity."""

    def __init__(
        self,
        shard: OpenShard | FrozenShard,
        outbox: Outbox,
        *,
        page_nbytes: int,
        timeout_s: float,
        coding: Coding,
    ) -> None:
        sizing = shard.sizing
        self.record_nbytes = sizing.record_nbytes
        self.budget_nbytes = sizing.budget_nbytes
        self.read_only = isinstance(shard, FrozenShard)
        """Whether the tier was opened read-only. ``budget_nbytes`` is then what its records take now."""
        self._form = coding.form
        self._view_nbytes = page_nbytes if self._form is None else self._form.view_nbytes
        self._directory = shard.directory
        self._lock = shard.lock
        self._catalogue = shard.catalogue
        if self.read_only:
            self.budget_nbytes = max(sizing.record_nbytes, shard.catalogue.live_nbytes)
        self._sizing = sizing
        self._num_readers = shard.readers
        self._payload, self._direct, self._codec = shard.payload, shard.direct, coding.on_disk
        self._outbox = outbox
        # If a thread cannot be started, the directory is released and the threads that run are ended.
        with ExitStack() as undone:
            undone.callback(shard.lock.release)
            undone.callback(shard.catalogue.close)
            self._readers = Readers(
                shard.catalogue.reader,
                outbox,
                count=shard.readers,
                page_nbytes=page_nbytes,
                timeout_s=timeout_s,
                coding=coding,
            )
            undone.callback(self._readers.close)
            self._writer: Writer | NoWriter = (
                NoWriter(outbox)
                if isinstance(shard, FrozenShard)
                else Writer(shard.catalogue, outbox, sizing, timeout_s, shortage=shard.shortage)
            )
            undone.callback(self._writer.join, timeout_s)
            undone.callback(self._writer.close)
            self.lender = Lender(shard.catalogue.reader, page_nbytes)
            self._watchdog = Watchdog([self._readers.look, self._writer.look], timeout_s)
            undone.pop_all()
        self._disk_nbytes = 0
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity: int,
        fingerprint: str,
        shard: int,
        page_nbytes: int,
        wake: Callable[[], None],
        readers: int | None = None,
        timeout_s: float = 10.0,
        description: Mapping[str, object] | None = None,
        payload: str = "auto",
        codec: str = "none",
        layout: PageLayout | None = None,
        held: str = "none",
        read_only: bool = False,
    ) -> NvmeTier:
        """Open the tier's sub-directory of ``path``, creating it if needed.

        A sub-directory that an earlier process left damaged is renamed, with one warning, and the tier starts empty.
        Records of any codec can be read, encoded ones only with ``layout``.

        Args:
            path: The home directory.
            capacity: Limit in bytes for everything in the sub-directory on disk.
            wake: Called from an I/O thread, with no lock held, when a transfer or a sync has ended.
            description: Stored in the marker, for people.
            payload: Keep page bytes in "lmdb" or in "extents"; records of the other kind are removed with one warning.
                "auto" keeps the existing kind, and for a new directory writes 32 MiB to measure the disk.
            codec: How pages are written from now on, a name of ``tierstore.codecs``. Every codec but "none" needs
                ``layout``.
            held: Codec of the pages in memory (``codecs.host_format``). They are written as they are, or with their
                codes compressed.
            readers: Number of reader threads. None: as many as the disk needs for 95 % of its throughput. This
                is measured and stored when a directory of at least 1 GiB is made; otherwise it is 2.
            timeout_s: Seconds after which callers no longer wait for a read or a batch of writes; see
                ``submit_*`` and ``state``.
            read_only: The sub-directory must exist. Nothing is written to it, and other processes may read it too;
                ``capacity`` and ``payload`` have no effect.

        Raises:
            ConfigError: The directory is not ours or in use, or the disk lacks space for the capacity. Nothing is
                changed.
        """
        coding = Coding(codec, layout, held)
        marker = directory_layout.ShardMarker(
            fingerprint=fingerprint,
            shard=shard,
            page_nbytes=page_nbytes,
            capacity=capacity,
            key_scheme=keys.SCHEME,
            codec=coding.on_disk,
            description=dict(description or {}),
        )
        shard_home: OpenShard | FrozenShard
        if read_only:
            held_nbytes = None if coding.form is None else coding.form.payload_nbytes
            shard_home = open_frozen(path, marker, readers=readers, held_nbytes=held_nbytes)
        else:
            shard_home = open_shard(path, marker, payload, readers=readers, coding=coding)
        return cls(
            shard_home,
            Outbox(wake),
            page_nbytes=page_nbytes,
            timeout_s=timeout_s,
            coding=coding,
        )

    def records(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Yield key, parent and bytes on disk of every record found at opening. Call it once, before any ``submit_*``.

        The sizes sum to at most ``budget_nbytes``. After the capacity was lowered, records beyond that are
        erased instead.
        """
        self._guard()
        room = self.budget_nbytes
        surplus: list[PageKey] = []
        erased = set(self._catalogue.undeleted)
        try:
            for record in self._catalogue.reader.summaries():
                if record[0] in erased:
                    continue
                room -= record[2]
                if room < 0:
                    surplus.append(record[0])
                else:
                    yield record
        except lmdb.Error as error:
            _log.warning("the NVMe tier at %s cannot list all of its records: %s", self._directory, error)
        self._writer.submit_erase(surplus)

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Store ``pages[i]`` under ``transfer.keys[i]``, replacing what was there.

        A page that failed leaves no record. While a batch hangs, transfers behind it fail as UNAVAILABLE.

        Args:
            transfer: Names the keys. The ``nbytes`` of its Ack are record bytes on disk.
            pages: Flat uint8 of page_nbytes, or of a slot's view (``HostFormat.view_nbytes``) if memory holds
                encoded pages. They must not change before the Ack.
        """
        self._guard()
        self._check(transfer, pages)
        form = self._form
        self._writer.submit_write(
            transfer, pages if form is None else [page[: form.payload_nbytes] for page in pages]
        )

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Fill ``out[i]`` with the page of ``transfer.keys[i]``.

        A page whose read hangs is ``late`` in a first Ack. A second Ack follows once nothing writes to
        ``out[i]`` any more. While the disk hangs or fails reads, pages fail as UNAVAILABLE at once, except
        for an occasional probe.

        Args:
            transfer: Names the keys. The ``nbytes`` of its Ack are page bytes.
            out: Flat writable uint8, sized as for ``submit_write``. The content is undefined until the Ack, and after
                it for a page that failed.
        """
        self._guard()
        self._check(transfer, out)
        self._readers.submit(transfer, out)

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Remove records, ordered with the writes of the same keys. Missing records are ignored; there is no Ack."""
        self._guard()
        self._writer.submit_erase(keys)

    def poll(self) -> list[Ack]:
        """Return the Acks of transfers ended since the last call, oldest first. Works after ``close`` too."""
        self._guard()
        return self._outbox.take()

    def sync(self, timeout_s: float) -> bool:
        """Wait until every write submitted so far is durable or acked as failed, and every erase is durable.

        An erase is durable when a restart does not bring the page back: the record is deleted, or a tombstone names it.

        Returns:
            False if that did not happen in time, or if the disk refuses it.
        """
        self._guard()
        return self._writer.sync(timeout_s)

    def begin_sync(self) -> SyncWork:
        """Queue a mark behind everything submitted so far and return it, for callers that wait in steps."""
        self._guard()
        return self._writer.begin_sync()

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for the batch in progress: ``state`` is not "ok" until it ends."""
        self._writer.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Number of erased pages that a restart now could bring back."""
        return self._writer.pending_erases

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes when the disk completes a write."""
        return self._writer.progress

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, fail queued reads with CLOSED, end the threads, and release environment and lock.

        Once it has returned True, another call has no effect.

        Returns:
            False if a thread did not end in time. Work that has not begun then fails, the environment stays
                open and the lock held, and another ``close`` tries again.
        """
        if os.getpid() != self._pid or self._closed:
            return True
        deadline = time.monotonic() + timeout_s
        self._watchdog.close()
        self._readers.close()
        self._writer.close()
        ended = self._writer.join(max(0.0, deadline - time.monotonic()))
        if not ended:
            self._writer.abandon()
        ended = self.lender.close(max(0.0, deadline - time.monotonic())) and ended
        if not (self._readers.join_until(deadline) and ended):
            _log.warning(
                "the NVMe tier at %s has a thread that does not end; it is left behind", self._directory
            )
            return False
        self._closed = True
        self._catalogue.close()
        self._lock.release()
        return True

    @property
    def state(self) -> Literal["ok", "read_only", "absent"]:
        """State of the disk: "ok", "absent" or "read_only".

        "absent" while reads are not tried because the disk hangs or fails them; "read_only" while writes
        fail, or while one takes longer than the timeout or than a flush waits for it. A tier that was opened
        read-only is "ok" unless it is "absent".
        """
        if self._readers.absent:
            return "absent"
        return "read_only" if self._writer.read_only else "ok"

    def stats(self) -> dict[str, object]:
        """Return sizes, counters and state, for people and metrics.

        Reads a few directory entries, unless the disk hangs. A directory that was moved or deleted while the tier is
        open counts as 0 bytes.
        """
        self._guard()
        counts = self._outbox.counts()
        hangs = self._readers.num_late > 0 or self._writer.stalled
        if not hangs:
            with suppress(OSError):  # for example if no file descriptor is left: keep the last value
                self._disk_nbytes = directory_layout.disk_nbytes(self._directory)
        return {
            "path": str(self._directory),
            "state": self.state,
            "disk_nbytes": self._disk_nbytes,
            "map_nbytes": self._sizing.map_size,
            "budget_nbytes": self.budget_nbytes,
            "record_nbytes": self.record_nbytes,
            "records": self._catalogue.num_records,
            "read_only": self.read_only or self._writer.read_only,
            "hung_reads": self._readers.num_late,
            "pending_erases": self.pending_erases,
            "payload": self._payload,
            "codec": self._codec,
            "live_nbytes": self._catalogue.live_nbytes,
            "o_direct": self._direct,
            "readers": self._num_readers,
            "others": [] if hangs else directory_layout.others(self._directory),
            **{name: counts.get(name, 0) for name in _COUNTERS},
        }

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(f"this NVMe tier belongs to process {self._pid}; open another after a fork")

    def _check(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        if len(pages) != len(transfer.keys) or len(transfer.parents) != len(transfer.keys):
            raise ValueError(
                f"{len(transfer.keys)} keys, {len(transfer.parents)} parents, {len(pages)} pages"
            )
        if any(len(key) != KEY_NBYTES for key in transfer.keys):
            raise ValueError(f"a key has {KEY_NBYTES} bytes")
        if any(page.shape != (self._view_nbytes,) or page.dtype != np.uint8 for page in pages):
            raise ValueError(f"a page is a flat uint8 array of {self._view_nbytes} bytes")


_COUNTERS = (
    "batches",
    "bytes_read",
    "bytes_stored",
    "bytes_written",
    "read_integrity",
    "read_io_error",
    "read_late",
    "read_not_found",
    "read_unfit",
    "read_unavailable",
    "reopened",
    "write_io_error",
    "write_no_space",
    "write_unavailable",
)
