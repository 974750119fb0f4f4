"""How much memory is free: on the machine, and within the control groups (containers) that the process runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.config import exact_size
from tierstore.host.control_group import control_groups

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
"""Files of a limit and of what counts against it. Above ``memory.high`` a group crawls, but is not killed."""

_RECLAIMABLE = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file", "slab_reclaimable"),
}
"""Lines of ``memory.stat`` that count as free, with those of the groups below.

The rule is that of the kernel's own estimate for the machine, ``MemAvailable`` (``si_mem_available`` in
``mm/show_mem.c``): page cache on both LRU lists of files, and reclaimable slab. Shared memory, tmpfs and locked pages
are page cache too but on other lists: they cannot be dropped. Version 1 does not tell its slab."""

_UNLIMITED = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest number of pages that fit in 63 bits, as bytes."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory under the one limit that leaves least."""

    nbytes: int
    """Bytes that can be allocated now without swapping."""
    used_nbytes: int
    """Bytes that count against the limit and cannot be reclaimed."""
    limit_nbytes: int
    limit: str
    """What sets the limit, as the subject of a sentence: "memory.max of the control group /x"."""

    def described(self) -> str:
        """Return the end of a refusal: what is free, and why it is not more."""
        return (
            f"only {exact_size(self.nbytes)} are free: {self.limit} is {exact_size(self.limit_nbytes)}, and "
            f"{exact_size(self.used_nbytes)} are in use, page cache not counted"
        )


def free_memory(root: Path = _ROOT) -> FreeMemory | None:
    """Return the least free memory under all limits that hold for this process, or None if Linux tells of none.

    The limits are the memory of the machine, and those of the process's control groups and all their ancestors, in
    version 1 and 2. Page cache counts as free, since the kernel drops it before it refuses memory or kills a process.

    Args:
        root: The root of the file system; tests give another.
    """
    found = [*_machine(root), *(free for group in control_groups("memory", root) for free in _within(group))]
    return min(found, key=lambda free: free.nbytes, default=None)


def available_nbytes() -> int | None:
    """Return the bytes that can be allocated now without swapping, or None if Linux does not tell."""
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
