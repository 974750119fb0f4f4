"""Threads of a room that has several: all of them begin, or none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread


def start_all(threads: Sequence[Thread], end: Callable[[], object]) -> None:
    """Starts them. RuntimeError where the system gives no more, after ``end``, which is to end those that began."""
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        end()
        raise
