"""Sizing of a tier from its capacity in bytes, and checks for free disk space.

A sizing consists of the map size, extents, batch size and budget. ``size`` and ``size_extents`` are pure
arithmetic; ``shortage`` and ``require_free`` query the file system.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import ConfigError
from tierstore.nvme import directory_layout
from tierstore.nvme.catalogue_entry import CATALOGUE_SHARE
from tierstore.nvme.record_format import record_nbytes
from tierstore.types import exact_size

_log = logging.getLogger("tierstore.nvme.opening")

EXTENTS_FROM = 1 << 30
"""Minimum capacity, in bytes, for which ``payload: auto`` chooses extent files.

Also the minimum capacity for which the disk of a new directory is benchmarked.
"""

_MIB = 1 << 20
_VALUE_PREFIX = 16  # LMDB's page header in front of a large value
_SMALL_FILES = 64 << 10  # lock files and markers: everything except data.mdb and extent files
_FIXED_PAGES = 32  # meta pages, tree roots and the free list
_COPIED_PAGES = 3  # tree pages that LMDB copies to change one record; the old ones become free later
_WATERMARK = 0.85  # maximum fraction of the map to fill; above it, runs of free pages become too short
_WATERMARK_ENCODED = 0.80  # records of different lengths leave holes
_BATCH_NBYTES = 16 * _MIB
# Larger, because these batches are not kept in memory, and each commit takes 10 ms plus the time to write the bytes.
_EXTENT_BATCH_NBYTES = 256 * _MIB
_SLACK_NBYTES = 64 * _MIB  # for records that replace others
_EXTENT_WATERMARK_ENCODED = (
    0.90  # slots of different lengths leave holes; moving records makes it possible to fill this fraction
)
_EXTENT_NBYTES = 256 * _MIB
_UNITS = 32  # number of slot lengths: more lengths waste less per slot, fewer make holes easier to reuse
_SHORTEST = {"exp": 2}  # by codec, n: every slot is at least 1/n of the longest, which bounds the catalogue
_SHORTEST_LOSSY = 4
_LEAST_SLOTS = 8
_LEAST_ENCODED = 4
_MOST_EXTENTS = 256  # each needs a file descriptor
_ERASED_TOGETHER = 256
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Sizes of a tier in bytes, and the maximum numbers of pages written and keys erased per transaction.

    A record takes at most ``record_nbytes``. While all records together take at most ``budget_nbytes``, the
    tier stays within its capacity.

    The fields from ``slot_nbytes`` on are 0 if records are stored in LMDB. In extent files, the slot of a
    record is a multiple of ``unit_nbytes`` between ``least_nbytes`` and ``slot_nbytes``. All files together
    take at most ``extents_nbytes``, and a new file takes at most ``extent_nbytes``.
    """

    record_nbytes: int
    map_size: int
    budget_nbytes: int
    batch_pages: int
    erase_keys: int
    slot_nbytes: int = 0
    unit_nbytes: int = 0
    least_nbytes: int = 0
    extents_nbytes: int = 0
    extent_nbytes: int = 0

    @property
    def most_nbytes(self) -> int:
        """Total size of all records, in bytes, above which writes are refused.

        With LMDB, this is halfway between the budget and the map size. With extent files, it is the size of the
        largest record times the number of slots of that size.
        """
        if self.slot_nbytes:
            return self.extents_nbytes // self.slot_nbytes * self.record_nbytes
        return (self.budget_nbytes + self.map_size) // 2

    def slot(self, stored_nbytes: int) -> int:
        """Return the slot size in bytes for a payload of this length."""
        wanted = max(_BLOCK + stored_nbytes, self.least_nbytes)
        return min(-(-wanted // self.unit_nbytes) * self.unit_nbytes, self.slot_nbytes)

    def cost(self, stored_nbytes: int) -> int:
        """Return the disk space, in bytes, for a payload of this length and its share of the catalogue."""
        on_disk = self.slot(stored_nbytes) if self.slot_nbytes else _on_disk(stored_nbytes)
        return on_disk + CATALOGUE_SHARE


def size(capacity: int, page_nbytes: int, *, codec: str = "none") -> Sizing:
    """Return the sizes of a tier that stores records in LMDB.

    Everything on disk fits into ``capacity`` bytes while live records stay within the budget.
    In the result, ``record_nbytes`` is the size of the largest record; encoded pages take less.

    Raises:
        ConfigError: Not even one page fits.
    """
    block = mmap.PAGESIZE
    watermark = _WATERMARK if codec == "none" else _WATERMARK_ENCODED
    on_disk = _on_disk(page_nbytes)
    record = on_disk + CATALOGUE_SHARE
    copied = _COPIED_PAGES * block
    batch_pages = max(1, min(_BATCH_NBYTES, capacity // 16) // (on_disk + copied))
    batch = batch_pages * (on_disk + copied)
    map_size = (capacity - _SMALL_FILES) // block * block
    budget = min(int(map_size * watermark), map_size - 2 * batch - _FIXED_PAGES * block)
    if budget < record:
        least = _SMALL_FILES + record + 2 * (on_disk + copied) + _FIXED_PAGES * block
        raise _too_small(capacity, least, page_nbytes)
    return Sizing(
        record_nbytes=record,
        map_size=map_size,
        budget_nbytes=budget,
        batch_pages=batch_pages,
        erase_keys=max(1, batch // copied),
    )


def size_extents(
    capacity: int, page_nbytes: int, catalogue_nbytes: int = 0, *, codec: str = "none"
) -> Sizing:
    """Return the sizes of a tier with extent files.

    The files and a full catalogue together fit into ``capacity`` bytes. Slots beyond the budget are reserved for
    records that replace others, for records that are still being read and, with a codec, for holes. The catalogue is
    large enough even if every record has the shortest slot.

    Args:
        catalogue_nbytes: Length in bytes of an existing data.mdb, which never shrinks, or 0.

    Raises:
        ConfigError: Not even one page fits.
    """
    block, encoded = mmap.PAGESIZE, codec != "none"
    slot = _BLOCK + -(-page_nbytes // _BLOCK) * _BLOCK
    shortest = _SHORTEST.get(codec, _SHORTEST_LOSSY) if encoded else 1
    share = CATALOGUE_SHARE * shortest
    copied = _COPIED_PAGES * block
    batch_pages = max(1, min(_EXTENT_BATCH_NBYTES, capacity // 16) // (slot + copied))
    erase_keys = max(batch_pages, min(_ERASED_TOGETHER, capacity // 64 // copied))
    extent_slots = max(1, max(capacity // _MOST_EXTENTS, min(_EXTENT_NBYTES, capacity // 16)) // slot)
    if encoded:  # the end of a file is wasted if it is too short for a record
        extent_slots = max(extent_slots, _LEAST_SLOTS)
    # Space for the changes of one transaction, and for pages freed by the two before it, which cannot be
    # reused yet.
    working = _FIXED_PAGES * block + 3 * erase_keys * copied
    files = _SMALL_FILES + (capacity // (extent_slots * slot) + 2) * block
    num_slots = max(0, capacity - files - working) // (slot + share)
    map_size = working + -(-num_slots * share // block) * block
    if map_size < catalogue_nbytes + working:
        map_size = -(-(catalogue_nbytes + working) // block) * block
        num_slots = max(0, capacity - files - map_size) // slot
    least_slots = _LEAST_ENCODED if encoded else 2
    if num_slots < least_slots:
        least = _SMALL_FILES + (36 + _FIXED_PAGES) * block + 3 * copied + catalogue_nbytes
        raise _too_small(capacity, least + least_slots * (slot + share), page_nbytes)
    slack = max(1, min(_SLACK_NBYTES // slot, num_slots // 16))
    record = slot + CATALOGUE_SHARE
    fitting = int(num_slots * _EXTENT_WATERMARK_ENCODED) if encoded else num_slots
    return Sizing(
        record_nbytes=record,
        map_size=map_size,
        budget_nbytes=(fitting - slack) * record,
        batch_pages=batch_pages,
        erase_keys=erase_keys,
        slot_nbytes=slot,
        least_nbytes=slot // shortest,
        unit_nbytes=-(-slot // _UNITS // _BLOCK) * _BLOCK if encoded else slot,
        extents_nbytes=num_slots * slot,
        extent_nbytes=extent_slots * slot,
    )


def _on_disk(stored_nbytes: int) -> int:
    """Return the total size in bytes of the LMDB pages that a record occupies."""
    return -(-(_VALUE_PREFIX + record_nbytes(stored_nbytes)) // mmap.PAGESIZE) * mmap.PAGESIZE


def _too_small(capacity: int, least: int, page_nbytes: int) -> ConfigError:
    return ConfigError(
        f"nvme.capacity must be at least {exact_size(least * 5 // 4)} for pages of {exact_size(page_nbytes)}, got "
        f"{exact_size(capacity)}"
    )


_TRANSACTION_NBYTES = 64 << 10


def free_nbytes(directory: Path) -> int:
    """Return how many bytes this user can still allocate on the disk that holds ``directory``."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def least_free_nbytes(record_nbytes: int) -> int:
    """Return the number of free bytes below which a disk counts as full.

    A transaction needs space for two records and 64 KiB of other LMDB pages.
    """
    return 2 * record_nbytes + _TRANSACTION_NBYTES


def require_free(directory: Path, record_nbytes: int) -> None:
    """Raise OSError (ENOSPC) if the disk has too little free space for a record of up to ``record_nbytes`` bytes."""
    if free_nbytes(directory) < least_free_nbytes(record_nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def shortage(directory: Path, marker: directory_layout.ShardMarker) -> str | None:
    """Return a description of the disk's shortage of space if not even one more page fits, else None.

    A directory that contains records may have less disk space than its capacity: if at least one more page fits,
    only a warning is logged.

    Raises:
        ConfigError: The directory is new and the disk has less free space than ``marker.capacity``.
    """
    own = directory_layout.disk_nbytes(directory)
    free = free_nbytes(directory.parent)
    if marker.capacity <= free + own:
        return None
    if not has_records(directory):
        raise ConfigError(
            f"nvme.capacity must be at most {exact_size(free + own)}, which is the free disk space plus the space "
            f"that the tier already uses, got {exact_size(marker.capacity)}"
        )
    told = (
        f"the disk has {exact_size(free)} free, the tier uses {exact_size(own)}, and nvme.capacity is "
        f"{exact_size(marker.capacity)}"
    )
    if free < least_free_nbytes(marker.page_nbytes):
        return told
    _log.warning("the NVMe tier at %s has less disk space than its capacity: %s", directory, told)
    return None


def has_records(directory: Path) -> bool:
    """Return whether the directory contains a non-empty catalogue. The catalogue itself is not checked."""
    try:
        found = (directory / directory_layout.DATA_FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0
