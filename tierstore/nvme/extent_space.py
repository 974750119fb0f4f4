"""Room in extent files that no erase gives by itself: files cut to a lower capacity, and holes joined.

The writer's thread, or at open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore.nvme import allocator
from tierstore.nvme.allocator import Place, Slots, sorted_by_extent
from tierstore.nvme.direct_io import BLOCK
from tierstore.nvme.entry import LOCATION, NBYTES, slot_blocks
from tierstore.nvme.extent_records import ExtentRecords
from tierstore.nvme.extents import ExtentFiles, copy_records
from tierstore.types import PageKey


class Entries(Protocol):
    """What a catalogue lends for it."""

    def locations(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """LOCATION and NBYTES of all entries, as they are found, some at a time."""
        ...

    def find(self, wanted: Callable[[bytes], bool]) -> list[tuple[PageKey, bytes]]:
        """The entries that are."""
        ...

    def erase(self, keys: Sequence[PageKey]) -> None:
        """Remove records in one transaction."""
        ...

    def move(self, places: Mapping[PageKey, Place]) -> None:
        """Name other places for these in one transaction."""
        ...


class ExtentSpace:
    """Of one directory. ``longest``: blocks of a slot at most."""

    def __init__(
        self,
        entries: Entries,
        files: ExtentFiles,
        slots: Slots,
        records: ExtentRecords,
        *,
        longest: int,
        erase_keys: int,
    ) -> None:
        self._entries = entries
        self._files = files
        self._slots = slots
        self._records = records
        self._longest = longest
        self._erase_keys = erase_keys

    def shrink(self, nbytes: int) -> int:
        """Give the end of the last extent files back to the disk until all take ``nbytes`` at most; how many records
        were dropped with it. Their entries go first.
        """
        ends, left = {}, nbytes // BLOCK
        for number, length in self._files.sizes.items():
            ends[number] = min(left, length // BLOCK)
            if ends[number] < min(self._longest, length // BLOCK):
                ends[number] = 0  # no record would fit
            left -= ends[number]
        cut = {number: end for number, end in ends.items() if end < self._files.sizes[number] // BLOCK}
        lost = [key for key, _ in self._entries.find(lambda raw: _reaches_behind(raw, cut))] if cut else []
        for start in range(0, len(lost), self._erase_keys):
            self._entries.erase(lost[start : start + self._erase_keys])
        for number, end in cut.items():
            self._slots.cut_extent(number, end)
            if end:
                self._files.cut(number, end * BLOCK)
            else:
                self._files.remove(number)
        return len(lost)

    def join_holes(self, count: int) -> bool:
        """Move records so that up to ``count`` more of the longest fit; whether any was moved. O(records).

        Raises what the disk or the catalogue raises; every record is then where an entry says.
        """
        columns = list(self._entries.locations())
        if not columns:
            return False
        firsts, costs = (np.concatenate(column) for column in zip(*columns, strict=True))
        spans = sorted_by_extent(firsts, slot_blocks(costs))
        extents = {
            number: (nbytes // BLOCK, spans.get(number, [])) for number, nbytes in self._files.sizes.items()
        }
        with allocator.moves(self._slots, extents, self._longest, count) as planned:
            if planned:
                self._move(planned)
        return bool(planned)

    def _move(self, planned: Sequence[allocator.Move]) -> None:
        try:
            copy_records(self._files, planned)
        except BaseException:
            self._slots.free([move.new for move in planned])
            raise
        there = {move.old.first: move.new for move in planned}
        found = self._entries.find(lambda raw: _location(raw) in there)
        places = {key: there.pop(_location(raw)) for key, raw in found}
        self._slots.free(there.values())
        for key, place in places.items():
            self._records.arriving(key, place)
        self._entries.move(places)


def _location(raw: bytes) -> int:
    return int.from_bytes(raw[LOCATION], "little")


def _reaches_behind(raw: bytes, ends: Mapping[int, int]) -> bool:
    location = _location(raw)
    end = (location & 0xFFFFFFFF) + slot_blocks(int.from_bytes(raw[NBYTES], "little"))
    return end > ends.get(location >> 32, end)
