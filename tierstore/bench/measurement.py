"""A row with a figure and its goal, the device, the best of several runs, and a pause for the garbage collector."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``goal`` is the most that it should be, ``at_least`` the least; both may be missing."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool:
        """Return whether the goal is met."""
        if self.at_least is not None and self.value < self.at_least:
            return False
        return self.goal is None or self.value <= self.goal

    @property
    def goal_text(self) -> str:
        """Return the goal as a formula, or ""."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.goal is None else f"<= {self.goal:g}"

    def plain(self) -> dict[str, object]:
        """Return the row for JSON."""
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal if self.at_least is None else self.at_least,
            "ok": self.ok,
        }


def best_of(times: int, act: Callable[[], object]) -> float:
    """Return the seconds of the fastest run, the one that other programs disturbed least."""
    seconds = []
    for _ in range(times):
        start = perf_counter()
        act()
        seconds.append(perf_counter() - start)
    return min(seconds)


def load_average() -> float:
    """Return the runnable threads of the machine over a minute. Above the number of cores, figures are unreliable."""
    return os.getloadavg()[0]


def device() -> str:
    """Return processor, usable cores and interpreter."""
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, Python {platform.python_version()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@contextmanager
def at_rest() -> Iterator[None]:
    """Freeze existing objects, as engines do after start: a full collection takes 40 to 150 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
