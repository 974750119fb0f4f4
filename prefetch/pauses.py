"""How long sessions rest between a turn's answer and the next turn, and when the next is to be expected. No clock."""

from __future__ import annotations

from collections import deque
from statistics import median

KNOWN = 3
"""Pauses of a session that have to be known before a next turn is expected: guesses from fewer are mostly wrong."""

OVERDUE_S = 2.0
"""How long after its time a turn that was expected is still waited for."""

_LAST = 32


class Pauses:
    """The last pauses of one session."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LAST)

    def note(self, seconds: float) -> None:
        """The session went on after so long; below 0, as when turns overlap, counts as 0."""
        self._seconds.append(max(0.0, seconds))

    @property
    def expected_s(self) -> float | None:
        """The median of the last 32; None while fewer than ``KNOWN`` are known."""
        return median(self._seconds) if len(self._seconds) >= KNOWN else None
