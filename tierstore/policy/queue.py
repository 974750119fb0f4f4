"""The evictable pages of a tier in the order of their ranks."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.types import PageKey


class VictimQueue:
    """The evictable pages of a tier, lowest rank first. O(log n) to offer, amortised O(log n) to find the first.

    Ranks are unique while offered. Withdrawn ranks stay in the heap until they surface or outnumber the live ones.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, PageKey] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PageKey]:
        """Keys in victim order; O(n log n)."""
        return (self._keys[rank] for rank in sorted(self._keys))

    def offer(self, rank: int, key: PageKey) -> None:
        """The page may leave from now on; no effect if it was offered already."""
        if rank in self._keys:
            return
        self._keys[rank] = key
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = list(self._keys)
            heapify(self._heap)

    def withdraw(self, rank: int) -> bool:
        """The page may not leave any more; no effect if it was not offered. Whether it was."""
        return self._keys.pop(rank, None) is not None

    def shift(self, rank: int, key: PageKey, *, offered: bool) -> None:
        """Offers or withdraws the page, whichever is asked."""
        if offered:
            self.offer(rank, key)
        else:
            self.withdraw(rank)

    def first(self) -> PageKey | None:
        """The next victim, still offered; None if there is none."""
        heap, keys = self._heap, self._keys
        while heap:
            key = keys.get(heap[0])
            if key is not None:
                return key
            heappop(heap)
        return None

    def first_where(self, allowed: Callable[[PageKey], bool]) -> PageKey | None:
        """The first victim that is allowed; O(n) to begin with, O(log n) for each that is not."""
        heap, keys = self._heap.copy(), self._keys
        while heap:
            key = keys.get(heappop(heap))
            if key is not None and allowed(key):
                return key
        return None
