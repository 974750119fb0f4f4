"""Victim order per tier. An order and nothing else: it sees ranks, keys and records, never slots, bytes or clocks.

A rank is an integer given when a page enters a tier and renewed when it is used; the evictable page of lowest rank
goes first. Ranks are unique and live in four bands: pages that cannot be reached before all others, then unwanted
pages, and retained pages after all others, those of higher priority last. Which pages are evictable is not the order's
business: a reachable page with readable children never is, so every order is leaf first.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.policy.history import History, Record
    from tierstore.types import PageKey

BAND = 1 << 120
"""Retained pages have ranks from here on, a band for each priority."""
SHIFT = 48
"""Bits of a rank that only keep ranks unique, and tails before heads, among pages of equal value."""

_LEVEL = 1 << 64
_HIGHEST = (1 << 32) - 1
"""Priorities above are as this one to pages whose retention has ended."""


def band(rank: int) -> int:
    """What a retained page's priority adds to its rank; 0 of others."""
    return rank // BAND * BAND if rank >= BAND else 0


class Fifo:
    """First in, first out: use does not renew a rank."""

    def __init__(self) -> None:
        self._next = count()

    def enter(self, key: PageKey) -> int:
        """Rank of a page that becomes resident now."""
        return next(self._next)

    def touch(self, key: PageKey, rank: int) -> int:
        """Rank after the page was used; an unwanted page becomes a normal one, a retained one stays retained."""
        return rank if rank >= 0 else next(self._next)

    def unwanted(self) -> int:
        """Rank before every normal page: nobody will ask for this one again."""
        return next(self._next) - BAND

    def unreachable(self, key: PageKey) -> int:
        """Rank before every other page, and before pages that became unreachable earlier: deeper ones leave first.

        The order forgets the page until it enters again.
        """
        self._forget(key)
        return -BAND - 1 - next(self._next)

    def retained(self, priority: int = 0) -> int:
        """Rank after every normal page: somebody announced to come back for this one.

        And after retained pages of lower priority; below 0 counts as 0.
        """
        return next(self._next) + (1 + max(0, priority)) * BAND

    def ordinary(self, key: PageKey, rank: int) -> int:
        """Rank of a page whose retention ended; other ranks stay."""
        return self.enter(key) if rank >= BAND else rank

    def left(self, key: PageKey, rank: int) -> None:
        """The page left the tier."""

    def _forget(self, key: PageKey) -> None:
        """The page is in none of the order's segments any more."""

    def moved(self) -> Iterator[tuple[PageKey, int, int]]:
        """Pages, with their ranks before and now, that lost their place to others since this was last asked."""
        return iter(())


class Lru(Fifo):
    """Least recently used first."""

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + band(rank)


class Priority(Lru):
    """By the priority of the last hint that retained the page, after that hint's end too; of equal ones LRU."""

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + max(0, rank // _LEVEL * _LEVEL)

    def retained(self, priority: int = 0) -> int:
        return super().retained(priority) + min(max(0, priority), _HIGHEST) * _LEVEL

    def ordinary(self, key: PageKey, rank: int) -> int:
        return next(self._next) + rank % BAND // _LEVEL * _LEVEL if rank >= BAND else rank


class Scored(Fifo):
    """By a value of at least 0 that the page's record gives; of equal values the least recently used first."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def enter(self, key: PageKey) -> int:
        return (self._value(key, self._history.get(key)) << SHIFT) + next(self._next)

    def touch(self, key: PageKey, rank: int) -> int:
        return self.enter(key) + band(rank)

    def _value(self, key: PageKey, record: Record | None) -> int:
        raise NotImplementedError


class Lfu(Scored):
    """Least often used first, uses before the page left included while they are remembered."""

    def _value(self, key: PageKey, record: Record | None) -> int:
        return 0 if record is None else record.uses


class Gdsf(Scored):
    """Greedy dual size frequency (Cherkasova, 1998), pages all of one size: uses times the cost of computing the page
    again, on top of the value of what left last, so that old fame fades.

    The cost grows with the depth: 1 for the first page of a sequence, 2 at ``doubling_depth``.
    """

    def __init__(self, history: History, doubling_depth: float) -> None:
        super().__init__(history)
        self._doubling = max(1.0, doubling_depth)
        self._inflation = 0

    def left(self, key: PageKey, rank: int) -> None:
        """What leaves sets the floor for what comes."""
        if 0 <= rank < BAND:
            self._inflation = max(self._inflation, rank >> SHIFT)

    def _value(self, key: PageKey, record: Record | None) -> int:
        uses, depth = (1, 0) if record is None else (record.uses + 1, record.depth)
        return self._inflation + int(1024 * uses * (1 + depth / self._doubling))


class Slru(Fifo):
    """Segmented LRU (Karedla, 1994): pages that were used again are protected, up to four fifths of the tier.

    What is pushed out of the protected segment goes to the end of the other one. A page that is put again while it is
    remembered counts as used.
    """

    def __init__(self, history: History, pages: int) -> None:
        super().__init__()
        self._history = history
        self._most = max(1, pages * 4 // 5)
        self._protected: OrderedDict[PageKey, int] = OrderedDict()
        self._moved: list[tuple[PageKey, int, int]] = []

    def enter(self, key: PageKey) -> int:
        record = self._history.get(key)
        if record is None or not record.uses:
            return next(self._next)
        self._protected.pop(key, None)
        rank = self._protected[key] = (1 << SHIFT) + next(self._next)
        if len(self._protected) > self._most:
            pushed, before = self._protected.popitem(last=False)
            self._moved.append((pushed, before, next(self._next)))
        return rank

    def touch(self, key: PageKey, rank: int) -> int:
        if rank < BAND:
            return self.enter(key)
        self._protected.pop(key, None)
        return next(self._next) + band(rank)

    def left(self, key: PageKey, rank: int) -> None:
        """It is protected no more."""
        if self._protected.get(key) == rank:
            del self._protected[key]

    def _forget(self, key: PageKey) -> None:
        self._protected.pop(key, None)

    def moved(self) -> Iterator[tuple[PageKey, int, int]]:
        moved, self._moved = self._moved, []
        return iter(moved)
