"""Which parts of the extent files are free, used, or still read: bookkeeping only, no file, no catalogue.

A slot is taken before it is written and freed once no committed entry names it. One that a reader has pinned comes
back with its last pin. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme.runs import FreeRuns


class Place(NamedTuple):
    """A slot: number of its extent file (from 1), its first block there, and its length in blocks."""

    extent: int
    block: int
    blocks: int

    @property
    def first(self) -> int:
        """Its first block among those of all files."""
        return self.extent << 32 | self.block

    @classmethod
    def at(cls, first: int, blocks: int) -> Place:
        """The slot whose ``first`` that is."""
        return cls(first >> 32, first & 0xFFFFFFFF, blocks)


class Slots:
    """Slots of any length up to ``longest`` blocks, in extent files. All counts are of blocks."""

    def __init__(self, longest: int) -> None:
        self._lock = threading.Lock()
        self._extents: dict[int, int] = {}
        self._runs = FreeRuns(longest)
        self._pins: Counter[Place] = Counter()
        self._waiting: set[Place] = set()

    @property
    def total(self) -> int:
        """Blocks of all extents."""
        with self._lock:
            return sum(self._extents.values())

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, though not all in a row."""
        with self._lock:
            return self._runs.num_blocks

    @property
    def num_waiting(self) -> int:
        """Blocks that come back with their slots' last pins."""
        with self._lock:
            return sum(place.blocks for place in self._waiting)

    def add_extent(self, number: int, blocks: int, used: Sequence[tuple[int, int]] = ()) -> None:
        """An extent file of so many blocks; all are free but the ``used`` (first, length), ascending, at open.

        IntegrityError if one of those lies outside or reaches into the next.
        """
        ends = [0, *(first + length for first, length in used)]
        firsts = [*(first for first, _ in used), blocks]
        with self._lock:
            self._extents[number] = blocks
            for end, first in zip(ends, firsts, strict=True):
                if first < end:
                    raise IntegrityError(f"two records in one place of extent file {number}, or one outside")
                if first > end:
                    self._runs.give(number << 32 | end, first - end)

    def cut_extent(self, number: int, blocks: int) -> None:
        """Forget an extent's blocks from ``blocks`` on, none of which is used or pinned; all of it if that is 0."""
        with self._lock:
            self._runs.take_between(number << 32 | blocks, 1 << 32)
            if blocks:
                self._extents[number] = blocks
            else:
                del self._extents[number]

    def has(self, place: Place) -> bool:
        """Whether there are such blocks, used or not."""
        return 0 < place.blocks <= self._extents.get(place.extent, 0) - place.block

    def take(self, blocks: int) -> Place | None:
        """A free slot of that length, the next one its neighbour where that can be; None if there is none."""
        with self._lock:
            first = self._runs.take(blocks)
            return None if first is None else Place.at(first, blocks)

    def free(self, places: Iterable[Place]) -> None:
        """No committed entry names these any more: they may be taken again, pinned ones after their last pin."""
        with self._lock:
            for place in places:
                if self._pins[place] > 0:
                    self._waiting.add(place)
                else:
                    del self._pins[place]
                    self._runs.give(place.first, place.blocks)

    def reserve(self, window: Place) -> list[Place]:
        """Take what is free of ``window``, so that nothing else is put there; the pieces, to be freed by the caller."""
        with self._lock:
            return [Place.at(*run) for run in self._runs.take_between(window.first, window.blocks)]

    def pinned(self, place: Place) -> Pin:
        """While this lasts the slot is not taken again."""
        return Pin(self, place)

    def pin(self, place: Place) -> None:
        """Begin what ``pinned`` does, until ``unpin``."""
        with self._lock:
            self._pins[place] += 1

    def unpin(self, place: Place) -> None:
        """End it."""
        with self._lock:
            left = self._pins[place] - 1
            if left:
                self._pins[place] = left
                return
            del self._pins[place]
            if place in self._waiting:
                self._waiting.remove(place)
                self._runs.give(place.first, place.blocks)


class Pin:
    """A slot pinned while the context lasts. A class of its own: every read of a page makes one."""

    __slots__ = ("_place", "_slots")

    def __init__(self, slots: Slots, place: Place) -> None:
        self._slots = slots
        self._place = place

    def __enter__(self) -> None:
        self._slots.pin(self._place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.unpin(self._place)


def sorted_by_extent(
    firsts: NDArray[np.uint64], blocks: NDArray[np.uint64]
) -> dict[int, list[tuple[int, int]]]:
    """Slots, as (first block there, length), ascending, by the number of their extent file."""
    order = np.argsort(firsts, kind="stable")
    firsts, blocks = firsts[order], blocks[order]
    extents = firsts >> np.uint64(32)
    heres = (firsts & np.uint64(0xFFFFFFFF)).astype(np.int64)
    starts = np.flatnonzero(np.diff(extents, prepend=np.uint64(1 << 32)))
    return {
        int(extents[start]): list(zip(heres[start:end].tolist(), blocks[start:end].tolist(), strict=True))
        for start, end in pairwise([*starts.tolist(), len(firsts)])
    }
