"""Parts that the benchmarks share.

They include result rows with goals, best-of-n timing, a description of the machine, and a context manager that
excludes existing objects from garbage collection.
"""

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
    """One measured value of a benchmark, with an optional goal.

    ``goal`` is the maximum for ``value``, and ``at_least`` is the minimum. If both are None, the value has no goal.
    If both are set, ``value`` must be between them.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the value meets its goal. True if there is no goal."""
        if self.at_least is not None and self.value < self.at_least:
            return False
        return self.goal is None or self.value <= self.goal

    @property
    def goal_text(self) -> str:
        """The goal as text, such as ">= 3", or "" if there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.goal is None else f"<= {self.goal:g}"

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal if self.at_least is None else self.at_least,
            "ok": self.ok,
        }


def best_of(times: int, act: Callable[[], object]) -> float:
    """Call ``act`` several times and return the shortest time in seconds.

    The fastest run is the one that other programs disturbed least.
    """
    seconds = []
    for _ in range(times):
        start = perf_counter()
        act()
        seconds.append(perf_counter() - start)
    return min(seconds)


def load_average() -> float:
    """Return the machine's load average over the last minute.

    If it exceeds the number of cores, measurements are unreliable.
    """
    return os.getloadavg()[0]


def device() -> str:
    """Return a description of the machine: processor, number of usable cores, and Python version."""
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
    """Exclude all existing objects from garbage collection until the block ends.

    Inference engines do the same after startup. Otherwise, a full collection during a measurement takes 40 to 150
    ms. If the process already has frozen objects, all objects stay frozen after the block.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
