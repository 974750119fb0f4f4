"""The pump of a store: the store's lock, the steps that make progress, and the thread that runs them.

A step applies finished transfers and passes new commands to the mover. Threads wait for changes with
``Wakeup``, which misses no event. ``Guard`` records the longest time for which the lock was held.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Lock, RLock, current_thread
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.events import PendingEvents
from tierstore.threads import Worker
from tierstore.watch import Watches

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tierstore.build import Parts
    from tierstore.types import Ack


class Wakeup:
    """A counter of events that threads can wait for.

    To wait for a change, read ``count``, check whether the state has changed already, and if not, call
    ``wait`` with that count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counts = itertools.count(1)
        self._waiting: deque[LockType] = deque()
        """One locked lock for each waiting thread.

        ``bump`` removes the lock from the queue and releases it, which wakes the thread.
        """

    def bump(self) -> None:
        """Count an event and wake all waiting threads. Thread-safe."""
        self.count = next(self._counts)
        # A thread that starts to wait after this point sees the new count.
        for _ in range(len(self._waiting)):
            with suppress(IndexError):  # another thread removed it
                self._waiting.popleft().release()

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        """Wait until the count differs from ``seen``.

        Return at the monotonic time ``deadline`` or after ``at_most_s`` seconds, whichever is earlier.
        """
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
    """A fair, reentrant lock for ``with`` statements.

    A thread that releases the lock and acquires it again gets it only after every thread that was already waiting.

    ``__exit__`` is a C method, so no Python code runs between the end of the block and the release. A signal
    handler can therefore raise an exception only before ``__exit__`` starts or after the release. In both
    cases the lock is released.
    """

    __slots__ = ("__exit__", "_lock", "_turn")
    __exit__: Callable[..., None]

    def __init__(self) -> None:
        self._lock = RLock()
        self._turn = RLock()
        """Held by the next thread in line while it waits for ``_lock``. All others wait for this lock."""
        self.__exit__ = self._lock.__exit__

    def __enter__(self) -> None:
        taken: list[bool] = []
        try:
            with self._turn:
                # The interpreter runs this in a single step, so no signal handler can run after the lock was
                # acquired and before that is recorded.
                taken.extend(map(self._lock.acquire, (True,)))
        except BaseException:
            if taken:
                self._lock.release()
            raise


class Guard:
    """Detects that code was interrupted while it held the lock.

    Every thread enters the guard after the lock: ``with pump.lock, pump.guard``. A signal handler may raise
    an exception while the lock is held, or call code that acquires the lock again. The state that the lock
    protects may then be inconsistent, so the guard raises StoreClosed from then on.

    The guard is separate from the lock, because a handler may raise before the first line of the guard's
    ``__exit__``. The lock is then released, and the next thread finds that the guard was not exited.

    ``longest_s`` and ``longest_cpu_s`` are in seconds and may be read without the lock.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Longest time for which the lock was held."""
        self.longest_cpu_s = 0.0
        """Longest CPU time of a thread while it held the lock. Time in which other threads ran is not included."""
        self.broken = False
        """Whether a thread was interrupted while it held the lock."""
        self._held = False
        """Whether a thread holds the lock now."""
        self._since = 0.0
        self._cpu_since = 0.0

    def require_whole(self) -> None:
        """Raise StoreClosed if a thread was interrupted while it held the lock."""
        if self.broken:
            raise StoreClosed(
                "the store was interrupted in the middle of a change and can no longer be used; open a new one"
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

    Code under the lock raises only subclasses of Exception.
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
    """The store's lock, and the thread that processes finished work between calls.

    No thread blocks while it holds the lock.
    """

    def __init__(self, parts: Parts, wakeup: Wakeup) -> None:
        self.directory = parts.directory
        self.mover = parts.mover
        self.metrics = parts.metrics
        self.events = PendingEvents(parts.directory)
        """Actions that are deferred until a caller's event has completed."""
        self.lock = FairLock()
        self.guard = Guard()
        """Detects interruptions. Enter it after the lock: ``with pump.lock, pump.guard``."""
        self.metrics.watch_lock(lambda: self.guard.longest_s, lambda: self.guard.longest_cpu_s)
        self.closed = False
        self.hinted = Wakeup()
        """Wakes threads that wait for a hint. Bumped by every ``hint`` call and when the store closes."""
        self.watches = Watches(parts.directory.residency, wakeup.bump)
        """The watches created by ``TierStore.watch``."""
        self._pid = os.getpid()
        self._wakeup = wakeup
        self._acks: deque[Ack] = deque()
        self._thread: Worker | None = None

    def start(self) -> None:
        """Start the thread that processes finished work between calls."""
        self._thread = Worker(self._run, name="tierstore-pump")
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread, waiting up to ``timeout_s`` for it, and end all watches.

        Later calls raise StoreClosed.
        """
        self.closed = True
        self._wakeup.bump()
        self.hinted.bump()
        if (
            self._thread is not None and self._thread is not current_thread()
        ):  # a callback of `watch` may close the store
            self._thread.join(timeout_s)
        self.watches.close()

    def require_open(self) -> None:
        """Raise StoreClosed if the store was closed or interrupted, or if this is a forked child.

        In a forked child, the lock and the threads belong to the parent process.
        """
        if self.inherited:
            raise StoreClosed(
                f"the store belongs to process {self._pid}, from which this process was forked; open another store "
                "after the fork"
            )
        if self.closed:
            raise StoreClosed("the store is closed")
        self.guard.require_whole()

    @property
    def usable(self) -> bool:
        """Whether the store is open, was not interrupted, and belongs to this process. Takes no lock."""
        return not (self.closed or self.guard.broken or self.inherited)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of a store that belongs to the parent process."""
        return os.getpid() != self._pid

    def advance(self) -> None:
        """Process all work that has finished by now, and release the lock after each transfer.

        Work that finishes during the call is left for later. Otherwise the call might never return, because a
        failing disk may complete writes as fast as they are submitted.
        """
        self.require_open()
        with self.lock, self.guard:
            left = self.step()
        while left > 0:
            with self.lock, self.guard:
                left = min(left - _ACKS_PER_HOLD, self.step())

    def step(self) -> int:
        """Apply a finished transfer, make decisions and submit new transfers. The caller holds the lock.

        Returns:
            The number of finished transfers that are not applied yet.
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
        """Pass the directory's commands to the mover, in order. The caller holds the lock."""
        for command in self.directory.take_commands():
            self.mover.submit(command)

    def until(self, deadline: float | None, woken_by: Wakeup | None = None) -> Iterator[None]:
        """Process finished work before each iteration of the caller's loop, and wait for a change after it.

        Args:
            deadline: The monotonic time at which the loop ends. None: never.
            woken_by: A Wakeup that counts all events for which the caller waits. If the store's thread is
                running, only this Wakeup wakes the caller. None: any change wakes it.
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
        """Wake all waiting threads, because a call has changed something that they may be waiting for."""
        self._wakeup.bump()

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight, queued, or waiting for an event. The caller holds the lock."""
        return not (self.directory.busy() or self.events.waiting or self._acks)

    def wait_idle(self, deadline: float) -> bool:
        """Wait until the store is settled. Return False if the monotonic ``deadline`` passes first."""
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
            except Exception:  # noqa: BLE001 - the top of a thread: count and log the error, then continue
                self.metrics.fault()
                _log.exception("unexpected error in the store's thread; it continues")
                turns = self.until(None)
            self._tell()

    def _tell(self) -> None:
        try:
            self.watches.tell()
        except Exception:  # noqa: BLE001 - the caller's code: count and log the error, then continue
            self.metrics.fault()
            self._wakeup.bump()
            _log.exception("a callback of TierStore.watch raised an exception")
