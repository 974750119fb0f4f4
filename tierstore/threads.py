"""Starts several threads so that either all of them run or none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread


def start_all(threads: Sequence[Thread], end: Callable[[], object]) -> None:
    """Start ``threads``.

    RuntimeError if the system cannot start one, after calling ``end`` to end the others.
    """
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        end()
        raise
