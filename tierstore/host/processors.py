"""The processor cores available to this process, and the number of threads to compute with."""

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
"""Environment variables from which torch takes its number of threads. If one is set, that number is kept."""


@dataclass(frozen=True, slots=True)
class Processors:
    """The cores that this process may use, and the load of the machine."""

    cores: int
    """Number of cores that this process may run on (its affinity)."""
    total: int
    """Number of cores of the machine."""
    quota: float | None
    """Processor time that the control groups allow, in cores: the lowest of their limits. None: no limit."""
    load: float
    """Load average of the machine over the last minute."""

    @property
    def free(self) -> int:
        """Number of threads that could each run on a separate free core now, at least 1."""
        allowed = [self.cores, self.total - self.load, *([] if self.quota is None else [self.quota])]
        return max(1, round(min(allowed)))

    def described(self) -> str:
        """Return the values as text: "2 cores, of which control groups allow 1.5; load average 0.3"."""
        quota = "" if self.quota is None else f", of which control groups allow {self.quota:g}"
        return f"{self.cores} core{'' if self.cores == 1 else 's'}{quota}; load average {self.load:.1f}"


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads torch uses for an operation, and why."""

    count: int
    why: str
    chosen: bool = True
    """Whether TierStore chose the number. False: the user chose it, so it is not changed."""

    def described(self) -> str:
        """Return a line that tells users the number of threads, the reason, and how to change the number."""
        return (
            f"torch computes with {self.count} thread{'' if self.count == 1 else 's'} ({self.why}); "
            "use --threads to set another number"
        )


def processors(root: Path = _ROOT) -> Processors:
    """Return the current state of the processors.

    Args:
        root: Root of the file system. Tests pass another directory.
    """
    cores = len(os.sched_getaffinity(0))
    return Processors(cores, os.cpu_count() or cores, min(_quotas(root), default=None), os.getloadavg()[0])


def choose_threads(
    default: int, wanted: int | None, found: Processors, environment: Mapping[str, str] = os.environ
) -> Threads:
    """Choose the number of threads that torch uses for an operation on the CPU.

    An operation finishes when its last thread does. A thread that waits for a core delays all others, in each
    of the thousands of operations per token. With more threads than free cores, computing is slower than with
    a single thread.

    Args:
        default: Number of threads that torch would use by default.
        wanted: Number of threads that the user requested, which takes precedence. None: no request.
        found: The processors.
        environment: Environment variables. A thread setting for torch counts as a request.
    """
    if wanted is not None:
        return Threads(wanted, "as requested", chosen=False)
    named = next((name for name in _THREAD_VARIABLES if environment.get(name)), None)
    if named is not None:
        return Threads(default, f"{named} is set", chosen=False)
    return Threads(min(default, found.free), found.described())


def use_threads(device: str, wanted: int | None) -> Threads | None:
    """Make torch use the number of threads that ``choose_threads`` returns, for operations on the CPU.

    Returns:
        The choice. None if nothing was changed, because ``device`` is not "cpu" and ``wanted`` is None.
    """
    if device != "cpu" and wanted is None:
        return None
    import torch

    chosen = choose_threads(torch.get_num_threads(), wanted, processors())
    torch.set_num_threads(chosen.count)
    return chosen


def use_fewer_threads(cores: float) -> Threads | None:
    """Make torch use fewer threads if its threads wait too long for cores that other programs use.

    Args:
        cores: CPU time per second that this process got while torch computed, in cores.

    Returns:
        The new choice. None if nothing was changed, because torch uses one thread, or because its threads got
        at least 70 % of the time that they could use.
    """
    import torch

    before = torch.get_num_threads()
    if before == 1 or cores >= _MOST_OF_IT * before:
        return None
    chosen = Threads(max(1, int(cores)), f"{before} threads got the CPU time of only {cores:.1f} cores")
    torch.set_num_threads(chosen.count)
    return chosen


_MOST_OF_IT = 0.7


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limit, in cores, of each control group that has one."""
    for group in control_groups("cpu", root):
        if group.version == 2:
            quota, period = (*group.words("cpu.max"), "", "")[:2]
        else:
            quota, period = str(group.number("cpu.cfs_quota_us")), str(group.number("cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)
