"""How much memory is free: on the machine, and in the control group (container) that the process runs in."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_nbytes() -> int | None:
    """Return the bytes that can be allocated without swapping, as Linux estimates them, or None if it does not tell.

    The smaller of ``MemAvailable`` and what is left of the limit of the control group.
    """
    known = [n for n in (_machine(), _control_group()) if n is not None]
    return min(known, default=None)


def _machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
