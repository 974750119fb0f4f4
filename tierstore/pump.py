"""The pump of a store: its lock, one step of progress, waits, and the thread that steps between calls.

A step processes finished work and hands decisions to the mover. Threads of a store wait for each other with
``Wakeup``, which loses no event, and with a lock whose longest hold is recorded.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Lock, RLock, Thread, current_thread
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.events import PendingEvents
from tierstore.watch import Watches

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tierstore.build import Parts
    from tierstore.types import Ack


class Wakeup:
    """A counter of events. Read ``count``, check the state, then wait for a change from that count."""

    def __init__(self) -> None:
        self.count = 0
        self._counts = itertools.count(1)
        self._waiting: deque[LockType] = deque()
        """A locked lock for each waiting thread. The thread that removes a lock from here releases it."""

    def bump(self) -> None:
        """Count an event and wake all waiters. Thread-safe."""
        self.count = next(self._counts)
        # A thread that begins to wait from now on sees the new count.
        for _ in range(len(self._waiting)):
            with suppress(IndexError):  # another thread removed it
                self._waiting.popleft().release()

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        """Return when the count differs from ``seen``, at the monotonic ``deadline``, or after ``at_most_s``."""
        timeout = at_most_s if deadline is None else min(at_most_s, deadline - monotonic())
        woken = Lock()
        woken.acquire()
        self._waiting.append(woken)
        try:
            if self.count == seen:
                woken.acquire(timeout=max(0.0, timeout))
        finally:
            with suppress(ValueError):  # ``bump`` has removed it
                self._waiting.remove(woken)


class FairLock:
    """A reentrant lock for ``with`` that lets a waiting thread in before one that takes it again and again.

    No Python code runs between the end of a block and the release, because ``__exit__`` is a C method. So the
    lock is released even if a signal handler raises: its exception comes either before ``__exit__`` runs or
    after the release.
    """

    __slots__ = ("__exit__", "_lock", "_turn")
    __exit__: Callable[..., None]

    def __init__(self) -> None:
        self._lock = RLock()
        self._turn = RLock()
        """Held by the next thread in line while it waits; all others queue behind it."""
        self.__exit__ = self._lock.__exit__

    def __enter__(self) -> None:
        taken: list[bool] = []
        try:
            with self._turn:
                # One step for the interpreter: no signal handler runs between acquiring and noting it.
                taken.extend(map(self._lock.acquire, (True,)))
        except BaseException:
            if taken:
                self._lock.release()
            raise


class Guard:
    """Detects interrupted holds of the lock. Every hold enters it too: ``with pump.lock, pump.guard``.

    A signal handler may raise in the middle of a hold, or call code that takes the lock again. The guarded
    state may then be inconsistent, and every later hold raises StoreClosed. The guard is separate from the
    lock because a handler may raise before the first line of ``__exit__``. The lock is then released, and the
    next hold finds that the last one has not ended. The times are in seconds and may be read without the
    lock.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0
        """Longest hold in CPU time of its thread: its cost when nothing else runs."""
        self.broken = False
        """Whether a hold was interrupted."""
        self._held = False
        """Whether a hold has begun and not ended."""
        self._since = 0.0
        self._cpu_since = 0.0

    def require_whole(self) -> None:
        """Raise StoreClosed if a hold was interrupted."""
        if self.broken:
            raise StoreClosed(
                "the store was interrupted in the middle of a change, and has ended; open it again"
            )

    def __enter__(self) -> None:
        if self._held:
            self.broken = True
        if self.broken:
            self.require_whole()
        self._since, self._cpu_since = perf_counter(), thread_time()
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and _by_handler(kind, trace):
            self.broken = True
        self.longest_cpu_s = max(self.longest_cpu_s, thread_time() - self._cpu_since)
        self.longest_s = max(self.longest_s, perf_counter() - self._since)
        self._held = False


def _by_handler(kind: type[BaseException], trace: TracebackType | None) -> bool:
    """Return whether a signal handler raised the exception.

    The guarded code raises only subclasses of Exception.
    """
    if not issubclass(kind, Exception):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _code(handler: object) -> object:
    """Return the code object of a function, a method or a callable object, or None if it has none."""
    while isinstance(handler, partial):
        handler = handler.func
    code: object = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(handler.__call__, "__code__", None)
    return code


_log = logging.getLogger("tierstore.progress")

_EVENT_POLL_S = 0.001
_IDLE_S = 0.25
_ACKS_PER_HOLD = 1


class Pump:
    """The store's lock, and everything that happens under it between calls.

    No thread waits while it holds the lock.
    """

    def __init__(self, parts: Parts, wakeup: Wakeup) -> None:
        self.directory = parts.directory
        self.mover = parts.mover
        self.metrics = parts.metrics
        self.events = PendingEvents(parts.directory)
        """Actions that wait for an event of a caller."""
        self.lock = FairLock()
        self.guard = Guard()
        """Must be entered at every hold of the lock: ``with pump.lock, pump.guard``."""
        self.metrics.watch_lock(lambda: self.guard.longest_s, lambda: self.guard.longest_cpu_s)
        self.closed = False
        self.hinted = Wakeup()
        """Wakes threads that wait for a hint, when one comes and when the store closes."""
        self.watches = Watches(parts.directory.residency, wakeup.bump)
        """The callbacks of ``TierStore.watch``."""
        self._pid = os.getpid()
        self._wakeup = wakeup
        self._acks: deque[Ack] = deque()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread that advances the store between calls."""
        self._thread = Thread(target=self._run, name="tierstore-pump", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread. From now on calls raise StoreClosed."""
        self.closed = True
        self._wakeup.bump()
        self.hinted.bump()
        if (
            self._thread is not None and self._thread is not current_thread()
        ):  # a callback of `watch` may close
            self._thread.join(timeout_s)
        self.watches.close()

    def require_open(self) -> None:
        """Raise StoreClosed after ``stop``, after an interrupted hold, and in a forked child.

        The threads and the lock belong to the parent process.
        """
        if self.inherited:
            raise StoreClosed(f"this store belongs to process {self._pid}; open another after a fork")
        if self.closed:
            raise StoreClosed("the store is closed")
        self.guard.require_whole()

    @property
    def usable(self) -> bool:
        """Return whether the store is neither closed, nor interrupted, nor another process's.

        Takes no lock.
        """
        return not (self.closed or self.guard.broken or self.inherited)

    @property
    def inherited(self) -> bool:
        """Return whether this is the copy of another process's store in a forked child."""
        return os.getpid() != self._pid

    def advance(self) -> None:
        """Process everything that has finished by now, a few transfers per hold of the lock.

        Work that finishes during the call is left for later, because a failing disk may end writes as fast as
        they are submitted.
        """
        self.require_open()
        with self.lock, self.guard:
            left = self.step()
        while left > 0:
            with self.lock, self.guard:
                left = min(left - _ACKS_PER_HOLD, self.step())

    def step(self) -> int:
        """Apply some finished transfers, decide on new ones and submit them. The caller holds the lock.

        Returns the number of finished transfers that are not applied yet.
        """
        self._acks.extend(self.mover.poll())
        batch = [self._acks.popleft() for _ in range(min(len(self._acks), _ACKS_PER_HOLD))]
        self.events.poll()
        more = self.directory.advance(batch, monotonic())
        self.submit()
        if batch or more:
            self._wakeup.bump()
        return len(self._acks)

    def submit(self) -> None:
        """Hand the directory's commands to the mover, in order. The caller holds the lock."""
        for command in self.directory.take_commands():
            self.mover.submit(command)

    def until(self, deadline: float | None, woken_by: Wakeup | None = None) -> Iterator[None]:
        """Advance the store before each iteration of the caller's loop. Ends at the monotonic ``deadline``.

        Args:
            deadline: The monotonic time to end at. None: never.
            woken_by: For a caller that waits for only one kind of event: its wake-up. Other events then do
                not wake the caller, provided that the store has a thread to advance it.
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
        """Wake threads that may wait for a change that a call has just made."""
        self._wakeup.bump()

    @property
    def settled(self) -> bool:
        """Return whether nothing is in flight, queued, or waiting for an event. The caller holds the lock."""
        return not (self.directory.busy() or self.events.waiting or self._acks)

    def wait_idle(self, deadline: float) -> bool:
        """Wait until the store is settled. False if the monotonic ``deadline`` came first."""
        for _ in self.until(deadline):
            with self.lock, self.guard:
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
