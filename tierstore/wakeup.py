"""How threads of one store wait for each other without losing a wake-up."""

from __future__ import annotations

from threading import Condition
from time import monotonic


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
