"""The amount of free memory on the machine, and within the control groups (containers) of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.host.control_group import control_groups
from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.host.control_group import ControlGroup

_ROOT = Path("/")

_LIMITS = {
    1: (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
    2: (("memory.max", "memory.current"), ("memory.high", "memory.current")),
}
"""Pairs of files with a limit and the usage that counts against it.

A group that exceeds ``memory.high`` is slowed down, but not killed.
"""

_RECLAIMABLE = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file", "slab_reclaimable"),
}
"""Lines of ``memory.stat`` that count as free. They include descendant groups.

This follows the kernel's estimate for the machine, ``MemAvailable`` (``si_mem_available`` in
``mm/show_mem.c``): page cache on both LRU lists of files, and reclaimable slab. Shared memory, tmpfs and
locked pages are page cache too, but they are on other lists and cannot be dropped. Version 1 does not report
its slab.
"""

_UNLIMITED = 1 << 60
"""Limits of at least this many bytes count as no limit.

Version 1 represents "no limit" as the largest multiple of the page size that fits into 63 bits.
"""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory under one limit: that of the machine, or of a control group."""

    nbytes: int
    """Number of bytes that can be allocated now without swapping."""
    used_nbytes: int
    """Number of bytes that count against the limit and cannot be reclaimed."""
    limit_nbytes: int
    limit: str
    """The origin of the limit, as the subject of a sentence: "memory.max of the control group /x"."""

    def described(self) -> str:
        """Return text for an error message: how much memory is free, and which limit applies."""
        return (
            f"only {exact_size(self.nbytes)} is free: {self.limit} is {exact_size(self.limit_nbytes)}, and "
            f"{exact_size(self.used_nbytes)} is in use, not counting the page cache"
        )


def free_memory(root: Path = _ROOT) -> FreeMemory | None:
    """Return the free memory under the tightest limit of this process, or None if no limit can be read.

    The tightest limit is the one that leaves the least free memory. The limits are the memory of the machine,
    and the limits of the process's control groups (cgroup v1 and v2) and all their ancestors. Page cache
    counts as free, because the kernel drops it before it refuses memory or kills a process.

    Args:
        root: Root of the file system. Tests pass another directory.
    """
    found = [*_machine(root), *(free for group in control_groups("memory", root) for free in _within(group))]
    return min(found, key=lambda free: free.nbytes, default=None)


def available_nbytes() -> int | None:
    """Return the number of bytes that can be allocated now without swapping, or None if it is unknown."""
    free = free_memory()
    return None if free is None else free.nbytes


def _machine(root: Path) -> Iterator[FreeMemory]:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        available, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError):
        return
    yield FreeMemory(available, total - available, total, "the memory of this machine")


def _within(group: ControlGroup) -> Iterator[FreeMemory]:
    for limit_file, used_file in _LIMITS[group.version]:
        limit, used = group.number(limit_file), group.number(used_file)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        figures = group.figures("memory.stat")
        kept = max(0, used - sum(figures.get(name, 0) for name in _RECLAIMABLE[group.version]))
        yield FreeMemory(max(0, limit - kept), kept, limit, f"{limit_file} of the control group {group.name}")
