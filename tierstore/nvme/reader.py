"""Read page records with every byte checked: the reader threads, the checker threads beside them, and the lender.

``RecordReader`` reads one record on any thread. ``Readers`` are the tier's threads: together they take pages of the
oldest transfer and check each before it counts. A read that exceeds ``timeout_s`` is late: its page gets a separate
ack, so nobody waits for it, and its thread and slot stay occupied until it ends. While the disk hangs, or fails several
reads in a row, reads are not tried (``read_breaker``).

``Checkers`` check and decode pages while the readers fetch the next ones. A page's checksum takes a tenth of the time
in which a fast disk delivers the page, and the thread that waits for the disk would have one read less in flight
meanwhile. ``Lender`` lends records in their stored form, payload and codec, for use elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
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
from tierstore.threads import start_all
from tierstore.types import Failure, PageKey, Transfer


def scratch_for(page_nbytes: int) -> NDArray[np.uint8]:
    """Return memory that suits ``fetch``: aligned, and large enough for pages that cannot be read into place."""
    return aligned(BLOCK + padded(page_nbytes))


class RecordReader:
    """Reads records. Thread-safe."""

    def __init__(
        self,
        env: Environment,
        payload: RecordBytes,
        *,
        fingerprint: bytes,
        held_nbytes: int | None = None,
        erased: Container[bytes] = (),
    ) -> None:
        """Read records of ``env``.

        Args:
            payload: Where the bytes of records are.
            held_nbytes: Length of the encoded pages in memory; None if memory holds pages unchanged.
            erased: Keys that ``record`` and the listings skip.
        """
        self._held = held_nbytes
        self._env = env
        self._payload = payload
        self._fingerprint = fingerprint
        self._erased = erased

    def fetch(self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> Fetched:
        """Read the record of ``key`` into ``out``, or into ``scratch`` if memory holds another form. Checks nothing.

        The errors except KeyError are about the record that the catalogue names now: a record that is replaced or moved
        during the read is looked up again.

        Args:
            key: The page.
            out: Memory for the page; the caller's until ``check`` has returned.
            scratch: Aligned memory of at least BLOCK bytes; the caller's until ``check`` has returned.

        Raises:
            KeyError: There is no such record.
            IntegrityError: The bytes cannot be what was written.
            OSError: The record could not be read.
            lmdb.Error: The catalogue could not be read.
            MovedError: The record was replaced or moved during every attempt.
        """
        try:
            return self._payload.fetch(key, out, scratch, self._held)
        except lmdb.ReadersFullError:
            self._env.reader_check()  # killed readers may occupy the reader slots
            return self._payload.fetch(key, out, scratch, self._held)

    def check(
        self,
        key: PageKey,
        fetched: Fetched,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        """Check every byte and fill ``out`` with the page in the form that memory holds.

        A record that was replaced or moved during the read is read again. If this raises, the content of ``out`` is
        undefined. Errors of ``fetch`` are raised too.

        Args:
            fetched: What ``fetch`` returned for ``out`` and ``scratch``.
            decoders: The calling thread's; the thread need not be the one that fetched.

        Raises:
            IntegrityError: The bytes are not what was written, or they are encoded and have no decoder.
            UnfitError: Memory cannot hold the page.
        """
        head, fetched = self._settled(key, fetched, out, scratch)
        decoders.fill(head, fetched.payload, out)

    def record(
        self, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[bytes, NDArray[np.uint8]]:
        """Return the head and the payload of a record in its stored form, with every byte checked.

        The payload is a part of ``out`` or ``scratch``, which are as for ``fetch``. Raises what ``fetch`` and ``check``
        raise.
        """
        if key in self._erased:
            raise KeyError(key)
        _, fetched = self._settled(key, self.fetch(key, out, scratch), out, scratch)
        return scratch[HEAD].tobytes(), fetched.payload

    def _settled(
        self, key: PageKey, fetched: Fetched, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> tuple[record_format.Head, Fetched]:
        """Return the checked head and its bytes, read again if the catalogue names another record by now.

        A record that fails its checks is damaged only if the catalogue still names it, because no transaction keeps its
        place from being rewritten during the read.
        """
        for _ in range(TRIES):
            try:
                return self._verified(key, fetched, scratch), fetched
            except IntegrityError:
                if lookup(self._env, key) == fetched.raw:
                    raise
            fetched = self.fetch(key, out, scratch)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def _verified(self, key: PageKey, fetched: Fetched, scratch: NDArray[np.uint8]) -> record_format.Head:
        """Return the head of a record, after checking every byte of head and payload."""
        return record_format.verify(
            scratch[HEAD],
            fetched.payload,
            fingerprint=self._fingerprint,
            key=key,
            generation=fetched.generation,
        )

    def summaries(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Yield key, parent and bytes on disk of every record in key order, from one snapshot. Not while a writer runs.

        Entries are used as the checking child found them; each is checked again when its page is loaded.
        """
        with self._env.begin() as txn:
            yield from map(summary, self._listed(txn))

    def loss_classes(self) -> Iterator[tuple[PageKey, str]]:
        """Yield key and loss class of every record; "" if no class was noted. Otherwise like ``summaries``."""
        with self._env.begin() as txn:
            yield from map(loss_class, self._listed(txn))

    def verify_all(self) -> Iterator[tuple[PageKey, str | None]]:
        """Read every record and yield its key and what is wrong with it, or None. For tools; changes nothing.

        Encoded pages are not decoded: the check is that the bytes are those that were written.
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
        """Yield key and entry of every record that is not erased."""
        items = iter(txn.cursor(db=self._env.catalogue))
        return items if self._erased == () else ((k, raw) for k, raw in items if k not in self._erased)

    def close(self) -> None:
        """Close the descriptors, but not the environment. No call may be in progress or follow."""
        self._payload.close()


Task = Callable[[Decoders], None]


class Checkers:
    """``count`` daemon threads that check pages, with memory for one page each. Thread-safe.

    With ``count`` 0 the thread that fetches also checks.
    """

    def __init__(self, count: int, page_nbytes: int, coding: Coding) -> None:
        self._coding = coding
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Task, NDArray[np.uint8]]] = deque()
        self._spare = [scratch_for(page_nbytes) for _ in range(count)]
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tierstore-nvme-check-{number}", daemon=True)
            for number in range(count)
        ]
        start_all(self._threads, self.close)

    def offer(self, task: Task, scratch: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Hand ``task`` to a thread, which uses ``scratch`` until the task ends.

        Returns:
            Another scratch for the caller, or None if all threads are busy and the caller must run the task. A task
                must not raise.
        """
        with self._changed:
            if self._closing or not self._spare:
                return None
            self._tasks.append((task, scratch))
            self._changed.notify()
            return self._spare.pop()

    def close(self) -> None:
        """Accept no more tasks, run the accepted ones, and let the threads end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the threads, to be joined after ``close``."""
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

_WORTH_CHECKING_APART = 512 << 10  # bytes of a page; handing over a smaller one takes as long as checking it


@dataclass(slots=True, eq=False)
class _Read:
    """A page that a thread is reading, with the ticket of the breaker and the start time of its busy share."""

    job: Job
    index: int
    ticket: int
    since: float
    begun: float
    late: bool = False


class Readers:
    """``count`` daemon threads that read pages. ``submit``, ``look`` and ``close`` are thread-safe."""

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
        self._warned = False  # about a bad page
        self._count = count
        self._page_nbytes = page_nbytes
        self._timeout_s = timeout_s
        self._coding = coding
        self._breaker = breaker or Breaker()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._reading: set[_Read] = set()
        self._shares = Shares()
        self._num_late = 0
        self._closing = False
        self._posted = False  # acks that were queued but not announced
        self._told_absent = False
        # Decoding a page takes ten times as long as summing it: up to half the time the disk takes to deliver it.
        apart = count if coding.changes else max(1, count // 2)
        self._checkers = Checkers(apart if page_nbytes >= _WORTH_CHECKING_APART else 0, page_nbytes, coding)
        self._threads = [
            threading.Thread(target=self._run, name=f"tierstore-nvme-read-{number}", daemon=True)
            for number in range(count)
        ]
        start_all(self._threads, self.close)

    @property
    def absent(self) -> bool:
        """Whether reads are not tried at present, except for an occasional probe."""
        return self._breaker.state is not Circuit.CLOSED or self._num_late == self._count

    @property
    def num_late(self) -> int:
        """Number of late reads that have not ended."""
        return self._num_late

    def submit(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read. Never blocks. Acked as CLOSED after ``close``, as UNAVAILABLE if all threads hang."""
        with self._changed:
            if out and not self._closing and self._num_late < self._count:
                self._jobs.append(Job(transfer, out))
                self._changed.notify(len(out))
                return
            hanging = bool(out) and not self._closing
        self._outbox.add_quietly(failed(transfer, Failure.UNAVAILABLE if hanging else Failure.CLOSED))
        if hanging:
            self._outbox.count("read_unavailable", len(out))

    def look(self, now: float) -> None:
        """Detect late reads. Call it periodically with time.monotonic()."""
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
        """Fail reads that have not begun with CLOSED, and let the threads end."""
        with self._changed:
            self._closing = True
            self._refuse(Failure.CLOSED)
            self._changed.notify_all()
        self._checkers.close()

    def join_until(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (time.monotonic()). Returns whether all have ended."""
        threads = [*self._threads, *self._checkers.threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -- a thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        scratch = scratch_for(self._page_nbytes)
        decoders = self._coding.decoders()
        read = self._wait()
        while read is not None:
            fetched = self._fetch(read, scratch)
            if isinstance(fetched, Failure):
                read = self._next(read, fetched) or self._wait()
                continue
            spare = self._checkers.offer(partial(self._check_apart, read, fetched, scratch), scratch)
            if spare is None:
                read = self._next(read, self._check(read, fetched, scratch, decoders)) or self._wait()
            else:
                scratch, read = spare, self._wait()

    def _check_apart(
        self, read: _Read, fetched: Fetched, scratch: NDArray[np.uint8], decoders: Decoders
    ) -> None:
        """Check the page on another thread than the one that fetched it."""
        outcome = self._check(read, fetched, scratch, decoders)
        with self._changed:
            self._ended(read, outcome, time.monotonic())
            posted = self._take_posted()
        self._told_of(posted=posted)

    def _next(self, read: _Read, outcome: Outcome) -> _Read | None:
        """Record the end of a read and return the next one, if any, in a single hold of the lock."""
        now = time.monotonic()
        with self._changed:
            self._ended(read, outcome, now)
            following = self._take(now)
            posted = self._take_posted()
        self._told_of(posted=posted)
        return following

    def _told_of(self, *, posted: bool) -> None:
        if posted:
            self._outbox.wake()
        self._tell_state()

    def _wait(self) -> _Read | None:
        """Wait for the next read. None when the readers close."""
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

    def _fetch(self, read: _Read, scratch: NDArray[np.uint8]) -> Fetched | Failure:
        key, out = read.job.transfer.keys[read.index], read.job.pages[read.index]
        fetched: list[Fetched] = []
        failure = self._guarded(key, lambda: fetched.append(self._reader.fetch(key, out, scratch)))
        return fetched[0] if failure is None else failure

    def _check(
        self, read: _Read, fetched: Fetched, scratch: NDArray[np.uint8], decoders: Decoders
    ) -> Outcome:
        key, out = read.job.transfer.keys[read.index], read.job.pages[read.index]
        failure = self._guarded(key, lambda: self._reader.check(key, fetched, out, scratch, decoders))
        return out.nbytes if failure is None else failure

    def _guarded(self, key: PageKey, act: Callable[[], None]) -> Failure | None:
        """Call ``act``. Returns the page's failure, counted and logged, or None."""
        try:
            act()
        except KeyError:
            failure = Failure.NOT_FOUND
        except UnfitError as error:
            failure = Failure.UNFIT
            self._warn("page %s on disk is none for memory: %s", key, error)
        except IntegrityError as error:
            failure = Failure.INTEGRITY
            self._warn("page %s on disk is not what was written: %s", key, error)
        except (MovedError, lmdb.PanicError):  # a catalogue in panic is reopened by the writer
            failure = Failure.UNAVAILABLE
        except lmdb.ReadersFullError as error:
            failure = Failure.UNAVAILABLE
            self._warn(
                "page %s was not read: other programs read the catalogue in all its places: %s", key, error
            )
        except (OSError, lmdb.Error) as error:
            failure = Failure.IO_ERROR
            self._warn("page %s could not be read: %s", key, error)
        except Exception:  # noqa: BLE001  the thread's top: one page fails, the thread goes on
            failure = Failure.IO_ERROR
            _pages_log.exception("reading page %s failed", key.hex())
        else:
            return None
        self._outbox.count(f"read_{failure.value}")
        return failure

    def _warn(self, message: str, key: PageKey, error: Exception) -> None:
        """Log a warning about the first bad page. A failing disk has thousands, which are only counted."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _pages_log.log(level, message, key.hex(), error)

    # -- with the lock held -------------------------------------------------------------------------------------

    def _take(self, now: float) -> _Read | None:
        """Return the next page to read. If reads are not tried, fail everything queued."""
        if not self._jobs:
            return None
        ticket = self._breaker.admit(now)
        if ticket is None:
            self._refuse(Failure.UNAVAILABLE)
            return None
        job = self._jobs[0]
        read = _Read(job, job.next, ticket, now, self._shares.begin(now))
        job.next += 1
        if job.next == len(job.pages):
            self._jobs.popleft()
        self._reading.add(read)
        return read

    def _ended(self, read: _Read, outcome: Outcome, now: float) -> None:
        self._reading.remove(read)
        if outcome in (
            Failure.NOT_FOUND,
            Failure.UNAVAILABLE,
        ):  # answered by the catalogue, perhaps from memory
            self._breaker.gave_up(read.ticket, now)
        elif outcome is not Failure.IO_ERROR:
            self._breaker.succeeded(read.ticket, now)
        elif not read.late:
            self._breaker.failed(read.ticket, now)
        self._num_late -= read.late
        if not read.late:
            read.job.spent(self._shares.end(read.begun, now))
        if read.job.done(read.index, outcome):
            self._post(read.job)

    def _late(self, read: _Read, now: float) -> None:
        read.late = True
        self._num_late += 1
        self._outbox.count("read_late")
        self._breaker.hung(read.ticket, now)
        read.job.spent(self._shares.end(read.begun, now))
        if read.job.late(read.index):
            self._post(read.job)

    def _refuse(self, failure: Failure) -> None:
        """Fail everything that is queued and has not begun."""
        while self._jobs:
            job = self._jobs.popleft()
            begun, job.next = job.next, len(job.pages)
            due = [job.done(index, failure) for index in range(begun, job.next)]
            self._outbox.count(f"read_{failure.value}", len(due))
            if any(due):
                self._post(job)

    def _post(self, job: Job) -> None:
        # under the lock, so that the ack of late pages cannot overtake the ack that declares them late
        ack = job.ack()
        self._outbox.count("bytes_read", ack.nbytes)
        self._outbox.add_quietly(ack)
        self._posted = True

    def _take_posted(self) -> bool:
        posted, self._posted = self._posted, False
        return posted

    # -- what people are told -----------------------------------------------------------------------------------

    def _tell_state(self) -> None:
        """Log a warning when reads stop being tried, and a message when they resume; once each."""
        if self.absent is self._told_absent:
            return
        with self._changed:
            absent, hanging = self.absent, self._num_late
            if self._closing or absent is self._told_absent:
                return
            self._told_absent = absent
        if absent:
            _log.warning(
                "the disk under the NVMe tier fails or hangs (%d reads for %g s or longer): its pages are misses until "
                "it answers again",
                hanging,
                self._timeout_s,
            )
        else:
            _log.info("the disk under the NVMe tier answers again")


NOT_FOUND = "not found"


class Lent(NamedTuple):
    """Memory that a record is read into, as ``RecordReader.fetch`` needs it."""

    page: NDArray[np.uint8]
    scratch: NDArray[np.uint8]


class Record(NamedTuple):
    """A checked record: its head, the head as bytes (``raw``), and its payload, flat uint8, in ``lent`` if not None."""

    head: record_format.Head
    raw: bytes
    payload: NDArray[np.uint8]
    lent: Lent | None = None


class RecordBuffers:
    """A pool of memory for records on their way to one consumer. Thread-safe.

    Memory is reused because allocating it costs more than reading a page.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._free: list[Lent] = []

    def take(self) -> Lent:
        """Return memory for one record. It is the caller's until given back or dropped."""
        try:
            return self._free.pop()
        except IndexError:
            return Lent(aligned(self._page_nbytes)[: self._page_nbytes], scratch_for(self._page_nbytes))

    def give_back(self, record: Record) -> None:
        """Return a record's memory for reuse."""
        if record.lent is not None:
            self._free.append(record.lent)


def read_record(reader: RecordReader, key: PageKey, memory: RecordBuffers) -> Record | str:
    """Return the record of a page with every byte checked, or the reason why it is unavailable."""
    lent = memory.take()
    try:
        raw, payload = reader.record(key, *lent)
    except KeyError:
        return NOT_FOUND
    except (IntegrityError, MovedError, lmdb.Error, OSError) as error:
        return str(error)
    return Record(record_format.parse(raw), raw, payload, lent)


class Lender:
    """Lends records of an open tier. Reads on the calling threads, several at once, until ``close``."""

    def __init__(self, reader: RecordReader, page_nbytes: int) -> None:
        self._reader = reader
        self._page_nbytes = page_nbytes
        self._ended = Condition()
        self._reading = 0
        self._closed = False

    def record(self, key: PageKey, memory: RecordBuffers | None = None) -> Record | str:
        """Like ``read_record``, until ``close``. Waits if the disk hangs. Without ``memory`` it allocates its own."""
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
        """Stop lending. Returns False if a call did not end in time."""
        with self._ended:
            self._closed = True
            return self._ended.wait_for(lambda: not self._reading, timeout_s)
