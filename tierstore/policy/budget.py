"""Bytes written lately, against a limit a day. Time is passed in, in seconds of any clock that only goes forward."""

from __future__ import annotations

from collections import deque

DAY_S = 86_400.0
_BUCKET_S = 900.0


class WriteBudget:
    """What a tier may write in any 24 hours; ``daily_nbytes`` None: as much as it likes.

    Counted in quarters of an hour. A quarter counts whole until its last byte is a day old: the sum is never too low.
    """

    def __init__(self, daily_nbytes: int | None) -> None:
        self.daily_nbytes = daily_nbytes
        self.total = 0
        """Bytes written since the beginning."""
        self._buckets: deque[list[float]] = deque()
        self._sum = 0

    def spend(self, nbytes: int, now: float) -> None:
        """Bytes were written."""
        bucket = now // _BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append([bucket, 0])
        self._buckets[-1][1] += nbytes
        self._sum += nbytes
        self.total += nbytes

    def spent(self, now: float) -> int:
        """Bytes written in the last 24 hours."""
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S <= now - DAY_S:
            self._sum -= int(self._buckets.popleft()[1])
        return self._sum

    def left(self, now: float) -> int | None:
        """Bytes that may still be written now, at least 0; None without a limit."""
        return None if self.daily_nbytes is None else max(0, self.daily_nbytes - self.spent(now))
