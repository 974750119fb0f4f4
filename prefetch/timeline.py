"""When one more page can cross an edge that carries one page at a time, beside those that have their time already."""

from __future__ import annotations

from math import inf


class Timeline:
    """The free time of one edge from ``now`` on. ``page_s``: seconds of a page; 0 while nothing is known."""

    def __init__(self, now: float, page_s: float) -> None:
        self.page_s = page_s
        self._free: list[tuple[float, float]] = [(now, inf)]

    def cursor(self) -> Cursor:
        """Tries out times, each after the one before. Changes nothing; void after ``take``."""
        return Cursor(self._free, self.page_s)

    def take(self, starts: list[float]) -> None:
        """These starts, ascending and found by one cursor, are taken. O(free pieces + starts)."""
        free: list[tuple[float, float]] = []
        left = iter(self._free)
        start, end = next(left)
        for taken in starts:
            while end < taken + self.page_s:
                free.append((start, end))
                start, end = next(left)
            if start < taken:
                free.append((start, taken))
            start = taken + self.page_s
        free.append((start, end))
        free.extend(left)
        self._free = [piece for piece in free if piece[0] < piece[1]]


class Cursor:
    """Walks over free time, forwards only."""

    def __init__(self, free: list[tuple[float, float]], page_s: float) -> None:
        self._free = free
        self._page_s = page_s
        self._piece = 0
        self._at = 0.0

    def place(self, available: float) -> float:
        """The earliest start of a page that is there from ``available`` on, after all placed before."""
        self._at = max(self._at, available)
        while True:
            start, end = self._free[self._piece]
            begin = max(start, self._at)
            if begin + self._page_s <= end:
                self._at = begin + self._page_s
                return begin
            self._piece += 1
