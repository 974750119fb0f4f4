"""The hint table: latest revision of each request, retained pages with their end, hints waiting for a prefetcher.

Metadata only. Bounded: at ``MAX_REQUESTS`` the longest unchanged request is forgotten, at ``MAX_QUEUED`` a
``will_need`` is rejected.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tierstore.types import Hint, HintResult

if TYPE_CHECKING:
    from tierstore.residency import Residency
    from tierstore.types import PageKey

MAX_REQUESTS = 65536
MAX_QUEUED = 4096


class HintTable:
    """Applies what concerns the victim order at once; keeps the rest for an attached prefetcher."""

    def __init__(self, residency: Residency) -> None:
        self.attached = False
        self._residency = residency
        self._revisions: OrderedDict[str, int] = OrderedDict()
        self._queue: OrderedDict[str, Hint] = OrderedDict()
        self._retained: dict[str, tuple[int, tuple[PageKey, ...]]] = {}
        self._expiries: list[tuple[float, str, int]] = []

    def apply(self, hint: Hint, now: float) -> HintResult:
        """Takes in one hint. It never pins and never moves a page by itself."""
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
            return HintResult.DEFERRED
        self._residency.set_wanted(reversed(hint.keys), wanted=hint.need == "retain")
        if hint.need == "retain":
            self._retain(hint, now)
        return HintResult.APPLIED

    def take(self) -> list[Hint]:
        """The waiting hints, oldest first; from the first call on a prefetcher counts as attached."""
        self.attached = True
        hints = list(self._queue.values())
        self._queue.clear()
        return hints

    def expire(self, now: float) -> None:
        """Ends the retentions whose time has come."""
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id, revision = heappop(self._expiries)
            if self._retained.get(request_id, (None,))[0] == revision:
                self._forget(request_id)

    @property
    def next_expiry(self) -> float | None:
        """When the next retention ends."""
        return self._expiries[0][0] if self._expiries else None

    def _can_queue(self, request_id: str) -> bool:
        return self.attached and (request_id in self._queue or len(self._queue) < MAX_QUEUED)

    def _retain(self, hint: Hint, now: float) -> None:
        self._retained[hint.request_id] = (hint.revision, hint.keys)
        if hint.ttl_s is not None:
            heappush(self._expiries, (now + hint.ttl_s, hint.request_id, hint.revision))

    def _forget(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        retained = self._retained.pop(request_id, None)
        if retained is not None:
            self._residency.end_retention(retained[1])
