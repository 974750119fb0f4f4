"""The reader threads: they take pages of the oldest transfer together, and check each before it counts.

A read that takes longer than ``timeout_s`` is late: its page is acked apart, so that nobody waits for it, and its
thread and its slot stay with it until it ends. While the disk hangs or fails reads in a row, reads are not tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierstore.nvme.acks import Job, Outbox, Outcome, Shares, failed
from tierstore.nvme.breaker import Breaker, Circuit
from tierstore.nvme.checking import Checkers
from tierstore.nvme.mishaps import Mishaps
from tierstore.nvme.reading import RecordReader, scratch_for
from tierstore.nvme.record import Coding, Decoders, Fetched
from tierstore.threads import start_all
from tierstore.types import Failure, Transfer

_log = logging.getLogger(__name__)

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
        self._mishaps = Mishaps(outbox)
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
        failure = self._mishaps.guarded(key, lambda: fetched.append(self._reader.fetch(key, out, scratch)))
        return fetched[0] if failure is None else failure

    def _check(
        self, read: _Read, fetched: Fetched, scratch: NDArray[np.uint8], decoders: Decoders
    ) -> Outcome:
        key, out = read.job.transfer.keys[read.index], read.job.pages[read.index]
        failure = self._mishaps.guarded(key, lambda: self._reader.check(key, fetched, out, scratch, decoders))
        return out.nbytes if failure is None else failure

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
