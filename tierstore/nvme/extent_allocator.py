"""Allocator for the blocks of extent files. It accesses neither the files nor the catalogue.

A slot is taken before it is written, and freed once no committed entry refers to it. A slot that readers have
pinned is freed at the last unpin. Allocation is best fit (segregated fit; Wilson et al., "Dynamic Storage
Allocation", 1995): a slot is cut from the front of the shortest free run that is long enough. Of several runs of
that length, the one at the lowest block is used. Freed runs are merged with their neighbours. Records can therefore
reuse holes that records of other lengths have left. Block numbers include the file number (file << 32 | block), so a
free run never extends over two files.

If records differ in length, in particular after a change of codec, every free run may be too short. ``moves`` then
plans which records to move into holes that fit them. It selects the records in the emptiest windows, which are
ranges of consecutive blocks. If all records have the same length, no moves are needed.

All methods of ``Slots`` are thread-safe.
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
    """Free runs of blocks. Runs of at least ``longest`` blocks (the longest slot) are treated as equally long.

    With n runs, ``take`` and ``give`` run in amortized O(log n) time.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._lengths: dict[int, int] = {}  # run length by first block
        self._firsts: dict[int, int] = {}  # first block of a run, by the block after its end
        self._heaps: dict[int, list[int]] = {}  # first blocks by run length; may contain stale entries
        self._known: list[int] = []  # lengths that have a heap, ascending
        self._pushed = 0
        self.num_blocks = 0
        """Total number of free blocks."""

    def take(self, blocks: int) -> int | None:
        """Take ``blocks`` consecutive blocks. Return the first one, or None if no run is long enough."""
        for length in self._known[bisect_left(self._known, blocks) :]:
            first = self._lowest(length)
            if first is not None:
                rest = self._remove(first) - blocks
                if rest:
                    self._add(first + blocks, rest)
                return first
        return None

    def give(self, first: int, blocks: int) -> None:
        """Free blocks that were taken, and merge them with adjacent free runs."""
        end = first + blocks
        before = self._firsts.get(first)
        if before is not None:
            self._remove(before)
            first = before
        if end in self._lengths:
            end += self._remove(end)
        self._add(first, end - first)

    def take_between(self, first: int, blocks: int) -> list[tuple[int, int]]:
        """Take all free blocks among the ``blocks`` blocks that start at ``first``.

        Returns:
            The (first block, length) of each run of blocks taken.
        """
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
        """Remove stale heap entries."""
        self._heaps.clear()
        self._known.clear()
        self._pushed = 0
        for first, length in self._lengths.items():
            self._push(first, length)


class Place(NamedTuple):
    """A slot: the number of its extent file (from 1), its first block in that file, and its length in blocks."""

    extent: int
    block: int
    blocks: int

    @property
    def first(self) -> int:
        """Global number of the slot's first block."""
        return self.extent << 32 | self.block

    @classmethod
    def at(cls, first: int, blocks: int) -> Place:
        """Return the slot that begins at the global block ``first``."""
        return cls(first >> 32, first & 0xFFFFFFFF, blocks)


class Slots:
    """Slots of up to ``longest`` blocks in extent files. All counts are in blocks. Thread-safe."""

    def __init__(self, longest: int) -> None:
        self._lock = threading.Lock()
        self._extents: dict[int, int] = {}
        self._runs = FreeRuns(longest)
        self._pins: Counter[Place] = Counter()
        self._waiting: set[Place] = set()

    @property
    def total(self) -> int:
        """Number of blocks in all extent files."""
        with self._lock:
            return sum(self._extents.values())

    @property
    def num_free(self) -> int:
        """Number of free blocks, which need not be consecutive."""
        with self._lock:
            return self._runs.num_blocks

    @property
    def num_waiting(self) -> int:
        """Number of blocks in freed slots that are still pinned."""
        with self._lock:
            return sum(place.blocks for place in self._waiting)

    def add_extent(self, number: int, blocks: int, used: Sequence[tuple[int, int]] = ()) -> None:
        """Add an extent file of ``blocks`` blocks.

        All its blocks are free except the ranges in ``used``, given as (first block, length) in ascending order.

        Raises:
            IntegrityError: A used range lies outside the file or overlaps the next one.
        """
        ends = [0, *(first + length for first, length in used)]
        firsts = [*(first for first, _ in used), blocks]
        with self._lock:
            self._extents[number] = blocks
            for end, first in zip(ends, firsts, strict=True):
                if first < end:
                    raise IntegrityError(
                        f"records of extent file {number} overlap, or one extends past the end of the file"
                    )
                if first > end:
                    self._runs.give(number << 32 | end, first - end)

    def cut_extent(self, number: int, blocks: int) -> None:
        """Truncate an extent to its first ``blocks`` blocks, or remove the whole extent if ``blocks`` is 0.

        None of the removed blocks may be used or pinned.
        """
        with self._lock:
            self._runs.take_between(number << 32 | blocks, 1 << 32)
            if blocks:
                self._extents[number] = blocks
            else:
                del self._extents[number]

    def has(self, place: Place) -> bool:
        """Return whether the slot's blocks exist, whether or not they are in use."""
        return 0 < place.blocks <= self._extents.get(place.extent, 0) - place.block

    def take(self, blocks: int) -> Place | None:
        """Take a free slot of ``blocks`` blocks. Return None if no free run is long enough."""
        with self._lock:
            first = self._runs.take(blocks)
            return None if first is None else Place.at(first, blocks)

    def free(self, places: Iterable[Place]) -> None:
        """Free slots that no committed entry refers to any more.

        Pinned slots become free at their last unpin.
        """
        with self._lock:
            for place in places:
                if self._pins[place] > 0:
                    self._waiting.add(place)
                else:
                    del self._pins[place]
                    self._runs.give(place.first, place.blocks)

    def reserve(self, window: Place) -> list[Place]:
        """Take all free blocks of ``window`` and return them, so that no record is placed there.

        The caller must free them later.
        """
        with self._lock:
            return [Place.at(*run) for run in self._runs.take_between(window.first, window.blocks)]

    def pinned(self, place: Place) -> Pin:
        """Return a context manager that keeps the slot from being reused."""
        return Pin(self, place)

    def pin(self, place: Place) -> None:
        """Keep the slot from being reused until ``unpin``."""
        with self._lock:
            self._pins[place] += 1

    def unpin(self, place: Place) -> None:
        """Undo one ``pin``."""
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
    """Context manager that pins a slot.

    It is a class, not a generator, for speed: every page read creates one.
    """

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
    """Group slots by extent file.

    Args:
        firsts: Global number of each slot's first block.
        blocks: Length of each slot in blocks.

    Returns:
        A mapping from the number of each file to its slots, as (first block in the file, length) in ascending order.
    """
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
"""Records of one extent file as (first block, length), in ascending order."""


class Move(NamedTuple):
    """A record's current slot and its new slot."""

    old: Place
    new: Place


class Window(NamedTuple):
    """A range of consecutive blocks and the records in it."""

    place: Place
    records: list[Place]


@contextmanager
def moves(
    slots: Slots, extents: Mapping[int, tuple[int, Spans]], need: int, count: int
) -> Iterator[list[Move]]:
    """Plan moves of records that free up to ``count`` runs of ``need`` blocks.

    The new slots are taken by this function. The caller must either commit entries that refer to them, or free them.
    Until the context exits, no record is placed in the ranges that the moves empty.

    Args:
        slots: Allocator of the slots.
        extents: For each file number, the file's length in blocks and its records.
        need: Length of each run to free, in blocks.
        count: Maximum number of runs to free.
    """
    held: list[Place] = []
    planned: list[Move] = []
    try:
        for window in _windows(extents, need, count):
            pieces = slots.reserve(window.place)
            held += pieces
            known = sum(each.blocks for each in (*pieces, *window.records))
            # Skip a window that also contains blocks that are pinned, in doubt, or just taken for another window.
            if known == window.place.blocks:
                planned += _targets(slots, window.records)
        yield planned
    finally:
        slots.free(held)


def _targets(slots: Slots, records: Sequence[Place]) -> list[Move]:
    """Take a new slot for every record. If there are too few free slots, take no slot and return []."""
    planned: list[Move] = []
    for old in records:
        new = slots.take(old.blocks)
        if new is None:
            slots.free([move.new for move in planned])
            return []
        planned.append(Move(old, new))
    return planned


def _windows(extents: Mapping[int, tuple[int, Spans]], need: int, count: int) -> Iterator[Window]:
    """Yield up to ``count`` disjoint windows of at least ``need`` blocks, starting with the emptiest one."""
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
        # Windows are compared by the gaps in front of records, because windows that share a gap overlap.
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
