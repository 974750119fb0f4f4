"""How threads of one store wait for each other: a wake-up that is not lost, and a lock that knows its longest hold."""

from __future__ import annotations

import sys
from threading import Condition, Lock, get_ident
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed

if TYPE_CHECKING:
    from types import FrameType, TracebackType

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
