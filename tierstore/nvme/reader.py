"""Readers of page records, which verify every byte.

``RecordReader`` reads one record on any thread. ``Readers`` are the threads of the tier. They take pages from the
oldest transfer, and verify each page before it counts as read. A read that exceeds ``timeout_s`` is late. The late
page gets a separate ack, so that the rest of the transfer need not wait for it. The thread and the slot stay
occupied until the read finishes. While the disk hangs, or after several consecutive reads have failed, no reads are
attempted (see ``read_breaker``).

``Checkers`` verify and decode pages while the readers fetch the next ones. Verifying the checksum of a page takes a
tenth of the time in which a fast disk delivers the page. If the reader threads also verified pages, fewer reads
would be in flight during that time. ``Lender`` reads records for archives, without decoding them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import loss_class, summary, unpack
from tierstore.nvme.completion_queue import Job, Outbox, Outcome, Shares, failed
from tierstore.nvme.direct_io import BLOCK, aligned, padded
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.page_codecs import Coding, Decoders, UnfitError
from tierstore.nvme.read_breaker import Breaker, Circuit
from tierstore.nvme.record_storage import HEAD, TRIES, Fetched, MovedError, RecordBytes, lookup
from tierstore.threads import Worker, start_all
from tierstore.types import Failure, PageKey, Transfer


def scratch_for(page_nbytes: int) -> NDArray[np.uint8]:
    """Return aligned scratch memory for ``fetch``. It is large enough for a record that cannot be read in place."""
    return aligned(BLOCK + padded(page_nbytes))


class RecordReader:
    """Reader of page records. Thread-safe."""

    def __init__(
        self,
        env: Environment,
        payload: RecordBytes,
        *,
        fingerprint: bytes,
        held_nbytes: int | None = None,
        erased: Container[bytes] = (),
    ) -> None:
        """Create a reader of the records in ``env``.

        Args:
            payload: Storage of the records' bytes.
            held_nbytes: Length in bytes of encoded pages in memory, or None if pages in memory are not
                encoded.
            erased: Keys whose records count as missing in ``record`` and in the listings.
        """
        self._held = held_nbytes
        self._env = env
        self._payload = payload
        self._fingerprint = fingerprint
        self._erased = erased

    def fetch(self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> Fetched:
        """Read the record of ``key``: the head into ``scratch``, and the payload into ``out``.

        A payload whose format differs from that of host memory is read into ``scratch``. Nothing is verified. If the
        record is replaced or moved during the read, the key is looked up again. Errors other than KeyError therefore
        refer to the record that the catalogue names now.

        Args:
            key: Key of the page.
            out: Memory for the page. The caller must not use it for anything else until ``check`` has
                returned.
            scratch: Aligned memory of at least BLOCK bytes. The same restriction applies.

        Raises:
            KeyError: The page has no record.
            IntegrityError: The bytes cannot be those that were written.
            OSError: The record could not be read.
            lmdb.Error: The catalogue could not be read.
            MovedError: The record was replaced or moved during every attempt.
        """
        try:
            return self._payload.fetch(key, out, scratch, self._held)
        except lmdb.ReadersFullError:
            self._env.reader_check()  # killed processes may have left reader slots occupied
            return self._payload.fetch(key, out, scratch, self._held)

    def check(
        self,
        key: PageKey,
        fetched: Fetched,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        """Verify every byte and fill ``out`` with the page in the format of host memory.

        A record that was replaced or moved during the read is read again. If an exception is raised, the content of
        ``out`` is undefined. The exceptions of ``fetch`` are possible as well.

        Args:
            fetched: The result of ``fetch`` for ``out`` and ``scratch``.
            decoders: Decoders of the calling thread, which need not be the thread that fetched the page.

        Raises:
            IntegrityError: The bytes are not those that were written, or they are encoded and no decoder exists for
                them.
            UnfitError: The codec of host memory cannot represent the page.
        """
        head, fetched = self._settled(key, fetched, out, scratch)
        decoders.fill(head, fetched.payload, out)

    def read_run(
        self,
        keys: Sequence[PageKey],
        outs: Sequence[NDArray[np.uint8]],
        heads: Sequence[NDArray[np.uint8]],
        began: Callable[[], None],
    ) -> list[bool]:
        """Read and verify pages whose records lie next to each other.

        Return which pages are now in ``outs``, each with every byte verified. The other pages must be read with
        ``fetch`` and ``check``, which also report why a page cannot be read. The contents of their ``outs`` are
        undefined.

        Args:
            heads: For each page, aligned scratch memory of BLOCK bytes.
            began: Function that is called before each read from the disk.
        """
        if self._held is not None:
            return [False] * len(keys)
        try:
            found = self._payload.fetch_run(keys, outs, heads, began)
        except lmdb.Error:
            return [False] * len(keys)
        return [
            fetched is not None and self._is_intact(key, fetched, head)
            for key, fetched, head in zip(keys, found, heads, strict=True)
        ]

    def _is_intact(self, key: PageKey, fetched: Fetched, head: NDArray[np.uint8]) -> bool:
        """Return whether a record is intact and contains the page unencoded."""
        try:
            return self._verified(key, fetched, head).codec is record_format.Codec.NONE
        except IntegrityError:
            return False

    def record(
        self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[bytes, NDArray[np.uint8]]:
        """Return the head and the payload of a record in its stored form, after verifying every byte.

        The payload is a view of ``out`` or ``scratch``, which must meet the requirements of ``fetch``. Raises
        the errors of ``fetch`` and ``check``.
        """
        if key in self._erased:
            raise KeyError(key)
        _, fetched = self._settled(key, self.fetch(key, out, scratch), out, scratch)
        return scratch[HEAD].tobytes(), fetched.payload

    def _settled(
        self, key: PageKey, fetched: Fetched, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[record_format.Head, Fetched]:
        """Return the verified head and the bytes of a record.

        A record that fails verification may have been replaced during the read, because no transaction protects the
        slot from being rewritten. The record counts as damaged only if the catalogue still names it. Otherwise, the
        record that the catalogue names now is read instead.
        """
        for _ in range(TRIES):
            try:
                return self._verified(key, fetched, scratch), fetched
            except IntegrityError:
                if lookup(self._env, key) == fetched.raw:
                    raise
            fetched = self.fetch(key, out, scratch)
        raise MovedError(f"the record was replaced {TRIES} times while it was being read")

    def _verified(self, key: PageKey, fetched: Fetched, scratch: NDArray[np.uint8]) -> record_format.Head:
        """Verify every byte of a record's head and payload, and return the head."""
        return record_format.verify(
            scratch[HEAD],
            fetched.payload,
            fingerprint=self._fingerprint,
            key=key,
            generation=fetched.generation,
        )

    def summaries(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Yield the key, parent and size on disk of every record in key order, from one snapshot.

        Must not be called while a writer runs. Entries are not verified here: a child process verified them
        when the directory was opened, and each entry is verified again when its page is loaded.
        """
        with self._env.begin() as txn:
            yield from map(summary, self._listed(txn))

    def loss_classes(self) -> Iterator[tuple[PageKey, str]]:
        """Yield the key and loss class of every record ("" if unknown). Must not be called while a writer runs."""
        with self._env.begin() as txn:
            yield from map(loss_class, self._listed(txn))

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Read every record, and yield (key, fault). The fault is a description, or None for an intact record.

        Changes nothing. Encoded pages are not decoded: the check confirms only that the bytes are those that
        were written.
        """
        out, scratch = aligned(0)[:0], scratch_for(0)
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
        """Yield the key and entry of every record that is not erased."""
        items = iter(txn.cursor(db=self._env.catalogue))
        return items if self._erased == () else ((k, raw) for k, raw in items if k not in self._erased)

    def close(self) -> None:
        """Close the file descriptors but not the environment. No other call may be in progress or follow."""
        self._payload.close()


Task = Callable[[Decoders], None]


class Checkers:
    """A set of ``count`` daemon threads that verify pages, each with memory for one page. Thread-safe.

    If ``count`` is 0, the thread that fetches a page also verifies it.
    """

    def __init__(self, count: int, page_nbytes: int, coding: Coding) -> None:
        self._coding = coding
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Task, NDArray[np.uint8]]] = deque()
        self._spare = [scratch_for(page_nbytes) for _ in range(count)]
        self._closing = False
        self._threads = [Worker(self._run, name=f"tierstore-nvme-check-{number}") for number in range(count)]
        start_all(self._threads, self.close)

    def offer(self, task: Task, scratch: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Hand ``task`` to a thread, which uses ``scratch`` until the task finishes. A task must not raise.

        Returns:
            Another scratch buffer for the caller, or None if all threads are busy or ``close`` was called. After
            None, the caller must run the task itself.
        """
        with self._changed:
            if self._closing or not self._spare:
                return None
            self._tasks.append((task, scratch))
            self._changed.notify()
            return self._spare.pop()

    def close(self) -> None:
        """Accept no more tasks, run those already accepted, and let the threads exit."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[Worker]:
        """The threads, to be joined after ``close``."""
        return self._threads

    def _run(self) -> None:
        decoders = self._coding.decoders()
        while True:
            with self._changed:
                while not self._tasks and not self._closing:
                    self._changed.wait()
                if not self._tasks:
                    return
                task, scratch = self._tasks.popleft()
            task(decoders)
            with self._changed:
                self._spare.append(scratch)


_log = logging.getLogger("tierstore.nvme.readers")
_pages_log = logging.getLogger("tierstore.nvme.mishaps")  # for problems with single pages

_WORTH_CHECKING_APART = 512 << 10  # bytes; handing over a smaller page takes as long as verifying it
_RUN_NBYTES = 1 << 20  # size of the pages that one call reads, if their records lie next to each other
_MOST_IN_RUN = 256  # pages; each needs a block of memory for its head
_LEAST_IN_RUN = 4  # pages; the last pages in the queue are divided among the threads
_LEAST_FOR_RUNS = 32  # pages; if fewer pages are queued and a read hangs, only one page waits


@dataclass(slots=True, eq=False)
class _Read:
    """The pages that a thread is reading: the pages ``indexes`` of ``job``.

    ``ticket`` is the breaker's permit for the read, ``since`` is the time at which the read started, and ``begun``
    is the result of ``Shares.begin``, which ``Shares.end`` needs.
    """

    job: Job
    indexes: range
    ticket: int
    since: float
    begun: float
    late: bool = False


class Readers:
    """A set of ``count`` daemon threads that read pages. ``submit``, ``look`` and ``close`` are thread-safe."""

    def __init__(
        self,
        reader: RecordReader,
        outbox: Outbox,
        *,
        count: int,
        page_nbytes: int,
        timeout_s: float,
        coding: Coding,
        breaker: Breaker | None = None,
    ) -> None:
        self._reader = reader
        self._outbox = outbox
        self._warned = False  # whether a bad page was reported
        self._count = count
        self._page_nbytes = page_nbytes
        self._timeout_s = timeout_s
        self._coding = coding
        self._breaker = breaker or Breaker()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._num_queued = 0  # pages of these jobs whose reads have not started
        self._reading: set[_Read] = set()
        self._shares = Shares()
        self._num_late = 0
        self._closing = False
        self._posted = False  # whether acks were queued but not announced
        self._told_absent = False
        small = page_nbytes < _WORTH_CHECKING_APART
        self._run_pages = min(_MOST_IN_RUN, _RUN_NBYTES // page_nbytes) if small else 1
        self._least_in_run = max(1, min(_LEAST_IN_RUN, self._run_pages // 4))
        # Decoding a page takes ten times as long as verifying it, and up to half the time in which the disk
        # delivers it.
        apart = count if coding.changes else max(1, count // 2)
        self._checkers = Checkers(apart if page_nbytes >= _WORTH_CHECKING_APART else 0, page_nbytes, coding)
        self._threads = [Worker(self._run, name=f"tierstore-nvme-read-{number}") for number in range(count)]
        start_all(self._threads, self.close)

    @property
    def absent(self) -> bool:
        """Whether reads are currently skipped, except for an occasional probe."""
        return self._breaker.state is not Circuit.CLOSED or self._num_late == self._count

    @property
    def num_late(self) -> int:
        """Number of late reads that are still in progress."""
        return self._num_late

    def submit(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read. Never blocks.

        The read fails as CLOSED after ``close``, and as UNAVAILABLE if all threads hang.
        """
        with self._changed:
            if out and not self._closing and self._num_late < self._count:
                self._jobs.append(Job(transfer, out))
                self._num_queued += len(out)
                self._changed.notify(len(out))
                return
            hanging = bool(out) and not self._closing
        self._outbox.add_quietly(failed(transfer, Failure.UNAVAILABLE if hanging else Failure.CLOSED))
        if hanging:
            self._outbox.count("read_unavailable", len(out))

    def look(self, now: float) -> None:
        """Mark reads in progress that have exceeded the timeout as late. Call this periodically.

        If the reads of all threads are late, the queued reads fail as UNAVAILABLE. ``now`` is the value of
        time.monotonic().
        """
        with self._changed:
            for read in self._reading:
                if not read.late and now - read.since >= self._timeout_s:
                    self._late(read, now)
            if self._num_late == self._count:
                self._refuse(Failure.UNAVAILABLE)
            posted = self._take_posted()
        if posted:
            self._outbox.wake()
        self._tell_state()

    def close(self) -> None:
        """Ack queued pages as CLOSED, and let the threads exit once they have finished their reads."""
        with self._changed:
            self._closing = True
            self._refuse(Failure.CLOSED)
            self._changed.notify_all()
        self._checkers.close()

    def join_until(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (time.monotonic()). Return whether all have exited."""
        threads = [*self._threads, *self._checkers.threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -- on the reader threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        scratch = scratch_for(self._page_nbytes)
        decoders = self._coding.decoders()
        heads = aligned(self._run_pages * BLOCK).reshape(-1, BLOCK)
        read = self._wait()
        while read is not None:
            if len(read.indexes) > 1:
                read = self._next(read, self._read_run(read, heads, scratch, decoders)) or self._wait()
                continue
            fetched = self._fetch(read, scratch)
            if isinstance(fetched, Failure):
                read = self._next(read, [fetched]) or self._wait()
                continue
            spare = self._checkers.offer(partial(self._check_apart, read, fetched, scratch), scratch)
            if spare is None:
                read = self._next(read, [self._check(read, fetched, scratch, decoders)]) or self._wait()
            else:
                scratch, read = spare, self._wait()

    def _check_apart(
        self, read: _Read, fetched: Fetched, scratch: NDArray[np.uint8], decoders: Decoders
    ) -> None:
        """Verify a page on a thread other than the one that fetched it, and record the result."""
        outcome = self._check(read, fetched, scratch, decoders)
        with self._changed:
            self._ended(read, [outcome], time.monotonic())
            posted = self._take_posted()
        self._told_of(posted=posted)

    def _next(self, read: _Read, outcomes: Sequence[Outcome]) -> _Read | None:
        """Record the result of a read and return the next read, if any. The lock is taken only once."""
        now = time.monotonic()
        with self._changed:
            self._ended(read, outcomes, now)
            following = self._take(now)
            posted = self._take_posted()
        self._told_of(posted=posted)
        return following

    def _told_of(self, *, posted: bool) -> None:
        if posted:
            self._outbox.wake()
        self._tell_state()

    def _wait(self) -> _Read | None:
        """Wait for the next read. Return None when the readers close."""
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                read = self._take(time.monotonic())
                closing, posted = self._closing, self._take_posted()
            if posted:
                self._outbox.wake()
            if read is not None or closing:
                return read

    def _read_run(
        self, read: _Read, heads: NDArray[np.uint8], scratch: NDArray[np.uint8], decoders: Decoders
    ) -> list[Outcome]:
        """Read several pages, with few calls if their records lie next to each other."""
        pages = slice(read.indexes.start, read.indexes.stop)
        keys, outs = read.job.transfer.keys[pages], read.job.pages[pages]

        def began() -> None:
            read.since = time.monotonic()  # the timeout applies to each read from the disk

        arrived = self._reader.read_run(keys, outs, [*heads[: len(keys)]], began)
        outcomes: list[Outcome] = []
        for index, out, there in zip(read.indexes, outs, arrived, strict=True):
            if there:
                outcomes.append(out.nbytes)
                continue
            began()
            one = replace(read, indexes=range(index, index + 1))
            fetched = self._fetch(one, scratch)
            if isinstance(fetched, Failure):
                outcomes.append(fetched)
            else:
                outcomes.append(self._check(one, fetched, scratch, decoders))
        return outcomes

    def _fetch(self, read: _Read, scratch: NDArray[np.uint8]) -> Fetched | Failure:
        index = read.indexes.start
        key, out = read.job.transfer.keys[index], read.job.pages[index]
        fetched: list[Fetched] = []
        failure = self._guarded(key, lambda: fetched.append(self._reader.fetch(key, out, scratch)))
        return fetched[0] if failure is None else failure

    def _check(
        self, read: _Read, fetched: Fetched, scratch: NDArray[np.uint8], decoders: Decoders
    ) -> Outcome:
        index = read.indexes.start
        key, out = read.job.transfer.keys[index], read.job.pages[index]
        failure = self._guarded(key, lambda: self._reader.check(key, fetched, out, scratch, decoders))
        return out.nbytes if failure is None else failure

    def _guarded(self, key: PageKey, act: Callable[[], None]) -> Failure | None:
        """Call ``act`` and return None. If it raises an exception, count, log and return the failure of the page."""
        try:
            act()
        except KeyError:
            failure = Failure.NOT_FOUND
        except UnfitError as error:
            failure = Failure.UNFIT
            self._warn("page %s on disk cannot be held in memory: %s", key, error)
        except IntegrityError as error:
            failure = Failure.INTEGRITY
            self._warn("page %s on disk is damaged: %s", key, error)
        except (MovedError, lmdb.PanicError):  # the writer reopens a catalogue in panic
            failure = Failure.UNAVAILABLE
        except lmdb.ReadersFullError as error:
            failure = Failure.UNAVAILABLE
            self._warn(
                "page %s was not read: other programs occupy all reader slots of the catalogue (MDB_READERS_FULL): %s",
                key,
                error,
            )
        except (OSError, lmdb.Error) as error:
            failure = Failure.IO_ERROR
            self._warn("page %s could not be read: %s", key, error)
        except Exception:  # noqa: BLE001  top level of the thread: one page fails, the thread continues
            failure = Failure.IO_ERROR
            _pages_log.exception("reading page %s failed", key.hex())
        else:
            return None
        self._outbox.count(f"read_{failure.value}")
        return failure

    def _warn(self, message: str, key: PageKey, error: Exception) -> None:
        """Log a warning about the first bad page.

        Later bad pages are only counted, because a failing disk has thousands of them.
        """
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _pages_log.log(level, message, key.hex(), error)

    # -- with the lock held -------------------------------------------------------------------------------------

    def _take(self, now: float) -> _Read | None:
        """Return the next pages to read. If the breaker admits no read, fail all queued pages and return None."""
        if not self._jobs:
            return None
        ticket = self._breaker.admit(now)
        if ticket is None:
            self._refuse(Failure.UNAVAILABLE)
            return None
        job = self._jobs[0]
        left = self._num_queued
        many = left >= _LEAST_FOR_RUNS or len(job.pages) >= _LEAST_FOR_RUNS
        most = min(self._run_pages, max(left // (2 * self._count), self._least_in_run)) if many else 1
        indexes = range(job.next, min(len(job.pages), job.next + max(1, most)))
        read = _Read(job, indexes, ticket, now, self._shares.begin(now))
        job.next = indexes.stop
        self._num_queued -= len(indexes)
        if job.next == len(job.pages):
            self._jobs.popleft()
        self._reading.add(read)
        return read

    def _ended(self, read: _Read, outcomes: Sequence[Outcome], now: float) -> None:
        self._reading.remove(read)
        if all(
            outcome in (Failure.NOT_FOUND, Failure.UNAVAILABLE) for outcome in outcomes
        ):  # the catalogue answered, perhaps from memory
            self._breaker.gave_up(read.ticket, now)
        elif Failure.IO_ERROR not in outcomes:
            self._breaker.succeeded(read.ticket, now)
        elif not read.late:
            self._breaker.failed(read.ticket, now)
        self._num_late -= read.late
        if not read.late:
            read.job.spent(self._shares.end(read.begun, now))
        due = [read.job.done(index, outcome) for index, outcome in zip(read.indexes, outcomes, strict=True)]
        if any(due):
            self._post(read.job)

    def _late(self, read: _Read, now: float) -> None:
        read.late = True
        self._num_late += 1
        self._outbox.count("read_late", len(read.indexes))
        self._breaker.hung(read.ticket, now)
        read.job.spent(self._shares.end(read.begun, now))
        due = [read.job.late(index) for index in read.indexes]
        if any(due):
            self._post(read.job)

    def _refuse(self, failure: Failure) -> None:
        """Fail all queued pages whose reads have not started."""
        self._num_queued = 0
        while self._jobs:
            job = self._jobs.popleft()
            begun, job.next = job.next, len(job.pages)
            due = [job.done(index, failure) for index in range(begun, job.next)]
            self._outbox.count(f"read_{failure.value}", len(due))
            if any(due):
                self._post(job)

    def _post(self, job: Job) -> None:
        # Called with the lock held, so that the ack of late pages cannot overtake the ack that declares these pages
        # late.
        ack = job.ack()
        self._outbox.count("bytes_read", ack.nbytes)
        self._outbox.add_quietly(ack)
        self._posted = True

    def _take_posted(self) -> bool:
        posted, self._posted = self._posted, False
        return posted

    # -- logging -----------------------------------------------------------------------------------------

    def _tell_state(self) -> None:
        """Log one warning when the tier stops attempting reads, and one message when it resumes."""
        if self.absent is self._told_absent:
            return
        with self._changed:
            absent, hanging = self.absent, self._num_late
            if self._closing or absent is self._told_absent:
                return
            self._told_absent = absent
        if absent:
            _log.warning(
                "the disk of the NVMe tier fails or hangs (%d reads have taken %g s or longer): its pages are misses "
                "until it answers again",
                hanging,
                self._timeout_s,
            )
        else:
            _log.info("the disk of the NVMe tier answers again")


NOT_FOUND = "not found"


class Lent(NamedTuple):
    """The memory into which ``RecordReader.fetch`` reads one record."""

    page: NDArray[np.uint8]
    scratch: NDArray[np.uint8]


class Record(NamedTuple):
    """A verified record: its head, the bytes of the head (``raw``), and its payload as flat uint8.

    ``lent`` is the memory that contains the payload, if it belongs to a ``RecordBuffers``.
    """

    head: record_format.Head
    raw: bytes
    payload: NDArray[np.uint8]
    lent: Lent | None = None


class RecordBuffers:
    """A pool of memory for records that are passed to one consumer. Thread-safe.

    Memory is reused because allocating it takes longer than reading a page.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._free: list[Lent] = []

    def take(self) -> Lent:
        """Return memory for one record. The caller may return it with ``give_back``, or drop it."""
        try:
            return self._free.pop()
        except IndexError:
            return Lent(aligned(self._page_nbytes)[: self._page_nbytes], scratch_for(self._page_nbytes))

    def give_back(self, record: Record) -> None:
        """Put the memory of a record back into the pool. The record must not be used afterwards."""
        if record.lent is not None:
            self._free.append(record.lent)


def read_record(reader: RecordReader, key: PageKey, memory: RecordBuffers) -> Record | str:
    """Read and verify the record of a page into a buffer of ``memory``.

    Return the record, or the reason why it is unavailable.
    """
    lent = memory.take()
    try:
        raw, payload = reader.record(key, *lent)
    except KeyError:
        return NOT_FOUND
    except (IntegrityError, MovedError, lmdb.Error, OSError) as error:
        return str(error)
    return Record(record_format.parse(raw), raw, payload, lent)


class Lender:
    """Reads records of an open tier in the form in which they are stored. Thread-safe.

    Each call reads on its own thread.
    """

    def __init__(self, reader: RecordReader, page_nbytes: int) -> None:
        self._reader = reader
        self._page_nbytes = page_nbytes
        self._ended = Condition()
        self._reading = 0
        self._closed = False

    def record(self, key: PageKey, memory: RecordBuffers | None = None) -> Record | str:
        """Return the same as ``read_record``, or "the tier is closed" after ``close``.

        Blocks while the disk hangs. If ``memory`` is None, new memory is allocated.
        """
        with self._ended:
            if self._closed:
                return "the tier is closed"
            self._reading += 1
        try:
            return read_record(self._reader, key, memory or RecordBuffers(self._page_nbytes))
        finally:
            with self._ended:
                self._reading -= 1
                self._ended.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Refuse further calls, and wait up to ``timeout_s`` seconds for those in progress.

        Return whether all of them have finished.
        """
        with self._ended:
            self._closed = True
            return self._ended.wait_for(lambda: not self._reading, timeout_s)
