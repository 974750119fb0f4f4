"""How late a thread runs that wants to run every millisecond: what the others' holds of Python's lock do to it."""

from __future__ import annotations

from threading import Event, Thread
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_TICK_S = 1e-3


class Stalls(NamedTuple):
    """Milliseconds by which ticks came late: the middle, one in a thousand, the worst."""

    p50: float
    p999: float
    max: float


def stalls_during(act: Callable[[], object]) -> Stalls:
    """What a thread that sleeps a millisecond at a time sees while ``act`` runs in this one.

    Lateness of the scheduler is in it: compare with a run in which nothing happens.
    """
    ticking, over, late = Event(), Event(), [0.0]

    def tick() -> None:
        begin = perf_counter()
        ticking.set()
        while not over.is_set():
            sleep(_TICK_S)
            now = perf_counter()
            late.append(now - begin - _TICK_S)
            begin = now

    watcher = Thread(target=tick, name="tierstore-bench-tick", daemon=True)
    watcher.start()
    ticking.wait()
    try:
        act()
    finally:
        over.set()
        watcher.join()
    p50, p999, worst = (float(found) * 1e3 for found in np.percentile(late, [50, 99.9, 100]))
    return Stalls(p50, p999, worst)
