"""The read-only state of the tier: why the disk refuses writes, and when the writer tries again."""

from __future__ import annotations

import logging
import time

import lmdb

from tierstore.types import Failure

_log = logging.getLogger("tierstore.nvme.refusal")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


class Refusal:
    """State of a disk that refuses writes. For the writer's thread only, except ``active``, which is thread-safe."""

    def __init__(self) -> None:
        self.active = False
        self.failure = Failure.IO_ERROR
        self._pause_s = _FIRST_PAUSE_S
        self._again = 0.0
        self._told = False

    def begin(self, error: lmdb.Error | OSError | str, failure: Failure) -> None:
        """Enter the state or double the pause before the next attempt. Warns once until a page is written."""
        if not self._told:
            _log.warning("the NVMe tier is read-only until the disk takes writes again: %s", error)
        self._told = self.active = True
        self.failure = failure
        self._again = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Report that a write succeeded."""
        self.active = False

    def forget(self) -> None:
        """Report that pages were written: the disk has recovered."""
        if self._told:
            _log.info("the NVMe tier takes writes again")
        self.active = self._told = False
        self._pause_s = _FIRST_PAUSE_S

    def remaining_s(self) -> float:
        """Return the seconds until the next attempt."""
        return max(0.0, self._again - time.monotonic())
