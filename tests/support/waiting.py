"""Waiting for what other threads do in their own time: it ends as soon as it holds, and a hang is a failure."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

PATIENCE_S = 60.0


def wait_for(holds: Callable[[], bool]) -> None:
    """Returns once it holds. For what happens sooner or later and then stays; nothing is to be told from how soon."""
    deadline = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < deadline, "it never holds"
        sleep(0.002)
