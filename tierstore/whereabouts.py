"""Where the copies of each page are: the questions about the tables of all tiers. Pure metadata, nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.tier_table import TierTable
    from tierstore.types import PageKey


class Whereabouts:
    """The tables of all tiers, fastest first, as far as they can be asked. What changes them: ``residency``."""

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        self.tables = {tier: tables[tier] for tier in sorted(tables)}
        self._order = list(self.tables.items())
        self._copies = [table.copies for _, table in self._order]

    def where(self, key: PageKey) -> Tier | None:
        """Fastest tier with a readable copy, or None."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready:
                return tier
        return None

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Tier of each page of the longest readable prefix. Changes nothing, is no use for the policy."""
        tables = [(tier, table.copies) for tier, table in self._order]
        found: list[Tier] = []
        for key in keys:
            for tier, copies in tables:
                copy = copies.get(key)
                if copy is not None and copy.ready:
                    found.append(tier)
                    break
            else:
                break
        return found

    def unpinned(self, tier: Tier) -> int:
        """Readable copies of a tier that nothing holds."""
        return self.tables[tier].idle

    def held(self, key: PageKey) -> bool:
        """Whether any tier has a copy, readable or on its way."""
        for copies in self._copies:  # noqa: SIM110 - any() with a generator takes three times as long
            if key in copies:
                return True
        return False
