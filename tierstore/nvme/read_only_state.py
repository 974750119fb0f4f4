"""The read-only state of the tier: why the disk refuses writes and when the writer retries."""

from __future__ import annotations

import logging
import time

import lmdb

from tierstore.types import Failure

_log = logging.getLogger("tierstore.nvme.refusal")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


class Refusal:
    """State of a disk that refuses writes.

    Only the writer's thread may use it, but any thread may read ``active``.
    """

    def __init__(self) -> None:
        self.active = False
        self.failure = Failure.IO_ERROR
        self._pause_s = _FIRST_PAUSE_S
        self._again = 0.0
        self._told = False

    def begin(self, error: lmdb.Error | OSError | str, failure: Failure) -> None:
        """Enter the read-only state, or double the pause before the next attempt.

        Logs one warning until ``forget`` is called. Until ``end`` or ``forget`` is called, writes fail with
        ``failure``.
        """
        if not self._told:
            _log.warning("the NVMe tier is read-only until the disk accepts writes again: %s", error)
        self._told = self.active = True
        self.failure = failure
        self._again = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Leave the read-only state after a successful transaction. Only ``forget`` resets the pause."""
        self.active = False

    def forget(self) -> None:
        """Leave the read-only state and reset the pause. Call this once pages were written: the disk has recovered."""
        if self._told:
            _log.info("the NVMe tier accepts writes again")
        self.active = self._told = False
        self._pause_s = _FIRST_PAUSE_S

    def remaining_s(self) -> float:
        """Return the number of seconds until the next attempt."""
        return max(0.0, self._again - time.monotonic())
