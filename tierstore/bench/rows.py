"""What a benchmark says: one row a figure, and the device it was taken on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``goal`` is the most it should be; None: it is only told."""

    what: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the goal is met."""
        return self.goal is None or self.value <= self.goal

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "ok": self.ok,
        }


def best_of(times: int, act: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: the one that others on the machine disturbed least."""
    seconds = []
    for _ in range(times):
        start = perf_counter()
        act()
        seconds.append(perf_counter() - start)
    return min(seconds)


def device() -> str:
    """Processor, usable cores and interpreter."""
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, Python {platform.python_version()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
