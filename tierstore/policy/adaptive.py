"""``session`` as long as it hits more than LRU, judged by small ghost caches of both that run beside.

A ghost cache holds keys of a sample of the pages, chosen by key, and as much smaller a capacity (SHARDS, Waldspurger
2015), so that it hits as often as the whole would.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tierstore.policy.session import Session

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record
    from tierstore.types import PageKey

_GHOST_PAGES = 512
_DEEPEST = (1 << 32) - 1
_WINDOW = 2
"""Capacities after which a hit of a ghost counts half."""


class Ghost:
    """Keys with a value each, at most ``pages``; the lowest value leaves first.

    ``hits``: those of the first pages of each request, up to one that is missing.
    """

    def __init__(self, pages: int) -> None:
        self.hits = 0.0
        self._request = -1
        self._whole = True
        self._pages = max(1, pages)
        self._values: dict[PageKey, int] = {}
        self._heap: list[tuple[int, PageKey]] = []

    def ask(self, page: PageKey, value: int, request: int) -> None:
        """The page is asked for by this request and gets a value."""
        if request != self._request:
            self._request, self._whole = request, True
        self._whole = self._whole and page in self._values
        self.hits += self._whole
        self._values[page] = value
        heappush(self._heap, (value, page))
        while len(self._values) > self._pages:
            lowest, victim = heappop(self._heap)
            if self._values.get(victim) == lowest:
                del self._values[victim]
        if len(self._heap) > 4 * self._pages + 64:
            self._heap = sorted((value, page) for page, value in self._values.items())


class Rivals:
    """A watcher that lets both orders serve the same sample of requests, and says which does better."""

    def __init__(self, session: Session, pages: int) -> None:
        self.follow_session = True
        self._session = session
        self._every = max(1, pages // _GHOST_PAGES)
        self._ghost, self._lru = Ghost(pages // self._every), Ghost(pages // self._every)
        self._next = self._period = max(64, pages // 2)
        self._fade = 0.5 ** (self._period / max(1, pages) / _WINDOW)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Nothing: the ghosts know what they hold."""

    def forgotten(self, record: Record, now: int) -> None:
        """Nothing: the ghosts know what they hold."""

    def began(self, record: Record, now: int) -> None:
        """The ghosts are asked for the page too."""
        if self._every == 1 or int.from_bytes(record.key[:4]) % self._every == 0:
            # The same moment for all pages of a request, and tails before heads, as residency has it.
            request, place = now - record.depth, _DEEPEST - min(record.depth, _DEEPEST)
            kept = int(self._session.lifetimes.kept[record.kind])
            self._ghost.ask(record.key, ((request + kept) << 32) + place, request)
            self._lru.ask(record.key, (request << 32) + place, request)
        if now >= self._next:
            self._next = now + self._period
            self.follow_session = self._ghost.hits > self._lru.hits
            self._ghost.hits *= self._fade
            self._lru.hits *= self._fade


class Adaptive(Session):
    """``session`` or LRU, whichever would hit more often now."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history, pages)
        self.rivals = Rivals(self, pages)
        self._followed_session = True
        self._head_start = self._longest = 0
        history.watchers.append(self.rivals)

    def _value(self, key: PageKey, record: Record | None) -> int:
        follow_session = self.rivals.follow_session
        if follow_session != self._followed_session:
            # What the other order had promised counts from its last use only: else pages of the past outlived new ones.
            self._followed_session = follow_session
            self._head_start += self._longest
            self._longest = 0
        kept = int(self.lifetimes.kept[record.kind]) if follow_session and record is not None else 0
        if kept > self._longest:
            self._longest = kept
        return self._history.now + self._head_start + kept
