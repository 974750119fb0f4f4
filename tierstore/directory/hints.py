"""The hint table: the latest revision of each request, retained pages, and hints queued for a prefetcher.

Metadata only. The size is bounded. If there are more than ``MAX_REQUESTS`` requests, the least recently
updated one is forgotten. If ``MAX_QUEUED`` hints are queued, further ``will_need`` hints are rejected.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.types import Hint, HintResult

if TYPE_CHECKING:
    from tierstore.directory.residency import Residency
    from tierstore.types import PageKey

_Change: TypeAlias = "Callable[[Iterable[PageKey]], None]"

MAX_REQUESTS = 65536
MAX_QUEUED = 4096
_AFTER_DEADLINE_S = 60.0
_WITHOUT_DEADLINE_S = 600.0


class HintTable:
    """The active hints of a store.

    ``retain`` and ``wont_need`` hints change the eviction order at once. ``will_need`` hints are queued for an
    attached prefetcher, and rejected without one.
    """

    def __init__(self, residency: Residency) -> None:
        self.attached = False
        self._closed = False
        self._residency = residency
        self._revisions: OrderedDict[str, int] = OrderedDict()
        self._queue: OrderedDict[str, Hint] = OrderedDict()
        self._retained: dict[str, tuple[int, tuple[PageKey, ...]]] = {}
        self._expiries: list[tuple[float, str, int]] = []
        self._holders: Counter[PageKey] = Counter()
        """Number of requests that retain each page."""
        self._needed: dict[str, tuple[int, tuple[PageKey, ...]]] = {}
        """Revision and pages of each active ``will_need`` hint, by request."""
        self._expecting: Counter[PageKey] = Counter()
        """Number of requests with an active ``will_need`` hint for each page."""
        self.ended: deque[str] = deque()
        """IDs of requests whose ``will_need`` hint is no longer active. ``Promotions`` empties the queue."""
        self._changes: deque[tuple[_Change, list[PageKey]]] = deque()

    def apply(self, hint: Hint, now: float) -> HintResult:
        """Process a hint. Never pins pages.

        This call reranks at most one batch of pages for eviction. While ``pending`` is True, call ``advance``
        to rerank the others.
        """
        result = self._take_in(hint, now)
        self.advance(BATCH_PAGES)
        return result

    @property
    def pending(self) -> bool:
        """Whether ``advance`` has work to do."""
        return bool(self._changes)

    def advance(self, limit: int) -> None:
        """Rerank up to ``limit`` pages for eviction as hints require, for each hint from the last page to the first."""
        while self._changes and limit > 0:
            change, keys = self._changes[0]
            change(reversed(keys[-limit:]))
            done = min(limit, len(keys))
            del keys[-limit:]
            limit -= done
            if not keys:
                self._changes.popleft()

    def take(self) -> list[Hint]:
        """Return the queued hints, oldest first, and clear the queue.

        The first call attaches a prefetcher.
        """
        self.attached = not self._closed
        hints = list(self._queue.values())
        self._queue.clear()
        return hints

    def detach(self) -> None:
        """Detach the prefetcher.

        Queued hints are discarded, active ``will_need`` hints end, and new ones are rejected.
        """
        self.attached = False
        self._queue.clear()
        self.ended.extend(self._needed)
        self._needed.clear()
        self._expecting.clear()

    def close(self) -> None:
        """Detach the prefetcher permanently, because the store is about to close."""
        self._closed = True
        self.detach()

    def in_force(self, hint: Hint) -> bool:
        """Return whether a ``will_need`` hint is active: neither replaced nor withdrawn nor expired."""
        return self._needed.get(hint.request_id, (None,))[0] == hint.revision

    def retained(self, key: PageKey) -> bool:
        """Return whether a request retains the page."""
        return self._holders[key] > 0

    @property
    def keys_retained(self) -> list[PageKey]:
        """The pages that requests retain, in any tier."""
        return list(self._holders)

    def expire(self, now: float) -> None:
        """End ``retain`` and ``will_need`` hints that have expired."""
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id, revision = heappop(self._expiries)
            if self._lives(request_id, revision):
                self._forget(request_id)
        self.advance(BATCH_PAGES)

    @property
    def next_expiry(self) -> float | None:
        """The monotonic time at which the next hint expires, or None if no hint has an expiry time."""
        return self._expiries[0][0] if self._expiries else None

    def _take_in(self, hint: Hint, now: float) -> HintResult:
        last = self._revisions.get(hint.request_id)
        if last is not None and hint.revision <= last:
            return HintResult.DUPLICATE
        if hint.keys and hint.need == "will_need" and not self._can_queue(hint.request_id):
            return HintResult.REJECTED
        self._revisions[hint.request_id] = hint.revision
        self._revisions.move_to_end(hint.request_id)
        self._forget(hint.request_id)
        while len(self._revisions) > MAX_REQUESTS:
            self._forget(self._revisions.popitem(last=False)[0])
        if not hint.keys:
            if self.attached:
                self._queue[hint.request_id] = hint
            return HintResult.APPLIED
        if hint.need == "will_need":
            self._queue[hint.request_id] = hint
            self._needed[hint.request_id] = (hint.revision, hint.keys)
            self._expecting.update(hint.keys)
            self._end_at(now + lifetime(hint), hint)
            return HintResult.DEFERRED
        if hint.need == "retain":
            retain = partial(self._residency.queues.set_wanted, wanted=True, priority=hint.priority)
            self._changes.append((retain, list(hint.keys)))
            self._retain(hint, now)
        else:
            # Pages that another request retains or will need are not affected.
            left = [key for key in hint.keys if key not in self._holders and key not in self._expecting]
            self._changes.append((partial(self._residency.queues.set_wanted, wanted=False), left))
        return HintResult.APPLIED

    def _can_queue(self, request_id: str) -> bool:
        return self.attached and (request_id in self._queue or len(self._queue) < MAX_QUEUED)

    def _retain(self, hint: Hint, now: float) -> None:
        self._retained[hint.request_id] = (hint.revision, hint.keys)
        self._holders.update(hint.keys)
        if hint.ttl_s is not None:
            self._end_at(now + hint.ttl_s, hint)

    def _end_at(self, when: float, hint: Hint) -> None:
        heappush(self._expiries, (when, hint.request_id, hint.revision))
        if len(self._expiries) > 2 * (len(self._retained) + len(self._needed)) + 64:
            self._expiries = [x for x in self._expiries if self._lives(x[1], x[2])]
            heapify(self._expiries)

    def _lives(self, request_id: str, revision: int) -> bool:
        named = (hints.get(request_id, (None,))[0] for hints in (self._retained, self._needed))
        return revision in named

    def _forget(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        needed = self._needed.pop(request_id, None)
        if needed is not None:
            _uncount(self._expecting, needed[1])
            self.ended.append(request_id)
        retained = self._retained.pop(request_id, None)
        if retained is not None:
            free = _uncount(self._holders, retained[1])
            self._changes.append((self._residency.queues.end_retention, free))


def _uncount(counter: Counter[PageKey], keys: Iterable[PageKey]) -> list[PageKey]:
    """Subtract 1 for each of these keys. Return the keys whose count has reached 0, in order."""
    gone: list[PageKey] = []
    for key in keys:
        left = counter[key] - 1
        if left:
            counter[key] = left
        else:
            del counter[key]
            gone.append(key)
    return gone


def lifetime(hint: Hint) -> float:
    """Return the number of seconds after which a ``will_need`` hint ends, unless a newer hint ends it earlier."""
    if hint.ttl_s is not None:
        return hint.ttl_s
    return _WITHOUT_DEADLINE_S if hint.deadline_s is None else max(0.0, hint.deadline_s) + _AFTER_DEADLINE_S
