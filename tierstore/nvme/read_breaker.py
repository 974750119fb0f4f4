"""A circuit breaker for reads from a disk that fails or hangs. Not thread-safe.

    CLOSED     every read is attempted; several failures in a row, or one read that hangs, open the breaker
    OPEN       no read is attempted until a pause is over
    PROBING    one read is attempted; it closes the breaker, or opens it again for twice as long

This is the circuit breaker of M. Nygard, "Release It!". The class reads no clock: the caller passes the time. Each
read keeps the ticket with which it was admitted. If the breaker has opened since then, a failure of the read is
ignored, because it says little about the current state of the disk; a success shows that the disk answers again.
"""

from __future__ import annotations

from enum import Enum

LIMIT = 5
"""Number of consecutive failures that opens the breaker."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Circuit(Enum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """A circuit breaker. Only its methods change ``state``. ``now`` is in seconds and must never decrease."""

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
        """Return a ticket if a read may be attempted now, else None.

        The caller must report the result of the read.
        """
        if self.state is Circuit.CLOSED:
            return self._ticket
        if self.state is Circuit.OPEN and now >= self._again:
            self.state = Circuit.PROBING
            return self._ticket
        return None

    def succeeded(self, ticket: int, now: float) -> None:
        """Report that the disk returned data, whether it was valid or not."""
        if ticket == self._ticket and self.state is not Circuit.OPEN:
            self.state = Circuit.CLOSED
            self._failures = 0
            self._pause_s = self._first_pause_s
        elif self.state is Circuit.OPEN:
            self._again = min(self._again, now)

    def failed(self, ticket: int, now: float) -> None:
        """Report that the read with this ticket failed because the disk returned an error."""
        if ticket != self._ticket or self.state is Circuit.OPEN:
            return
        self._failures += 1
        if self.state is Circuit.PROBING or self._failures >= self._limit:
            self._open(now)

    def hung(self, ticket: int, now: float) -> None:
        """Report that the disk did not answer in time. Do not call ``failed`` for the same read later."""
        if ticket == self._ticket and self.state is not Circuit.OPEN:
            self._open(now)

    def gave_up(self, ticket: int, now: float) -> None:
        """Report that the disk was not accessed after all, so that another read may be attempted instead."""
        if ticket == self._ticket and self.state is Circuit.PROBING:
            self.state = Circuit.OPEN
            self._again = min(self._again, now)

    def _open(self, now: float) -> None:
        self.state = Circuit.OPEN
        self._ticket += 1
        self._again = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
