"""What nobody can beat by much: a cache that knows the future, drops the leaf that is asked for last, and may refuse.

Belady's rule on a tree of prefixes. For pages of one sequence, which are hit together or not at all, it is not proven
to be the optimum; it is the bound that others in the field compare with.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.replay.traces import Request
    from tierstore.types import PageKey

_NEVER = 1 << 60


def clairvoyant_hits(requests: Sequence[Request], pages: int) -> list[int]:
    """Pages of the prefix that each request finds in a cache of ``pages``. O(n log n) in blocks asked for."""
    cache = _Clairvoyant(pages)
    return [
        cache.serve(request.keys, following)
        for request, following in zip(requests, _next_uses(requests), strict=True)
    ]


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    upcoming: dict[PageKey, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        found.append([upcoming.get(key, _NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    return found[::-1]


class _Clairvoyant:
    """Resident pages with their next use; the leaves among them in a heap, what is asked for last first."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._next: dict[PageKey, int] = {}
        self._parent: dict[PageKey, PageKey] = {}
        self._children: dict[PageKey, int] = {}
        self._leaves: list[tuple[int, int, PageKey]] = []
        self._order = 0

    def serve(self, keys: Sequence[PageKey], following: Sequence[int]) -> int:
        """Pages found, first to last until one is missing; takes in all, then drops what is too much."""
        hits = 0
        while hits < len(keys) and keys[hits] in self._next:
            hits += 1
        before: PageKey | None = None
        for key, upcoming in zip(keys, following, strict=True):
            if key not in self._next:
                self._children.setdefault(key, 0)
                if before is not None:
                    self._parent[key] = before
                    self._children[before] += 1
            self._next[key] = upcoming
            before = key
        if before is not None and not self._children[before]:
            self._offer(before)
        while len(self._next) > self._pages:
            self._drop()
        return hits

    def _offer(self, key: PageKey) -> None:
        self._order += 1
        heappush(self._leaves, (-self._next[key], -self._order, key))

    def _drop(self) -> None:
        upcoming, _, key = heappop(self._leaves)
        if self._next.get(key) != -upcoming or self._children[key]:
            return
        del self._next[key], self._children[key]
        parent = self._parent.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._offer(parent)
