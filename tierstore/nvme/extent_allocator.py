"""Which blocks of the extent files are free, used, or still read: bookkeeping only, no file, no catalogue.

A slot is taken before it is written and freed once no committed entry names it. A slot that a reader has pinned comes
back with its last pin. Free blocks are runs, cut by best fit: of the shortest runs that are long enough the lowest is
cut from its front, and what comes back joins its neighbours, so that records of few lengths fit into each other's
holes (segregated fit; Wilson et al., "Dynamic Storage Allocation", 1995). A block's number holds its file's (file <<
32 | block), so that no run reaches from one file into another.

Where lengths differ, most of all where a codec came or went, the free blocks may all lie in pieces that are too
short. ``moves`` then plans which records go out of the windows that hold the least, into holes that fit them. Records
of one length never need it.

All methods of ``Slots`` may be called from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError


class FreeRuns:
    """``longest``: blocks of the longest piece ever taken; runs of that length and beyond are all alike.

    ``take`` and ``give`` are O(log n), amortised, in the number of runs.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._lengths: dict[int, int] = {}  # by first block
        self._firsts: dict[int, int] = {}  # by the block behind the last
        self._heaps: dict[int, list[int]] = {}  # first blocks by length; some are not runs any more
        self._known: list[int] = []  # the heaps' lengths, ascending
        self._pushed = 0
        self.num_blocks = 0
        """Free blocks altogether."""

    def take(self, blocks: int) -> int | None:
        """First of so many blocks in a row, free no more; None if no run is that long."""
        for length in self._known[bisect_left(self._known, blocks) :]:
            first = self._lowest(length)
            if first is not None:
                rest = self._remove(first) - blocks
                if rest:
                    self._add(first + blocks, rest)
                return first
        return None

    def give(self, first: int, blocks: int) -> None:
        """These blocks are free from now on; none of them was."""
        end = first + blocks
        before = self._firsts.get(first)
        if before is not None:
            self._remove(before)
            first = before
        if end in self._lengths:
            end += self._remove(end)
        self._add(first, end - first)

    def take_between(self, first: int, blocks: int) -> list[tuple[int, int]]:
        """Take what is free of so many blocks from ``first`` on: first block and length of each piece. O(n)."""
        end, taken = first + blocks, []
        for start, length in sorted(self._lengths.items()):
            stop = start + length
            if start < end and stop > first:
                self._remove(start)
                if start < first:
                    self._add(start, first - start)
                if stop > end:
                    self._add(end, stop - end)
                taken.append((max(start, first), min(stop, end) - max(start, first)))
        return taken

    def _lowest(self, length: int) -> int | None:
        heap = self._heaps[length]
        while heap:
            if min(self._lengths.get(heap[0], 0), self._longest) == length:
                return heap[0]
            heappop(heap)
        del self._heaps[length]
        self._known.remove(length)
        return None

    def _add(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._firsts[first + length] = first
        self.num_blocks += length
        self._push(first, length)
        if self._pushed > 4 * len(self._lengths) + 1024:
            self._sweep()

    def _push(self, first: int, length: int) -> None:
        kind = min(length, self._longest)
        if kind not in self._heaps:
            self._heaps[kind] = []
            insort(self._known, kind)
        heappush(self._heaps[kind], first)
        self._pushed += 1

    def _remove(self, first: int) -> int:
        length = self._lengths.pop(first)
        del self._firsts[first + length]
        self.num_blocks -= length
        return length

    def _sweep(self) -> None:
        """Drop what is left of runs that are gone."""
        self._heaps.clear()
        self._known.clear()
        self._pushed = 0
        for first, length in self._lengths.items():
            self._push(first, length)


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


Spans = Sequence[tuple[int, int]]
"""Records of one extent file: first block there and length, ascending."""


class Move(NamedTuple):
    """A record's slot, and the one that it is to have."""

    old: Place
    new: Place


class Window(NamedTuple):
    """Blocks in a row, and the records in them."""

    place: Place
    records: list[Place]


@contextmanager
def moves(
    slots: Slots, extents: Mapping[int, tuple[int, Spans]], need: int, count: int
) -> Iterator[list[Move]]:
    """Moves after which ``count`` pieces of ``need`` blocks are free, or as many of them as can be had.

    ``extents``: length in blocks and records, by number. The new slots are taken: the caller's, to be named by entries
    or freed. While this lasts nothing else is put into the windows.
    """
    held: list[Place] = []
    planned: list[Move] = []
    try:
        for window in _windows(extents, need, count):
            pieces = slots.reserve(window.place)
            held += pieces
            known = sum(each.blocks for each in (*pieces, *window.records))
            # Blocks that are neither free nor a record's: pinned, in doubt, or just taken for another window's.
            if known == window.place.blocks:
                planned += _targets(slots, window.records)
        yield planned
    finally:
        slots.free(held)


def _targets(slots: Slots, records: Sequence[Place]) -> list[Move]:
    """A new slot for each of these, or none for any."""
    planned: list[Move] = []
    for old in records:
        new = slots.take(old.blocks)
        if new is None:
            slots.free([move.new for move in planned])
            return []
        planned.append(Move(old, new))
    return planned


def _windows(extents: Mapping[int, tuple[int, Spans]], need: int, count: int) -> Iterator[Window]:
    """At most ``count`` windows of ``need`` blocks or a little more, apart, those that hold least first."""
    found: list[tuple[int, int, int, int]] = []
    for number, (blocks, spans) in extents.items():
        firsts = np.array([*(first for first, _ in spans), blocks])
        ends = np.array([0, *(first + length for first, length in spans)])
        held = np.cumsum([0, *(length for _, length in spans)])
        behind = np.searchsorted(firsts, ends + need)
        fits = np.flatnonzero(behind < len(firsts))
        costs = held[behind[fits]] - held[fits]
        cheapest = np.argsort(costs, kind="stable")[: 4 * count]
        found += [(int(costs[at]), number, int(fits[at]), int(behind[fits[at]])) for at in cheapest]
    taken: set[tuple[int, int]] = set()
    for _, number, start, end in sorted(found):
        # By the gaps in front of records: windows that share one overlap.
        gaps = {(number, gap) for gap in range(start, end + 1)}
        if len(taken & gaps) or not count:
            continue
        taken |= gaps
        count -= 1
        blocks, spans = extents[number]
        first = sum(spans[start - 1]) if start else 0
        behind_last = spans[end][0] if end < len(spans) else blocks
        records = [Place(number, *span) for span in spans[start:end]]
        yield Window(Place(number, first, behind_last - first), records)
