"""The NVMe tier: stores pages on disk, with a catalogue in LMDB and with queues that never block the caller."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
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
from tierstore.threads import Worker
from tierstore.types import Ack, PageKey, Tier, Transfer, exact_size

_watchdog_log = logging.getLogger("tierstore.nvme.patience")

_LOOKS = 4
"""Number of checks for late reads and writes per timeout."""


_CLOSE_S = 5.0


class Watchdog:
    """A daemon thread that calls each function in ``looks`` with time.monotonic(), four times per ``timeout_s``."""

    def __init__(self, looks: Sequence[Callable[[float], None]], timeout_s: float) -> None:
        self._looks = looks
        self._every_s = timeout_s / _LOOKS
        self._over = threading.Event()
        self._thread = Worker(self._run, name="tierstore-nvme-watch")
        self._thread.start()

    def close(self) -> None:
        """Stop the checks. Waits briefly for a check in progress, which never does I/O."""
        self._over.set()
        self._thread.join(_CLOSE_S)  # with a timeout, because a signal handler may have left a lock held

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for look in self._looks:
                try:
                    look(time.monotonic())
                except Exception:  # noqa: BLE001  top level of the thread: it continues
                    _watchdog_log.exception("checking the disk's threads failed")


_log = logging.getLogger("tierstore.nvme.tier")


class NvmeTier:
    """The disk tier of a store: the sub-directory of a home directory for one fingerprint and shard.

    While the tier is open, no other process can open the sub-directory, except if all processes open it read-only.

    All methods are thread-safe, and ``submit_*`` never blocks. A page does not count as read or written
    until ``poll`` has returned the Ack of its transfer. In a forked child, ``close`` has no effect and every method
    that accesses pages raises StoreClosed.
    """

    tier: ClassVar[Tier] = Tier.NVME
    """The tier of the store that this class implements."""

    record_nbytes: int
    """Maximum size of a page's record on disk in bytes, including its share of the catalogue."""

    budget_nbytes: int
    """Total size of records, in bytes, up to which the files of the tier stay within the capacity."""

    def __init__(
        self,
        shard: OpenShard | FrozenShard,
        outbox: Outbox,
        *,
        page_nbytes: int,
        timeout_s: float,
        coding: Coding,
        batch_nbytes: int | None = None,
    ) -> None:
        sizing = shard.sizing
        if batch_nbytes is not None:
            batch_pages = max(1, min(sizing.batch_pages, batch_nbytes // page_nbytes))
            sizing = replace(sizing, batch_pages=batch_pages)
        self.record_nbytes = sizing.record_nbytes
        self.budget_nbytes = sizing.budget_nbytes
        self.read_only = isinstance(shard, FrozenShard)
        """Whether the tier was opened read-only. ``budget_nbytes`` is then the size of its records."""
        self._form = coding.form
        self._view_nbytes = page_nbytes if self._form is None else self._form.view_nbytes
        self._directory = shard.directory
        self._lock = shard.lock
        self._undo = shard.undo
        self._retracted = False
        self._catalogue = shard.catalogue
        if self.read_only:
            self.budget_nbytes = max(sizing.record_nbytes, shard.catalogue.live_nbytes)
        self._sizing = sizing
        self._num_readers = shard.readers
        self._payload, self._direct, self._codec = shard.payload, shard.direct, coding.on_disk
        self._outbox = outbox
        # If a thread cannot be started, stop the running threads and release the directory.
        with ExitStack() as undone:
            undone.callback(shard.undo)
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
            release = undone.pop_all()
        self.lender = Lender(shard.catalogue.reader, page_nbytes)
        try:
            self._watchdog = Watchdog([self._readers.look, self._writer.look], timeout_s)
        except BaseException:
            self._readers.close()
            self._writer.close()
            if self._writer.join(timeout_s):  # otherwise it still uses the catalogue, under the lock
                release.close()
            raise
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
        batch_nbytes: int | None = None,
    ) -> NvmeTier:
        """Open the tier's sub-directory of ``path``, creating it if needed.

        A sub-directory that an earlier process left damaged is renamed, with one warning, and the tier starts
        empty. Records of any codec can be read, but encoded records need ``layout``.

        Args:
            path: The home directory.
            capacity: Maximum disk space for everything in the sub-directory, in bytes.
            wake: Function that an I/O thread calls, with no lock held, when a transfer or a sync has
                completed.
            description: Free-form description, stored in the marker for people.
            payload: Where to store page bytes: "lmdb", "extents" or "auto". Records in the other storage are
                removed, with one warning. "auto" keeps the existing storage, or chooses by ``capacity`` for a
                new directory.
            codec: Codec for pages written from now on, a name from ``tierstore.codecs``. Every codec but
                "none" needs ``layout``.
            held: Codec of the pages in memory (``codecs.host_format``). Such pages are written unchanged, or with
                their codes compressed.
            readers: Number of reader threads. None selects the smallest number that reaches 95 % of the best read
                throughput. A benchmark that writes 32 MiB measures this number when a directory with a capacity of
                at least 1 GiB is created. Without a measurement, None selects 2.
            timeout_s: Seconds after which callers no longer wait for a read or a batch of writes; see
                ``submit_*`` and ``state``.
            read_only: Open an existing sub-directory and write nothing to it. Other processes may read it at the
                same time. ``capacity`` and ``payload`` are ignored.
            batch_nbytes: Maximum total size of the pages that are written and made durable together. A caller that
                reuses the memory of its pages passes half of this memory, so that it can fill the other half during
                a batch. None: a default for callers that keep their pages.

        Raises:
            ConfigError: The directory does not belong to TierStore or is in use, or the disk lacks space for
                the capacity. Nothing is changed.
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
            batch_nbytes=batch_nbytes,
        )

    def records(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Yield the key, parent and size on disk of every record that was found when the tier was opened.

        Call this once, before any ``submit_*``. The sizes add up to at most ``budget_nbytes``. If the capacity
        was lowered or the catalogue has grown, the records may exceed this budget. Those records that are farthest
        from the beginning of their sequence are then queued for removal and not yielded.
        """
        self._guard()
        erased = set(self._catalogue.undeleted)
        surplus: list[PageKey] = []
        try:
            listed: Iterator[_Summary] = (
                each for each in self._catalogue.reader.summaries() if each[0] not in erased
            )
            if self._catalogue.live_nbytes > self.budget_nbytes:
                listed, surplus = _split_by_depth(list(listed), self.budget_nbytes)
            yield from listed
        except lmdb.Error as error:
            _log.warning("the NVMe tier at %s cannot list all of its records: %s", self._directory, error)
        self._writer.submit_erase(surplus)

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a write that stores ``pages[i]`` under ``transfer.keys[i]``, replacing any existing record.

        If a page cannot be written, an older record of its key is removed. While a batch hangs, transfers queued
        behind it fail as UNAVAILABLE.

        Args:
            transfer: The keys. ``nbytes`` of the Ack counts the bytes of records on disk.
            pages: Flat uint8 arrays of page_nbytes, or of ``HostFormat.view_nbytes`` if memory contains
                encoded pages. They must not change before the Ack.
        """
        self._guard()
        self._check(transfer, pages)
        form = self._form
        self._writer.submit_write(
            transfer, pages if form is None else [page[: form.payload_nbytes] for page in pages]
        )

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read that fills ``out[i]`` with the page of ``transfer.keys[i]``.

        A page whose read hangs is ``late`` in the first Ack. A second Ack follows once nothing writes to ``out[i]``
        any more. While the disk hangs or fails reads, all pages except an occasional probe fail as UNAVAILABLE at
        once.

        Args:
            transfer: The keys. ``nbytes`` of the Ack counts the bytes of pages.
            out: Flat writable uint8 arrays, with the same sizes as in ``submit_write``. The content is
                undefined until the Ack and, for a page that failed, after it.
        """
        self._guard()
        self._check(transfer, out)
        self._readers.submit(transfer, out)

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Queue the removal of records. Removals and writes of a key are applied in the order of submission.

        Missing records are ignored. No Ack is reported.
        """
        self._guard()
        self._writer.submit_erase(keys)

    def poll(self) -> list[Ack]:
        """Remove and return the Acks of transfers that have completed, oldest first.

        Works after ``close``, too.
        """
        self._guard()
        return self._outbox.take()

    def sync(self, timeout_s: float) -> bool:
        """Wait until every write submitted so far is durable or acked as failed, and every erase is durable.

        An erase is durable if a restart does not bring the page back: its record is deleted, or a tombstone names
        its key.

        Returns:
            False on a timeout, or if the disk refuses to write.
        """
        self._guard()
        return self._writer.sync(timeout_s)

    def begin_sync(self) -> SyncWork:
        """Queue a mark behind everything submitted so far, and return it without waiting.

        Used instead of ``sync`` by callers that wait for the mark in steps.
        """
        self._guard()
        return self._writer.begin_sync()

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for the batch in progress.

        ``state`` is then "read_only" or "absent" until the batch finishes.
        """
        self._writer.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Number of erased pages that a restart at this moment could bring back."""
        return self._writer.pending_erases

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes when the disk completes a write."""
        return self._writer.progress

    def close(self, timeout_s: float) -> bool:
        """Write all queued pages, fail queued reads as CLOSED, stop the threads, and release the directory.

        Once a call has returned True, further calls have no effect.

        Returns:
            False if a thread did not stop within ``timeout_s`` seconds. In this case, work that has not started
            fails, the environment stays open, and the lock stays held. Call ``close`` again to retry.
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
                "a thread of the NVMe tier at %s did not finish in time; the directory stays locked",
                self._directory,
            )
            return False
        # A signal handler may interrupt any step or call ``close`` itself, so another call repeats the steps.
        self._catalogue.close()
        if not self._retracted:
            self._lock.release()
        elif not self._closed:
            self._closed = True  # a second ``close`` must not remove what another process has created
            self._undo()
        self._closed = True
        return True

    def retract(self, timeout_s: float) -> bool:
        """Close the tier, and remove everything that was created on disk when it was opened.

        Used if the store could not be opened. The argument and the result are the same as for ``close``.
        """
        self._retracted = True
        return self.close(timeout_s)

    @property
    def state(self) -> Literal["ok", "read_only", "absent"]:
        """State of the disk: "ok", "absent" or "read_only".

        "absent" means that reads are not attempted, because the disk hangs or fails them. "read_only" means that
        the disk refuses writes, that a batch of writes has exceeded the timeout, or that a flush stopped waiting
        for the batch. A tier that was opened read-only is "ok" unless it is "absent".
        """
        if self._readers.absent:
            return "absent"
        return "read_only" if self._writer.read_only else "ok"

    def counters(self) -> dict[str, int]:
        """Return the counters of ``stats``, without access to the disk."""
        self._guard()
        counts = self._outbox.counts()
        return {name: counts.get(name, 0) for name in _COUNTERS}

    def stats(self) -> dict[str, object]:
        """Return sizes, counters and state, for people and metrics.

        Reads a few directory entries, unless the disk hangs. If the directory was moved or deleted while the tier is
        open, its size is 0.
        """
        self._guard()
        hangs = self._readers.num_late > 0 or self._writer.stalled
        if not hangs:
            with suppress(OSError):  # for example, if no file descriptor is left: keep the last value
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
            **self.counters(),
        }

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(f"this NVMe tier belongs to process {self._pid}; open another after a fork")

    def _check(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        if len(pages) != len(transfer.keys) or len(transfer.parents) != len(transfer.keys):
            raise ValueError(
                f"a transfer must have a parent and a page for each of its {len(transfer.keys)} keys, got "
                f"{len(transfer.parents)} parents and {len(pages)} pages"
            )
        if any(len(key) != KEY_NBYTES for key in transfer.keys):
            raise ValueError(f"every key must be {KEY_NBYTES} bytes long")
        if any(page.shape != (self._view_nbytes,) or page.dtype != np.uint8 for page in pages):
            raise ValueError(f"every page must be a flat uint8 array of {exact_size(self._view_nbytes)}")


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


_Summary = tuple[PageKey, PageKey | None, int]


def _split_by_depth(records: Sequence[_Summary], room: int) -> tuple[Iterator[_Summary], list[PageKey]]:
    """Return the records to keep, whose sizes add up to at most ``room`` bytes, and the keys of the other records.

    Records nearest to the beginning of their sequence are kept first, so a record is kept only if all records before
    it are kept. Records whose parent is missing come last.
    """
    parents = {key: parent for key, parent, _ in records}
    depths: dict[PageKey, float] = {}
    for key in parents:
        path: list[PageKey] = []
        at: PageKey | None = key
        while at is not None and at in parents and at not in depths:
            depths[at] = math.inf  # also ends the walk if damaged records form a cycle
            path.append(at)
            at = parents[at]
        depth = -1.0 if at is None else depths.get(at, math.inf)
        for each in reversed(path):
            depth += 1
            depths[each] = depth
    kept: list[_Summary] = []
    surplus: list[PageKey] = []
    for record in sorted(records, key=lambda each: depths[each[0]]):
        room -= record[2]
        if room < 0:
            surplus.append(record[0])
        else:
            kept.append(record)
    return iter(kept), surplus
