"""Victim order per tier. An order and nothing else: it sees ranks and keys, never slots, bytes or clocks.

A rank is an integer given when a page enters a tier and renewed when it is used; the evictable page of lowest rank
goes first. Ranks live in three bands: unwanted pages before all others, retained pages after all others.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.types import PageKey

_BAND = 1 << 60


class Fifo:
    """First in, first out: use does not renew a rank. Ranks are unique."""

    def __init__(self) -> None:
        self._next = count()

    def enter(self) -> int:
        """Rank of a page that becomes resident now."""
        return next(self._next)

    def touch(self, rank: int) -> int:
        """Rank after the page was used; an unwanted page becomes a normal one."""
        return rank if rank >= 0 else next(self._next)

    def unwanted(self) -> int:
        """Rank before every normal page: nobody will ask for this one again."""
        return next(self._next) - _BAND

    def retained(self) -> int:
        """Rank after every normal page: somebody announced to come back for this one."""
        return next(self._next) + _BAND

    def ordinary(self, rank: int) -> int:
        """Rank of a page whose retention ended; other ranks stay."""
        return next(self._next) if rank >= _BAND else rank


class Lru(Fifo):
    """Least recently used first."""

    def touch(self, rank: int) -> int:
        return next(self._next) + (_BAND if rank >= _BAND else 0)


def make_policy(name: str) -> Fifo:
    """The policy a configuration names: "lru" or "fifo"."""
    return {"lru": Lru, "fifo": Fifo}[name]()


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
