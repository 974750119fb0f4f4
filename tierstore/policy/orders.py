"""Victim order per tier. An order and nothing else: it sees ranks and keys, never slots, bytes or clocks.

A rank is an integer given when a page enters a tier and renewed when it is used; the evictable page of lowest rank
goes first. Ranks live in three bands: unwanted pages before all others, retained pages after all others.
"""

from __future__ import annotations

from itertools import count

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
