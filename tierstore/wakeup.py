"""How threads of one store wait for each other: a wake-up that is not lost, and a lock that knows its longest hold."""

from __future__ import annotations

from threading import Condition, Lock
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Wakeup:
    """A counter that goes up when something happened. Read ``count``, look at the state, then wait from that count."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = Condition()

    def bump(self) -> None:
        """Something happened; wakes all waiters. Any thread."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        """Returns when the count has left ``seen``, the monotonic ``deadline`` has come, or ``at_most_s`` passed."""
        timeout = at_most_s if deadline is None else min(at_most_s, max(0.0, deadline - monotonic()))
        with self._condition:
            if self.count == seen:
                self._condition.wait(timeout)


class TimedLock:
    """A lock for ``with``, not reentrant. Its figures are in seconds and may be read without it.

    Who holds it again and again lets those in that wait: a plain lock would be taken back before they wake.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0
        """Of the holder's own CPU time: what a hold costs when nothing else runs."""
        self._lock = Lock()
        self._turn = Lock()
        """Held by the next in line while it waits; all others queue behind it."""
        self._since = 0.0
        self._cpu_since = 0.0

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()
        self._since, self._cpu_since = perf_counter(), thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.longest_cpu_s = max(self.longest_cpu_s, thread_time() - self._cpu_since)
        self.longest_s = max(self.longest_s, perf_counter() - self._since)
        self._lock.release()
