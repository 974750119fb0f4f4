"""Whether a disk that fails reads is worth asking: pure state, the time is passed in. One thread at a time.

    CLOSED     every read is tried; so many failures in a row, or one read that hangs, open the breaker
    OPEN       no read is tried until the pause is over
    PROBING    one read is out to see; it closes the breaker, or opens it again for twice as long

The circuit breaker of M. Nygard, "Release It!". A read is known by the ticket it was admitted with: what became of a
read of an earlier time says little of now. Its failure is old news; its success means that the disk answers again.
"""

from __future__ import annotations

from enum import Enum

LIMIT = 5
"""Failures in a row that open the breaker."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Circuit(Enum):
    """States of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """``state`` changes in the calls alone; ``now`` never goes back."""

    def __init__(
        self,
        *,
        limit: int = LIMIT,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self.state = Circuit.CLOSED
        self._limit = limit
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._failures = 0
        self._ticket = 0
        self._again = 0.0

    def admit(self, now: float) -> int | None:
        """The ticket of a read that may be tried now, or None. What became of it must be told."""
        if self.state is Circuit.CLOSED:
            return self._ticket
        if self.state is Circuit.OPEN and now >= self._again:
            self.state = Circuit.PROBING
            return self._ticket
        return None

    def succeeded(self, ticket: int, now: float) -> None:
        """The disk answered, whatever it said."""
        if ticket == self._ticket and self.state is not Circuit.OPEN:
            self.state = Circuit.CLOSED
            self._failures = 0
            self._pause_s = self._first_pause_s
        elif self.state is Circuit.OPEN:
            self._again = min(self._again, now)

    def failed(self, ticket: int, now: float) -> None:
        """The disk answered with an error."""
        if ticket != self._ticket or self.state is Circuit.OPEN:
            return
        self._failures += 1
        if self.state is Circuit.PROBING or self._failures >= self._limit:
            self._open(now)

    def hung(self, ticket: int, now: float) -> None:
        """The disk did not answer in time. Not to be followed by ``failed`` of the same read."""
        if ticket == self._ticket and self.state is not Circuit.OPEN:
            self._open(now)

    def gave_up(self, ticket: int, now: float) -> None:
        """The disk was not asked after all: that says nothing, and another read may go in its place."""
        if ticket == self._ticket and self.state is Circuit.PROBING:
            self.state = Circuit.OPEN
            self._again = min(self._again, now)

    def _open(self, now: float) -> None:
        self.state = Circuit.OPEN
        self._ticket += 1
        self._again = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
