"""The row of a figure, the device it was taken on, the best of several runs, and Python's garbage collector at rest."""

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
    """One figure. ``goal`` is the most it should be, ``at_least`` the least; neither: it is only told."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the goal is met."""
        if self.at_least is not None and self.value < self.at_least:
            return False
        return self.goal is None or self.value <= self.goal

    @property
    def goal_text(self) -> str:
        """The goal in words of arithmetic, "" where there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.goal is None else f"<= {self.goal:g}"

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal if self.at_least is None else self.at_least,
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


def load_average() -> float:
    """Runnable threads of the whole machine, averaged over a minute: above the cores' number figures are worth less."""
    return os.getloadavg()[0]


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


@contextmanager
def at_rest() -> Iterator[None]:
    """As engines do after their start: a full pass over what torch made stops everything for 40 to 150 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
