"""Waits for the work of other threads. A wait ends as soon as its condition holds; a timeout fails the test."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

PATIENCE_S = 60.0


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds, at most ``PATIENCE_S`` seconds.

    Use this only for conditions that stay true once they hold. A test must not depend on how long the wait takes.
    """
    deadline = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < deadline, f"the condition did not hold within {PATIENCE_S} s"
        sleep(0.002)
