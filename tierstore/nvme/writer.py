"""The writer thread: its queue, group commit, and handling of a disk that refuses writes or hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.nvme.catalogue import Catalogue, Page
from tierstore.nvme.completion_queue import Job, Outbox, Outcome, failed
from tierstore.nvme.directory_layout import FULL
from tierstore.nvme.disk_space import Sizing
from tierstore.nvme.lmdb_environment import STALE
from tierstore.threads import Worker
from tierstore.types import Ack, Failure, PageKey, Transfer


@dataclass(slots=True)
class EraseWork:
    """Keys whose records are to be erased, in order."""

    keys: dict[PageKey, None]


@dataclass(slots=True)
class SyncWork:
    """A request to sync the disk. It is put into the queue, and applies to all work queued before it.

    ``done`` is set once this work has succeeded or failed. ``synced`` is True if the successful writes are durable.
    ``ok`` is True if the erases are durable as well.
    """

    done: threading.Event = field(default_factory=threading.Event)
    synced: bool = False
    ok: bool = False


@dataclass(slots=True)
class Batch:
    """The work of one transaction: first ``erases``, then ``writes`` (job, page index), then ``sync``."""

    erases: list[PageKey] = field(default_factory=list)
    writes: list[tuple[Job, int]] = field(default_factory=list)
    sync: SyncWork | None = None


class WorkQueue:
    """A queue in which erases may overtake writes of other keys. Work on the same key stays in order.

    Not thread-safe: protected by the writer's lock.
    """

    def __init__(self, batch_pages: int) -> None:
        self.batch_pages = batch_pages
        """Maximum number of pages in the next batch."""
        self._items: deque[Job | EraseWork | SyncWork] = deque()

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def num_erases(self) -> int:
        """Number of distinct keys in the queued erases."""
        return len(set[PageKey]().union(*(item.keys for item in self._items if isinstance(item, EraseWork))))

    def add(self, item: Job | EraseWork | SyncWork) -> None:
        """Append an item.

        Adjacent erases are merged, so that the number of pages limits the length of a stalled queue.
        """
        last = self._items[-1] if self._items else None
        if isinstance(item, EraseWork) and isinstance(last, EraseWork):
            last.keys.update(item.keys)
        else:
            self._items.append(item)

    def take_jobs(self) -> list[Job]:
        """Remove and return all queued writes, including those that are partly finished."""
        jobs = [item for item in self._items if isinstance(item, Job)]
        self._items = deque(item for item in self._items if not isinstance(item, Job))
        return jobs

    def take(self) -> Batch:
        """Remove and return the next batch, with at most ``batch_pages`` pages and one sync mark.

        An erase moves ahead of queued writes of other keys, but never ahead of a write of its own key.
        """
        batch = Batch()
        written: set[PageKey] = set()
        while self._items and batch.sync is None:
            item = self._items[0]
            if isinstance(item, SyncWork):
                batch.sync = item
            elif isinstance(item, EraseWork):
                if not written.isdisjoint(item.keys):
                    break
                batch.erases.extend(item.keys)
            elif not self._take_pages(item, batch, written):
                break
            self._items.popleft()
        return batch

    def take_erases(self, written: set[PageKey]) -> list[PageKey]:
        """Remove queued erases that may run before the writes of the keys in ``written``. Return their keys.

        An erase stays in the queue if one of its keys is in ``written`` or in a write queued before it.
        """
        taken: list[PageKey] = []
        kept: deque[Job | EraseWork | SyncWork] = deque()
        blocked = set(written)
        for item in self._items:
            if isinstance(item, Job):
                blocked.update(item.transfer.keys)
            elif isinstance(item, EraseWork) and blocked.isdisjoint(item.keys):
                taken.extend(item.keys)
                continue
            kept.append(item)
        self._items = kept
        return taken

    def _take_pages(self, job: Job, batch: Batch, written: set[PageKey]) -> bool:
        """Move pages of ``job`` into ``batch``. Return whether the job has no more pages in the queue."""
        room = self.batch_pages - len(batch.writes)
        end = min(len(job.pages), job.next + room)
        batch.writes.extend((job, index) for index in range(job.next, end))
        written.update(job.transfer.keys[job.next : end])
        job.next = end
        return end == len(job.pages)


_refusal_log = logging.getLogger("tierstore.nvme.refusal")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


class Refusal:
    """The read-only state of the tier: why the disk refuses writes, and when the writer retries.

    Only the writer's thread may use it, but any thread may read ``active``.
    """

    def __init__(self) -> None:
        self.active = False
        self.failure = Failure.IO_ERROR
        self._pause_s = _FIRST_PAUSE_S
        self._again = 0.0
        self._told = False

    def begin(self, error: lmdb.Error | OSError | str, failure: Failure) -> None:
        """Enter the read-only state, or double the pause before the next attempt.

        Logs one warning until ``forget`` is called. Until ``end`` or ``forget`` is called, writes fail with
        ``failure``.
        """
        if not self._told:
            _refusal_log.warning("the NVMe tier is read-only until the disk accepts writes again: %s", error)
        self._told = self.active = True
        self.failure = failure
        self._again = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Leave the read-only state after a successful transaction. Only ``forget`` resets the pause."""
        self.active = False

    def forget(self) -> None:
        """Leave the read-only state and reset the pause. Call this once pages were written: the disk has recovered."""
        if self._told:
            _refusal_log.info("the NVMe tier accepts writes again")
        self.active = self._told = False
        self._pause_s = _FIRST_PAUSE_S

    def remaining_s(self) -> float:
        """Return the number of seconds until the next attempt."""
        return max(0.0, self._again - time.monotonic())


_log = logging.getLogger("tierstore.nvme.writer")

_Result = TypeVar("_Result")

_ROOM_PATIENCE_S = 2.0

_LONG_S = 2.0
"""Seconds after which a batch counts as slow. The next batches are then smaller, so that progress becomes visible."""


class Writer:
    """A daemon thread that runs every write transaction. Its public methods are thread-safe."""

    def __init__(
        self,
        catalogue: Catalogue,
        outbox: Outbox,
        sizing: Sizing,
        timeout_s: float = 10.0,
        *,
        shortage: str | None = None,
    ) -> None:
        """Start the thread, which first deletes the records that could not be deleted when ``catalogue`` was opened.

        ``shortage`` is the reason why the disk had no space when the directory was opened, or None. Writes are
        refused at first if there is such a reason, or if any records must still be deleted.
        """
        self._catalogue = catalogue
        self._outbox = outbox
        self._sizing = sizing
        self._timeout_s = timeout_s
        self.room_patience_s = min(_ROOM_PATIENCE_S, timeout_s / 2)
        """Maximum time in seconds that a batch waits for read transactions that keep LMDB's map full."""
        self._since: float | None = None  # start time of the batch in progress
        self._hanging = False
        self._stalled = False  # a flush stopped waiting for the batch in progress
        self._done = 0  # number of committed transactions
        self._changed = threading.Condition()
        self._queue = WorkQueue(sizing.batch_pages)
        self._closing = False
        self._abandoned = False
        self._owed: dict[PageKey, None] = dict.fromkeys(catalogue.undeleted)
        """Keys of records that must be deleted before any write."""
        self._unrecorded: set[PageKey] = set()
        """Keys in ``_owed`` that no tombstone names, so that a restart would bring back their records."""
        self._told_unrecorded = False
        self._map_full = False  # whether LMDB's map was full at the last attempt to store pages
        self._full_under: set[tuple[int, str, int]] = set()
        """Read transactions that kept LMDB's map full when a batch failed for that reason."""
        self._told_reopened = False
        self.refusal = Refusal()
        if self._owed and shortage is None:
            shortage = "erased pages could not be deleted when the directory was opened"
        if shortage is not None:
            self.refusal.begin(shortage, Failure.NO_SPACE)
        self._thread = Worker(self._run, name="tierstore-nvme-write")
        self._thread.start()

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a write. Never blocks.

        After ``close``, the write fails as CLOSED. While the writer hangs, it fails as UNAVAILABLE, and older
        records of the same keys are queued for removal.
        """
        if pages and self._hanging:
            self._add(EraseWork(dict.fromkeys(transfer.keys)))
            self._outbox.count("write_unavailable", len(pages))
            self._outbox.add_quietly(failed(transfer, Failure.UNAVAILABLE))
        elif not pages or not self._add(Job(transfer, pages)):
            self._outbox.add_quietly(failed(transfer, Failure.CLOSED))

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Queue an erase. Never blocks. Ignored after ``close``."""
        if keys:
            self._add(EraseWork(dict.fromkeys(keys)))

    @property
    def hanging(self) -> bool:
        """Whether the batch in progress has exceeded ``timeout_s``."""
        return self._hanging

    @property
    def stalled(self) -> bool:
        """Whether the batch in progress is hanging, or a caller has stopped waiting for it."""
        return self._hanging or self._stalled

    @property
    def read_only(self) -> bool:
        """Whether writes have stopped because the disk refuses them or the batch in progress is stalled."""
        return self.stalled or self.refusal.active

    @property
    def pending_erases(self) -> int:
        """Number of erases that are not durable yet. A restart at this moment could bring back their records."""
        with self._changed:
            return self._queue.num_erases + len(self._unrecorded)

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes with every commit, and with every disk write that completes within a batch."""
        return self._done, _written_nbytes(self._thread.native_id)

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for the batch in progress.

        ``stalled`` is then True until the batch finishes. No effect if no batch is in progress.
        """
        with self._changed:
            if self._since is None or self._stalled:
                return
            told, self._stalled = self._hanging, True
        if not told:
            _log.warning("the NVMe tier is read-only until the disk answers: a write hangs")

    def look(self, now: float) -> None:
        """Detect a batch that exceeds ``timeout_s``. Call this periodically with time.monotonic().

        Queued pages that are in no batch yet then fail as UNAVAILABLE, because memory still contains these pages and
        no caller should wait for the disk. Older records of these pages are queued for removal.
        """
        with self._changed:
            hangs = self._since is not None and now - self._since >= self._timeout_s
            if not hangs or self._closing:
                return
            told, self._hanging = self._hanging, True
            acks = [ack for job in self._queue.take_jobs() if (ack := self._give_up(job))]
        if not told:
            _log.warning(
                "the NVMe tier is read-only until the disk answers: a write has not completed for %g s",
                self._timeout_s,
            )
        for ack in acks:
            self._outbox.add(ack)

    def begin_sync(self) -> SyncWork:
        """Queue a mark behind everything queued so far and return it.

        After ``close``, the mark is already done, with ``synced`` and ``ok`` False.
        """
        mark = SyncWork()
        if not self._add(mark):
            mark.done.set()
        return mark

    def sync(self, timeout_s: float) -> bool:
        """Wait until all work queued so far has succeeded or failed, and is durable if it succeeded.

        Returns:
            False on a timeout, or if the disk refuses to sync or cannot make an erase durable.
        """
        mark = self.begin_sync()
        return mark.done.wait(timeout_s) and mark.ok

    def close(self) -> None:
        """Accept no more work, and let the thread exit once the queue is empty. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let the thread exit without further writes. Queued pages fail as CLOSED. Does not wait."""
        with self._changed:
            self._closing = self._abandoned = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread. Return whether it has exited."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _add(self, item: Job | EraseWork | SyncWork) -> bool:
        with self._changed:
            if self._closing:
                return False
            self._queue.add(item)
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            outcomes: Sequence[Outcome]
            try:
                outcomes = self._serve(batch)
            except Exception:  # noqa: BLE001  top level of the thread: the batch fails, the thread continues
                _log.exception("a batch of %d pages failed", len(batch.writes))
                self._doubt(batch.writes)
                outcomes = [Failure.IO_ERROR] * len(batch.writes)
            self._settle(batch, outcomes)
            self._rest()
        self._end()

    def _end(self) -> None:
        """Delete the records in ``_owed`` before the thread exits. Write tombstones for records that remain."""
        try:
            if not self._abandoned:
                self._erase_owed()
        except (lmdb.Error, OSError) as error:
            _log.debug("the last erases failed: %s", error)
        self._record_owed()
        if self._unrecorded:
            _log.warning(
                "%d evicted pages could not be erased from the NVMe tier; the next open may find them again",
                len(self._unrecorded),
            )

    def _rest(self) -> None:
        """Record the end of a batch, and choose the size of the next one from the duration of this one."""
        with self._changed:
            assert self._since is not None
            took, limit = time.monotonic() - self._since, self._queue.batch_pages
            self._queue.batch_pages = (
                max(1, int(limit * _LONG_S / took))
                if took > _LONG_S
                else min(self._sizing.batch_pages, limit * 2)
            )
            hung = self.stalled
            self._hanging = self._stalled = False
            self._since = None
        if hung:
            _log.info("the NVMe tier accepts writes again")

    def _give_up(self, job: Job) -> Ack | None:
        """Fail the pages of ``job`` that are in no batch yet. Return the ack if it is due.

        Older records of these pages are queued for removal. The caller must hold the lock.
        """
        left = range(job.next, len(job.pages))
        job.next = len(job.pages)
        self._queue.add(EraseWork(dict.fromkeys(job.transfer.keys[index] for index in left)))
        self._outbox.count("write_unavailable", len(left))
        due = [job.done(index, Failure.UNAVAILABLE) for index in left]
        return job.ack() if any(due) else None

    def _next(self) -> Batch | None:
        """Wait for work and return the next batch, or None once the writer is closed and the queue is empty.

        An empty batch means that it is time to check whether the disk accepts writes again.
        """
        with self._changed:
            while not self._queue:
                if self._closing:
                    return None
                wait_s = self.refusal.remaining_s() if self.refusal.active else None
                if not self._changed.wait(wait_s) and wait_s is not None:
                    break
            self._since = time.monotonic()
            batch = self._queue.take()
            self._owe(batch.erases)
            return batch

    def _serve(self, batch: Batch) -> Sequence[Outcome]:
        """Process a batch. Return the outcome of each page in ``batch.writes``."""
        if self._abandoned:
            self._record_owed()
            return [Failure.CLOSED] * len(batch.writes)
        if self.refusal.active and self.refusal.remaining_s() > 0:
            self._doubt([write for write in batch.writes if self._replaces(write)])
            self._record_owed()
            return [self.refusal.failure] * len(batch.writes)
        try:
            return self._transact(batch)
        except (lmdb.Error, OSError) as error:
            if not isinstance(error, STALE) and not self._catalogue.in_panic:
                return self._refused(batch, error)
            stale = error
        self._doubt(batch.writes)
        try:
            self._reopen(stale)
            return self._transact(batch)
        except (lmdb.Error, OSError) as error:
            return self._refused(batch, error)

    def _transact(self, batch: Batch) -> Sequence[Outcome]:
        self._erase_owed()
        if self.refusal.active and not batch.writes:
            self._check_room()
            self._catalogue.turn()
            self.refusal.end()
        return self._write(batch.writes)

    def _refused(self, batch: Batch, error: lmdb.Error | OSError) -> Sequence[Outcome]:
        failure = _name(error)
        self._outbox.count(f"write_{failure.value}")
        self.refusal.begin(error, failure)
        self._doubt(batch.writes)
        self._record_owed()
        return [failure] * len(batch.writes)

    def _reopen(self, error: lmdb.Error | OSError) -> None:
        """Reopen the environment, because nothing else can clear ``error``.

        Raises lmdb.Error or OSError if reopening fails.
        """
        self._catalogue.reopen()
        self._outbox.count("reopened")
        level = logging.DEBUG if self._told_reopened else logging.WARNING
        self._told_reopened = True
        _log.log(level, "the catalogue of the NVMe tier was closed and reopened after an error: %s", error)

    def _write(self, writes: list[tuple[Job, int]]) -> Sequence[Outcome]:
        room = self._catalogue.room()
        if room < len(writes):
            self._erase_ahead({job.transfer.keys[index] for job, index in writes})
            room = self._catalogue.room()
        sizes = self._store([_page(job, index) for job, index in writes[:room]])
        sizes += [None] * (len(writes) - len(sizes))
        stored = [(write, size) for write, size in zip(writes, sizes, strict=True) if size is not None]
        refused = [write for write, size in zip(writes, sizes, strict=True) if size is None]
        if stored:
            self._done += 1
            self._outbox.count("bytes_written", sum(job.pages[index].nbytes for (job, index), _ in stored))
            self._outbox.count("bytes_stored", sum(size for _, size in stored))
            self._outbox.count("batches")
            self.refusal.forget()
            self._told_reopened = False
            self._catalogue.prepare_tombstones()
        if refused:
            self._outbox.count("write_no_space", len(refused))
            self._doubt([write for write in refused if self._replaces(write)])
        return [Failure.NO_SPACE if size is None else size for size in sizes]

    def _store(self, pages: list[Page]) -> list[int | None]:
        """Write the pages. If space is lacking, make space and retry the pages that were not stored.

        Returns:
            The size of each page on disk in bytes, or None for a page that was not stored.
        """
        sizes = self._attempt(pages)
        for make_room in (self._make_room, self._catalogue.make_places):
            missing = [index for index, size in enumerate(sizes) if size is None]
            if missing and make_room([pages[index] for index in missing]):
                again = self._attempt([pages[index] for index in missing])
                for index, size in zip(missing, again, strict=True):
                    sizes[index] = size
        if pages and self._map_full:
            return self._until_room(partial(self._catalogue.store, pages)) or sizes
        return sizes

    def _attempt(self, pages: list[Page]) -> list[int | None]:
        try:
            sizes = self._catalogue.store(pages) if pages else []
        except lmdb.MapFullError:
            self._map_full = True
            return [None] * len(pages)
        self._map_full = False
        return sizes

    def _until_room(self, act: Callable[[], _Result]) -> _Result | None:
        """Retry ``act``, which found LMDB's map full, while older read transactions keep pages in use.

        If a read transaction is still open after ``room_patience_s``, the tier becomes read-only for a while.

        Returns:
            The result of ``act``, or None if there is still no space.
        """
        holding = self._catalogue.readers()
        deadline = time.monotonic() + self.room_patience_s
        pause_s = 0.01
        while holding and time.monotonic() < deadline:
            with self._changed:
                if self._changed.wait_for(lambda: self._abandoned, pause_s):
                    break
            pause_s = min(2 * pause_s, 0.2)
            self._catalogue.drop_dead_readers()
            holding &= self._catalogue.readers()
            try:
                for _ in range(2):  # space freed by a transaction becomes usable in the second one after it
                    self._catalogue.turn()
                return act()
            except lmdb.MapFullError:
                continue
        if holding:
            self._full_under = holding
            self.refusal.begin(self._held(holding), Failure.NO_SPACE)
        return None

    def _check_room(self) -> None:
        """If writes are refused for lack of space, check whether there is space again.

        Raises lmdb.Error or OSError if the disk or LMDB's map is still full.
        """
        if self.refusal.failure is not Failure.NO_SPACE:
            return
        self._full_under &= self._catalogue.readers()
        if self._full_under:
            raise self._held(self._full_under)
        self._catalogue.check_room()

    def _held(self, holding: set[tuple[int, str, int]]) -> lmdb.MapFullError:
        """Return an error that names the processes whose read transactions keep LMDB's map full."""
        who = ", ".join(str(pid) for pid in sorted({pid for pid, _, _ in holding}))
        return lmdb.MapFullError(
            f"LMDB's map is full: open read transactions of process {who} keep LMDB from reusing freed pages"
        )

    def _make_room(self, pages: list[Page]) -> bool:
        self._erase_ahead({page.key for page in pages})
        self._catalogue.drop_dead_readers()
        with suppress(lmdb.MapFullError):
            self._catalogue.turn()
        return True

    def _erase_ahead(self, written: set[PageKey]) -> None:
        """Run queued erases of other keys now, to make space for writes of the keys in ``written``."""
        with self._changed:
            self._owe(self._queue.take_erases(written))
        self._erase_owed()

    def _owe(self, keys: Iterable[PageKey]) -> None:
        """Record that these records must be deleted and have no tombstone yet. The caller holds the lock."""
        for key in keys:
            self._owed[key] = None
            self._unrecorded.add(key)

    def _erase_owed(self) -> None:
        """Delete all records in ``_owed``, ``erase_keys`` per transaction, and retire the tombstones.

        After an error, the next call deletes the rest. No page may be written while tombstones are live, because a
        new record would count as erased if a tombstone names its key.
        """
        while self._owed:
            keys = [key for key, _ in zip(self._owed, range(self._sizing.erase_keys), strict=False)]
            try:
                self._catalogue.erase(keys)
            except lmdb.MapFullError:
                if self._until_room(partial(self._erased, keys)) is None:
                    raise
            self._done += 1
            with self._changed:
                self._unrecorded.difference_update(keys)
            for key in keys:
                del self._owed[key]
        if self._catalogue.tombstones.live:
            self._catalogue.bury(())

    def _erased(self, keys: Sequence[PageKey]) -> bool:
        self._catalogue.erase(keys)
        return True

    def _record_owed(self) -> None:
        """Write tombstones for records that could not be deleted, so that no restart brings them back."""
        self._forget_absent()
        if not self._unrecorded:
            return
        try:
            self._catalogue.tombstones.record(self._unrecorded)
        except OSError as error:
            level = logging.DEBUG if self._told_unrecorded else logging.WARNING
            self._told_unrecorded = True
            _log.log(
                level,
                "%d erases cannot be made durable, and are kept in memory until the disk accepts them: %s",
                len(self._unrecorded),
                error,
            )
            return
        self._told_unrecorded = False
        with self._changed:
            self._unrecorded.clear()

    def _forget_absent(self) -> None:
        """Drop keys without a record from ``_unrecorded``, because they need no tombstone.

        Refused writes leave such keys behind, and on a full disk their number keeps growing. Unnecessary tombstones
        are harmful: each may also match other keys, whose records the next open would then delete.
        """
        absent = [key for key in self._unrecorded if not self._has(key)]
        with self._changed:
            self._unrecorded.difference_update(absent)
        for key in absent:
            if not self._catalogue.in_doubt(key):
                self._owed.pop(key, None)

    def _doubt(self, writes: Iterable[tuple[Job, int]]) -> None:
        # A failed commit may still have reached the disk. The store does not count these records, so they
        # must be deleted.
        with self._changed:
            self._owe(job.transfer.keys[index] for job, index in writes)

    def _replaces(self, write: tuple[Job, int]) -> bool:
        """Return whether there is an older record of the page that ``write`` failed to store."""
        job, index = write
        return self._has(job.transfer.keys[index])

    def _has(self, key: PageKey) -> bool:
        """Return whether the page has a record, or True if that cannot be determined."""
        try:
            return self._catalogue.has(key)
        except lmdb.Error:
            return True

    def _settle(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        ended = zip(batch.writes, outcomes, strict=True)
        with self._changed:
            assert self._since is not None
            share = (time.monotonic() - self._since) / max(1, len(batch.writes))
            for job, _ in batch.writes:
                job.spent(share)
            acks = [job.ack() for (job, index), outcome in ended if job.done(index, outcome)]
        for ack in acks:
            self._outbox.add(ack)
        if batch.sync is not None:
            self._sync(batch.sync)

    def _sync(self, mark: SyncWork) -> None:
        try:
            if not self.refusal.active:
                self._erase_owed()
        except (lmdb.Error, OSError) as error:
            self.refusal.begin(error, _name(error))
        self._record_owed()
        try:
            self._catalogue.sync()
            mark.synced = True
            mark.ok = not self._unrecorded
        except (lmdb.Error, OSError) as error:
            _log.warning("the NVMe tier could not be synced: %s", error)
        finally:
            mark.done.set()
            self._outbox.wake()


class NoWriter:
    """The writer of a tier that was opened read-only. Thread-safe.

    It fails all writes and deletes no records from the disk.
    """

    read_only = stalled = hanging = False
    """Always False: nothing is written to the disk, so no write can be refused or hang."""
    progress = (0, 0)

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._erased: set[PageKey] = set()

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Ack every page as UNAVAILABLE."""
        self._outbox.add_quietly(failed(transfer, Failure.UNAVAILABLE))

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Count these pages as erased. Their records stay on disk, so a restart brings the pages back."""
        self._erased.update(keys)

    @property
    def pending_erases(self) -> int:
        """Number of pages that were erased. All their records are still on disk."""
        return len(self._erased)

    def begin_sync(self) -> SyncWork:
        """Return a sync mark that is already done.

        ``ok`` is False if any page was erased, because no erase is durable here.
        """
        mark = SyncWork(synced=True, ok=not self._erased)
        mark.done.set()
        return mark

    def sync(self, timeout_s: float) -> bool:
        """Return False if any page was erased, because erases are never durable here. Does not wait."""
        return not self._erased

    def look(self, now: float) -> None:
        """Do nothing: no write can hang."""

    def give_up_waiting(self) -> None:
        """Do nothing: no caller waits for a batch."""

    def close(self) -> None:
        """Do nothing: a read-only tier has no writer thread."""

    def abandon(self) -> None:
        """Do nothing: a read-only tier queues no writes."""

    def join(self, timeout_s: float) -> bool:
        """Return True, because a read-only tier has no writer thread."""
        return True


def _written_nbytes(thread: int | None) -> int:
    """Return how many bytes a thread has written in completed system calls, or 0 if this is unknown."""
    try:
        for line in Path(f"/proc/self/task/{thread}/io").read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.partition(":")[2])
    except OSError:
        pass
    return 0


def _page(job: Job, index: int) -> Page:
    return Page(job.transfer.keys[index], job.transfer.parents[index], job.pages[index])


def _name(error: lmdb.Error | OSError) -> Failure:
    code = error.code if isinstance(error, lmdb.Error) else error.errno
    full = code in FULL or isinstance(error, lmdb.DiskError | lmdb.MapFullError)
    return Failure.NO_SPACE if full else Failure.IO_ERROR
