"""How a capacity in bytes becomes a map, batches and a budget. Pure arithmetic."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from tierstore.codec import record_nbytes
from tierstore.errors import ConfigError

_MIB = 1 << 20
_VALUE_PREFIX = 16  # LMDB's page header in front of a large value
_CATALOGUE_SHARE = (
    1024  # leaf and branch bytes of one record in both trees, at their lowest fill of a quarter
)
_SMALL_FILES = 64 << 10  # lock files and markers, everything that is not data.mdb
_FIXED_PAGES = 32  # meta pages, roots, the free list
_COPIED_PAGES = 3  # tree pages that one changed record copies before the old ones are free again
_WATERMARK = 0.85  # of the map: fuller, and runs of free pages become too short


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """All in bytes, but ``batch_pages`` and ``erase_keys``, which say how much one transaction may take."""

    record_nbytes: int
    map_size: int
    budget_nbytes: int
    batch_pages: int
    erase_keys: int

    @property
    def max_records(self) -> int:
        """More records than this are refused: half of the slack above the budget."""
        return (self.budget_nbytes + self.map_size) // 2 // self.record_nbytes


def size(capacity: int, page_nbytes: int) -> Sizing:
    """Sizes such that everything on disk stays within ``capacity`` while live records stay within the budget.

    ConfigError if not even one page fits.
    """
    block = mmap.PAGESIZE
    on_disk = -(-(_VALUE_PREFIX + record_nbytes(page_nbytes)) // block) * block
    record = on_disk + _CATALOGUE_SHARE
    copied = _COPIED_PAGES * block
    batch_pages = max(1, min(16 * _MIB, capacity // 16) // (on_disk + copied))
    batch = batch_pages * (on_disk + copied)
    map_size = (capacity - _SMALL_FILES) // block * block
    budget = min(int(map_size * _WATERMARK), map_size - 2 * batch - _FIXED_PAGES * block)
    if budget < record:
        least = _SMALL_FILES + record + 2 * (on_disk + copied) + _FIXED_PAGES * block
        raise ConfigError(
            f"nvme.capacity is {capacity} bytes; allowed: at least {least * 5 // 4} for a page of {page_nbytes} bytes"
        )
    return Sizing(
        record_nbytes=record,
        map_size=map_size,
        budget_nbytes=budget,
        batch_pages=batch_pages,
        erase_keys=max(1, batch // copied),
    )
