"""What drives a store: finished work in, decisions out to the mover, and the thread that does it when nobody calls."""

from __future__ import annotations

import logging
import os
from collections import deque
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.wakeup import TimedLock, Wakeup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.directory.directory import Directory
    from tierstore.metrics import Metrics
    from tierstore.mover import Mover
    from tierstore.pending import PendingEvents
    from tierstore.types import Ack

_log = logging.getLogger(__name__)

_EVENT_POLL_S = 0.001
_IDLE_S = 0.25
_ACKS_PER_HOLD = 1


class Progress:
    """The store's lock and everything that happens under it between calls. Nothing waits while holding it."""

    def __init__(
        self, directory: Directory, mover: Mover, pending: PendingEvents, wakeup: Wakeup, metrics: Metrics
    ) -> None:
        self.lock = TimedLock()
        metrics.watch_lock(lambda: self.lock.longest_s, lambda: self.lock.longest_cpu_s)
        self.closed = False
        self.hinted = Wakeup()
        """A hint has come, or the end."""
        self._pid = os.getpid()
        self._directory = directory
        self._mover = mover
        self._pending = pending
        self._wakeup = wakeup
        self._metrics = metrics
        self._acks: deque[Ack] = deque()
        self._thread: Thread | None = None

    def start_pump(self) -> None:
        """Starts the thread that advances the store when nobody calls."""
        self._thread = Thread(target=self._run, name="tierstore-pump", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """No call and no thread advances the store from now on."""
        self.closed = True
        self._wakeup.bump()
        self.hinted.bump()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def require_open(self) -> None:
        """StoreClosed after ``stop``, and in a forked child: the threads, and who held the lock, are the parent's."""
        if self.inherited:
            raise StoreClosed(f"this store belongs to process {self._pid}; open another after a fork")
        if self.closed:
            raise StoreClosed("the store is closed")
        self.lock.require_whole()

    @property
    def usable(self) -> bool:
        """Whether calls are served: neither closed, nor interrupted, nor another process's. Takes no lock."""
        return not (self.closed or self.lock.broken or self.inherited)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of another process's store."""
        return os.getpid() != self._pid

    def advance(self) -> None:
        """Takes in everything that has finished by now, a few transfers at each hold of the lock.

        Not what finishes meanwhile: a failing disk ends writes as fast as they are decided.
        """
        self.require_open()
        with self.lock:
            left = self.step()
        while left > 0:
            with self.lock:
                left = min(left - _ACKS_PER_HOLD, self.step())

    def step(self) -> int:
        """With the lock held: applies some finished transfers, decides, submits; how many more have finished."""
        self._acks.extend(self._mover.poll())
        batch = [self._acks.popleft() for _ in range(min(len(self._acks), _ACKS_PER_HOLD))]
        self._pending.poll()
        more = self._directory.advance(batch, monotonic())
        self.submit()
        if batch or more:
            self._wakeup.bump()
        return len(self._acks)

    def submit(self) -> None:
        """With the lock held: hands the directory's commands to the mover, in order."""
        for command in self._directory.take_commands():
            self._mover.submit(command)

    def until(self, deadline: float | None, woken_by: Wakeup | None = None) -> Iterator[None]:
        """Advances the store before each turn of the caller's loop; ends at the monotonic ``deadline``.

        ``woken_by``: what alone ends a pause of who waits for nothing else, while the store's own thread advances it.
        """
        sleeps = woken_by is not None and self._thread is not None
        wakeup = woken_by if sleeps and woken_by is not None else self._wakeup
        while True:
            seen = wakeup.count
            self.advance()
            yield
            if deadline is not None and monotonic() >= deadline:
                return
            wakeup.wait(seen, deadline, _IDLE_S if sleeps else self._pause())

    def notify(self) -> None:
        """Somebody may be waiting for what a call has just changed."""
        self._wakeup.bump()

    @property
    def settled(self) -> bool:
        """With the lock held: nothing is in flight, queued, or waiting for an event."""
        return not (self._directory.busy() or self._pending.waiting or self._acks)

    def _pause(self) -> float:
        if self._pending.waiting or self._mover.polled:
            return _EVENT_POLL_S
        due = [
            t
            for t in (
                self._directory.placement.next_spill,
                self._directory.hints.next_expiry,
                self._directory.leasing.next_deadline,
            )
            if t is not None
        ]
        return max(_EVENT_POLL_S, min([_IDLE_S, *(t - monotonic() for t in due)]))

    def _run(self) -> None:
        turns = self.until(None)
        while not self.closed:
            try:
                next(turns)
            except StoreClosed:
                return
            except Exception:  # noqa: BLE001 - a thread's top: count it, log it, go on
                self._metrics.fault()
                _log.exception("the store's pump met an unexpected error")
                turns = self.until(None)
