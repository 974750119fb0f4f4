"""What left the tiers, and why: counted, and remembered for a while so that a miss can say what became of its page."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.directory.residency import Drop, Residency
    from tierstore.types import Counters, PageKey, Tier

_log = logging.getLogger(__name__)

_REMEMBERED = 8192


class Drops:
    """Drains residency's log of dropped copies. Bounded."""

    def __init__(self, residency: Residency, metrics: Counters) -> None:
        self._residency = residency
        self._metrics = metrics
        self._fates: OrderedDict[PageKey, str] = OrderedDict()
        self.left: Callable[[PageKey, Tier], None] | None = None
        """Told of every dropped copy."""
        self.unsaved = 0
        """Pages lost although a tier below was there for them, since ``tell`` was last asked."""
        self.refused = 0
        """Pages lost because admission did not want them below."""
        self._lowest = max(residency.tables)
        self._told = False

    def note(self, reason: str | None = None) -> None:
        """Counts what was dropped since the last call. Reason None: to make room."""
        dropped = self._residency.dropped
        counts: Counter[tuple[Tier, str]] = Counter()
        while dropped:
            drop = dropped.popleft()
            why = reason or _to_make_room(drop)
            counts[drop.tier, why] += 1
            self.unsaved += why == "capacity" and drop.tier < self._lowest
            if self.left is not None:
                self.left(drop.key, drop.tier)
            if drop.last:
                self.refused += why == "not_admitted"
                self._fates[drop.key] = why
                self._fates.move_to_end(drop.key)
        for (tier, why), number in counts.items():
            self._metrics.dropped(tier, why, number)
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)

    def tell(self, *, refused: bool) -> None:
        """Warns, once, that pages come faster than the tiers below take them; a tier that refuses is told elsewhere."""
        if self.unsaved and not refused and not self._told:
            self._told = True
            _log.warning(
                "pages come faster than the tiers below take them; what finds no room is lost and counted in "
                "dropped_copies (said once)"
            )
        self.unsaved = 0

    def fate(self, key: PageKey) -> str | None:
        """Why the page's last copy went, if it went recently and has not come back."""
        return None if self._residency.where(key) is not None else self._fates.get(key)


def _to_make_room(drop: Drop) -> str:
    if not drop.last:
        return "saved"
    if drop.refused:
        return "not_admitted"
    if drop.memory_only:
        return "memory_only"
    return "unreachable" if drop.unreachable else "capacity"
