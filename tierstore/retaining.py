"""Which pages somebody wants, and which nobody does: where they wait among those that may go. Metadata only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.policy.orders import BAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tierstore.directory.residency import TierTable
    from tierstore.settling import Settling
    from tierstore.types import PageKey, Tier


class Retaining:
    """Of all tiers. It changes the order of victims, never where a page is."""

    def __init__(self, tables: Mapping[Tier, TierTable], settling: Settling) -> None:
        self._tables = tables
        self._settling = settling

    def set_wanted(self, keys: Iterable[PageKey], *, wanted: bool, priority: int = 0) -> None:
        """Moves pages after (wanted) or before (not wanted) all normal ones in every tier's victim order.

        ``priority``: of those that are wanted. Copies that they get later are wanted as well, until ``end_retention``.
        """
        for key in keys:
            if not wanted:
                self._settling.retained.pop(key, None)
                self._settling.put_first(key)
                continue
            self._settling.retained[key] = priority
            for tier, table in self._tables.items():
                copy = table.copies.get(key)
                if copy is not None:
                    self._settling.rerank(key, tier, table, copy, table.policy.retained(priority))

    def keep(self, key: PageKey, tier: Tier, priority: int) -> None:
        """An expected request is to find the page in the tier: it waits after all normal ones there.

        Also a copy that it gets there later, until ``end_keeping``. While it is kept, the first priority counts.
        """
        priority = self._settling.kept.setdefault((key, tier), priority)
        table = self._tables[tier]
        copy = table.copies.get(key)
        if copy is not None and copy.rank < BAND:
            self._settling.rerank(key, tier, table, copy, table.policy.retained(priority))

    def end_keeping(self, key: PageKey, tier: Tier) -> None:
        """Nobody is to find the page in the tier any more: it becomes a normal one there, unless it is retained."""
        self._settling.kept.pop((key, tier), None)
        if key not in self._settling.retained:
            self._settling.make_ordinary(key, tier, self._tables[tier])

    def end_retention(self, keys: Iterable[PageKey]) -> None:
        """Retained pages become normal ones, but where they are kept."""
        for key in keys:
            self._settling.retained.pop(key, None)
            for tier, table in self._tables.items():
                self._settling.make_ordinary(key, tier, table)
