"""What left the tiers, and why: counted, and remembered for a while so that a miss can say what became of its page."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.metrics import Metrics
    from tierstore.residency import Drop, Residency
    from tierstore.types import PageKey, Tier

_REMEMBERED = 8192


class Drops:
    """Drains residency's log of dropped copies. Bounded."""

    def __init__(self, residency: Residency, metrics: Metrics) -> None:
        self._residency = residency
        self._metrics = metrics
        self._fates: OrderedDict[PageKey, str] = OrderedDict()

    def note(self, reason: str | None = None) -> None:
        """Counts what was dropped since the last call. Reason None: to make room."""
        dropped = self._residency.dropped
        counts: Counter[tuple[Tier, str]] = Counter()
        while dropped:
            drop = dropped.popleft()
            why = reason or _to_make_room(drop)
            counts[drop.tier, why] += 1
            if drop.last:
                self._fates[drop.key] = why
                self._fates.move_to_end(drop.key)
        for (tier, why), number in counts.items():
            self._metrics.dropped(tier, why, number)
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)

    def fate(self, key: PageKey) -> str | None:
        """Why the page's last copy went, if it went recently and has not come back."""
        return None if self._residency.where(key) is not None else self._fates.get(key)


def _to_make_room(drop: Drop) -> str:
    if not drop.last:
        return "saved"
    return "memory_only" if drop.memory_only else "capacity"
