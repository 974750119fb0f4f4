"""How many processor cores this process may use, how many of them are free, and how many threads to compute with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.host.control_group import control_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROOT = Path("/")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Of torch, not ours: who sets one has chosen."""


@dataclass(frozen=True, slots=True)
class Processors:
    """What this process may use of the machine's cores, and what others leave of them."""

    cores: int
    """Cores that this process may run on (its affinity)."""
    total: int
    """Cores of the machine."""
    quota: float | None
    """Cores' worth of time that its control groups allow, the least of them; None: no limit."""
    load: float
    """Load average of the machine over the last minute."""

    @property
    def free(self) -> int:
        """Return how many threads find a core of their own now, at least 1."""
        allowed = [self.cores, self.total - self.load, *([] if self.quota is None else [self.quota])]
        return max(1, round(min(allowed)))

    def described(self) -> str:
        """Return the figures in words: "2 cores, of which control groups allow 1.5; load average 0.3"."""
        quota = "" if self.quota is None else f", of which control groups allow {self.quota:g}"
        return f"{self.cores} core{'' if self.cores == 1 else 's'}{quota}; load average {self.load:.1f}"


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads torch is to compute an operation with, and why."""

    count: int
    why: str

    def described(self) -> str:
        """Return one line for people."""
        return (
            f"torch computes with {self.count} thread{'' if self.count == 1 else 's'} ({self.why}); "
            "--threads sets another number"
        )


def processors(root: Path = _ROOT) -> Processors:
    """Return what is known of the processors now. ``root``: the root of the file system; tests give another."""
    cores = len(os.sched_getaffinity(0))
    return Processors(cores, os.cpu_count() or cores, min(_quotas(root), default=None), os.getloadavg()[0])


def choose_threads(
    default: int, wanted: int | None, found: Processors, environment: Mapping[str, str] = os.environ
) -> Threads:
    """Choose how many threads torch computes an operation with on the CPU.

    An operation ends when its last thread does. A thread that waits for a core holds up all others, at each of the
    thousands of operations of a token, so more threads than free cores are slower than one.

    Args:
        default: What torch would take by itself.
        wanted: What the user asked for, which wins; None if nothing.
        found: The processors.
        environment: Where a setting of torch's own counts as asked for.
    """
    if wanted is not None:
        return Threads(wanted, "as asked for")
    named = next((name for name in _THREAD_VARIABLES if environment.get(name)), None)
    if named is not None:
        return Threads(default, f"{named} is set")
    return Threads(min(default, found.free), found.described())


def use_threads(device: str, wanted: int | None) -> Threads | None:
    """Have torch compute operations on the CPU with the threads that ``choose_threads`` finds, from now on.

    Returns what was chosen; None, with nothing changed, for a model on a card unless the user asked for a number.
    """
    if device != "cpu" and wanted is None:
        return None
    import torch

    chosen = choose_threads(torch.get_num_threads(), wanted, processors())
    torch.set_num_threads(chosen.count)
    return chosen


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limit of each control group that has one, in cores."""
    for group in control_groups("cpu", root):
        if group.version == 2:
            quota, period = (*group.words("cpu.max"), "", "")[:2]
        else:
            quota, period = str(group.number("cpu.cfs_quota_us")), str(group.number("cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)
