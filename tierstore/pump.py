"""What drives a store: its lock, one step of progress, waits, and the thread that steps when nobody calls.

A step takes in finished work and hands decisions to the mover. Threads of one store wait for each other by a wake-
up that is not lost, and by a lock that knows its longest hold.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from threading import Condition, Lock, Thread, current_thread, get_ident
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.events import PendingEvents
from tierstore.watch import Watches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from tierstore.build import Parts
    from tierstore.types import Ack

_LOOK_S = 0.5
"""How long somebody waits for a lock before looking whether it was left locked."""


class Wakeup:
    """A counter that goes up when something happened. Read ``count``, look at the state, then wait from that count."""

    def __init__(self) -> None:
        self.count = 0
        # Taken itself, not through its condition, which takes it in Python: a signal may come between.
        self._lock = Lock()
        self._condition = Condition(self._lock)

    def bump(self) -> None:
        """Something happened; wakes all waiters. Any thread."""
        with self._lock:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        """Returns when the count has left ``seen``, the monotonic ``deadline`` has come, or ``at_most_s`` passed."""
        timeout = at_most_s if deadline is None else min(at_most_s, max(0.0, deadline - monotonic()))
        with self._lock:
            if self.count == seen:
                self._condition.wait(timeout)


class TimedLock:
    """A lock for ``with``, not reentrant. Its figures are in seconds and may be read without it.

    Who holds it again and again lets those in that wait: a plain lock would be taken back before they wake.
    A signal's handler may raise in the middle of a hold, or call what takes the lock: then nobody knows what state is
    guarded, and every hold from then on is StoreClosed. Nobody waits for a lock that such an exception left locked.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0
        """Of the holder's own CPU time: what a hold costs when nothing else runs."""
        self.broken = False
        """A hold was interrupted: what it guards may be halfway between two states."""
        self._lock = Lock()
        self._turn = Lock()
        """Held by the next in line while it waits; all others queue behind it."""
        self._since = 0.0
        self._cpu_since = 0.0
        self._holder: int | None = None
        self._block: FrameType | None = None
        """The frame of the holder that has the ``with``."""

    def require_whole(self) -> None:
        """StoreClosed once a hold was interrupted."""
        if self.broken:
            raise StoreClosed(
                "the store was interrupted in the middle of a change, and has ended; open it again"
            )

    def __enter__(self) -> None:
        thread = get_ident()
        if self._holder == thread:
            self.broken = True
        taken: list[bool] = []
        try:
            with self._turn:
                while not taken:
                    if self.broken:
                        self.require_whole()
                    # One step for the interpreter: no signal comes between the lock and the note that it was taken.
                    taken.extend(filter(None, map(self._lock.acquire, (True,), (_LOOK_S,))))
                    holder, block = self._holder, self._block
                    # Looked at again at last: who let go while its frames were walked has no block any more.
                    if not taken and _has_left(holder, block) and self._block is block:
                        self.broken = True
            if self.broken:
                self.require_whole()
            self._holder, self._block = thread, sys._getframe(1)
            self._since, self._cpu_since = perf_counter(), thread_time()
        except BaseException:
            if taken:
                self._holder = self._block = None
                self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Nothing that is guarded raises these: they come from a handler.
            if kind is not None and (not issubclass(kind, Exception) or issubclass(kind, TimeoutError)):
                self.broken = True
            self.longest_cpu_s = max(self.longest_cpu_s, thread_time() - self._cpu_since)
            self.longest_s = max(self.longest_s, perf_counter() - self._since)
        finally:
            self._holder = self._block = None
            self._lock.release()


def _has_left(thread: int | None, block: FrameType | None) -> bool:
    """Whether a thread is out of the block that it took a lock for: an exception came just before it let go."""
    if thread is None or block is None:
        return False
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not block:
        frame = frame.f_back
    return frame is None


_log = logging.getLogger("tierstore.progress")

_EVENT_POLL_S = 0.001
_IDLE_S = 0.25
_ACKS_PER_HOLD = 1


class Pump:
    """The store's lock and everything that happens under it between calls. Nothing waits while holding it."""

    def __init__(self, parts: Parts, wakeup: Wakeup) -> None:
        self.parts = parts
        self.directory = parts.directory
        self.mover = parts.mover
        self.metrics = parts.metrics
        self.events = PendingEvents(parts.directory)
        """What waits for an event of a caller."""
        self.lock = TimedLock()
        self.metrics.watch_lock(lambda: self.lock.longest_s, lambda: self.lock.longest_cpu_s)
        self.closed = False
        self.hinted = Wakeup()
        """A hint has come, or the end."""
        self.watches = Watches(parts.directory.residency, wakeup.bump)
        """Callbacks that are told of pages that come and go."""
        self._pid = os.getpid()
        self._wakeup = wakeup
        self._acks: deque[Ack] = deque()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Starts the thread that advances the store when nobody calls."""
        self._thread = Thread(target=self._run, name="tierstore-pump", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """No call and no thread advances the store from now on."""
        self.closed = True
        self._wakeup.bump()
        self.hinted.bump()
        if (
            self._thread is not None and self._thread is not current_thread()
        ):  # a callback of `watch` may close
            self._thread.join(timeout_s)
        self.watches.close()

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
        self._acks.extend(self.mover.poll())
        batch = [self._acks.popleft() for _ in range(min(len(self._acks), _ACKS_PER_HOLD))]
        self.events.poll()
        more = self.directory.advance(batch, monotonic())
        self.submit()
        if batch or more:
            self._wakeup.bump()
        return len(self._acks)

    def submit(self) -> None:
        """With the lock held: hands the directory's commands to the mover, in order."""
        for command in self.directory.take_commands():
            self.mover.submit(command)

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
        return not (self.directory.busy() or self.events.waiting or self._acks)

    def wait_idle(self, deadline: float) -> bool:
        """Wait until the store is settled; False if the monotonic ``deadline`` came first."""
        for _ in self.until(deadline):
            with self.lock:
                if self.settled:
                    return True
        return False

    def _pause(self) -> float:
        if self.events.waiting or self.mover.polled:
            return _EVENT_POLL_S
        due = [
            t
            for t in (
                self.directory.writeback.next_spill,
                self.directory.hints.next_expiry,
                self.directory.leases.next_deadline,
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
                self.metrics.fault()
                _log.exception("the store's pump met an unexpected error")
                turns = self.until(None)
            self._tell()

    def _tell(self) -> None:
        try:
            self.watches.tell()
        except Exception:  # noqa: BLE001 - code of the caller: count it, log it, tell the rest in the next turn
            self.metrics.fault()
            self._wakeup.bump()
            _log.exception("a callback of watch() raised")
