"""Read page records, every byte checked: the reader threads, the checkers beside them, and the lender.

``RecordReader`` reads one record by any thread. ``Readers`` are the tier's threads: they take pages of the oldest
transfer together, and check each before it counts. A read that takes longer than ``timeout_s`` is late: its page is
acked apart, so that nobody waits for it, and its thread and its slot stay with it until it ends. While the disk hangs
or fails reads in a row, reads are not tried (``breaker``).

``Checkers`` check and decode pages while the readers fetch the next ones. A page's checksum takes a tenth of the time
that a fast disk takes to send it: if the thread that waits for the disk made it, the disk would have one read less to
do meanwhile. ``Lender`` lends records as they are kept, payload and codec, to whoever takes pages elsewhere.
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
    ) -> tuple[record_format.Head, Fetched]:
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

    def _verified(self, key: PageKey, fetched: Fetched, scratch: NDArray[np.uint8]) -> record_format.Head:
        """The head of a record, every byte of it and of the payload checked."""
        return record_format.verify(
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
        """Key and entry of every record that is not erased."""
        items = iter(txn.cursor(db=self._env.catalogue))
        return items if self._erased == () else ((k, raw) for k, raw in items if k not in self._erased)

    def close(self) -> None:
        """Close the descriptors, not the environment. No call may be running, and none may follow."""
        self._payload.close()


Task = Callable[[Decoders], None]


class Checkers:
    """``count`` daemon threads, each with room for one page; with 0 whoever fetches checks. Any thread."""

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
        """Another scratch, and ``task`` will be run by one of the threads, which uses ``scratch`` until then.

        None: every thread has one already, and the caller is to run it. A task raises nothing.
        """
        with self._changed:
            if self._closing or not self._spare:
                return None
            self._tasks.append((task, scratch))
            self._changed.notify()
            return self._spare.pop()

    def close(self) -> None:
        """Take no more, run what was taken, and let the threads end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """To be joined after ``close``."""
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
_pages_log = logging.getLogger("tierstore.nvme.mishaps")  # of what goes wrong with single pages

_WORTH_CHECKING_APART = 512 << 10  # bytes of a page: handing over a smaller one takes as long as checking it


@dataclass(slots=True, eq=False)
class _Read:
    """One page that a thread is reading. ``ticket``: the breaker's; ``begun``: the shares'."""

    job: Job
    index: int
    ticket: int
    since: float
    begun: float
    late: bool = False


class Readers:
    """``count`` daemon threads. ``submit``, ``look`` and ``close`` from any thread."""

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
        self._warned = False  # of a bad page
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
        self._posted = False  # acks whose queueing nobody was told of
        self._told_absent = False
        # Decoding a page takes a core ten times as long as summing it: up to half as long as a disk takes to send it.
        apart = count if coding.changes else max(1, count // 2)
        self._checkers = Checkers(apart if page_nbytes >= _WORTH_CHECKING_APART else 0, page_nbytes, coding)
        self._threads = [
            threading.Thread(target=self._run, name=f"tierstore-nvme-read-{number}", daemon=True)
            for number in range(count)
        ]
        start_all(self._threads, self.close)

    @property
    def absent(self) -> bool:
        """Whether reads are not tried now, but for one now and then."""
        return self._breaker.state is not Circuit.CLOSED or self._num_late == self._count

    @property
    def num_late(self) -> int:
        """Reads that are late and have not ended."""
        return self._num_late

    def submit(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read. Never blocks. Acked as CLOSED after ``close``, as UNAVAILABLE if every thread hangs."""
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
        """To be called now and then, with time.monotonic(): sees which reads are late."""
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
        """Fail what has not begun with CLOSED and let the threads end."""
        with self._changed:
            self._closing = True
            self._refuse(Failure.CLOSED)
            self._changed.notify_all()
        self._checkers.close()

    def join_until(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (time.monotonic); whether all have ended."""
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
        """For another thread than the one that fetched the page."""
        outcome = self._check(read, fetched, scratch, decoders)
        with self._changed:
            self._ended(read, outcome, time.monotonic())
            posted = self._take_posted()
        self._told_of(posted=posted)

    def _next(self, read: _Read, outcome: Outcome) -> _Read | None:
        """The read has ended; the next one if there is one now. One hold of the lock for both."""
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
        """The next read, when there is one; None when the readers close."""
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
        """Call ``act``; return what went wrong with the page, counted and logged, or None."""
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
        except (MovedError, lmdb.PanicError):  # the writer opens a catalogue in panic anew
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
        """Warn of the first bad page; a failing disk has thousands, and they are counted."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _pages_log.log(level, message, key.hex(), error)

    # -- with the lock held -------------------------------------------------------------------------------------

    def _take(self, now: float) -> _Read | None:
        """The next page to read. Where reads are not tried all that is queued ends."""
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
        if outcome in (Failure.NOT_FOUND, Failure.UNAVAILABLE):  # the catalogue's answer, perhaps from memory
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
        """End what is queued and has not begun."""
        while self._jobs:
            job = self._jobs.popleft()
            begun, job.next = job.next, len(job.pages)
            due = [job.done(index, failure) for index in range(begun, job.next)]
            self._outbox.count(f"read_{failure.value}", len(due))
            if any(due):
                self._post(job)

    def _post(self, job: Job) -> None:
        # With the lock held, so that the ack of late pages cannot overtake the one that says they are late.
        ack = job.ack()
        self._outbox.count("bytes_read", ack.nbytes)
        self._outbox.add_quietly(ack)
        self._posted = True

    def _take_posted(self) -> bool:
        posted, self._posted = self._posted, False
        return posted

    # -- what people are told -----------------------------------------------------------------------------------

    def _tell_state(self) -> None:
        """Warn once when reads are not tried any more, and say once that they are again."""
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
    """Memory that a record is read to: as ``RecordReader.fetch`` wants it."""

    page: NDArray[np.uint8]
    scratch: NDArray[np.uint8]


class Record(NamedTuple):
    """A record, checked: ``raw`` is its head as bytes, ``payload`` flat uint8, in ``lent`` where that is not None."""

    head: record_format.Head
    raw: bytes
    payload: NDArray[np.uint8]
    lent: Lent | None = None


class RecordBuffers:
    """Memory for records on their way to one taker, used again and again: fresh memory costs more than a page's read.

    Any thread.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._free: list[Lent] = []

    def take(self) -> Lent:
        """Memory for one record, the caller's until it is given back or forgotten."""
        try:
            return self._free.pop()
        except IndexError:
            return Lent(aligned(self._page_nbytes)[: self._page_nbytes], scratch_for(self._page_nbytes))

    def give_back(self, record: Record) -> None:
        """The record is not used any more."""
        if record.lent is not None:
            self._free.append(record.lent)


def read_record(reader: RecordReader, key: PageKey, memory: RecordBuffers) -> Record | str:
    """The record of a page, every byte checked, or why it cannot be had."""
    lent = memory.take()
    try:
        raw, payload = reader.record(key, *lent)
    except KeyError:
        return NOT_FOUND
    except (IntegrityError, MovedError, lmdb.Error, OSError) as error:
        return str(error)
    return Record(record_format.parse(raw), raw, payload, lent)


class Lender:
    """Of an open tier: reads in the calling threads, several at once, until ``close``."""

    def __init__(self, reader: RecordReader, page_nbytes: int) -> None:
        self._reader = reader
        self._page_nbytes = page_nbytes
        self._ended = Condition()
        self._reading = 0
        self._closed = False

    def record(self, key: PageKey, memory: RecordBuffers | None = None) -> Record | str:
        """``read_record``, until ``close``; None: to memory of its own. A disk that hangs is waited for."""
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
        """Lend no more; False if a call did not end in time."""
        with self._ended:
            self._closed = True
            return self._ended.wait_for(lambda: not self._reading, timeout_s)
