"""Runs of free blocks by best fit: bookkeeping only, no file, no lock.

A block's number holds its file's (file << 32 | block), so that no run reaches from one file into another. Of the
shortest runs that are long enough the lowest is cut from its front, and what comes back joins its neighbours: records
of few lengths fit into each other's holes (segregated fit; Wilson et al., "Dynamic Storage Allocation", 1995).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush


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
